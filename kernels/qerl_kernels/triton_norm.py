"""Triton kernels of RMSNorm, forward and backward, a CTA per row, in float32."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.triton_launch import Direct


@triton.jit
def _scaled_kernel(x, weight, out, inverse, eps, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    value = tl.load(x + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, 0), columns * 1.0)
    unit = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    scaled = tl.load(weight + k, mask=inside, other=0.0) * (value * unit)
    tl.store(out + row * columns + k, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(inverse + row, unit)


@triton.jit
def _gradient_kernel(grad, x, weight, inverse, out, columns: tl.constexpr, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < columns
    inner = tl.load(grad + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    inner *= tl.load(weight + k, mask=inside, other=0.0)
    value = tl.load(x + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    unit = tl.load(inverse + row)
    # This sum is the inverse's gradient; the mean square's is half of it times -inverse^3.
    share = tl.div_rn(tl.sum(inner * value, 0) * (unit * unit * unit), columns * 1.0)
    total = inner * unit - share * value
    tl.store(out + row * columns + k, total.to(out.dtype.element_ty), mask=inside)


# Each product rounds to float32, as PyTorch's single operations do.
_scaled = Direct(_scaled_kernel, enable_fp_fusion=False)
_gradient = Direct(_gradient_kernel, enable_fp_fusion=False)


@functools.cache
def _shape(columns: int) -> tuple[int, int]:
    """(elements, warps) of a CTA. They fix the order of a sum, so they depend on nothing else."""
    block = triton.next_power_of_2(columns)
    return block, min(max(block // 512, 1), 16)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address that is a multiple of 16: for others Triton would sum in another order."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def scaled(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight [K] * (x [..., K] * inverse) in x's dtype, and inverse = 1 / sqrt(mean(x^2) + eps), float32 [M rows]."""
    x, columns = _plain(x), x.shape[-1]
    rows, (block, warps) = x.numel() // columns, _shape(columns)
    out, inverse = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _scaled(rows, warps, (x, _plain(weight), out, inverse), eps, columns=columns, BLOCK=block)
    return out, inverse


def gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Gradient of `scaled` to x, from that to its result [..., K]."""
    grad, columns = _plain(grad), x.shape[-1]
    out, (block, warps) = torch.empty_like(grad), _shape(columns)
    tensors = (grad, _plain(x), _plain(weight), inverse, out)
    _gradient(inverse.numel(), warps, tensors, columns=columns, BLOCK=block)
    return out
