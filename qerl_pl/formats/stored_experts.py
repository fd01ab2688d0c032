"""A layer's experts in a checkpoint of any base format."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from qerl_kernels import StackedWeight
from torch import Tensor

from qerl_pl.formats.base_format import BaseFormat
from qerl_pl.models.families import DOWN, GATE_UP, Experts
from qerl_pl.models.folder import TensorFiles

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
        """Of the tensors in the checkpoint."""
        if self.experts.stored_in_stacks:
            stacks = [self.base_format.stack_names(f"{self.stacked}.{matrix}") for matrix in (GATE_UP, DOWN)]
            return {*itertools.chain(*stacks), *(f"{self.stacked}.{bias}" for bias in BIASES)}
        linears = itertools.chain(*self._linears(GATE_UP), *self._linears(DOWN))
        return {tensor for linear in linears for tensor in self.base_format.tensor_names(linear)}

    def weight(self, matrix: str, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> StackedWeight:
        """One of GATE_UP and DOWN of all experts.

        Args:
            matrix: Its name.
            dtype: Of weights that are not quantized.
            place: Puts a tensor where it stays.
        """
        if self.experts.stored_in_stacks:
            return self.base_format.expert_stack(f"{self.stacked}.{matrix}", self.tensors, dtype, place)
        return self.base_format.stacked_weight(self._linears(matrix), self.tensors, dtype, place)

    def biases(self, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Of both matrices by the names in `BIASES`; empty where experts have none."""
        if not self.experts.stored_in_stacks:
            return {}
        return {bias: place(self.tensors.read(f"{self.stacked}.{bias}").to(dtype)) for bias in BIASES}
