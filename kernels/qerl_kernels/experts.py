"""A mixture of frozen experts: tokens sorted by expert, dequantization of a group of experts, one grouped GEMM.

The dense weights of a group live as long as its product and are dequantized again in backward, which gives gradients to
the input and the top-k weights.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.backend import runs_triton
from qerl_kernels.frozen_weights import StackedWeight
from qerl_kernels.selective_checkpointing import computes_graph_only, save_products

Activation = Callable[[Tensor, Tensor], Tensor]
"""act(gate) * up."""

GROUP_BYTES = 2**28
"""Dense weights of a group of experts, at most, unless a single expert has more."""


class ExpertBiases(NamedTuple):
    """Frozen biases of all experts, in the dtype of the activations."""

    gate_up: Tensor
    """[E, 2 I], in the order of the rows of the weights."""
    down: Tensor
    """[E, D]."""


def mixture_of_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    activation: Activation,
    biases: ExpertBiases | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Sum over each token's experts e of topk_weights * down_e(activation(gate_e(x), up_e(x))).

    Args:
        x: [S, D], bfloat16 or float32; the products are computed in its dtype, the sum in float32.
        topk_weights: Weight of each token's experts, float32 [S, k].
        topk_ids: Those experts, int64 [S, k].
        gate_up: Gates above ups, [2 I, D] each.
        down: [D, I] each.
        activation: act(gate) * up.
        biases: Of both, frozen; None where there are none.
        interleaved: Rows of gates and ups are interleaved, a gate first, as gpt-oss stores them.

    Returns:
        [S, D] in x's dtype. The sum's order is that of `topk_ids`, so that a run repeats bit for bit.
    """
    return _Mixture.apply(x, topk_weights, topk_ids, gate_up, down, activation, biases, interleaved)


