"""Triton kernels that expand 4-bit weights, from the compressed-tensors layout and from vLLM's Marlin layout.

They read 0.5625 and write 2 bytes per weight and are bound by memory. Codes 16 bits apart become two float16
numbers e2m1 * 2**-14 by the same integer operations; the float32 product with the block's unit * 2**14 is exact.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.triton_launch import Tuned


@triton.jit
def _halves(words):
    """Words [...] to [..., 4]: element j holds codes j and j + 4 as float16 numbers e2m1 * 2**-14 in its two halves."""
    nibbles = tl.expand_dims(words.to(tl.uint32, bitcast=True), -1) >> (4 * tl.arange(0, 4)).to(tl.uint32)
    return ((nibbles << 9) & 0x0E000E00) | ((nibbles << 12) & 0x80008000)


@triton.jit
def _unpack(pairs):
    """The two float16 numbers of each word [...], along a new last dimension: float32 [..., 2]."""
    low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high).to(tl.float32)


@triton.jit
def _unit(byte, MX: tl.constexpr, MARLIN: tl.constexpr):
    """Block scale of an E8M0 byte; or times 2**14, of an E4M3 byte or of Marlin's byte with a five-bit exponent."""
    bits = byte.to(tl.int32)
    if MX:  # 0 stands for the subnormal 2**-127
        unit = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    elif MARLIN:  # the top bits of the float16 number scale * 2**7
        unit = (bits << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 128.0
    else:  # as float16 bits an E4M3 number is 2**-8 of itself
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.uint16)
        unit = half.to(tl.float16, bitcast=True).to(tl.float32) * 4194304.0
    return unit


@triton.jit
def _dequantize_rows_kernel(words, scales, out, total, MX: tl.constexpr, BLOCK: tl.constexpr):
    """out[8i:8i+8] from words[i], flat: rows divide into blocks, so neither words nor scales straddle them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    word = tl.load(words + i, mask=inside, other=0)
    unit = _unit(tl.load(scales + (i >> (2 if MX else 1)), mask=inside, other=0), MX, False)
    values = _unpack(_halves(word))  # (word, j, half): k = j + 4 * half
    if MX:
        values *= 16384.0
    values = tl.permute(values, (0, 2, 1)).reshape(BLOCK, 8) * unit[:, None]
    at = i[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _dequantize_marlin_kernel(
    words, scales, out, k_tiles, stride_words, stride_scales, stride_out, MX: tl.constexpr, TILES: tl.constexpr
):
    """A tile of 64 output by 16 * TILES input features: a row of 128 words is 64 x 16 weights.

    Neighbouring CTAs are neighbours along k, so that together they write full rows.
    """
    k_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    n_tile = tl.program_id(1).to(tl.int64)
    inside = (k_tile < k_tiles)[:, None]
    row = k_tile[:, None].to(tl.int64)
    word = tl.load(words + row * stride_words + n_tile * 128 + tl.arange(0, 128)[None, :], mask=inside, other=0)
    at = (row // 2 if MX else row) * stride_scales + n_tile * 64 + tl.arange(0, 64)[None, :]
    unit = _unit(tl.load(scales + at, mask=inside, other=0), MX, True)
    values = _unpack(_halves(word))
    if MX:
        values *= 16384.0
    # (k tile, n%8, (k%8)//2, (n%64)//16, (n>>3)&1, (k>>3)&1, k&1) -> (n, k)
    values = tl.permute(values.reshape(TILES, 8, 4, 4, 2, 2, 2), (3, 4, 1, 0, 5, 2, 6)).reshape(64, TILES, 16)
    # (k tile, n%8, bits 5, 3 and 4 of n) -> (n, k tile)
    unit = tl.permute(unit.reshape(TILES, 8, 2, 2, 2), (2, 4, 3, 1, 0)).reshape(64, TILES)
    values = (values * unit[:, :, None]).reshape(64, 16 * TILES)
    n = n_tile * 64 + tl.arange(0, 64)[:, None]
    k = tl.program_id(0) * (16 * TILES) + tl.arange(0, 16 * TILES)[None, :]
    tl.store(out + n * stride_out + k, values.to(out.dtype.element_ty), mask=k < k_tiles * 16)


# Large matrices want much work per CTA, small ones many CTAs: these fill an H200's 132 SMs evenly.
_rows = Tuned(
    _dequantize_rows_kernel,
    [
        ({"BLOCK": block}, warps)
        for block, warps in ((1024, 4), (512, 4), (2048, 4), (2048, 8), (512, 2), (256, 2), (256, 1))
    ],
)
_marlin = Tuned(
    _dequantize_marlin_kernel,
    # Not two tiles on one warp: Triton 3.6 compiles that to wrong MXFP4 values on sm_90.
    [({"TILES": tiles}, warps) for tiles, warps in ((2, 2), (4, 4), (4, 2), (8, 4), (4, 8), (8, 8), (2, 4))],
)


def from_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype, *, mx: bool) -> Tensor:
    """packed uint8 [N, K/2] and scale, a byte each block, [N, K/16] ([N, K/32] for MXFP4) -> dtype [N, K]."""
    packed, scale = packed.contiguous(), scale.contiguous()
    rows, columns = packed.shape
    out = packed.new_empty((rows, 2 * columns), dtype=dtype)
    total, words, scales = rows * columns // 4, packed.data_ptr(), scale.data_ptr()
    key = (total, dtype, mx, packed.get_device(), words % 16, scales % 16)
    launch = _rows.get(key)
    if launch is None:
        arguments = (packed.view(torch.int32), scale.view(torch.uint8), out, total)
        _rows.tune(key, arguments, lambda meta: (triton.cdiv(total, meta["BLOCK"]), 1, 1), MX=mx)
    else:
        launch(words, scales, out.data_ptr(), total)
    return out


def from_marlin(weight: Tensor, scale: Tensor, start: int, stop: int, dtype: torch.dtype, *, mx: bool) -> Tensor:
    """Rows of a Marlin weight int32 [K/16, 2N] with its scales -> dtype [stop - start, K]."""
    k_tiles, n_tiles = weight.shape[0], (stop - start) // 64
    out = weight.new_empty((stop - start, 16 * k_tiles), dtype=dtype)
    strides = weight.stride(0), scale.stride(0), out.stride(0)
    # A row of the slice has 8 bytes of codes and 1 of scales, and its start is a multiple of 64.
    words, scales = weight.data_ptr() + 8 * start, scale.data_ptr() + start
    key = (k_tiles, n_tiles, strides, dtype, mx, weight.get_device(), words % 16, scales % 16, out.data_ptr() % 16)
    launch = _marlin.get(key)
    if launch is None:
        arguments = (weight[:, 2 * start :], scale.view(torch.uint8)[:, start:], out, k_tiles, *strides)
        _marlin.tune(key, arguments, lambda meta: (triton.cdiv(k_tiles, meta["TILES"]), n_tiles, 1), MX=mx)
    else:
        launch(words, scales, out.data_ptr(), k_tiles, *strides)
    return out
