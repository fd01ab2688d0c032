"""Triton kernels of the causal convolution of packed sequences, with SiLU, and of its gradient."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.triton_launch import Direct

TOKENS, CHANNELS, WARPS = 16, 128, 4
"""Of a CTA."""


@triton.jit
def _convolved(x, weight, position, row, channel, inside, channels, WIDTH: tl.constexpr):
    """Sums [TOKENS, CHANNELS] of the tokens `row`, before SiLU, in float32."""
    total = tl.zeros((row.shape[0], channel.shape[1]), tl.float32)
    for back in tl.static_range(WIDTH):
        tap = tl.load(weight + channel * WIDTH + (WIDTH - 1 - back), mask=channel < channels, other=0.0)
        before = tl.load(x + (row - back) * channels + channel, mask=inside & (position >= back), other=0.0)
        total += tap.to(tl.float32) * before.to(tl.float32)
    return total


@triton.jit
def _convolution_kernel(
    x, weight, positions, out, rows, channels, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    blocks = tl.cdiv(channels, CHANNELS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (row < rows) & (channel < channels)
    position = tl.load(positions + row, mask=row < rows, other=0)
    total = _convolved(x, weight, position, row, channel, inside, channels, WIDTH)
    tl.store(out + row * channels + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    grad, x, weight, positions, out, rows, channels, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    """The gradient reaches a token from itself and from the WIDTH - 1 after it, in its sequence."""
    blocks = tl.cdiv(channels, CHANNELS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (row < rows) & (channel < channels)
    result = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for ahead in tl.static_range(WIDTH):
        later = row + ahead
        position = tl.load(positions + later, mask=later < rows, other=0)
        reaches = (later < rows) & (channel < channels) & (position >= ahead)
        total = _convolved(x, weight, position, later, channel, reaches, channels, WIDTH)
        sigmoid = tl.sigmoid(total)
        slope = sigmoid * (1 + total * (1 - sigmoid))
        of_result = tl.load(grad + later * channels + channel, mask=reaches, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * WIDTH + (WIDTH - 1 - ahead), mask=channel < channels, other=0.0)
        result += of_result * slope * tap.to(tl.float32)
    tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=inside)


_convolution, _gradient = Direct(_convolution_kernel), Direct(_gradient_kernel)


def _launch(kernel: Direct, x: Tensor, weight: Tensor, tensors: tuple[Tensor, ...]) -> None:
    rows, channels = x.shape
    ctas = triton.cdiv(rows, TOKENS) * triton.cdiv(channels, CHANNELS)
    kernel(ctas, WARPS, tensors, rows, channels, WIDTH=weight.shape[1], TOKENS=TOKENS, CHANNELS=CHANNELS)


def convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """`qerl_kernels.delta_rule.causal_convolution` of a contiguous x."""
    out = torch.empty_like(x)
    _launch(_convolution, x, weight, (x, weight.contiguous(), positions, out))
    return out


def convolution_gradient(grad: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Gradient of `convolution` to x, from that to its result, contiguous."""
    out = torch.empty_like(x)
    _launch(_gradient, x, weight, (grad, x, weight.contiguous(), positions, out))
    return out
