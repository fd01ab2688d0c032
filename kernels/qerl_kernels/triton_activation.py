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
LONGEST_BLOCK = 4096
"""Elements of a row that a program takes at most."""


@triton.jit
def _one_plus_exp_minus(x, ON_GPU: tl.constexpr):
    if ON_GPU:  # the function that PyTorch's kernels call; Triton's own is an approximation
        return 1 + libdevice.exp(-x)
    else:
        return 1 + tl.exp(-x)


@triton.jit
def silu_times(gate, up, ON_GPU: tl.constexpr, kind: tl.constexpr = tl.bfloat16):
    """silu(gate) * up in float32, the first factor rounded to `kind`."""
    activated = rounded(tl.div_rn(gate, _one_plus_exp_minus(gate, ON_GPU)), kind, ON_GPU).to(tl.float32)
    return activated * up


@triton.jit
def _part_of_row(size, width, stride, blocks, BLOCK: tl.constexpr):
    """Offsets of a program's elements: `blocks` programs a row, rows without gaps and `stride` elements apart."""
    row, column = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = row * width + column
    return at, row * stride + column, (column < width) & (at < size)


@triton.jit
def _gated_product_kernel(gate, up, out, size, width, stride, blocks, ON_GPU: tl.constexpr, BLOCK: tl.constexpr):
    """A part of a row of gates and ups; rows of the result have no gaps."""
    at, source, inside = _part_of_row(size, width, stride, blocks, BLOCK)
    kind = out.dtype.element_ty
    x = tl.load(gate + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, rounded(silu_times(x, u, ON_GPU, kind), kind, ON_GPU), mask=inside)


@triton.jit
def _gated_product_backward_kernel(
    grad, gate, up, grad_gate, grad_up, size, width, stride, blocks, ON_GPU: tl.constexpr, BLOCK: tl.constexpr
):
    at, source, inside = _part_of_row(size, width, stride, blocks, BLOCK)
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
        block = min(triton.next_power_of_2(width), LONGEST_BLOCK)
    else:
        gate, up = gate.contiguous(), up.contiguous()
    blocks, tensors = triton.cdiv(width, block), (*grad, gate, up, *outputs)
    kernel(triton.cdiv(size, width) * blocks, WARPS, tensors, size, width, stride, blocks, ON_GPU=on_gpu, BLOCK=block)


def _are_halves(gate: Tensor, up: Tensor) -> bool:
    """Whether they are rows [R, I] of one matrix, with a gap between rows."""
    alike = gate.dim() == 2 and gate.stride() == up.stride() and gate.stride(1) == 1
    return alike and gate.shape[1] < gate.stride(0)


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
