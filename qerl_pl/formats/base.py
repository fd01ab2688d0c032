"""What a base format is, and which there are. A format is one file: how it is told, written, read and sampled from."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from qerl_kernels import BlockScales, FrozenWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.dense import DENSE
from qerl_pl.formats.model_folder import TensorFiles, read_config
from qerl_pl.formats.mxfp4 import MXFP4Format, MXFP4Quantizer
from qerl_pl.formats.nf4 import NF4Format, NF4Quantizer
from qerl_pl.formats.nvfp4 import NVFP4Format, NVFP4Quantizer

Quantization = Literal["nvfp4", "mxfp4", "nf4", "none"]
"""Names of the base formats, as `model.policy.quantization` has them."""


class BaseFormat(Protocol):
    """How the linears of a base model are stored in its folder."""

    @property
    def name(self) -> str:
        """As `model.policy.quantization` calls it."""

    @property
    def vllm_devices(self) -> tuple[str, ...]:
        """Where vLLM runs it as it is; elsewhere vLLM gets dense weights."""

    @property
    def vllm_options(self) -> Mapping[str, str]:
        """What vLLM is told to read it, beyond what it finds in the folder."""

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether this is the format of a folder whose config.json has this `quantization_config`."""

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        """Checkpoint names of what a linear's weight is stored in, where it is stored in this format's own way."""

    def check(self, tensors: TensorFiles) -> None:
        """Refuse by UserError a checkpoint that engine and trainer would read differently."""

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        """The weight of a linear, as the trainer holds an own copy of it.

        Args:
            linear: Its name, such as "model.layers.0.self_attn.q_proj".
            tensors: The folder's.
            place: What each tensor is put through: it moves them to their device.

        Returns:
            None for a linear that the format leaves in 16 bits.
        """

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a checkpoint by its name in a dense one, floating-point ones as `dtype`, on the CPU."""

    def vllm_linear_backend(self, asked: str) -> str | None:
        """The `linear_backend` that vLLM is told where a user asked for `asked`; None where it has no such choice."""


class Quantizer(Protocol):
    """How `qerl quantize` rounds 16-bit matrices to one format; made from its options."""

    @property
    def label(self) -> str:
        """The format's name in a sentence."""

    @property
    def block(self) -> int:
        """Weights along the input dimension that share a scale."""

    @property
    def config(self) -> dict[str, Any]:
        """The result's `quantization_config`."""

    @property
    def remedy(self) -> str:
        """What a user can do about a matrix that blocks do not divide."""

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        """What the matrices of a fused group share: float32 [1], None where the format has nothing like it."""

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and block scales of some rows [n, K], n rows of each."""

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """How a whole matrix, of a data type, is stored.

        Returns:
            Tensors by what follows the weight's name in their own, and the block scales as they can be read again.
        """

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        """The numbers that codes and stored scales of some rows stand for: float32 [n, K]."""


FORMATS: tuple[BaseFormat, ...] = (NVFP4Format(), MXFP4Format(), NF4Format(), DENSE)
"""What a policy's base can be stored in."""
QUANTIZERS: Mapping[str, Callable[[BlockScales, bool], Quantizer]] = {
    "nvfp4": NVFP4Quantizer,
    "mxfp4": MXFP4Quantizer,
    "nf4": NF4Quantizer,
}
"""What `qerl quantize --format` writes; made from its `scales` and `power_of_two`."""


def format_of(folder: Path) -> BaseFormat:
    """The format of a base model's folder.

    Raises:
        UserError: It is none of `FORMATS`, or the folder is no model's.
    """
    quantization: Any = read_config(folder).get("quantization_config")
    for one in FORMATS:
        if one.recognises(quantization):
            return one
    found = quantization.get("format") or quantization.get("quant_method")
    raise UserError(
        f"a quantized base must be as `qerl quantize` writes it, {', '.join(QUANTIZERS)}; {folder} has {found}: "
        "quantize the 16-bit model"
    )
