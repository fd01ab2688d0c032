"""Token log-probabilities and entropies from hidden states, never holding logits of more than a chunk of tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK = 512
SMALLEST_LOGP = -1e4
"""Stands for minus infinity where a probability that is zero multiplies it."""


def chunked_token_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    *,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, as `reference.token_logprobs` gives them.

    Gradients flow through both results to `hidden`, and to `lm_head` and `bias` where they require them.

    Args:
        hidden: [M, D], the last norm's output at the positions that predict `targets`.
        lm_head: [V, D].
        targets: int64 [M].
        temperature: Divides the logits, above 0.
        bias: [V].
        chunk: Tokens whose logits are held at a time.

    Returns:
        Log-probability and entropy in nats, each float32 [M] (float64 for float64 input).

    Raises:
        ValueError: The temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"The temperature must be above 0, got {temperature}; use 1.0 for greedy completions.")
    logprob, entropy = _ChunkedLogprobs.apply(hidden, lm_head, targets, float(temperature), bias, chunk)
    return logprob, entropy


def _scaled_logits(hidden: Tensor, lm_head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, lm_head, bias)
    return logits.to(torch.promote_types(hidden.dtype, torch.float32)) / temperature


class _ChunkedLogprobs(torch.autograd.Function):
    """Backward recomputes each chunk's logits: one GEMM more than the plain way, [M, V] less memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        targets: Tensor,
        temperature: float,
        bias: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprob, lse, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _scaled_logits(hidden[rows], lm_head, bias, temperature)
            lse[rows] = logits.logsumexp(-1)
            logprob[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - lse[rows]
            logp = logits.sub_(lse[rows, None]).clamp_(min=SMALLEST_LOGP)
            entropy[rows] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(hidden, lm_head, targets, bias, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, targets, bias, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_head, _, _, wants_bias, _ = ctx.needs_input_grad
        # Sums over chunks are kept in the logits' precision.
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(lm_head, dtype=lse.dtype) if wants_head else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if wants_bias else None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logp = _scaled_logits(hidden[rows], lm_head, bias, ctx.temperature) - lse[rows, None]
            p = logp.exp()
            # d logprob/dz = onehot - p and d entropy/dz = -p (log p + entropy).
            surprise = logp.clamp_(min=SMALLEST_LOGP) + entropy[rows, None]
            weight = grad_logprob[rows, None] + grad_entropy[rows, None] * surprise
            grad = p.mul_(weight).neg_()
            grad.scatter_add_(-1, targets[rows, None], grad_logprob[rows, None].to(grad.dtype))
            grad = (grad / ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ lm_head
            if grad_head is not None:
                grad_head += grad.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(lm_head.dtype),
            None,
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )
