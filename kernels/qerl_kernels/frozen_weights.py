"""Frozen weights: a matrix that nothing trains, held dense or in four bits, in one layout or another."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from qerl_kernels import ops
from qerl_kernels.marlin import MarlinTensor, check_rows, marlin_alpha
from qerl_kernels.reference import MXFP4Tensor, NVFP4Tensor


class FrozenWeight(Protocol):
    """A matrix W [N, K] = alpha * dense, made anew for each product that needs it.

    A layout is one class with these four. Engines lend them, linear layers multiply by them, and neither asks which.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def alpha(self) -> float:
        """Factor of `dense`; a number in the host's memory, so that reading it waits for no device."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W / alpha, dtype [N, K]; exact in bfloat16 where W is held in NVFP4 or MXFP4, rounded where in NF4."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What it holds, by the last part of the name that a checkpoint gives it, such as "weight_scale"."""


class DenseWeight:
    """A weight in 16 or 32 bits: what the 4-bit ones are compared with.

    Args:
        weight: [N, K].
    """

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

    Args:
        tensor: What is held; the global scale's reciprocal, rounded to float32 as engines round it, becomes alpha,
            which waits for the device.
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
    """A weight in MXFP4, in the layout of compressed-tensors.

    Args:
        tensor: What is held.
    """

    def __init__(self, tensor: MXFP4Tensor) -> None:
        self._tensor = tensor
        self.shape = (len(tensor.packed), 2 * tensor.packed.shape[1])
        self.alpha = 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_mxfp4(self._tensor.packed, self._tensor.scale, dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight_packed": self._tensor.packed, "weight_scale": self._tensor.scale}


class MarlinRows:
    """Rows [start, stop) of a weight in Marlin's layout, which may hold several projections: NVFP4, or MXFP4 where it
    has no global scale.

    Args:
        tensor: The whole matrix, an engine's.
        start: First row, a multiple of 64.
        stop: Row after the last, a multiple of 64; all if None.
        alpha: What `marlin_alpha` gave for the global scale; None reads it, which waits for the device.

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
        return ops.dequantize_marlin_rows(weight, scale, self.start, self.stop, global_scale is None, dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Of the whole matrix, by the names that vLLM gives them."""
        weight, scale, global_scale = self._tensor
        held = {"weight": weight, "weight_scale": scale}
        return held if global_scale is None else held | {"weight_global_scale": global_scale}
