"""RMSNorm with a frozen scale, rotary embedding, gated activations: a kernel in each direction, few saved tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl_kernels.backend import runs_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), computed in float32, in x's dtype [..., K].

    With a weight [K] in float32 it is rounded once. With one in the dtype of x it is rounded before the weight
    multiplies, too, as transformers' and vLLM's norms of Llama, Qwen and Mistral are.

    The kernel sums a row's squares in its own order, the same for any number of rows. If `weight` requires gradients,
    plain PyTorch runs.
    """
    if weight.requires_grad or not runs_triton(x):
        return plain_rms_norm(x, weight, eps)
    return _FrozenRMSNorm.apply(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain PyTorch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(torch.promote_types(weight.dtype, x.dtype))).to(x.dtype)


class _FrozenRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from qerl_kernels import triton_pointwise

        y, inverse = triton_pointwise.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from qerl_kernels import triton_pointwise

        return triton_pointwise.rms_norm_gradient(grad, *ctx.saved_tensors), None, None


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
        from qerl_kernels import triton_pointwise

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return triton_pointwise.rotary(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        from qerl_kernels import triton_pointwise

        return *triton_pointwise.rotary_gradient(grad_query, grad_key, *ctx.saved_tensors), None, None


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the first factor rounded to its dtype as PyTorch's own operations round it."""
    if runs_triton(gate):
        return _SiluProduct.apply(gate, up)
    return functional.silu(gate) * up


def gelu_tanh_product(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by its tanh approximation: PyTorch's two operations on every backend."""
    return functional.gelu(gate, approximate="tanh") * up


TILE_ELEMENTS = 2**22
"""Of gates that the clamped SwiGLU has in float32 at once."""


def clamped_swiglu_reference(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """`clamped_swiglu` by PyTorch's single operations, each rounded to the arguments' dtype."""
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's (up + 1) * gate * sigmoid(alpha * gate), the gate cut off above `limit`, up beyond both of +-`limit`.

    Computed in float32 (float64 for float64), a tile of rows at a time, and rounded once, forward and backward; saves
    only its inputs. What is cut off has no gradient.

    Args:
        gate: [rows, size], any strides.
        up: As `gate`.
        alpha: Factor of the gate in the sigmoid.
        limit: Positive.
    """
    return _ClampedSwiGLU.apply(gate, up, alpha, limit)


def _tiles(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The same rows of each tensor at a time, those of `TILE_ELEMENTS` elements."""
    rows = max(1, TILE_ELEMENTS // max(1, tensors[0].shape[-1]))
    return (list(parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True))


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _ClampedSwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        for out, g, u in _tiles(result, gate, up):
            out.copy_(clamped_swiglu_reference(_precise(g), _precise(u), alpha, limit))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        for to_gate, to_up, of_result, g, u in _tiles(of_gate, of_up, grad, gate, up):
            g, u, of_result = _precise(g), _precise(u), _precise(of_result)
            uncut_gate, uncut_up = g <= ctx.limit, u.abs() <= ctx.limit
            g, u = g.clamp(max=ctx.limit), u.clamp(min=-ctx.limit, max=ctx.limit)
            sigmoid = (ctx.alpha * g).sigmoid()
            to_up.copy_(of_result * g * sigmoid * uncut_up)
            slope = sigmoid * (1 + ctx.alpha * g * (1 - sigmoid))
            to_gate.copy_(of_result * (u + 1) * slope * uncut_gate)
        return of_gate, of_up, None, None


class _SiluProduct(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from qerl_kernels import triton_pointwise

        ctx.save_for_backward(gate, up)
        return triton_pointwise.silu_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from qerl_kernels import triton_pointwise

        return triton_pointwise.silu_product_gradient(grad.contiguous(), *ctx.saved_tensors)
