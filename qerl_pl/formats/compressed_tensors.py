"""Bases whose linears are packed as compressed-tensors packs 4-bit weights, so that others can load them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from qerl_kernels import FrozenWeight
from torch import Tensor

from qerl_pl.formats.model_folder import TensorFiles, in_dtype


class PackedFormat(ABC):
    """What NVFP4 and MXFP4 have in common: a linear X is stored as `X.weight_packed` and its scales."""

    name: ClassVar[str]
    file_format: ClassVar[str]
    """As config.json calls it."""
    parts: ClassVar[tuple[str, ...]]
    """What follows a linear's name in those of its tensors, the packed codes first."""
    vllm_devices = ("cuda",)
    vllm_options: Mapping[str, str] = {}

    @abstractmethod
    def weight(self, held: Sequence[Tensor]) -> FrozenWeight:
        """The frozen weight that a linear's tensors are."""

    @abstractmethod
    def dense(self, held: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] that a linear's tensors stand for."""

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether config.json names this format."""
        return quantization is not None and quantization.get("format") == self.file_format

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        """Of a linear that is packed."""
        return tuple(f"{linear}.{part}" for part in self.parts)

    @abstractmethod
    def check(self, tensors: TensorFiles) -> None:
        """Refuse by UserError a checkpoint that engine and trainer would read differently."""

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        """The weight of a packed linear."""
        names = self.tensor_names(linear)
        if names[0] not in tensors:
            return None
        return self.weight([place(tensors.read(name)) for name in names])

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a dense checkpoint."""
        for name in tensors:
            linear, _, part = name.rpartition(".")
            if part == self.parts[0]:
                held = [tensors.read(one) for one in self.tensor_names(linear)]
                yield f"{linear}.weight", self.dense(held, dtype)
            elif part not in self.parts:
                yield name, in_dtype(tensors.read(name), dtype)

    def vllm_linear_backend(self, asked: str) -> str | None:
        """What was asked for."""
        return asked


def quantization_config(file_format: str, strategy: str, group_size: int, scale_dtype: str) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose linears, but for lm_head, have 4-bit weights."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
        "scale_dtype": scale_dtype,
        "observer": "memoryless_minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
