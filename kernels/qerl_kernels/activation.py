"""Gated activations of a decoder's MLP; SwiGLU is one kernel forward, one backward, and saves only its inputs."""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl_kernels.backend import runs_triton


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the first factor rounded to its dtype as PyTorch's own operations round it.

    Args:
        gate: Any shape.
        up: As `gate`.
    """
    if runs_triton(gate):
        return _SiluProduct.apply(gate, up)
    return functional.silu(gate) * up


def gelu_tanh_product(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by its tanh approximation: PyTorch's two operations on every backend.

    Args:
        gate: Any shape.
        up: As `gate`.
    """
    return functional.gelu(gate, approximate="tanh") * up


class _SiluProduct(Function):
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
