"""The gated activation of a decoder's MLP: one pass forward, one backward, and nothing kept but its inputs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl_kernels.backend import runs_triton


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the first factor rounded to its dtype as PyTorch's own operations round it.

    Args:
        gate: Any shape, contiguous.
        up: As `gate`.
    """
    if runs_triton(gate):
        return _SiluProduct.apply(gate, up)
    return functional.silu(gate) * up


def silu_of_halves(x: Tensor) -> Tensor:
    """`silu_product` of the first and the second half of each row, [rows, 2 columns] to [rows, columns].

    Without gradients, and without a copy of either half.
    """
    if runs_triton(x):
        from qerl_kernels import triton_activation

        return triton_activation.silu_of_halves(x)
    return plain_silu_of_halves(x)


def plain_silu_of_halves(x: Tensor) -> Tensor:
    """As `silu_of_halves`, in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from qerl_kernels import triton_activation

        ctx.save_for_backward(gate, up)
        return triton_activation.silu_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from qerl_kernels import triton_activation

        return triton_activation.gradient(grad.contiguous(), *ctx.saved_tensors)
