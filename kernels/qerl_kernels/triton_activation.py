"""Triton kernels of the gated activation, which round where PyTorch's single operations do."""
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
HALF_BLOCK = 1024


@triton.jit
def _one_plus_exp_minus(x, PRECISE: tl.constexpr):
    if PRECISE:  # the function that PyTorch's kernels call; Triton's own is an approximation
        return 1 + libdevice.exp(-x)
    else:
        return 1 + tl.exp(-x)


@triton.jit
def silu_times(gate, up, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """silu(gate) * up in KIND, the first factor rounded to KIND too."""
    x = gate.to(tl.float32)
    activated = rounded(tl.div_rn(x, _one_plus_exp_minus(x, PRECISE)), KIND, PRECISE).to(tl.float32)
    return rounded(activated * up.to(tl.float32), KIND, PRECISE)


@triton.jit
def _product_kernel(gate, up, out, size, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(gate + at, mask=inside, other=0.0)
    product = silu_times(x, tl.load(up + at, mask=inside, other=0.0), out.dtype.element_ty, PRECISE)
    tl.store(out + at, product, mask=inside)


@triton.jit
def _silu_halves_kernel(x, out, columns, blocks, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate, row = x + row.to(tl.int64) * 2 * columns + at, row.to(tl.int64)
    up = tl.load(gate + columns, mask=inside, other=0.0)
    product = silu_times(tl.load(gate, mask=inside, other=0.0), up, out.dtype.element_ty, PRECISE)
    tl.store(out + row * columns + at, product, mask=inside)


@triton.jit
def _gradient_kernel(grad, gate, up, grad_gate, grad_up, size, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = grad.dtype.element_ty
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    below = _one_plus_exp_minus(x, PRECISE)
    activated = tl.div_rn(x, below).to(kind).to(tl.float32)
    tl.store(grad_up + at, (g * activated).to(kind), mask=inside)
    of_activated = (g * u).to(kind).to(tl.float32)
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), below)
    slope = tl.fma(x, 1 - sigmoid, tl.full((BLOCK,), 1.0, tl.float32))
    tl.store(grad_gate + at, (of_activated * sigmoid * slope).to(kind), mask=inside)


_product, _gradient, _halves = Direct(_product_kernel), Direct(_gradient_kernel), Direct(_silu_halves_kernel)


def _launch(kernel: Direct, tensors: tuple[Tensor, ...]) -> None:
    size = tensors[0].numel()
    kernel(triton.cdiv(size, BLOCK), WARPS, tensors, size, PRECISE=tensors[0].is_cuda, BLOCK=BLOCK)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of contiguous tensors."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _launch(_product, (gate, up, out))
    return out


def silu_of_halves(x: Tensor) -> Tensor:
    """silu(first half) * second half of each row, [rows, 2 columns] to [rows, columns]."""
    x, columns = x.contiguous(), x.shape[1] // 2
    out = x.new_empty((len(x), columns))
    blocks = triton.cdiv(columns, HALF_BLOCK)
    _halves(blocks * len(x), 4, (x, out), columns, blocks, PRECISE=x.is_cuda, BLOCK=HALF_BLOCK)
    return out


def gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_product` to gate and up."""
    gate, up = gate.contiguous(), up.contiguous()
    found = torch.empty_like(gate), torch.empty_like(up)
    _launch(_gradient, (grad, gate, up, *found))
    return found
