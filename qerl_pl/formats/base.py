"""Base formats: how the frozen linears of a base model are stored, recognised, read and quantized.

To add a format, write one file with a class that has the methods of `BaseFormat` (dense.py is the shortest) and, if
`qerl quantize` shall write it, a class that has those of `Quantizer`; then list both below: the name in
`QuantizedFormat`, the classes in `FORMATS` and `QUANTIZERS`. Its frozen weight is a `qerl_kernels.FrozenWeight`. All
other code asks a format by these methods and names none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from qerl_kernels import FrozenWeight, StackedWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.dense import DENSE
from qerl_pl.formats.mxfp4 import MXFP4Format, MXFP4Quantizer, MXFP4StacksFormat
from qerl_pl.formats.nf4 import NF4Format, NF4Quantizer
from qerl_pl.formats.nvfp4 import NVFP4Format, NVFP4Quantizer
from qerl_pl.models.folder import TensorFiles, read_config

QuantizedFormat = Literal["nvfp4", "mxfp4", "nf4"]
"""Formats that `qerl quantize` writes."""
Quantization = Literal[QuantizedFormat, "none"]
"""Values of `model.policy.quantization`."""
QUANTIZATIONS = (*get_args(QuantizedFormat), "none")


class BaseFormat(Protocol):
    """How the linears of a base model are stored in its folder."""

    @property
    def name(self) -> str:
        """Value of `model.policy.quantization` that selects it."""

    @property
    def vllm_devices(self) -> tuple[str, ...]:
        """Device types on which vLLM runs the format; on others it gets dense weights."""

    @property
    def vllm_options(self) -> Mapping[str, str]:
        """Arguments of `vllm.LLM` that it needs besides the folder."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """Ends of the names of tensors that are read by no one: scales of activations, which stay in 16 bits."""

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether a `quantization_config` of config.json names this format."""

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        """What a `quantization_config` that it recognises asks for besides, as text; None where it is exactly this."""

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        """Checkpoint names of the tensors that store a quantized linear."""

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the equivalent dense checkpoint, by name, read without the weights.

        Raises:
            UserError: Stored shapes are of another format.
        """

    def check(self, tensors: TensorFiles) -> None:
        """Raise UserError for a checkpoint that engine and trainer would read differently."""

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        """Load the weight of a linear for the trainer.

        Args:
            linear: Module name, such as "model.layers.0.self_attn.q_proj".
            tensors: The checkpoint.
            place: Moves a tensor to its device.

        Returns:
            None for a linear that the checkpoint stores in 16 bits.
        """

    def first_rows(
        self, linear: str, tensors: TensorFiles, rows: int, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        """As `frozen_weight`, of the first rows alone, which are all that is read.

        Args:
            linear: Module name.
            tensors: The checkpoint.
            rows: Their number, a multiple of 64.
            place: As for `frozen_weight`.

        Returns:
            None for a linear that the checkpoint stores in 16 bits.
        """

    def stacked_weight(
        self,
        experts: Sequence[Sequence[str]],
        tensors: TensorFiles,
        dtype: torch.dtype,
        place: Callable[[Tensor], Tensor],
    ) -> StackedWeight:
        """Load linears of a layer's experts for the trainer.

        Args:
            experts: Names of each expert's linears, stacked by rows, such as gate and up.
            tensors: The checkpoint.
            dtype: Of weights that are not quantized.
            place: Moves a tensor to its device.

        Raises:
            UserError: The format stores no experts.
        """

    def stack_names(self, stack: str) -> tuple[str, ...]:
        """Checkpoint names of the tensors that store a matrix of all experts, such as "….mlp.experts.down_proj".

        `dense.UnpackedStacks` has it, and no `dropped`, for formats that do not pack such stacks.
        """

    def expert_stack(
        self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
    ) -> StackedWeight:
        """Load a matrix of a layer's experts that the checkpoint stores in one stack, in 16 bits transposed.

        Args:
            stack: As for `stack_names`.
            tensors: The checkpoint.
            dtype: Of weights that are not quantized.
            place: Moves a tensor to its device.

        Raises:
            UserError: The format stores no such stacks.
        """

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the equivalent dense checkpoint, floating-point tensors as `dtype`, on the CPU."""

    def vllm_linear_backend(self, asked: str) -> str | None:
        """vLLM's `linear_backend` where a user requested `asked`; None where vLLM has no choice for this format."""

    def vllm_moe_backend(self, asked: str, share: bool) -> str | None:
        """vLLM's `moe_backend`, for experts in this format; None leaves the choice to vLLM.

        Args:
            asked: The `linear_backend` that a user requested.
            share: Whether the trainer is to use the engine's experts.
        """


class Quantizer(Protocol):
    """How `qerl quantize` rounds 16-bit matrices to a format."""

    @property
    def label(self) -> str:
        """Name of the format in messages."""

    @property
    def block(self) -> int:
        """Weights along the input dimension that share a scale."""

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config` of the result."""

    @property
    def remedy(self) -> str:
        """What a user can do about a matrix whose input dimension `block` does not divide."""

    @property
    def stores_experts(self) -> bool:
        """Whether the format holds a mixture of experts."""

    @property
    def of_stacks(self) -> "Quantizer | None":
        """The quantizer of experts that checkpoints store in stacks, and of nothing else; None where there is none."""

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Scale that the matrices of a fused group share, float32 [1]; None where the format has no such scale."""

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and block scales of rows [n, K]; n rows each."""

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """The tensors that store a matrix of data type `dtype`.

        Returns:
            Tensors by the suffix that follows the weight's name, and the block scales as a reader decodes them.
        """

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        """Dequantize rows from codes and stored scales: float32 [n, K]."""


FORMATS: tuple[BaseFormat, ...] = (
    NVFP4Format(),
    MXFP4Format(),
    MXFP4StacksFormat(),
    NF4Format(),
    DENSE,
)
"""Formats of a policy's base."""
QUANTIZERS: Mapping[str, Callable[[], Quantizer]] = {
    "nvfp4": NVFP4Quantizer,
    "mxfp4": MXFP4Quantizer,
    "nf4": NF4Quantizer,
}
"""Quantizers of `qerl quantize --format`."""


def format_of(folder: Path) -> BaseFormat:
    """The format of a base model's folder.

    Raises:
        UserError: The folder has no config.json, or another format.
    """
    return format_of_config(read_config(folder), folder)


def format_of_config(config: Mapping[str, Any], source: object) -> BaseFormat:
    """The format of a base model by its config.json.

    Args:
        config: As `read_config` returns it.
        source: The folder or name of the model, for the error message.

    Raises:
        UserError: It has another format, or asks for more than the format does.
    """
    quantization: Any = config.get("quantization_config") or None
    found = next((one for one in FORMATS if one.recognises(quantization)), None)
    excess = None if found is None else found.excess(quantization)
    if found is not None and excess is None:
        return found
    name = quantization.get("format") or quantization.get("quant_method")
    raise UserError(
        f"a quantized base has weights in {', '.join(QUANTIZERS)}, and 16-bit activations; {source} has {name}"
        f"{f' with {excess}' if excess else ''}: quantize the 16-bit model"
    )
