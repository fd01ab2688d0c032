"""Triton kernel that expands NF4 weights: half a byte and a sixteenth in, two bytes out a weight, bound by memory."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.backend import interpreting
from qerl_kernels.nf4 import nf4_values
from qerl_kernels.triton_launch import Tuned
from qerl_kernels.triton_marlin_tile import rounded


@triton.jit
def _kernel(packed, magnitudes, values, out, total, REAL: tl.constexpr, BLOCK: tl.constexpr):
    """out[2i] and out[2i + 1] from the high and the low half of packed[i]; 32 bytes share a magnitude."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    byte = tl.load(packed + i, mask=inside, other=0).to(tl.int32)
    magnitude = tl.load(magnitudes + (i >> 5), mask=inside, other=0)
    pair = tl.join(tl.load(values + (byte >> 4)), tl.load(values + (byte & 15))) * magnitude[:, None]
    at = i[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out + at, rounded(pair, out.dtype.element_ty, REAL), mask=inside[:, None])


_tuned = Tuned(_kernel, [({"BLOCK": block}, warps) for block, warps in ((1024, 4), (2048, 8), (512, 4), (256, 2))])


def from_nf4(packed: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [N, K/2] and magnitudes float32 [N, K/64] -> dtype [N, K]."""
    packed, magnitudes, values = packed.contiguous(), magnitudes.contiguous(), nf4_values(packed.device)
    out = packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)
    total, codes, units = packed.numel(), packed.data_ptr(), magnitudes.data_ptr()
    key = (total, dtype, packed.get_device(), codes % 16, units % 16)
    launch = _tuned.get(key)
    if launch is None:
        arguments = (packed, magnitudes, values, out, total)
        _tuned.tune(key, arguments, lambda meta: (triton.cdiv(total, meta["BLOCK"]), 1, 1), REAL=not interpreting())
    else:
        launch(codes, units, values.data_ptr(), out.data_ptr(), total)
    return out
