"""A mixture of frozen experts: tokens sorted by expert, dequantization of a group of experts, one grouped product.

The dense weights of a group live as long as its product and are dequantized again in backward, which gives gradients to
the input and the top-k weights alone.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl_kernels.selective_checkpointing import save_products
from qerl_kernels.stacked_weights import StackedWeight

Product = Callable[[Tensor, Tensor], Tensor]
"""act(gate) * up."""

GROUP_BYTES = 2**28
"""Dense weights of a group of experts, at most, unless a single expert has more."""


class ExpertBiases(NamedTuple):
    """Frozen biases of all experts, in the dtype of the activations."""

    gate_up: Tensor
    """[E, 2 I], in the order of the rows of the weights."""
    down: Tensor
    """[E, D]."""


def mixture_reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    product: Product,
    biases: ExpertBiases | None = None,
    alternating: bool = False,
) -> Tensor:
    """`mixture_of_experts` in plain PyTorch, by dense weights gate_up [E, 2 I, D] and down [E, D, I]."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        bias, last_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        hidden = functional.linear(x[tokens], gate_up[expert], bias)
        y = functional.linear(product(*_gates_and_ups(hidden, alternating)), down[expert], last_bias)
        out = out.index_add(0, tokens, (topk_weights[tokens, slots, None] * y).to(x.dtype))
    return out


def mixture_of_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    product: Product,
    biases: ExpertBiases | None = None,
    alternating: bool = False,
) -> Tensor:
    """Sum over each token's experts e of topk_weights * down_e(product(gate_e(x), up_e(x))).

    Args:
        x: [S, D], bfloat16 or float32; the products are computed in its dtype, the sum in float32.
        topk_weights: Weight of each token's experts, float32 [S, k].
        topk_ids: Those experts, int64 [S, k].
        gate_up: Gates above ups, [2 I, D] each.
        down: [D, I] each.
        product: act(gate) * up.
        biases: Of both, frozen; None where there are none.
        alternating: Rows of gates and ups are interleaved, a gate first, as gpt-oss stores them.

    Returns:
        [S, D] in x's dtype. The sum's order is that of `topk_ids`, so that a run repeats bit for bit.
    """
    return _Mixture.apply(x, topk_weights, topk_ids, gate_up, down, product, biases, alternating)


def _gates_and_ups(hidden: Tensor, alternating: bool) -> tuple[Tensor, Tensor]:
    """Views of rows [R, 2 I]."""
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if alternating else hidden.chunk(2, dim=-1)
    return gate, up


def _as_rows(gate: Tensor, up: Tensor, alternating: bool) -> Tensor:
    """Inverse of `_gates_and_ups`."""
    return torch.stack((gate, up), dim=-1).flatten(-2) if alternating else torch.cat((gate, up), dim=-1)


def _add_biases(rows: Tensor, bounds: Sequence[int], biases: Tensor) -> None:
    """Add to the rows of each expert its bias, in place: a gather of all biases would take as much memory as rows."""
    for bias, (start, stop) in zip(biases, pairwise(bounds), strict=True):
        rows[start:stop] += bias


def grouped_product(rows: Tensor, stops: Tensor, bounds: Sequence[int], weight: StackedWeight, back: bool) -> Tensor:
    """Rows of each expert times its W^T / alpha, or times W / alpha: [R, N] or [R, K].

    Args:
        rows: Sorted by expert, [R, K] or [R, N].
        stops: Row after each expert's last, int32 [E], on the rows' device.
        bounds: 0 and the same numbers, on the host.
        weight: W of each expert.
        back: Whether the product is with W, as for the input's gradient.
    """
    return (_by_groups if _has_kernel(rows) else _by_experts)(rows, stops, bounds, weight, back)


