"""RMSNorm with a frozen float32 scale: the plain formula's bits, at a third of its memory traffic."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.backend import runs_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded once.

    Args:
        x: [..., K].
        weight: float32 [K]; where it has a gradient, plain PyTorch computes all.
        eps: Added to the mean square.

    Returns:
        [..., K] in x's dtype.
    """
    if weight.requires_grad or not runs_triton(x):
        return plain_rms_norm(x, weight, eps)
    return _FrozenRMSNorm.apply(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, one operation after the other."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


class _FrozenRMSNorm(torch.autograd.Function):
    """PyTorch's own sums between kernels that multiply and round as it does, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from qerl_kernels import triton_norm

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        inverse = torch.rsqrt(triton_norm.squares(flat).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(flat, weight, inverse)
        return triton_norm.scaled(flat, weight, inverse).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from qerl_kernels import triton_norm

        x, weight, inverse = ctx.saved_tensors
        flat = grad.reshape(x.shape).contiguous()
        of_inverse = triton_norm.products(flat, x, weight).sum(-1, keepdim=True)
        of_square = -0.5 * of_inverse * inverse.pow(3) / x.shape[-1]
        return triton_norm.gradient(flat, x, weight, inverse, of_square).view(grad.shape), None, None
