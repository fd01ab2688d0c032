"""Triton kernels of RMSNorm, rotary embedding and SwiGLU, which round where PyTorch's single operations do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from qerl_kernels.backend import interpreting
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
_rms_norm = Direct(_rms_norm_kernel, enable_fp_fusion=False)
_rms_norm_gradient = Direct(_rms_norm_backward_kernel, enable_fp_fusion=False)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight [K] * (x [..., K] * inverse) in x's dtype, and inverse = 1 / sqrt(mean(x^2) + eps), float32 [M rows]."""
    x = _plain(x)
    out, inverse = torch.empty_like(x), torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    _launch_norm(_rms_norm, (x, _plain(weight), out, inverse), weight, x, eps)
    return out, inverse


def rms_norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Gradient of `rms_norm` to x, from that to its result [..., K]."""
    grad = _plain(grad)
    out = torch.empty_like(grad)
    _launch_norm(_rms_norm_gradient, (grad, _plain(x), _plain(weight), inverse, out), weight, x)
    return out


def _launch_norm(kernel: Direct, tensors: tuple[Tensor, ...], weight: Tensor, x: Tensor, *numbers: float) -> None:
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


@triton.jit
def _rounded(x, KIND: tl.constexpr, ON_GPU: tl.constexpr):
    return rounded(x, KIND, ON_GPU).to(tl.float32)


@triton.jit
def _turn(
    x, out, cosines, sines, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """All heads of a token; cosines and sines are pairs [BLOCK], of its channels' first and second half."""
    KIND: tl.constexpr = out.dtype.element_ty
    head, i = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = head * (2 * HALF) + i, (head < HEADS) & (i < HALF)
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    of_first, of_second = _rounded(first * cosines[0], KIND, ON_GPU), _rounded(second * cosines[1], KIND, ON_GPU)
    if BACK:  # a third addend of a channel's gradient, from slicing, is zero: it makes -0 a 0
        of_first = of_first + _rounded(second * sines[1], KIND, ON_GPU) + 0.0
        of_second = of_second - _rounded(first * sines[0], KIND, ON_GPU) + 0.0
    else:
        of_first = of_first - _rounded(second * sines[0], KIND, ON_GPU)
        of_second = of_second + _rounded(first * sines[1], KIND, ON_GPU)
    tl.store(out + at, rounded(of_first, KIND, ON_GPU), mask=inside)
    tl.store(out + at + HALF, rounded(of_second, KIND, ON_GPU), mask=inside)


@triton.jit
def _rope_kernel(
    query, key, cos, sin, out_query, out_key, HEADS: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_KEYS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    cos += token * (2 * HALF) + i
    sin += token * (2 * HALF) + i
    inside = i < HALF
    cosines = (
        tl.load(cos, mask=inside, other=0.0).to(tl.float32),
        tl.load(cos + HALF, mask=inside, other=0.0).to(tl.float32),
    )
    sines = (
        tl.load(sin, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32),
    )
    at = token * (HEADS * 2 * HALF)
    _turn(query + at, out_query + at, cosines, sines, HEADS, PADDED_HEADS, HALF, BLOCK, BACK, ON_GPU)
    at = token * (KEYS * 2 * HALF)
    _turn(key + at, out_key + at, cosines, sines, KEYS, PADDED_KEYS, HALF, BLOCK, BACK, ON_GPU)


# No fused multiply-add: each product rounds.
_rotary = Direct(_rope_kernel, enable_fp_fusion=False)


def _launch_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    query, key = query.contiguous(), key.contiguous()
    tokens, heads, size = query.shape
    keys = key.shape[1]
    outputs = torch.empty_like(query), torch.empty_like(key)
    block, padded = triton.next_power_of_2(size // 2), (triton.next_power_of_2(heads), triton.next_power_of_2(keys))
    constants = {"HEADS": heads, "KEYS": keys, "HALF": size // 2, "PADDED_HEADS": padded[0], "PADDED_KEYS": padded[1]}
    constants |= {"BLOCK": block, "BACK": back, "ON_GPU": not interpreting()}
    warps = min(max(padded[0] * block // 512, 1), 8)
    _rotary(tokens, warps, (query, key, cos, sin, *outputs), **constants)
    return outputs


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries [S, heads, size] and keys [S, key-value heads, size]; cos and sin [S, size] are contiguous."""
    return _launch_rotary(query, key, cos, sin, back=False)


def rotary_gradient(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to the inputs of `rotary`, from those to its results."""
    return _launch_rotary(query, key, cos, sin, back=True)


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


_silu_product, _silu_product_gradient = Direct(_gated_product_kernel), Direct(_gated_product_backward_kernel)


def _launch_silu_product(kernel: Direct, gate: Tensor, up: Tensor, outputs: tuple[Tensor, ...], *grad: Tensor) -> None:
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
    _launch_silu_product(_silu_product, gate, up, (out,))
    return out


def silu_product_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_product` to gate and up, of a contiguous `grad`."""
    first, second = (torch.empty_like(half, memory_format=torch.contiguous_format) for half in (gate, up))
    _launch_silu_product(_silu_product_gradient, gate, up, (first, second), grad)
    return first, second
