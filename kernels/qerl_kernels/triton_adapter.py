"""Triton kernels that add an adapter's product to few rows, such as a sampler decodes: two short launches.

Each element of the result is a sum in a fixed order, so it repeats bit for bit; libraries' kernels for such shapes
either wait on one processor for the whole inner dimension or add up with atomics.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor, float32

BLOCK_K, BLOCK_N, BLOCK_R = 128, 64, 32
WARPS = 4
SPLITS = 32
"""Parts of the inner dimension at most; each program of the second kernel reads them all."""


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x,
    a,
    parts,
    tokens,
    ranks,
    columns,
    stride,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """parts[s] = x[:, k] a[:, k]^T for the SPLIT columns k of part s."""
    split = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(SPLIT // BLOCK_K):
        k = split * SPLIT + step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < columns
        left = tl.load(x + m[:, None] * stride + k[None, :], mask=(m < tokens)[:, None] & inside[None, :], other=0.0)
        right = tl.load(a + r[None, :] * columns + k[:, None], mask=(r < ranks)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = parts + (split * tokens + m)[:, None] * ranks + r[None, :]
    tl.store(at, total, mask=(m < tokens)[:, None] & (r < ranks)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    parts,
    b,
    y,
    tokens,
    rows,
    stride,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y += (sum of parts, rounded) b^T."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, RANKS, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        inside = (m < tokens)[:, None] & (r < RANKS)[None, :]
        hidden = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):  # unrolled, so that the loads wait together
            hidden += tl.load(parts + (split * tokens + m)[:, None] * RANKS + r[None, :], mask=inside, other=0.0)
        right = tl.load(b + n[None, :] * RANKS + r[:, None], mask=(n < rows)[None, :] & (r < RANKS)[:, None], other=0.0)
        total = tl.dot(hidden.to(right.dtype), right, total, input_precision="ieee")
    at, inside = y + m[:, None] * stride + n[None, :], (m < tokens)[:, None] & (n < rows)[None, :]
    tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=inside)


def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """`reference.add_adapter` for contiguous a and b and contiguous rows of x and y, all of one dtype."""
    tokens, columns = x.shape
    rows, ranks = b.shape
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    split = triton.cdiv(triton.cdiv(columns, min(SPLITS, triton.cdiv(columns, 2 * BLOCK_K))), BLOCK_K) * BLOCK_K
    splits, m_blocks = triton.cdiv(columns, split), triton.cdiv(tokens, block_m)
    parts = x.new_empty((splits, tokens, ranks), dtype=float32)
    _shrink_kernel[(splits, triton.cdiv(ranks, BLOCK_R), m_blocks)](
        x, a, parts, tokens, ranks, columns, x.stride(0), split, block_m, BLOCK_R, BLOCK_K, num_warps=WARPS
    )
    _expand_kernel[(triton.cdiv(rows, BLOCK_N), m_blocks)](
        parts, b, y, tokens, rows, y.stride(0), ranks, splits, block_m, BLOCK_R, BLOCK_N, num_warps=WARPS
    )
