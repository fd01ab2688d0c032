"""Triton kernels of RMSNorm, forward and backward, a CTA for one long row or several short ones, in float32."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.triton_launch import Direct
from qerl_kernels.triton_marlin_tile import rounded


@triton.jit
def _tile(rows, columns: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A CTA's rows [ROWS, 1] and columns [1, BLOCK], and which of its elements exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    return row, k, (row < rows) & (k < columns)


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    inverse,
    rows,
    eps,
    columns: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ON_GPU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, k, inside = _tile(rows, columns, ROWS, BLOCK)
    value = tl.load(x + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 1)[:, None], columns * 1.0)
    unit = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    value *= unit
    if ROUNDS_FIRST:
        value = rounded(value, out.dtype.element_ty, ON_GPU).to(tl.float32)
    value *= tl.load(weight + k, mask=k < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + k, rounded(value, out.dtype.element_ty, ON_GPU), mask=inside)
    tl.store(inverse + row, unit, mask=row < rows)


@triton.jit
def _rms_norm_backward_kernel(
    grad,
    x,
    weight,
    inverse,
    out,
    rows,
    columns: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ON_GPU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, k, inside = _tile(rows, columns, ROWS, BLOCK)
    inner = tl.load(grad + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    inner *= tl.load(weight + k, mask=k < columns, other=0.0).to(tl.float32)
    if ROUNDS_FIRST:
        inner = rounded(inner, out.dtype.element_ty, ON_GPU).to(tl.float32)
    value = tl.load(x + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(inverse + row, mask=row < rows, other=0.0)
    # This sum is the inverse's gradient; the mean square's is half of it times -inverse^3.
    share = tl.div_rn(tl.sum(inner * value, 1)[:, None] * (unit * unit * unit), columns * 1.0)
    total = inner * unit - share * value
    tl.store(out + row * columns + k, rounded(total, out.dtype.element_ty, ON_GPU), mask=inside)


# Each product rounds to float32, as PyTorch's single operations do.
_scaled = Direct(_rms_norm_kernel, enable_fp_fusion=False)
_gradient = Direct(_rms_norm_backward_kernel, enable_fp_fusion=False)


@functools.cache
def _shape(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a CTA. They fix the order of a sum, so they depend on nothing else."""
    block = triton.next_power_of_2(columns)
    rows = max(1024 // block, 1)  # heads are short: one of them would be too little work
    return rows, block, min(max(rows * block // 512, 1), 16)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address that is a multiple of 16: for others Triton would sum in another order."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def scaled(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight [K] * (x [..., K] * inverse) in x's dtype, and inverse = 1 / sqrt(mean(x^2) + eps), float32 [M rows]."""
    x = _plain(x)
    out, inverse = torch.empty_like(x), torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    _launch(_scaled, (x, _plain(weight), out, inverse), weight, x, eps)
    return out, inverse


def gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Gradient of `scaled` to x, from that to its result [..., K]."""
    grad = _plain(grad)
    out = torch.empty_like(grad)
    _launch(_gradient, (grad, _plain(x), _plain(weight), inverse, out), weight, x)
    return out


def _launch(kernel: Direct, tensors: tuple[Tensor, ...], weight: Tensor, x: Tensor, *numbers: float) -> None:
    columns = x.shape[-1]
    count, (rows, block, warps) = x.numel() // columns, _shape(columns)
    kernel(
        triton.cdiv(count, rows),
        warps,
        tensors,
        count,
        *numbers,
        columns=columns,
        ROUNDS_FIRST=torch.promote_types(weight.dtype, x.dtype) != torch.float32,
        ON_GPU=x.is_cuda,
        ROWS=rows,
        BLOCK=block,
    )
