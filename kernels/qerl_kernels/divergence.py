"""Reverse KL divergence to a teacher over the vocabulary, in chunks of tokens: [M, V] logits never exist."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qerl_kernels.logprob import CHUNK_BYTES
from qerl_kernels.reference import log_distributions

LOGITS_HELD = 8
"""Float32 tensors of a chunk's logits that are alive at once in the backward pass."""


def chunked_reverse_kl(
    hidden: Tensor,
    lm_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """KL(policy || teacher) of the next-token distributions at each position, as `reverse_kl`.

    Gradients flow to `hidden`, and to `lm_head` where it requires them. The backward pass recomputes each chunk's
    logits. Source: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543).

    Args:
        hidden: [M, D], the policy's last hidden states.
        lm_head: [V, D].
        teacher_hidden: [M, E], the teacher's at the same positions.
        teacher_head: [W, E] with W >= V; rows beyond V are no tokens of the policy and are left out.
        temperature: Divides both policies' logits, above 0.
        soft_cap: Of the policy's logits, see `chunked_token_logprobs`; None for none.
        teacher_soft_cap: Of the teacher's.
        chunk: Tokens in a chunk; by default as many as fit `CHUNK_BYTES`.

    Returns:
        Nats, float32 [M] (float64 for float64 input).
    """
    teacher_head = teacher_head[: len(lm_head)].detach()
    chunk = chunk or max(1, CHUNK_BYTES // (LOGITS_HELD * 4 * len(lm_head)))
    pairs = zip(hidden.split(chunk), teacher_hidden.detach().split(chunk), strict=True)
    rest = (temperature, soft_cap, teacher_soft_cap)
    chunks = [
        checkpoint(reverse_kl, own, lm_head, theirs, teacher_head, *rest, use_reentrant=False, preserve_rng_state=False)
        for own, theirs in pairs
    ]
    return torch.cat(chunks)


def reverse_kl(
    hidden: Tensor,
    lm_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
) -> Tensor:
    """`chunked_reverse_kl` in plain PyTorch: sum over the vocabulary of p (log p - log q), [M]."""
    own = log_distributions(hidden, lm_head, temperature, soft_cap=soft_cap)
    theirs = log_distributions(teacher_hidden, teacher_head, temperature, soft_cap=teacher_soft_cap)
    return (own.exp() * (own - theirs)).sum(-1)
