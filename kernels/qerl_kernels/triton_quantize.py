"""Triton kernel that rounds weights to NVFP4, bit for bit as `reference`: IEEE divisions, ties to even."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.reference import BLOCK, NVFP4Tensor, check_matrix
from qerl_kernels.triton_marlin_tile import rounded


@triton.jit
def _e4m3(x):
    """Nearest E4M3 number to x in [0, 448] as (value, byte); zero becomes 0.125."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    # Below 2**-6 the step is 2**-9, which is float32's at 2**14.
    small = (x + 16384.0) - 16384.0
    subnormal = x < 0.015625
    value = tl.where(subnormal, small, bits.to(tl.float32, bitcast=True))
    byte = tl.where(subnormal, (small * 512.0).to(tl.int32), (bits >> 20) - 960)
    return tl.where(value == 0, 0.125, value), tl.where(value == 0, 32, byte)


@triton.jit
def _quantize_nvfp4_kernel(weight, global_scale, packed, scales, total, BLOCKS: tl.constexpr):
    """BLOCKS blocks of 16 weights, flat."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < total
    k = tl.arange(0, 16)
    w = tl.load(weight + block[:, None] * 16 + k[None, :], mask=inside[:, None], other=0.0)
    x = w.to(tl.float32)
    gs = tl.load(global_scale)
    sixth = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((BLOCKS,), 6.0, tl.float32))
    s = rounded(sixth, w.dtype, False).to(tl.float32) * gs
    unit, byte = _e4m3(tl.minimum(s, 448.0))
    unit = tl.div_rn(unit, tl.zeros((BLOCKS,), tl.float32) + gs)
    x = tl.div_rn(x, tl.broadcast_to(unit[:, None], (BLOCKS, 16)))
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code |= tl.where(x < 0, 8, 0)
    low, high = tl.split(code.reshape(BLOCKS, 8, 2))
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(packed + at, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + block, byte.to(tl.uint8), mask=inside)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor) -> NVFP4Tensor:
    """`reference.quantize_nvfp4` with min-max scales: weight [N, K], global_scale float32 of one element."""
    check_matrix(weight, BLOCK, "NVFP4")
    weight = weight.contiguous()
    rows, columns = weight.shape
    packed = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = weight.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    gs = global_scale.float().reshape(1)
    total = scale.numel()
    _quantize_nvfp4_kernel[(triton.cdiv(total, 128),)](weight, gs, packed, scale, total, BLOCKS=128, num_warps=4)
    return NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), gs)
