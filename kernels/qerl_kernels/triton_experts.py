"""Triton kernels around the grouped products of a mixture of experts, each bound by memory."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.triton_launch import Direct
from qerl_kernels.triton_marlin_tile import rounded

BLOCK = 1024
WARPS = 4


@triton.jit
def _expert_sum_kernel(
    rows,
    factors,
    indices,
    out,
    size,
    blocks,
    COUNT: tl.constexpr,
    SCALED: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of columns of a token's sum, in the order of its indices."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(COUNT):
        row = tl.load(indices + token * COUNT + j)
        value = tl.load(rows + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(factors + row)
        total += value
    tl.store(out + token * size + column, rounded(total, out.dtype.element_ty, ON_GPU), mask=inside)


@triton.jit
def _expert_scale_kernel(rows, factors, others, products, size, ON_GPU: tl.constexpr, BLOCK: tl.constexpr):
    """A row's product with the other row, and the row times its factor in its place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(rows + row * size + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(others + row * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(products + row, tl.sum(value * other, axis=0))
    scaled = rounded(value * tl.load(factors + row), rows.dtype.element_ty, ON_GPU)
    tl.store(rows + row * size + column, scaled, mask=inside)


@triton.jit
def _expert_scale_into_kernel(
    rows, factors, out, elements, size: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr
):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    value = tl.load(rows + element, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + element // size, mask=inside, other=0.0)
    tl.store(out + element, rounded(value, out.dtype.element_ty, ON_GPU), mask=inside)


_sum, _scale, _scale_into = Direct(_expert_sum_kernel), Direct(_expert_scale_kernel), Direct(_expert_scale_into_kernel)


def sum_indexed_rows(rows: Tensor, factors: Tensor | None, indices: Tensor) -> Tensor:
    """Sum over j of factors[indices[i, j]] * rows[indices[i, j]], float32 rounded once, [S, D] in the dtype of rows.

    Args:
        rows: Contiguous [R, D].
        factors: float32 [R], contiguous; None where all are 1.
        indices: Rows of each token, contiguous int64 [S, k].
    """
    (tokens, count), size = indices.shape, rows.shape[1]
    out = rows.new_empty(tokens, size)
    blocks = triton.cdiv(size, BLOCK)
    tensors = rows, rows if factors is None else factors, indices, out
    constants = {"COUNT": count, "SCALED": factors is not None, "ON_GPU": rows.is_cuda, "BLOCK": BLOCK}
    _sum(tokens * blocks, WARPS, tensors, size, blocks, **constants)
    return out


def scale_rows(rows: Tensor, factors: Tensor, others: Tensor) -> Tensor:
    """rows [R, I] *= factors, in place, and before it the product of each row with that of others, float32 [R].

    Args:
        rows: Contiguous.
        factors: float32 [R], contiguous.
        others: Contiguous, [R, I].
    """
    products = torch.empty_like(factors)
    size, block = rows.shape[1], triton.next_power_of_2(rows.shape[1])
    _scale(len(rows), WARPS, (rows, factors, others, products), size, ON_GPU=rows.is_cuda, BLOCK=block)
    return products


def scale_into(out: Tensor, rows: Tensor, factors: Tensor) -> None:
    """out = rows * factors, in float32, rounded once.

    Args:
        out: Contiguous [R, N].
        rows: The same.
        factors: float32 [R], contiguous.
    """
    elements, size = rows.numel(), rows.shape[1]
    _scale_into(
        triton.cdiv(elements, BLOCK), WARPS, (rows, factors, out), elements, size=size, ON_GPU=rows.is_cuda, BLOCK=BLOCK
    )
