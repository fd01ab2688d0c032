"""Causal attention of packed sequences by flash attention, with sinks and a fast deterministic gradient.

FlashAttention 4 computes it where it is `available`, PyTorch's FlashAttention 2 elsewhere.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels import flash_attention_4
from qerl_kernels.selective_checkpointing import save_products

MAX_HEAD_SIZE = 256
"""Elements of the largest head that flash attention takes."""
KEY_BLOCK = 128
"""Keys of a block of flash attention's backward pass, for heads of at most 128 elements."""
_CALL_COST = 16
"""Of one more call, in pairs of blocks that a streaming multiprocessor (SM) computes: its launches and copies."""


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each packed sequence, on a GPU, with a gradient.

    `torch.nn.attention.varlen.varlen_attn` by the ATen operation that it calls, which accepts fewer key-value heads
    (not documented for the function before 2.12), or by FlashAttention 4. Selective checkpointing saves its result.

    Args:
        query: [S, heads, head size], bfloat16 or float16; a head has at most `MAX_HEAD_SIZE` elements.
        key: [S, key-value heads, head size].
        value: As `key`.
        cu_seqlens: Cumulative lengths of the B sequences, int32 [B + 1].
        max_seqlen: Tokens of the longest.
        scale: Softmax scale; by default 1 / sqrt(head size).
        window: Tokens that each attends to, itself included; None for full causal attention.
        sinks: A score of each head [heads] that takes part in the softmax and has no value; frozen. None for none.

    Returns:
        [S, heads, head size].
    """
    result: Tensor = _VarlenAttention.apply(query, key, value, sinks, cu_seqlens, max_seqlen, scale, window)
    return result


def head_groups(heads: int, sequences: int, max_seqlen: int, sms: int) -> tuple[int, ...]:
    """Heads of each call of the deterministic backward pass, so that calls fill the GPU.

    The operation gives each sequence and head as many CTAs as occupy all SMs, rounded up, and each CTA every so-manieth
    block of keys. 28 heads of one sequence are 5 * 28 = 140 CTAs on 132 SMs: all but 8 SMs wait half of the time. In
    groups of 12, 12 and 4 heads, of 11 * 12 and 33 * 4 CTAs, none waits. A group has at most half of the heads: what a
    call needs beside its inputs grows with its heads.

    Args:
        heads: Of the queries.
        sequences: Packed ones.
        max_seqlen: Tokens of the longest.
        sms: Streaming multiprocessors of the GPU.
    """
    return _head_groups(heads, sequences, -(-max_seqlen // KEY_BLOCK), sms)


@functools.lru_cache(maxsize=4096)
def _head_groups(heads: int, sequences: int, blocks: int, sms: int) -> tuple[int, ...]:
    costs = [_CALL_COST + _backward_cost(n * sequences, blocks, sms) for n in range(1, heads + 1)]
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # by number of heads: cost and groups
    for n in range(1, heads + 1):
        last = range(1, min(n, max(1, heads // 2)) + 1)
        best.append(min((best[n - k][0] + costs[k - 1], (*best[n - k][1], k)) for k in last))
    return min((costs[-1], (heads,)), best[heads])[1]


def backward_splits(rows: int, sms: int) -> int:
    """CTAs that share a sequence's head in the deterministic backward pass, for `rows` = sequences times heads."""
    return -(-sms // rows)


def _backward_cost(rows: int, blocks: int, sms: int) -> int:
    """Waves of CTAs times the pairs of blocks of the longest, the first: key block i meets blocks - i of queries."""
    splits = backward_splits(rows, sms)
    return -(-rows * splits // sms) * sum(range(blocks, 0, -splits))


class _VarlenAttention(torch.autograd.Function):
    """With L the log of the sum of a row's exponentials without its sink s, attention with the sink is sigmoid(L - s)
    times that without, and its weights are exp(score - log(exp(L) + exp(s))). The backward operation computes the
    weights from the scores and the logarithm, and needs the sum of gradient times output: given both with the sink, its
    gradients are those of attention with sinks. The sinks have none: they are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        assert not ctx.needs_input_grad[3], "sinks are frozen"
        rows = [tensor.contiguous() for tensor in (query, key, value)]
        left = -1 if window is None else window - 1
        no_dropout, causal, no_debugging = 0.0, window is None, False
        ctx.arguments = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, no_dropout, causal)
        ctx.options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        ctx.version_4 = flash_attention_4.available(query.device, query.shape[2])

        def attend() -> tuple[Tensor, ...]:
            random: Sequence[Tensor] = ()  # state of the dropout that PyTorch's backward pass takes
            if ctx.version_4:
                out, log_sum = flash_attention_4.forward(rows[0], rows[1], rows[2], cu_seqlens, max_seqlen, scale, left)
            else:
                flash_attention = torch.ops.aten._flash_attention_forward
                out, log_sum, *random, _ = flash_attention(*rows, *ctx.arguments, no_debugging, **ctx.options)
            if sinks is None:
                return out, log_sum, *random
            scores = sinks.float()[:, None]  # log_sum is float32 [heads, S]
            out.mul_((log_sum - scores).sigmoid().t()[:, :, None])  # in float32, rounded once
            return out, torch.logaddexp(log_sum, scores), *random

        results = save_products(attend)
        ctx.save_for_backward(*rows, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, *random = ctx.saved_tensors
        if ctx.version_4:
            cu_seqlens, max_seqlen = ctx.arguments[0], ctx.arguments[2]
            tensors = (grad.contiguous(), query, key, value, out, log_sum, cu_seqlens, max_seqlen)
            options = (ctx.options["scale"], ctx.options["window_size_left"])
            return *flash_attention_4.backward(*tensors, *options), None, None, None, None, None
        of_rows = flash_gradients(grad, query, key, value, out, log_sum, ctx.arguments, random, ctx.options)
        return *of_rows, None, None, None, None, None


def flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    arguments: tuple[Any, ...],
    random: Sequence[Tensor],
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by PyTorch's operation, the deterministic ones by groups of heads.

    Args:
        grad: Of the result, [S, heads, head size], as `query` and `out`.
        query: As in the forward pass, like `key` and `value`.
        key: [S', key-value heads, head size].
        value: As `key`.
        out: The result.
        log_sum: Logarithm of each row's sum of exponentials, float32 [heads, S].
        arguments: Of the operation: cumulative and largest lengths of queries and keys, dropout, whether it is causal.
        random: State of the dropout that the forward operation returned.
        options: Scale and window of the operation.
    """
    cu_seqlens, max_keys, heads = arguments[0], arguments[3], query.shape[1]
    groups: tuple[int, ...] = (heads,)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        groups = head_groups(heads, len(cu_seqlens) - 1, max_keys, _sms(query.device))

    def gradients(query: Tensor, key: Tensor, value: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (grad[:, part], query, key, value, out[:, part], log_sum[part])
        backward = torch.ops.aten._flash_attention_backward
        results: tuple[Tensor, Tensor, Tensor] = backward(*tensors, *arguments, *random, **options)
        return results

    if len(groups) == 1:
        return gradients(query, key, value, slice(None))
    repeats = heads // key.shape[1]
    of_query = torch.empty_like(query)
    of_keys = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value)]
    first = 0
    for count in groups:
        part = slice(first, first + count)
        shared = range(first // repeats, (part.stop - 1) // repeats + 1)  # key-value heads
        skipped = first - shared.start * repeats
        keys, values = (
            tensor[:, shared.start : shared.stop].repeat_interleave(repeats, dim=1)[:, skipped : skipped + count]
            for tensor in (key, value)
        )
        of_query[:, part], *of_repeated = gradients(query[:, part], keys, values, part)
        for head in shared:
            own = slice(max(head * repeats - first, 0), (head + 1) * repeats - first)
            for total, one in zip(of_keys, of_repeated, strict=True):
                total[:, head] += one[:, own].sum(1, dtype=torch.float32)
        first = part.stop
    of_key, of_value = (total.to(key.dtype) for total in of_keys)
    return of_query, of_key, of_value


def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
