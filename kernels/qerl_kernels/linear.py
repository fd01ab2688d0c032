"""Linear layer on a frozen weight: dequantize it, then one GEMM whose alpha is the weight's.

The dense weight lives as long as one GEMM and is dequantized again in backward, which gives gradients to the input and
to the adapter only. The adapter's product is added in place to the rounded base product, the engine's order of
roundings. Layers on one input share their small products: one with all A, and in backward one for the input's gradient
through them and one for their own. A call of cuBLAS costs more than such a product.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.frozen_weights import FrozenWeight
from qerl_kernels.selective_checkpointing import computes_graph_only, save_products


class LoraFactors(NamedTuple):
    """An adapter: the layer adds scaling * B A to its weight. Computed in the input's dtype."""

    a: Tensor
    """[r, K]."""
    b: Tensor
    """[N, r]."""
    scaling: float


class AdaptedWeight(NamedTuple):
    """One of several linears on the same input, without its A: x W^T + bias + scaling * x A^T B^T."""

    weight: FrozenWeight
    bias: Tensor | None
    """[N], frozen."""
    b: Tensor
    """[N, r]."""
    scaling: float


def frozen_linear(
    x: Tensor, weight: FrozenWeight, bias: Tensor | None = None, lora: LoraFactors | None = None
) -> Tensor:
    """x W^T + bias (+ scaling * x A^T B^T) for a frozen W [N, K]: [..., N] in x's dtype.

    Args:
        x: [..., K], bfloat16, float16 or float32; the product is computed in its dtype.
        weight: W.
        bias: [N], frozen.
        lora: The adapter; its factors get gradients in their own dtype.
    """
    # The weight's tensors travel inside a closure: autograd neither saves them nor checks their versions.
    if lora is None:
        return _FrozenLinear.apply(x, weight.dense, weight.alpha, bias, weight.shape[0])
    return frozen_linears(x, [lora.a], [AdaptedWeight(weight, bias, lora.b, lora.scaling)])[0]


def frozen_linears(x: Tensor, a: Sequence[Tensor], linears: Sequence[AdaptedWeight]) -> tuple[Tensor, ...]:
    """x W^T + bias + scaling * x A^T B^T for each of several frozen W [N, K] on one x: [..., N] each.

    Args:
        x: [..., K], bfloat16, float16 or float32; the products are computed in its dtype.
        a: Each linear's A [r, K] in their order, or all of them concatenated by rows. They get gradients in their own
            dtype, and so does each linear's B.
        linears: Their weights, biases and B.
    """
    frozen = [(weight.dense, weight.alpha, bias, scaling) for weight, bias, _, scaling in linears]
    return _FrozenLoraLinears.apply(x, frozen, *a, *(linear.b for linear in linears))


Dense = Callable[[torch.dtype], Tensor]


def _flat(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]. Called inside autograd functions, for autograd would record each view."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(y: Tensor, like: Tensor) -> Tensor:
    """[M, N] -> [..., N] with the other sizes of `like`."""
    return y if like.dim() == 2 else y.view(*like.shape[:-1], y.shape[-1])


@functools.cache
def _no_bias(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`addmm`'s input at beta 0, cached: to allocate it takes a third of the call's time."""
    return torch.zeros(1, dtype=dtype, device=device)


def _gemm(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(_no_bias(x.dtype, x.device), x, weight, beta=0, alpha=alpha)
    return torch.addmm(bias.to(x.dtype), x, weight, alpha=alpha)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None, rows: int) -> Tensor:
        ctx.dense, ctx.alpha = dense, alpha
        if computes_graph_only():
            return x.new_full((), torch.nan).expand(*x.shape[:-1], rows)
        return _shaped(save_products(lambda: (_gemm(_flat(x), dense(x.dtype).t(), alpha, bias),))[0], x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _shaped(_gemm(_flat(grad), ctx.dense(grad.dtype), ctx.alpha, None), grad)
        return dx, None, None, None, None


# Views and concatenations cost CPU time: a single tensor needs none.
def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def _split(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    return [tensor] if len(sizes) == 1 else tensor.split(list(sizes), dim)


class _FrozenLoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, frozen: list[tuple[Dense, float, Tensor | None, float]], *factors: Tensor
    ) -> tuple[Tensor, ...]:
        flat, count = _flat(x), len(frozen)
        ranks = [b.shape[1] for b in factors[-count:]]

        def products() -> tuple[Tensor, ...]:
            low_a = _cat(factors[:-count], 0).to(x.dtype)
            low_b = [b.to(x.dtype) for b in factors[-count:]]
            hidden = torch.mm(flat, low_a.t())
            if computes_graph_only():
                nothing = x.new_full((), torch.nan)
                return *(nothing.expand(len(flat), len(b)) for b in low_b), hidden, low_a, *low_b
            results = []
            for (dense, alpha, bias, scaling), b, own in zip(frozen, low_b, _split(hidden, ranks, 1), strict=True):
                y = _gemm(flat, dense(x.dtype).t(), alpha, bias)
                results.append(y.addmm_(own, b.t(), alpha=scaling))
            return *results, hidden, low_a, *low_b

        saved = save_products(products)
        ctx.save_for_backward(flat, *saved[count:])  # small beside x, and not rounded again in backward
        ctx.frozen, ctx.ranks = frozen, ranks
        ctx.rows, ctx.dtypes = [len(a) for a in factors[:-count]], [factor.dtype for factor in factors]
        return tuple(_shaped(y, x) for y in saved[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, a, *b = ctx.saved_tensors
        frozen, flat, needed = ctx.frozen, [_flat(grad) for grad in grads], ctx.needs_input_grad[2:]
        gradients: list[Tensor | None] = [None] * len(needed)
        dx, count_a = None, len(ctx.rows)
        if ctx.needs_input_grad[0] or any(needed[:count_a]):
            expands = zip(flat, b, frozen, strict=True)
            inner = _cat([_gemm(g, low, scaling, None) for g, low, (*_, scaling) in expands], 1)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(inner, a)
            # Last to first, as autograd visits them: of q, k and v the largest is then added, and rounded, last.
            for g, (dense, alpha, _, _) in zip(flat[::-1], frozen[::-1], strict=True):
                dx.addmm_(g, dense(x.dtype), alpha=alpha)
            dx = _shaped(dx, grads[0])
        if any(needed[:count_a]):
            gradients[:count_a] = _split(torch.mm(inner.t(), x).to(ctx.dtypes[0]), ctx.rows, 0)
        for index, (g, own) in enumerate(zip(flat, _split(hidden, ctx.ranks, 1), strict=True)):
            if needed[count_a + index]:
                db = _gemm(g.t(), own, frozen[index][3], None)
                gradients[count_a + index] = db.to(ctx.dtypes[count_a + index])
        return dx, None, *gradients
