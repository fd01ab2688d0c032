"""Triton kernel that rotates queries and keys, or their gradients back, rounding where PyTorch's operations do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_kernels.backend import interpreting
from qerl_kernels.triton_launch import Direct
from qerl_kernels.triton_marlin_tile import rounded


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
_direct = Direct(_rope_kernel, enable_fp_fusion=False)


def _launch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    query, key = query.contiguous(), key.contiguous()
    tokens, heads, size = query.shape
    keys = key.shape[1]
    outputs = torch.empty_like(query), torch.empty_like(key)
    block, padded = triton.next_power_of_2(size // 2), (triton.next_power_of_2(heads), triton.next_power_of_2(keys))
    constants = {"HEADS": heads, "KEYS": keys, "HALF": size // 2, "PADDED_HEADS": padded[0], "PADDED_KEYS": padded[1]}
    constants |= {"BLOCK": block, "BACK": back, "ON_GPU": not interpreting()}
    warps = min(max(padded[0] * block // 512, 1), 8)
    _direct(tokens, warps, (query, key, cos, sin, *outputs), **constants)
    return outputs


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries [S, heads, size] and keys [S, key-value heads, size]; cos and sin [S, size] are contiguous."""
    return _launch(query, key, cos, sin, back=False)


def gradient(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients to the inputs of `rotated`, from those to its results."""
    return _launch(query, key, cos, sin, back=True)
