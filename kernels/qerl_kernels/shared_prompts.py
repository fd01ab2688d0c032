"""Causal attention of packed completions of which several share a prompt, whose tokens are there once.

A completion's token attends to the prompt and to what precedes it in the completion. Flash attention computes either
part with the logarithm of each row's sum of exponentials, by which both are combined (Hydragen, arXiv 2402.05099). Its
backward operation computes weights from scores and logarithm, and needs the sum of gradient times result: given the
combined logarithm and result, it gives each part's share of the gradients.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.attention import flash_gradients
from qerl_kernels.selective_checkpointing import save_products


class SharedPrompts(NamedTuple):
    """Indices of B completions and of their prompts among S packed tokens."""

    completions: Tensor
    """Of the completions' C tokens, one completion after the other, int64 [C]."""
    prompts: Tensor
    """Of the P tokens of each completion's prompt, one after the other, int64 [P]: a prompt has as many as completions.
    """
    cu_completions: Tensor
    """Cumulative lengths of the completions, int32 [B + 1]."""
    cu_prompts: Tensor
    """Cumulative lengths of each completion's prompt, int32 [B + 1]."""
    max_completion: int
    """Tokens of the longest completion."""
    max_prompt: int
    """Tokens of the longest prompt."""


def shared_prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    shared: SharedPrompts,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within prompts and within completions, and of completions to their prompts, on a GPU.

    Has a gradient, as `varlen_attention`. Always by FlashAttention 2, without windows and sinks.

    Args:
        query: [S, heads, head size], bfloat16 or float16; a head has at most `MAX_HEAD_SIZE` elements.
        key: [S, key-value heads, head size].
        value: As `key`.
        cu_seqlens: Cumulative lengths of the prompts and completions, each by itself, int32.
        max_seqlen: Tokens of the longest of them.
        shared: Where they are.
        scale: Softmax scale; by default 1 / sqrt(head size).

    Returns:
        [S, heads, head size].
    """
    result: Tensor = _SharedPromptAttention.apply(query, key, value, cu_seqlens, max_seqlen, shared, scale)
    return result


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        shared: SharedPrompts,
        scale: float | None,
    ) -> Tensor:
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        no_dropout, causal, no_debugging = 0.0, True, False
        lengths = (shared.cu_completions, shared.cu_prompts, shared.max_completion, shared.max_prompt)
        ctx.own = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, no_dropout, causal)
        ctx.across = (*lengths, no_dropout, not causal)
        ctx.own_options = {"scale": scale, "window_size_left": -1, "window_size_right": 0}
        ctx.across_options = {"scale": scale, "window_size_left": -1, "window_size_right": -1}
        ctx.shared = shared

        def attend() -> tuple[Tensor, ...]:
            operation, at = torch.ops.aten._flash_attention_forward, shared.completions
            out, log_sum, *random, _ = operation(query, key, value, *ctx.own, no_debugging, **ctx.own_options)
            rows = query[at], key[shared.prompts], value[shared.prompts]
            of_prompt, log_prompt, *_ = operation(*rows, *ctx.across, no_debugging, **ctx.across_options)
            log_own = log_sum[:, at]
            total = torch.logaddexp(log_own, log_prompt)
            share = (log_own - total).exp().t()[:, :, None]
            out[at] = (share * out[at] + (1 - share) * of_prompt).to(out.dtype)  # in float32, rounded once
            log_sum[:, at] = total
            return out, log_sum, *random

        results = save_products(attend)
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, *random = ctx.saved_tensors
        at, prompts = ctx.shared.completions, ctx.shared.prompts
        tensors = (grad, query, key, value, out, log_sum)
        of_query, *of_keys = flash_gradients(*tensors, ctx.own, random, ctx.own_options)
        tensors = (grad[at], query[at], key[prompts], value[prompts], out[at], log_sum[:, at])
        of_completions, *of_prompts = flash_gradients(*tensors, ctx.across, random, ctx.across_options)
        of_query[at] += of_completions
        of_key, of_value = (_added(total, prompts, more) for total, more in zip(of_keys, of_prompts, strict=True))
        return of_query, of_key, of_value, None, None, None, None


def _added(total: Tensor, index: Tensor, more: Tensor) -> Tensor:
    """total, with rows of `more` added at indices that may repeat, in float32."""
    return total.float().index_add_(0, index, more.float()).to(total.dtype)
