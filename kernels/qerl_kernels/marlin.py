"""vLLM's Marlin layout of 4-bit weights in closed form, to read.

With n the output and k the input feature of a weight, its code is nibble `4*(k&1) + 2*((n>>3)&1) + ((k>>3)&1)` of word
`(n//64)*128 + ((n%8)*4 + (k%8)//2)*4 + (n%64)//16` in row k//16, and its block's scale is column
`(n//64)*64 + 8*(n%8) + 4*((n>>5)&1) + 2*((n>>3)&1) + ((n>>4)&1)` of row k//16 (k//32 for MXFP4).
Rows can be read in slices at multiples of 64, so projections that vLLM fuses stay separate modules.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qerl_kernels.reference import e2m1_values, e8m0_values

TILE = 64
"""Output features that the layout interleaves; slices start and end at its multiples."""


class MarlinTensor(NamedTuple):
    """A 4-bit weight [N, K] as vLLM holds it after loading for Marlin with bfloat16 activations."""

    weight: Tensor
    """int32 [K/16, 2N]."""
    scale: Tensor
    """NVFP4: bytes [K/16, N], bits 7 to 14 of the float16 number scale * sf * 2**7. MXFP4: E8M0 bytes [K/32, N]."""
    global_scale: Tensor | None
    """NVFP4: float32, one element, 2**119 / (global scale * sf). MXFP4: None."""


def marlin_alpha(global_scale: Tensor | None) -> float:
    """Factor from `dequantize_marlin`'s result to the weight; synchronizes with the device."""
    return 1.0 if global_scale is None else global_scale.item() * 2.0**-119


def dequantize_marlin(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, start: int = 0, stop: int | None = None, *, mx: bool = False
) -> Tensor:
    """The weight without its global scale, e2m1 * scale, from Marlin's layout.

    Args:
        weight: int32 [K/16, 2N].
        scale: Bytes [K/16, N], or [K/32, N] for MXFP4.
        dtype: Of the result [stop - start, K], exact in bfloat16.
        start: First row, a multiple of 64.
        stop: Row after the last, a multiple of 64; N if None.
        mx: MXFP4 instead of NVFP4.

    Raises:
        ValueError: A slice that is not at multiples of 64.
    """
    start, stop = check_rows(weight, start, stop)
    words = weight[:, 2 * start : 2 * stop]
    nibbles = torch.stack([(words >> 4 * i) & 0xF for i in range(8)], dim=-1)
    # (k tile, n tile, n%8, (k%8)//2, (n%64)//16, k&1, (n>>3)&1, (k>>3)&1)
    codes = nibbles.view(len(weight), -1, 8, 4, 4, 2, 2, 2).permute(1, 4, 6, 2, 0, 7, 3, 5)
    values = e2m1_values(codes.reshape(stop - start, 16 * len(weight)))
    rows = scale.view(torch.uint8)[:, start:stop].view(len(scale), -1, 8, 2, 2, 2)
    rows = rows.permute(1, 3, 5, 4, 2, 0).reshape(stop - start, len(scale))
    unit = e8m0_values(rows) if mx else (rows.to(torch.int16) << 7).view(torch.float16).float() * 2.0**-7
    return (values.unflatten(1, (len(scale), -1)) * unit.unsqueeze(-1)).flatten(1).to(dtype)


def check_rows(weight: Tensor, start: int, stop: int | None) -> tuple[int, int]:
    """Bounds of a slice of rows of a Marlin weight, or ValueError."""
    rows = weight.shape[1] // 2
    end = rows if stop is None else stop
    if start % TILE or end % TILE or not 0 <= start < end <= rows:
        raise ValueError(
            f"A slice of a Marlin weight starts and ends at multiples of {TILE} within its {rows} rows, got "
            f"[{start}:{end}]; keep an own copy of this weight."
        )
    return start, end
