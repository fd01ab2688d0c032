"""Frozen weights, dense or 4-bit, of linears and of a layer's experts, in the layouts of checkpoints and of vLLM.

They are dequantized on the selected backend, past PyTorch's dispatcher, which takes longer than the kernel's launch.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from qerl_kernels import marlin, reference
from qerl_kernels.backend import runs_triton
from qerl_kernels.marlin import TILE, MarlinTensor, check_rows, marlin_alpha
from qerl_kernels.reference import MXFP4Tensor, NVFP4Tensor


@functools.cache
def _triton() -> ModuleType:
    """Imported at the first use: without Triton the rest of the package works."""
    from qerl_kernels import triton_dequantize

    return triton_dequantize


def dequantize_nvfp4_unscaled(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_nvfp4_unscaled` on the selected backend."""
    if runs_triton(packed):
        return _triton().from_rows(packed, scale, dtype, mx=False)
    return reference.dequantize_nvfp4_unscaled(packed, scale, dtype)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_mxfp4` on the selected backend."""
    if runs_triton(packed):
        return _triton().from_rows(packed, scale, dtype, mx=True)
    return reference.dequantize_mxfp4(packed, scale, dtype)


def dequantize_marlin(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, start: int = 0, stop: int | None = None, *, mx: bool = False
) -> Tensor:
    """`marlin.dequantize_marlin` on the selected backend."""
    if not runs_triton(weight):
        return marlin.dequantize_marlin(weight, scale, dtype, start, stop, mx=mx)
    return _triton().from_marlin(weight, scale, *check_rows(weight, start, stop), dtype, mx=mx)


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
        return dequantize_nvfp4_unscaled(self._tensor.packed, self._tensor.scale, dtype)

    def tensors(self) -> dict[str, Tensor]:
        return _by_name(self._tensor)


class MXFP4Weight:
    """A weight in MXFP4, in the layout of compressed-tensors."""

    alpha = 1.0

    def __init__(self, tensor: MXFP4Tensor) -> None:
        self._tensor = tensor
        self.shape = (len(tensor.packed), 2 * tensor.packed.shape[1])

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantize_mxfp4(*self._tensor, dtype)

    def tensors(self) -> dict[str, Tensor]:
        return _by_name(self._tensor)


def _by_name(tensor: NVFP4Tensor | MXFP4Tensor) -> dict[str, Tensor]:
    """The tensors by compressed-tensors' names."""
    return {f"weight_{field}": one for field, one in tensor._asdict().items()}


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
        return dequantize_marlin(weight, scale, dtype, self.start, self.stop, mx=global_scale is None)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the full matrix, by vLLM's names."""
        weight, scale, global_scale = self._tensor
        held = {"weight": weight, "weight_scale": scale}
        return held if global_scale is None else held | {"weight_global_scale": global_scale}


class StackedWeight(Protocol):
    """Matrices W_e [N, K] = alphas[e] * dense of E experts."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""

    @property
    def alphas(self) -> Tensor | None:
        """Factor of each expert's `dense`, float32 [E] on the weight's device; None where all are 1."""

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """W / alphas of the experts [start, stop), dtype [stop - start, N, K], perhaps a view with other strides."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors, each [E, ...]."""


class DenseStack:
    """Weights [E, N, K] in 16 or 32 bits."""

    alphas = None

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.shape = (weight.shape[0], weight.shape[1], weight.shape[2])

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._weight[start:stop].to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self._weight}


class NVFP4Stack:
    """Weights in NVFP4, in the layout of compressed-tensors: each tensor with the experts in front.

    Args:
        tensor: Codes uint8 [E, N, K/2], block scales [E, N, K/16], global scales float32 [E].
    """

    def __init__(self, tensor: NVFP4Tensor) -> None:
        self._tensor = tensor
        experts, rows, half = tensor.packed.shape
        self.shape = (experts, rows, 2 * half)

    @property
    def alphas(self) -> Tensor:  # read anew, for a module may have moved its tensors to another device
        return self._tensor.global_scale.float().reciprocal()

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        packed, scale = (tensor[start:stop].flatten(0, 1) for tensor in self._tensor[:2])
        return dequantize_nvfp4_unscaled(packed, scale, dtype).view(-1, *self.shape[1:])

    def tensors(self) -> dict[str, Tensor]:
        return _by_name(self._tensor)


class MXFP4Stack:
    """Weights in MXFP4, in the layout of compressed-tensors.

    Args:
        tensor: Codes uint8 [E, N, K/2], block scales uint8 [E, N, K/32].
    """

    alphas = None

    def __init__(self, tensor: MXFP4Tensor) -> None:
        self._tensor = tensor
        experts, rows, half = tensor.packed.shape
        self.shape = (experts, rows, 2 * half)

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        packed, scale = (tensor[start:stop].flatten(0, 1) for tensor in self._tensor)
        return dequantize_mxfp4(packed, scale, dtype).view(-1, *self.shape[1:])

    def tensors(self) -> dict[str, Tensor]:
        return _by_name(self._tensor)


class MarlinStack:
    """Weights in vLLM's Marlin layout, an engine's.

    Concatenated along K they are a single Marlin matrix [N, E K], so that one kernel dequantizes a group of experts.

    Args:
        tensor: As `MarlinTensor`, with the experts in front: int32 [E, K/16, 2N], bytes [E, K/16, N], and for NVFP4
            float32 [E].
        rows: Rows of each matrix; those that follow are padding. None for all N.
        columns: The same of its columns; None for all K.
    """

    def __init__(self, tensor: MarlinTensor, rows: int | None = None, columns: int | None = None) -> None:
        self._tensor = tensor
        experts, tiles, words = tensor.weight.shape
        self._padded_columns = 16 * tiles
        sizes = (words // 2 if rows is None else rows, self._padded_columns if columns is None else columns)
        self.shape = (experts, *sizes)
        scale = tensor.global_scale
        self.alphas = None if scale is None else scale.float().flatten() * 2.0**-119

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        weight, scale = (tensor[start:stop].flatten(0, 1) for tensor in self._tensor[:2])
        _, rows, columns = self.shape
        in_tiles = -(-rows // TILE) * TILE
        dense = dequantize_marlin(weight, scale, dtype, stop=in_tiles, mx=self._tensor.global_scale is None)
        return dense.view(in_tiles, stop - start, self._padded_columns)[:rows, :, :columns].transpose(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        weight, scale, global_scale = self._tensor
        held = {"weight": weight, "weight_scale": scale}
        return held if global_scale is None else held | {"weight_scale_2": global_scale}
