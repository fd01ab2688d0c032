"""LoftQ's adapter: the low-rank part of what rounding took from each linear, which training can start from.

Source: LoftQ (arXiv 2310.08659). Of its iterations the first alone: the base is rounded from the 16-bit weights, and
the adapter takes up the residual. PEFT's `init_lora_weights="loftq"` does the same for bitsandbytes' formats.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.errors import UserError, require_at_least

LOFTQ = "loftq"
"""Folder of the adapter in that of the quantized model."""
OVERSAMPLING = 16
"""Singular vectors beyond the rank in the randomized decomposition."""
ITERATIONS = 4
"""Power iterations of the randomized decomposition, `torch.svd_lowrank`."""
_PREFIX = "base_model.model."


def low_rank(residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors A [rank, K] and B [N, rank] whose product B A is near the best approximation of a float32 [N, K].

    The singular values are shared evenly, so that A and B are of equal norm. The decomposition is randomized
    (`torch.svd_lowrank`) by a fixed seed; the global random state does not change.
    """
    generators = [residual.device] if residual.is_cuda else []
    with torch.random.fork_rng(devices=generators):
        torch.manual_seed(0)
        columns = min(rank + OVERSAMPLING, *residual.shape)
        left, values, right = torch.svd_lowrank(residual, q=columns, niter=ITERATIONS)
    roots = values[:rank].sqrt()
    return (right[:, :rank] * roots).T.contiguous(), (left[:, :rank] * roots).contiguous()


class LoftQAdapter:
    """Collects the adapter of a model that is being quantized to the folder `base`, which the adapter's files record.

    Its methods raise UserError where the rank is below 1, or exceeds the smaller side of a weight.
    """

    def __init__(self, rank: int, base: Path) -> None:
        require_at_least(1, {"--loftq_rank": rank})
        self._rank, self._base = rank, base
        self._tensors: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether a weight's residual is asked for: experts have none."""
        return ".experts." not in name

    def add(self, name: str, residual: Tensor) -> None:
        """Take up the residual of a weight of this name: the weight less what is stored, float32 [N, K]."""
        if self._rank > min(residual.shape):
            raise UserError(
                f"a LoRA rank must not be above the smaller side of a weight; got --loftq_rank {self._rank} for {name} "
                f"with {min(residual.shape)}; lower it"
            )
        stem = _PREFIX + name.removesuffix(".weight")
        for side, factor in zip("AB", low_rank(residual, self._rank), strict=True):
            self._tensors[f"{stem}.lora_{side}.weight"] = factor.cpu()

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, with alpha equal to its rank; UserError if no linear is quantized."""
        if not self._tensors:
            raise UserError(
                "--loftq_rank needs quantized linears beside experts; this model has none; leave the option out"
            )
        from peft import LoraConfig  # slow, and only needed here
        from peft.utils import SAFETENSORS_WEIGHTS_NAME

        targets = sorted({name.removesuffix(".weight").split(".")[-2] for name in self._tensors})
        config = LoraConfig(
            r=self._rank,
            lora_alpha=self._rank,
            target_modules=targets,
            base_model_name_or_path=str(self._base.expanduser().absolute()),
            task_type="CAUSAL_LM",
        )
        config.save_pretrained(str(folder))
        save_file(self._tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
