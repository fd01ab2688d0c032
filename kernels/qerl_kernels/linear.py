"""The linear layer on a frozen weight: make it dense, then one GEMM whose alpha is the weight's.

The dense weight lives as long as one GEMM and is made again in backward, which gives gradients to the input and
to the adapter only. The adapter's product is added in place to the rounded base product, the engine's order of
roundings; one product with the adapter as further columns of the weight would save that pass, and round otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.frozen import FrozenWeight
from qerl_kernels.kept import kept


class LoraFactors(NamedTuple):
    """An adapter: the layer adds scaling * B A to its weight. Computed in the input's dtype."""

    a: Tensor
    """[r, K]."""
    b: Tensor
    """[N, r]."""
    scaling: float


def frozen_linear(
    x: Tensor, weight: FrozenWeight, bias: Tensor | None = None, lora: LoraFactors | None = None
) -> Tensor:
    """x W^T + bias (+ scaling * x A^T B^T) for a frozen W [N, K].

    Args:
        x: [..., K], bfloat16, float16 or float32; the product is computed in its dtype.
        weight: W.
        bias: [N], frozen.
        lora: The adapter; its factors get gradients in their own dtype.

    Returns:
        [..., N] in x's dtype.
    """
    if x.dim() != 2:  # autograd records each view
        flat = frozen_linear(x.reshape(-1, x.shape[-1]), weight, bias, lora)
        return flat.view(*x.shape[:-1], flat.shape[-1])
    # The weight's tensors travel inside a closure: autograd neither saves them nor watches their versions.
    if lora is None:
        return _FrozenLinear.apply(x, weight.dense, weight.alpha, bias)
    return _FrozenLoraLinear.apply(x, weight.dense, weight.alpha, bias, lora.a, lora.b, lora.scaling)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for a frozen dense W [N, K], as `torch.nn.functional.linear` computes it and its gradient.

    Unlike that it is a product which `keeping_products` knows.

    Args:
        x: [..., K].
        weight: W, in x's dtype.
        bias: [N], frozen.
    """
    return _DenseLinear.apply(x, weight, bias)


Dense = Callable[[torch.dtype], Tensor]


def _product(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(x.new_empty(1), x, weight, beta=0, alpha=alpha)
    return torch.addmm(bias.to(x.dtype), x, weight, alpha=alpha)


def _add_product(y: Tensor, x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """y + alpha * x weight, into y's memory."""
    if torch.compiler.is_compiling():  # PyTorch 2.11 loses the input's gradient there if y changes in place
        return torch.addmm(y, x, weight, alpha=alpha)
    return y.addmm_(x, weight, alpha=alpha)


class _DenseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return kept(lambda: (torch.nn.functional.linear(x, weight, bias),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat = grad.reshape(-1, grad.shape[-1])
        dx = torch.mm(flat, ctx.weight).view(*grad.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return dx, None, None


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None) -> Tensor:
        ctx.dense, ctx.alpha = dense, alpha
        return kept(lambda: (_product(x, dense(x.dtype).t(), alpha, bias),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = _product(grad, ctx.dense(grad.dtype), ctx.alpha, None) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _FrozenLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)

        def products() -> tuple[Tensor, Tensor]:
            hidden = torch.mm(x, low_a.t())
            y = _product(x, dense(x.dtype).t(), alpha, bias)
            return _add_product(y, hidden, low_b.t(), scaling), hidden

        y, hidden = kept(products)
        ctx.save_for_backward(x, hidden, low_a, low_b)  # small beside x, and not rounded again in backward
        ctx.dense, ctx.alpha, ctx.scaling, ctx.dtypes = dense, alpha, scaling, (a.dtype, b.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, a, b = ctx.saved_tensors
        scaling, needed = ctx.scaling, ctx.needs_input_grad
        dx = da = db = None
        if needed[0] or needed[4]:
            inner = _product(grad, b, scaling, None)
        if needed[0]:
            dx = _add_product(torch.mm(inner, a), grad, ctx.dense(x.dtype), ctx.alpha)
        if needed[4]:
            da = torch.mm(inner.t(), x).to(ctx.dtypes[0])
        if needed[5]:
            db = _product(grad.t(), hidden, scaling, None).to(ctx.dtypes[1])
        return dx, None, None, None, da, db, None
