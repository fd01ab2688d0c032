"""Rotary position embedding of queries and keys in the projections' layout, token-major: no transposed views."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.backend import runs_triton


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x cos + rotate_half(x) sin for queries and keys: channels i and i + size / 2 form a pair.

    Each product rounds to its dtype before the sum does, as PyTorch's single operations round, in both directions.

    Args:
        query: [S, heads, size], size even.
        key: [S, key-value heads, size].
        cos: [S, size]; of another dtype, or if it requires gradients, plain PyTorch runs.
        sin: As `cos`.
    """
    alike = query.dtype == key.dtype == cos.dtype == sin.dtype and query.shape[-1] == cos.shape[-1]
    if alike and runs_triton(query) and not (cos.requires_grad or sin.requires_grad):
        return _Rotary.apply(query, key, cos, sin)
    return plain_rotary(query, key, cos, sin)


def plain_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary` in plain PyTorch."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _Rotary(torch.autograd.Function):
    """One kernel in each direction; saves cosines and sines only, which all layers share."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from qerl_kernels import triton_rope

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return triton_rope.rotated(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        from qerl_kernels import triton_rope

        return *triton_rope.gradient(grad_query, grad_key, *ctx.saved_tensors), None, None
