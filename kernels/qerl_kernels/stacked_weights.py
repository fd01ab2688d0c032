"""Frozen weights of a layer's experts, one stack of matrices each, dequantized a group of experts at a time."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from qerl_kernels import ops
from qerl_kernels.marlin import TILE, MarlinTensor
from qerl_kernels.reference import MXFP4Tensor, NVFP4Tensor


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
        return ops.dequantize_nvfp4_unscaled(packed, scale, dtype).view(-1, *self.shape[1:])

    def tensors(self) -> dict[str, Tensor]:
        packed, scale, global_scale = self._tensor
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": global_scale}


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
        return ops.dequantize_mxfp4(packed, scale, dtype).view(-1, *self.shape[1:])

    def tensors(self) -> dict[str, Tensor]:
        return {"weight_packed": self._tensor.packed, "weight_scale": self._tensor.scale}


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
        dense = ops.dequantize_marlin(weight, scale, dtype, stop=in_tiles, mx=self._tensor.global_scale is None)
        return dense.view(in_tiles, stop - start, self._padded_columns)[:rows, :, :columns].transpose(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        weight, scale, global_scale = self._tensor
        held = {"weight": weight, "weight_scale": scale}
        return held if global_scale is None else held | {"weight_scale_2": global_scale}
