"""Causal attention of packed completions whose prompts are there once.

A completion's token attends to the prompt and to what precedes it in the completion. Flash attention computes either
part with the logarithm of each row's sum of exponentials, by which both are combined (Hydragen, arXiv 2402.05099). Its
backward operation computes weights from scores and logarithm, and needs the sum of gradient times result: given the
combined logarithm and result, it gives each part's share of the gradients.

All prompts come first, then all completions, those of a prompt next to each other. So both parts are slices: gathered
rows would have to be added again in backward, for which deterministic PyTorch sorts their indices.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.attention import flash_gradients
from qerl_kernels.selective_checkpointing import save_products


class SharedPrompts(NamedTuple):
    """Layout of S packed tokens: those of G prompts, then those of their completions in the same order."""

    tokens: int
    """Of all prompts."""
    cu_prompts: Tensor
    """Cumulative lengths of the prompts, int32 [G + 1]."""
    cu_completions: Tensor
    """Cumulative tokens of each prompt's completions, int32 [G + 1]."""
    max_prompt: int
    """Tokens of the longest prompt."""
    max_completions: int
    """Most tokens of a prompt's completions."""


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
        shared: Which tokens are of which prompt.
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
        lengths = (shared.cu_completions, shared.cu_prompts, shared.max_completions, shared.max_prompt)
        ctx.own = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, no_dropout, causal)
        ctx.across = (*lengths, no_dropout, not causal)
        ctx.own_options = {"scale": scale, "window_size_left": -1, "window_size_right": 0}
        ctx.across_options = {"scale": scale, "window_size_left": -1, "window_size_right": -1}
        ctx.prompts, ctx.completions = slice(shared.tokens), slice(shared.tokens, None)

        def attend() -> tuple[Tensor, ...]:
            operation = torch.ops.aten._flash_attention_forward
            out, log_sum, *random, _ = operation(query, key, value, *ctx.own, no_debugging, **ctx.own_options)
            rows = query[ctx.completions], key[ctx.prompts], value[ctx.prompts]
            of_prompt, log_prompt, *_ = operation(*rows, *ctx.across, no_debugging, **ctx.across_options)
            own, log_own = out[ctx.completions], log_sum[:, ctx.completions]
            total = torch.logaddexp(log_own, log_prompt)
            share = (log_own - total).exp().t()[:, :, None]
            own.copy_((of_prompt * (1 - share)).addcmul_(own, share))  # in float32, rounded once
            log_own.copy_(total)
            return out, log_sum, *random

        results = save_products(attend)
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, *random = ctx.saved_tensors
        prompts, completions = ctx.prompts, ctx.completions
        tensors = (grad, query, key, value, out, log_sum)
        gradients = flash_gradients(*tensors, ctx.own, random, ctx.own_options)
        of_completions = (grad[completions], query[completions], key[prompts], value[prompts], out[completions])
        log_sums = log_sum[:, completions].contiguous()
        more = flash_gradients(*of_completions, log_sums, ctx.across, random, ctx.across_options)
        for total, part, rows in zip(gradients, more, (completions, prompts, prompts), strict=True):
            total[rows].add_(part)
        return *gradients, None, None, None, None
