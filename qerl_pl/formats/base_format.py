"""`BaseFormat`: how the frozen linears of a base model are stored, recognised, read and quantized; and the dense one.

All other code asks a format by its methods and names none. `StoredExperts` are a layer's experts in any format.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels import DenseStack, FrozenWeight, StackedWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.models.families import DOWN, GATE_UP, Experts
from qerl_pl.models.folder import TensorFiles, in_dtype

Place = Callable[[Tensor], Tensor]
"""Moves a tensor to its device."""


class BaseFormat(ABC):
    """How the linears of a base model are stored in its folder, and how `qerl quantize` rounds 16-bit ones to it.

    A format of one's own needs `encode` and `decode`; docs/your-own-model.md has one. A linear X is then stored as
    `X.weight_codes` and `X.weight_scale`, and decoded for each product.
    """

    name = ""
    """Value of `model.policy.quantization` that selects it."""
    config: Mapping[str, Any] = {}
    """`quantization_config` of its checkpoints; of a user's class without one, `quant_method` with the class's name."""
    suffixes: tuple[str, ...] = ("weight_codes", "weight_scale")
    """What follows a linear's name in the names of its tensors: of codes, scales and, if there is one, global scale."""
    dropped: tuple[str, ...] = ()
    """Ends of the names of tensors that are read by no one: scales of activations, which stay in 16 bits."""
    block = 1
    """Weights along the input dimension that share a scale."""
    remedy = "set model.policy.quantization to none"
    """What a user can do about a model that it cannot store."""
    reads_mixed = False
    """Whether a checkpoint may have lm_head in it, and linears in FP8: they are dequantized once."""
    stores_experts = False
    """Whether it holds a mixture of experts."""

    @property
    def of_stacks(self) -> "BaseFormat | None":
        """The format of experts that checkpoints store in stacks, and of nothing else; None where there is none."""
        return None

    # Checkpoints

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether a `quantization_config` of config.json names this format."""
        return quantization is not None and quantization.get("quant_method") == self.config["quant_method"]

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        """What a `quantization_config` that it recognises asks for besides, as text; None where it is exactly this."""
        return extra_setting(quantization or {}, self.config)

    def is_mixed(self, quantization: Mapping[str, Any] | None, tensors: TensorFiles) -> bool:
        """Whether a checkpoint holds more than 4-bit linears of the layers, and the rest in 16 bits."""
        return False

    def check(self, tensors: TensorFiles) -> None:  # noqa: B027
        """Raise UserError for a checkpoint that engine and trainer would read differently, or not at all."""

    def report_unused(self, tensors: TensorFiles) -> None:  # noqa: B027
        """Log what of a checkpoint is not used, or not as it is stored."""

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        """Checkpoint names of the tensors that store a quantized linear."""
        return tuple(f"{linear}.{suffix}" for suffix in self.suffixes)

    def stored_names(self, tensors: TensorFiles) -> dict[str, tuple[str, ...]]:
        """Names of the stored tensors that make up each tensor of the equivalent dense checkpoint, by its name."""
        names = {}
        for name in tensors:
            linear, _, suffix = name.rpartition(".")
            if suffix == self.suffixes[0]:
                names[f"{linear}.weight"] = self.tensor_names(linear)
            elif suffix not in (*self.suffixes, *self.dropped):
                names[name] = (name,)
        return names

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the equivalent dense checkpoint, by name; UserError if it is of another format."""
        stored = tensors.shapes()
        return {
            name: stored[name] if group == (name,) else self.dense_shape(name.removesuffix(".weight"), stored)
            for name, group in self.stored_names(tensors).items()
        }

    def dense_shape(self, linear: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of a linear's weight from those of the stored tensors; by default that of its codes."""
        return stored[f"{linear}.{self.suffixes[0]}"]

    def weight(self, stored: Sequence[Tensor]) -> FrozenWeight:
        """The frozen weight of a linear, from its tensors in the order of `suffixes`."""
        return _DecodedWeight(self, stored)

    def dense(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The dequantized matrix [N, K] of a linear."""
        return self.weight(stored).dense(dtype)

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Place) -> FrozenWeight | None:
        """Load the weight of a linear (a module name) for the trainer; None if the checkpoint has it in 16 bits."""
        names = self.tensor_names(linear)
        if names[0] not in tensors:
            return None
        held = tensors.read_all(names)
        return self.weight([place(held[name]) for name in names])

    def first_rows(self, linear: str, tensors: TensorFiles, rows: int, place: Place) -> FrozenWeight | None:
        """Read the first rows of a linear's weight, a multiple of 64; otherwise as `frozen_weight`."""
        return self.frozen_weight(linear, tensors.first_rows(rows), place)

    def stacked_weight(
        self, experts: Sequence[Sequence[str]], tensors: TensorFiles, dtype: torch.dtype, place: Place
    ) -> StackedWeight:
        """Load linears of a layer's experts for the trainer; UserError if the format stores none.

        Args:
            experts: Names of each expert's linears, stacked by rows, such as gate and up.
            tensors: The checkpoint.
            dtype: Data type of weights that are not quantized.
            place: Moves a tensor to its device.
        """
        raise UserError(
            f"{self.name.upper()} holds no mixture of experts; the base has {experts[0][0]}: use nvfp4, or none"
        )

    def stack_names(self, stack: str) -> tuple[str, ...]:
        """Checkpoint names of the tensors that store a matrix of all experts, such as "….mlp.experts.down_proj"."""
        return (stack,)

    def expert_stack(self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Place) -> StackedWeight:
        """Load a stack of a layer's experts, stored transposed in 16 bits; UserError if the format stores none."""
        raise UserError(
            f"{self.name.upper()} holds no experts in stacks; the base has {stack}: take the published weights, or "
            "quantize those in 16 bits to mxfp4"
        )

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the equivalent dense checkpoint, floating-point tensors as `dtype`, on the CPU."""
        names = self.stored_names(tensors)
        for (name, group), stored in zip(names.items(), tensors.read_groups(names.values()), strict=True):
            yield name, in_dtype(stored[0], dtype) if group == (name,) else self.dense(stored, dtype)

    # Rounding

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        """Scale that the matrices of a fused group share, float32 [1]; None where the format has no such scale."""
        return None

    @abstractmethod
    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and block scales of rows [n, K]; n rows each."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        """Dequantize rows from codes and stored scales: float32 [n, K]."""

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Tensors that store a matrix of type `dtype`, by what follows its name; and its scales as they are read."""
        tensors = (codes, scales) if global_scale is None else (codes, scales, global_scale.clone())
        suffixes = (suffix.removeprefix("weight") for suffix in self.suffixes)
        return dict(zip(suffixes, tensors, strict=True)), scales


class _DecodedWeight:
    """A frozen weight that its format decodes for each product."""

    alpha = 1.0

    def __init__(self, base_format: BaseFormat, stored: Sequence[Tensor]) -> None:
        self._format, self._stored = base_format, dict(zip(base_format.suffixes, stored, strict=True))
        shapes = {f".{suffix}": tuple(tensor.shape) for suffix, tensor in self._stored.items()}
        rows, columns = base_format.dense_shape("", shapes)
        self.shape = (rows, columns)

    def dense(self, dtype: torch.dtype) -> Tensor:
        codes, scales, *rest = self._stored.values()
        return self._format.decode(codes, scales, rest[0] if rest else None).to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return self._stored


class DenseFormat(BaseFormat):
    """No quantization: every tensor in 16 or 32 bits, under its own name, with `nn.Linear` layers."""

    name = "none"
    suffixes = ("weight",)

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is None

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Place) -> FrozenWeight | None:
        return None

    def stacked_weight(
        self, experts: Sequence[Sequence[str]], tensors: TensorFiles, dtype: torch.dtype, place: Place
    ) -> StackedWeight:
        held = tensors.read_all([f"{name}.weight" for names in experts for name in names])
        rows = (torch.cat([held[f"{name}.weight"] for name in names]) for names in experts)
        return DenseStack(place(torch.stack([in_dtype(matrix, dtype) for matrix in rows])))

    def expert_stack(self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Place) -> StackedWeight:
        return DenseStack(place(in_dtype(tensors.read(stack), dtype).transpose(1, 2)))

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("16 bits are not rounded")

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return codes.float()


DENSE = DenseFormat()


def extra_setting(found: Mapping[str, Any], exact: Mapping[str, Any], free: Collection[str] = ()) -> str | None:
    """First setting of a part of a `quantization_config` that asks for more than the format does, as text.

    Args:
        found: The part.
        exact: The format's own: a setting that it has may be absent, null or the same, any other one must be empty.
        free: Settings that may have any value, for neither engine nor trainer reads the weights by them.
    """
    for key, value in found.items():
        same = value is None or value == exact[key] if key in exact else _is_empty(value)
        if key not in free and not same:
            return f"{key} {value!s:.80}"
    return None


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or value is False or value == []


BIASES = (f"{GATE_UP}_bias", f"{DOWN}_bias")


@dataclass(frozen=True)
class StoredExperts:
    """A layer's experts in a checkpoint."""

    experts: Experts
    base_format: BaseFormat
    tensors: TensorFiles
    stacked: str
    """Name of transformers' submodule with all of them."""
    count: int

    def _linears(self, matrix: str) -> list[tuple[str, ...]]:
        """Linears of each expert that make up its matrix, where experts are stored one by one."""
        members = ("gate_proj", "up_proj") if matrix == GATE_UP else (DOWN,)
        return [tuple(f"{self.stacked}.{expert}.{member}" for member in members) for expert in range(self.count)]

    def names(self) -> set[str]:
        """Names of the experts' tensors in the checkpoint."""
        if self.experts.stored_in_stacks:
            stacks = [self.base_format.stack_names(f"{self.stacked}.{matrix}") for matrix in (GATE_UP, DOWN)]
            return {*itertools.chain(*stacks), *(f"{self.stacked}.{bias}" for bias in BIASES)}
        linears = itertools.chain(*self._linears(GATE_UP), *self._linears(DOWN))
        return {tensor for linear in linears for tensor in self.base_format.tensor_names(linear)}

    def weight(self, matrix: str, dtype: torch.dtype, place: Place) -> StackedWeight:
        """One of GATE_UP and DOWN of all experts."""
        if self.experts.stored_in_stacks:
            return self.base_format.expert_stack(f"{self.stacked}.{matrix}", self.tensors, dtype, place)
        return self.base_format.stacked_weight(self._linears(matrix), self.tensors, dtype, place)

    def biases(self, dtype: torch.dtype, place: Place) -> dict[str, Tensor]:
        """Biases of both matrices by the names in `BIASES`; empty if experts have none."""
        if not self.experts.stored_in_stacks:
            return {}
        return {bias: place(self.tensors.read(f"{self.stacked}.{bias}").to(dtype)) for bias in BIASES}
