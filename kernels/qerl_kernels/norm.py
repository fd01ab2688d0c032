"""RMSNorm with a frozen scale: one kernel forward, one backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        from qerl_kernels import triton_norm

        y, inverse = triton_norm.scaled(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from qerl_kernels import triton_norm

        return triton_norm.gradient(grad, *ctx.saved_tensors), None, None
