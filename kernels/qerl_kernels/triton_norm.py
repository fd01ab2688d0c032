"""Triton kernels around the sums of an RMSNorm: each product rounds to float32, as PyTorch's single operations do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8


@triton.jit
def _squares_kernel(x, out, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    value = tl.load(x + row * columns + k, mask=inside).to(tl.float32)
    tl.store(out + row * columns + k, value * value, mask=inside)


@triton.jit
def _scaled_kernel(x, weight, inverse, out, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    value = tl.load(x + row * columns + k, mask=inside).to(tl.float32) * tl.load(inverse + row)
    value = tl.load(weight + k, mask=inside) * value
    tl.store(out + row * columns + k, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _products_kernel(grad, x, weight, out, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    inner = tl.load(grad + row * columns + k, mask=inside).to(tl.float32) * tl.load(weight + k, mask=inside)
    value = inner * tl.load(x + row * columns + k, mask=inside).to(tl.float32)
    tl.store(out + row * columns + k, value, mask=inside)


@triton.jit
def _gradient_kernel(grad, x, weight, inverse, of_square, out, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    inner = tl.load(grad + row * columns + k, mask=inside).to(tl.float32) * tl.load(weight + k, mask=inside)
    value = tl.load(x + row * columns + k, mask=inside).to(tl.float32)
    total = inner * tl.load(inverse + row) + tl.load(of_square + row) * (2 * value)
    tl.store(out + row * columns + k, total.to(out.dtype.element_ty), mask=inside)


def _launch(kernel, tensors: tuple[Tensor, ...], out: Tensor) -> Tensor:
    rows, columns = out.shape
    if rows:
        # A sum of two products is not to become one rounding.
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        kernel[(rows,)](*tensors, out, columns, BLOCK=triton.next_power_of_2(columns), **options)
    return out


def squares(x: Tensor) -> Tensor:
    """x^2, float32 [M, K], of x [M, K]."""
    return _launch(_squares_kernel, (x,), torch.empty_like(x, dtype=torch.float32))


def scaled(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """weight * (x * inverse) in x's dtype, of x [M, K], weight [K] and inverse [M, 1]."""
    return _launch(_scaled_kernel, (x, weight, inverse), torch.empty_like(x))


def products(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """(grad * weight) * x, float32 [M, K]: its row sums are the gradient of `inverse` in `scaled`."""
    return _launch(_products_kernel, (grad, x, weight), torch.empty_like(x, dtype=torch.float32))


def gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_square: Tensor) -> Tensor:
    """(grad * weight) * inverse + of_square * 2 x in x's dtype, where of_square [M, 1] is the gradient of `squares`."""
    return _launch(_gradient_kernel, (grad, x, weight, inverse, of_square), torch.empty_like(x))
