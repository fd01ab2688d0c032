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


@triton.jit
def _one_plus_exp_minus(x, ON_GPU: tl.constexpr):
    if ON_GPU:  # the function that PyTorch's kernels call; Triton's own is an approximation
        return 1 + libdevice.exp(-x)
    else:
        return 1 + tl.exp(-x)


@triton.jit
def _product_kernel(gate, up, out, size, ON_GPU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = out.dtype.element_ty
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(tl.div_rn(x, _one_plus_exp_minus(x, ON_GPU)), kind, ON_GPU).to(tl.float32)
    tl.store(out + at, rounded(activated * u, kind, ON_GPU), mask=inside)


@triton.jit
def _gradient_kernel(grad, gate, up, grad_gate, grad_up, size, ON_GPU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = grad.dtype.element_ty
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    below = _one_plus_exp_minus(x, ON_GPU)
    activated = tl.div_rn(x, below).to(kind).to(tl.float32)
    tl.store(grad_up + at, (g * activated).to(kind), mask=inside)
    of_activated = (g * u).to(kind).to(tl.float32)
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), below)
    slope = tl.fma(x, 1 - sigmoid, tl.full((BLOCK,), 1.0, tl.float32))
    tl.store(grad_gate + at, (of_activated * sigmoid * slope).to(kind), mask=inside)


_product, _gradient = Direct(_product_kernel), Direct(_gradient_kernel)


def _launch(kernel: Direct, *tensors: Tensor) -> None:
    size = tensors[0].numel()
    kernel(triton.cdiv(size, BLOCK), WARPS, tensors, size, ON_GPU=tensors[0].is_cuda, BLOCK=BLOCK)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of contiguous tensors."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _launch(_product, gate, up, out)
    return out


def gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_product` to gate and up."""
    gate, up = gate.contiguous(), up.contiguous()
    grads = torch.empty_like(gate), torch.empty_like(up)
    _launch(_gradient, grad, gate, up, *grads)
    return grads