def _has_kernel(rows: Tensor) -> bool:
    """Whether PyTorch has a kernel for a grouped product, and no loop."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] >= 9


def _by_experts(rows: Tensor, stops: Tensor, bounds: Sequence[int], weight: StackedWeight, back: bool) -> Tensor:
    experts, n, k = weight.shape
    out = rows.new_empty(len(rows), k if back else n)
    for expert in range(experts):
        start, stop = bounds[expert], bounds[expert + 1]
        if start < stop:
            dense = weight.dense(expert, expert + 1, rows.dtype)[0]
            torch.mm(rows[start:stop], dense if back else dense.t(), out=out[start:stop])
    return out


def _by_groups(rows: Tensor, stops: Tensor, bounds: Sequence[int], weight: StackedWeight, back: bool) -> Tensor:
    experts, n, k = weight.shape
    out = rows.new_empty(len(rows), k if back else n)
    fits = max(1, GROUP_BYTES // (n * k * rows.element_size()))
    size = 1 << (fits.bit_length() - 1)  # few sizes: a dequantization kernel is tuned for each
    for first in range(0, experts, size):
        last = min(first + size, experts)
        start, stop = bounds[first], bounds[last]
        if start < stop:
            dense = weight.dense(first, last, rows.dtype)
            right = dense if back else dense.transpose(-2, -1)
            out[start:stop] = torch._grouped_mm(rows[start:stop], right, offs=stops[first:last] - start)
    return out


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up: StackedWeight,
        down: StackedWeight,
        product: Product,
        biases: ExpertBiases | None,
        alternating: bool,
    ) -> Tensor:
        count = topk_ids.shape[1]
        sorted_experts, order = topk_ids.flatten().sort(stable=True)
        experts = torch.arange(gate_up.shape[0], device=x.device)
        stops = torch.searchsorted(sorted_experts, experts, right=True).int()
        bounds = [0, *stops.tolist()]  # waits for the device: the groups' rows must be known
        gate_alpha, down_alpha = (_of_rows(weight.alphas, sorted_experts) for weight in (gate_up, down))

        def first() -> tuple[Tensor]:
            result = grouped_product(x[order // count], stops, bounds, gate_up, back=False)
            result = result if gate_alpha is None else result.mul_(gate_alpha)
            if biases is not None:
                _add_biases(result, bounds, biases.gate_up)
            return (result,)

        (hidden,) = save_products(first)

        def second() -> tuple[Tensor]:
            inner = product(*_gates_and_ups(hidden, alternating))
            y = grouped_product(inner, stops, bounds, down, back=False)
            rows = topk_weights.flatten()[order, None]
            if biases is not None:
                y = y if down_alpha is None else y.mul_(down_alpha)
                _add_biases(y, bounds, biases.down)
            elif down_alpha is not None:
                rows = rows * down_alpha
            return (_sum_of_rows(y, rows, order, count),)

        (out,) = save_products(second)
        ctx.save_for_backward(x, topk_weights, hidden, order, stops, None if biases is None else topk_ids)
        ctx.bounds, ctx.weights, ctx.product, ctx.alphas = bounds, (gate_up, down), product, (gate_alpha, down_alpha)
        ctx.biases, ctx.alternating = biases, alternating
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, topk_weights, hidden, order, stops, topk_ids = ctx.saved_tensors
        (gate_up, down), (gate_alpha, down_alpha), count = ctx.weights, ctx.alphas, topk_weights.shape[1]
        with torch.enable_grad():
            gate, up = (part.detach().requires_grad_() for part in _gates_and_ups(hidden, ctx.alternating))
            inner = ctx.product(gate, up)
        # Alpha and the top-k weights follow, in float32.
        of_inner = grouped_product(grad[order // count], stops, ctx.bounds, down, back=True)
        of_weights = None
        if ctx.needs_input_grad[1]:
            rows = (of_inner.float() * inner.detach().float()).sum(-1, keepdim=True)
            rows = rows if down_alpha is None else rows * down_alpha
            of_weights = torch.empty_like(topk_weights)
            of_weights.view(-1).index_copy_(0, order, rows[:, 0].to(topk_weights.dtype))
            if ctx.biases is not None:
                of_weights += (grad.float() @ ctx.biases.down.float().t()).gather(1, topk_ids)
        if not ctx.needs_input_grad[0]:
            return None, of_weights, *[None] * 6
        factor = topk_weights.flatten()[order, None]
        factor = factor if down_alpha is None else factor * down_alpha
        of_gate, of_up = torch.autograd.grad(inner, (gate, up), (of_inner * factor).to(inner.dtype))
        of_hidden = _as_rows(of_gate, of_up, ctx.alternating)
        of_rows = grouped_product(of_hidden, stops, ctx.bounds, gate_up, back=True)
        return _sum_of_rows(of_rows, gate_alpha, order, count), of_weights, *[None] * 6


def _of_rows(alphas: Tensor | None, experts: Tensor) -> Tensor | None:
    """The alpha of each row's expert, [R, 1]."""
    return None if alphas is None else alphas[experts, None]


def _sum_of_rows(rows: Tensor, factor: Tensor | None, order: Tensor, count: int) -> Tensor:
    """Sum of each token's `count` rows [R, D] in the order of its experts, times factor [R, 1]: [R / count, D]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    total = rows.new_zeros(len(order) // count, rows.shape[1], dtype=torch.float32)
    for rows_of_slot in inverse.view(-1, count).unbind(1):
        if factor is None:
            total += rows[rows_of_slot]
        else:
            total.addcmul_(rows[rows_of_slot].float(), factor[rows_of_slot])
    return total.to(rows.dtype)