def _gates_and_ups(hidden: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of rows [R, 2 I]."""
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if interleaved else hidden.chunk(2, dim=-1)
    return gate, up


def _as_rows(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """Inverse of `_gates_and_ups`."""
    return torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)


def _add_biases(rows: Tensor, bounds: Sequence[int], biases: Tensor) -> None:
    """Add to the rows of each expert its bias, in place: a gather of all biases would take as much memory as rows."""
    for bias, (start, stop) in zip(biases, pairwise(bounds), strict=True):
        rows[start:stop] += bias


def grouped_gemm(
    rows: Tensor,
    stops: Tensor,
    bounds: Sequence[int],
    weight: StackedWeight,
    back: bool,
    factor: Tensor | None = None,
) -> Tensor:
    """Rows of each expert times its W^T / alpha, or times W / alpha: [R, N] or [R, K], rounded, then times the factor.

    Args:
        rows: Sorted by expert, [R, K] or [R, N].
        stops: Row after each expert's last, int32 [E], on the rows' device.
        bounds: 0 and the same numbers, on the host.
        weight: W of each expert.
        back: Whether the product is with W, as for the input's gradient.
        factor: Of each row of the result, float32 [R, 1].
    """
    if _has_kernel(rows) and _is_aligned(weight.shape, rows.dtype):
        return _by_groups(rows, stops, bounds, weight, back, factor)
    out = _by_experts(rows, bounds, weight, back)
    return out if factor is None else out.mul_(factor)


def _has_kernel(rows: Tensor) -> bool:
    """Whether PyTorch has a kernel for a grouped product, and no loop."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] >= 9


def _is_aligned(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows and columns are multiples of 16 bytes, as the kernel needs them."""
    return all(size * dtype.itemsize % 16 == 0 for size in shape[-2:])


def _by_experts(rows: Tensor, bounds: Sequence[int], weight: StackedWeight, back: bool) -> Tensor:
    experts, n, k = weight.shape
    out = rows.new_empty(len(rows), k if back else n)
    for expert in range(experts):
        start, stop = bounds[expert], bounds[expert + 1]
        if start < stop:
            dense = weight.dense(expert, expert + 1, rows.dtype)[0]
            torch.mm(rows[start:stop], dense if back else dense.t(), out=out[start:stop])
    return out


def _by_groups(
    rows: Tensor, stops: Tensor, bounds: Sequence[int], weight: StackedWeight, back: bool, factor: Tensor | None
) -> Tensor:
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
            result = torch._grouped_mm(rows[start:stop], right, offs=stops[first:last] - start)
            if factor is None:
                out[start:stop] = result
            else:
                _scale_into(out[start:stop], result, factor[start:stop])
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
        activation: Activation,
        biases: ExpertBiases | None,
        interleaved: bool,
    ) -> Tensor:
        count = topk_ids.shape[1]
        sorted_experts, order = topk_ids.flatten().to(torch.int16).sort(stable=True)  # a quarter of int64's passes
        experts = torch.arange(gate_up.shape[0], dtype=torch.int16, device=x.device)
        stops = torch.searchsorted(sorted_experts, experts, right=True).int()
        bounds = [0, *stops.tolist()]  # waits for the device: the groups' rows must be known
        gate_alpha, down_alpha = (_of_rows(weight.alphas, sorted_experts) for weight in (gate_up, down))

        def first() -> tuple[Tensor, ...]:
            rows = x[order // count]
            result = grouped_gemm(rows, stops, bounds, gate_up, back=False, factor=gate_alpha)
            if biases is not None:
                _add_biases(result, bounds, biases.gate_up)
            return (result,)

        (hidden,) = save_products(first)

        def second() -> tuple[Tensor, ...]:
            if computes_graph_only():
                return (x.new_full((), torch.nan).expand(x.shape),)
            intermediate = activation(*_gates_and_ups(hidden, interleaved))
            before_sum = None if biases is None else down_alpha
            y = grouped_gemm(intermediate, stops, bounds, down, back=False, factor=before_sum)
            rows = topk_weights.flatten()[order, None]
            if down_alpha is not None and before_sum is None:
                rows = rows * down_alpha
            if biases is not None:
                _add_biases(y, bounds, biases.down)
            return (_sum_of_rows(y, rows, order, count),)

        (out,) = save_products(second)
        ctx.save_for_backward(topk_weights, hidden, order, stops, None if biases is None else topk_ids)
        ctx.bounds, ctx.weights, ctx.alphas = bounds, (gate_up, down), (gate_alpha, down_alpha)
        ctx.activation, ctx.biases, ctx.interleaved = activation, biases, interleaved
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        topk_weights, hidden, order, stops, topk_ids = ctx.saved_tensors
        (gate_up, down), (gate_alpha, down_alpha), count = ctx.weights, ctx.alphas, topk_weights.shape[1]
        with torch.enable_grad():
            gate, up = (part.detach().requires_grad_() for part in _gates_and_ups(hidden, ctx.interleaved))
            intermediate = ctx.activation(gate, up)
        factor = topk_weights.flatten()[order, None]
        # Alpha and the top-k weights follow, in float32.
        of_intermediate = grouped_gemm(grad[order // count], stops, ctx.bounds, down, back=True)
        if down_alpha is not None:
            factor = factor * down_alpha
        products = _scale_rows(of_intermediate, factor, intermediate.detach())
        of_weights = None
        if ctx.needs_input_grad[1]:
            products = products if down_alpha is None else products * down_alpha
            of_weights = torch.empty_like(topk_weights)
            of_weights.view(-1).index_copy_(0, order, products[:, 0].to(topk_weights.dtype))
            if ctx.biases is not None:
                of_weights += (grad.float() @ ctx.biases.down.float().t()).gather(1, topk_ids)
        if not ctx.needs_input_grad[0]:
            return None, of_weights, *[None] * 6
        of_gate, of_up = torch.autograd.grad(intermediate, (gate, up), of_intermediate)
        of_hidden = _as_rows(of_gate, of_up, ctx.interleaved)
        of_rows = grouped_gemm(of_hidden, stops, ctx.bounds, gate_up, back=True)
        return _sum_of_rows(of_rows, gate_alpha, order, count), of_weights, *[None] * 6


def _of_rows(alphas: Tensor | None, experts: Tensor) -> Tensor | None:
    """The alpha of each row's expert, [R, 1]."""
    return None if alphas is None else alphas[experts.long(), None]


def _sum_of_rows(rows: Tensor, factor: Tensor | None, order: Tensor, count: int) -> Tensor:
    """Sum of each token's `count` rows [R, D] in the order of its experts, times factor [R, 1]: [R / count, D]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    indices = inverse.view(-1, count)
    if runs_triton(rows):
        from qerl_kernels import triton_experts

        return triton_experts.sum_indexed_rows(rows, factor, indices)
    total = rows.new_zeros(len(indices), rows.shape[1], dtype=torch.float32)
    for rows_of_slot in indices.unbind(1):
        if factor is None:
            total += rows[rows_of_slot]
        else:
            total.addcmul_(rows[rows_of_slot].float(), factor[rows_of_slot])
    return total.to(rows.dtype)


def _scale_into(out: Tensor, rows: Tensor, factor: Tensor) -> None:
    """out = rows [R, N] * factor [R, 1], the product in float32."""
    if runs_triton(rows):
        from qerl_kernels import triton_experts

        triton_experts.scale_into(out, rows, factor)
    else:
        torch.mul(rows, factor, out=out)


def _scale_rows(rows: Tensor, factor: Tensor, others: Tensor) -> Tensor:
    """rows [R, I] *= factor [R, 1], in place, and before it the product of each row with others', float32 [R, 1]."""
    if runs_triton(rows):
        from qerl_kernels import triton_experts

        return triton_experts.scale_rows(rows, factor, others)
    products = (rows.float() * others.float()).sum(-1, keepdim=True)
    rows.mul_(factor)
    return products
