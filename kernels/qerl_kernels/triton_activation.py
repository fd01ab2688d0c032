"""Triton kernels of SwiGLU, which round where PyTorch's single operations do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from qerl_kernels.triton_launch import Direct
from qerl_kernels.triton_marlin_tile import rounded

BLOCK = 2048
WARPS = 8
LONGEST_ROW = 4096
"""Elements of a row that a program takes at once; longer ones are copied and divided."""


@triton.jit
def _one_plus_exp_minus(x, ON_GPU: tl.constexpr):
    if ON_GPU:  # the function that PyTorch's kernels call; Triton's own is an approximation
        return 1 + libdevice.exp(-x)
    else:
        return 1 + tl.exp(-x)


@triton.jit
def _gated_product_kernel(gate, up, out, size, width, stride, ON_GPU: tl.constexpr, BLOCK: tl.constexpr):
    """A row of gates and ups, `stride` elements after the last; rows of the result have no gaps."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, source = row * width + column, row * stride + column
    inside = (column < width) & (at < size)
    kind = out.dtype.element_ty
    x = tl.load(gate + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(tl.div_rn(x, _one_plus_exp_minus(x, ON_GPU)), kind, ON_GPU).to(tl.float32)
    tl.store(out + at, rounded(activated * u, kind, ON_GPU), mask=inside)


@triton.jit
def _gated_product_backward_kernel(
    grad, gate, up, grad_gate, grad_up, size, width, stride, ON_GPU: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, source = row * width + column, row * stride + column
    inside = (column < width) & (at < size)
    kind = grad.dtype.element_ty
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    below = _one_plus_exp_minus(x, ON_GPU)
    activated = tl.div_rn(x, below).to(kind).to(tl.float32)
    tl.store(grad_up + at, (g * activated).to(kind), mask=inside)
    of_activated = (g * u).to(kind).to(tl.float32)
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), below)
    slope = tl.fma(x, 1 - sigmoid, tl.full((BLOCK,), 1.0, tl.float32))
    tl.store(grad_gate + at, (of_activated * sigmoid * slope).to(kind), mask=inside)


_product, _gradient = Direct(_gated_product_kernel), Direct(_gated_product_backward_kernel)


def _launch(kernel: Direct, gate: Tensor, up: Tensor, outputs: tuple[Tensor, ...], *grad: Tensor) -> None:
    """Launch a kernel on gates and ups as they lie: contiguous, or rows of two halves; else on copies."""
    size, on_gpu = gate.numel(), gate.is_cuda
    width = stride = block = BLOCK
    if _are_halves(gate, up):
        width, stride = gate.shape[1], gate.stride(0)
        block = triton.next_power_of_2(width)
    else:
        gate, up = gate.contiguous(), up.contiguous()
    tensors = *grad, gate, up, *outputs
    kernel(triton.cdiv(size, width), WARPS, tensors, size, width, stride, ON_GPU=on_gpu, BLOCK=block)


def _are_halves(gate: Tensor, up: Tensor) -> bool:
    """Whether they are rows [R, I] of one matrix, with a gap between rows, that a program takes at once."""
    alike = gate.dim() == 2 and gate.stride() == up.stride() and gate.stride(1) == 1
    return alike and gate.shape[1] < gate.stride(0) and gate.shape[1] <= LONGEST_ROW


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; halves of rows are not copied first."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch(_product, gate, up, (out,))
    return out


def gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_product` to gate and up, of a contiguous `grad`."""
    first, second = (torch.empty_like(half, memory_format=torch.contiguous_format) for half in (gate, up))
    _launch(_gradient, gate, up, (first, second), grad)
    return first, second
