"""What of the policy is trained, over PEFT: the factors of LoRA and, where asked for, norm scales."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from transformers import PreTrainedModel

from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.modules.attention import PackedAttention
from qerl_pl.modules.gated_mlp import GatedMLP
from qerl_pl.modules.lora import ADAPTER, LoraConfig, LoraLinear, attach_lora, go_together
from qerl_pl.modules.parameters import given_back, take_over
from qerl_pl.modules.rounded import round_together
from qerl_pl.run.seeding import stream_seed


class LoraAdapter:
    """Trains low-rank factors over a frozen base, and copies of its norms.

    All that is known of PEFT's wrapping is known here. Another way to train has the same methods.

    Args:
        base: The frozen causal LM; what is trained is put into it.
        config: Of the factors; their A is drawn from PyTorch's generator.
        train_norms: Train the layers' norms too.
        base_name: Folder or hub name of the base, as the user gave it.
    """

    result = "adapter"
    """Folder of a run that holds what was learned."""
    whole = False
    """Whether all of the model trains: then nothing is left to switch off."""

    def __init__(self, base: PreTrainedModel, config: LoraConfig, train_norms: bool, base_name: str) -> None:
        self.config = config
        self.base = base
        self.model: PeftModel = attach_lora(base, config, train_norms)
        self.model.peft_config[ADAPTER].base_model_name_or_path = base_name
        self._linears = [module for module in base.modules() if isinstance(module, LoraLinear)]
        self._sharing = [module for module in base.modules() if isinstance(module, PackedAttention | GatedMLP)]

    @property
    def random(self) -> bool:
        """Whether two forward passes in training differ."""
        return self.config.dropout > 0.0

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A [r, in] and B [out, r] by the linear's name in the base, the trained parameters themselves."""
        modules = self.base.named_modules()
        return {name: module.factors() for name, module in modules if isinstance(module, LoraLinear)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are trained whole, by their checkpoint name: norm scales [hidden]."""
        found: dict[str, Tensor] = {}
        for name, module in self.base.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                norm = module.modules_to_save[ADAPTER]
                assert isinstance(norm, Float32RMSNorm)
                found[f"{name}.weight"] = norm.weight
        return found

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The model, which is its base inside the block."""
        with self.model.disable_adapter():
            yield self.base

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, which is to be a single forward pass, all linears have copies of their factors in `dtype`.

        They are made together, and so are the masters' gradients of theirs: the same numbers as where each linear
        rounds its own, in few launches. The A of those that `go_together` are made one above the other. What a backward
        pass recomputes is outside of the block and rounds the masters, unless the rounded ones were kept.
        """
        groups = [linears for linears in (module.on_input for module in self._sharing) if go_together(linears)]
        grouped = {linear for group in groups for linear in group}
        groups += [(one,) for one in self._linears if not (one.disable_adapters or one in grouped)]
        linears = [linear for group in groups for linear in group]
        first = [[linear.factors()[0] for linear in group] for group in groups]
        second = [[linear.factors()[1]] for linear in linears]
        if all(master.dtype == dtype for masters in (*first, *second) for master in masters):
            yield
            return
        copies = round_together(first + second, dtype)
        try:
            of_group = [a for a, group in zip(copies, groups, strict=False) for _ in group]
            for linear, a, b in zip(linears, of_group, copies[len(groups) :], strict=True):
                linear.rounded = a, b
            yield
        finally:
            for linear in linears:
                linear.rounded = None

    @contextmanager
    def probed(self, seed: int) -> Iterator[None]:
        """Inside the block B of every adapter is random, and changes each product by some half of itself.

        Args:
            seed: Of the random numbers.
        """
        matrices = {name: b for name, (_, b) in self.factors().items()}
        std = 1 / (self.config.scaling * math.sqrt(self.config.rank))
        with given_back(matrices.values()):
            with torch.no_grad():
                for name, b in matrices.items():
                    b.normal_(std=std, generator=torch.Generator(b.device).manual_seed(stream_seed(seed, name)))
            yield

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by PEFT's names, detached."""
        # Not "auto", which asks the hub whether the base's embeddings are the model's own.
        state = get_peft_model_state_dict(self.model, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            UserError: Names or shapes are another adapter's.
        """
        take_over(self.state(), state, "adapter", "model.policy.lora and train_norms")

    def save(self, folder: Path) -> None:
        """Write it in PEFT's format."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
