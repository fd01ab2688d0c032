"""Frozen weights, dense or 4-bit, in the layouts of checkpoints and of vLLM."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from qerl_kernels import ops
from qerl_kernels.marlin import MarlinTensor, check_rows, marlin_alpha
from qerl_kernels.reference import MXFP4Tensor, NVFP4Tensor


class FrozenWeight(Protocol):
    """A matrix W [N, K] = alpha * dense, dequantized for each product.

    A layout is a class with these four members. Engines share such weights, linear layers multiply by them.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def alpha(self) -> float:
        """Factor of `dense`, a Python number: reading it does not synchronize with the device."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W / alpha, dtype [N, K]; exact in bfloat16 for NVFP4 and MXFP4, rounded for NF4."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by the last component of their checkpoint name, such as "weight_scale"."""


class DenseWeight:
    """A weight [N, K] in 16 or 32 bits."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.shape = (weight.shape[0], weight.shape[1])
        self.alpha = 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._weight.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self._weight}


class NVFP4Weight:
    """A weight in NVFP4, in the layout of compressed-tensors.

    alpha is the global scale's reciprocal, rounded to float32 as engines round it: `__init__` synchronizes.
    """

    def __init__(self, tensor: NVFP4Tensor) -> None:
        self._tensor = tensor
        self.shape = (len(tensor.packed), 2 * tensor.packed.shape[1])
        self.alpha = tensor.global_scale.float().reciprocal().item()

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_nvfp4_unscaled(self._tensor.packed, self._tensor.scale, dtype)

    def tensors(self) -> dict[str, Tensor]:
        packed, scale, global_scale = self._tensor
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": global_scale}


class MXFP4Weight:
    """A weight in MXFP4, in the layout of compressed-tensors."""

    def __init__(self, tensor: MXFP4Tensor) -> None:
        self._tensor = tensor
        self.shape = (len(tensor.packed), 2 * tensor.packed.shape[1])
        self.alpha = 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_mxfp4(self._tensor.packed, self._tensor.scale, dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight_packed": self._tensor.packed, "weight_scale": self._tensor.scale}


class MarlinRows:
    """Rows [start, stop) of a weight in Marlin's layout: NVFP4, or MXFP4 without a global scale.

    Args:
        tensor: The full matrix, an engine's.
        start: First row, a multiple of 64.
        stop: Row after the last, a multiple of 64; N if None.
        alpha: `marlin_alpha` of the global scale; None computes it, which synchronizes with the device.

    Raises:
        ValueError: A slice that is not at multiples of 64.
    """

    def __init__(
        self, tensor: MarlinTensor, start: int = 0, stop: int | None = None, alpha: float | None = None
    ) -> None:
        self._tensor = tensor
        self.start, self.stop = check_rows(tensor.weight, start, stop)
        self.shape = (self.stop - self.start, 16 * len(tensor.weight))
        self.alpha = marlin_alpha(tensor.global_scale) if alpha is None else alpha

    def dense(self, dtype: torch.dtype) -> Tensor:
        weight, scale, global_scale = self._tensor
        return ops.dequantize_marlin(weight, scale, dtype, self.start, self.stop, mx=global_scale is None)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the full matrix, by vLLM's names."""
        weight, scale, global_scale = self._tensor
        held = {"weight": weight, "weight_scale": scale}
        return held if global_scale is None else held | {"weight_global_scale": global_scale}
