"""The linear layer on a frozen weight: make it dense, then one GEMM whose alpha is the weight's.

The dense weight lives as long as one GEMM and is made again in backward, which gives gradients to the input and
to the adapter only. The adapter's product is added in place to the rounded base product, the engine's order of
roundings; one product with the adapter as further columns of the weight would save that pass, and round otherwise.
"""

import functools
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


def _flat(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]. Within a function of this file, for autograd would record each view."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(y: Tensor, like: Tensor) -> Tensor:
    """[M, N] -> [..., N] with the other sizes of `like`."""
    return y if like.dim() == 2 else y.view(*like.shape[:-1], y.shape[-1])


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `addmm` asks for where there is nothing to add; a new one each time takes a third of the call's time."""
    return torch.zeros(1, dtype=dtype, device=device)


def _product(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    if bias is None:
        nothing = x.new_empty(1) if torch.compiler.is_compiling() else _nothing(x.dtype, x.device)
        return torch.addmm(nothing, x, weight, beta=0, alpha=alpha)
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
        dx = _shaped(torch.mm(_flat(grad), ctx.weight), grad) if ctx.needs_input_grad[0] else None
        return dx, None, None


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None) -> Tensor:
        ctx.dense, ctx.alpha = dense, alpha
        return _shaped(kept(lambda: (_product(_flat(x), dense(x.dtype).t(), alpha, bias),))[0], x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _shaped(_product(_flat(grad), ctx.dense(grad.dtype), ctx.alpha, None), grad)
        return dx, None, None, None


class _FrozenLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        flat = _flat(x)

        def products() -> tuple[Tensor, ...]:
            low_a, low_b = a.to(x.dtype), b.to(x.dtype)
            hidden = torch.mm(flat, low_a.t())
            y = _product(flat, dense(x.dtype).t(), alpha, bias)
            return _add_product(y, hidden, low_b.t(), scaling), hidden, low_a, low_b

        y, *small = kept(products)
        ctx.save_for_backward(flat, *small)  # small beside x, and not rounded again in backward
        ctx.dense, ctx.alpha, ctx.scaling, ctx.dtypes = dense, alpha, scaling, (a.dtype, b.dtype)
        return _shaped(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, a, b = ctx.saved_tensors
        scaling, needed, flat = ctx.scaling, ctx.needs_input_grad, _flat(grad)
        dx = da = db = None
        if needed[0] or needed[4]:
            inner = _product(flat, b, scaling, None)
        if needed[0]:
            dx = _shaped(_add_product(torch.mm(inner, a), flat, ctx.dense(x.dtype), ctx.alpha), grad)
        if needed[4]:
            da = torch.mm(inner.t(), x).to(ctx.dtypes[0])
        if needed[5]:
            db = _product(flat.t(), hidden, scaling, None).to(ctx.dtypes[1])
        return dx, None, None, None, da, db, None
