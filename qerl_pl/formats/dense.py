"""No quantization: every tensor in 16 or 32 bits, under its own name."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import DenseStack, FrozenWeight, StackedWeight
from torch import Tensor

from qerl_pl.models.folder import TensorFiles, in_dtype


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


class UnpackedStacks:
    """Of formats that store no experts in stacks, or store them under their own name: all but one."""

    dropped: tuple[str, ...] = ()
    """See `BaseFormat.dropped`."""

    def stack_names(self, stack: str) -> tuple[str, ...]:
        return (stack,)

    def vllm_moe_backend(self, asked: str, share: bool) -> str | None:
        return None


class DenseFormat(UnpackedStacks):
    """The base in `PolicyConfig.dtype`, with `nn.Linear` layers."""

    name = "none"
    vllm_devices: tuple[str, ...] = ("cuda", "cpu")
    vllm_options: Mapping[str, str] = {}

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is None

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        return None

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return (f"{linear}.weight",)

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        return tensors.shapes()

    def check(self, tensors: TensorFiles) -> None:
        """Nothing to check."""

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        return None

    def first_rows(
        self, linear: str, tensors: TensorFiles, rows: int, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        return None

    def stacked_weight(
        self,
        experts: Sequence[Sequence[str]],
        tensors: TensorFiles,
        dtype: torch.dtype,
        place: Callable[[Tensor], Tensor],
    ) -> StackedWeight:
        held = tensors.read_all([f"{name}.weight" for names in experts for name in names])
        rows = (torch.cat([held[f"{name}.weight"] for name in names]) for names in experts)
        return DenseStack(place(torch.stack([in_dtype(matrix, dtype) for matrix in rows])))

    def expert_stack(
        self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
    ) -> StackedWeight:
        return DenseStack(place(in_dtype(tensors.read(stack), dtype).transpose(1, 2)))

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        names = list(tensors)
        read = tensors.read_groups([(name,) for name in names])
        return ((name, in_dtype(tensor, dtype)) for name, (tensor,) in zip(names, read, strict=True))

    def vllm_linear_backend(self, asked: str) -> str | None:
        return None


DENSE = DenseFormat()
