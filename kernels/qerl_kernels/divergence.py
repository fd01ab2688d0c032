"""Reverse KL divergence to a teacher over the vocabulary, in chunks of tokens: [M, V] logits never exist."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.backend import runs_triton
from qerl_kernels.logprob import SMALLEST_LOGP, ChunkedLogits, chunk_of, per_token, times_rows
from qerl_kernels.reference import log_distributions


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

    Gradients flow to `hidden`, and to `lm_head` where it requires them. With a frozen lm_head the forward pass saves
    d KL / d hidden, [M, D], and backward is one product with it: three GEMMs in all. Otherwise backward recomputes both
    policies' logits. Source: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543).

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
    chunk = chunk or _default_chunk(hidden, lm_head, teacher_hidden, (soft_cap, teacher_soft_cap))
    inputs = (hidden, lm_head, teacher_hidden.detach(), teacher_head, temperature, soft_cap, teacher_soft_cap, chunk)
    eager = not lm_head.requires_grad and hidden.requires_grad and torch.is_grad_enabled()
    kl: Tensor = (_EagerReverseKL if eager else _RecomputedReverseKL).apply(*inputs)
    return kl


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


def _default_chunk(
    hidden: Tensor, lm_head: Tensor, teacher_hidden: Tensor, soft_caps: tuple[float | None, float | None]
) -> int:
    # The plain path holds five tensors in float32 beside the logits; the policy's soft cap needs its slope.
    own = hidden.element_size() * (1 if soft_caps[0] is None else 2)
    return chunk_of((own + teacher_hidden.element_size() + (0 if runs_triton(hidden) else 20)) * len(lm_head))


class _Pair:
    """Logits of a chunk of tokens by policy and teacher, the divergence and its gradient, on the selected backend."""

    def __init__(
        self,
        hidden: Tensor,
        lm_head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        temperature: float,
        soft_cap: float | None,
        teacher_soft_cap: float | None,
        chunk: int,
    ) -> None:
        self.policy = ChunkedLogits(hidden, lm_head, temperature, chunk, soft_cap)
        self.teacher = ChunkedLogits(teacher_hidden, teacher_head, temperature, chunk, teacher_soft_cap)

    def divergence(self, rows: slice, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The divergence at these rows, and factor times its gradient to the policy's logits before their soft cap.

        Args:
            rows: A chunk.
            factor: Of each row, as the divergence; None leaves the gradient out.
        """
        logits, teacher_logits = self.policy.logits(rows), self.teacher.logits(rows)
        slope = None if factor is None else self.policy.slope(logits)
        kl, grad = (self._by_triton if self.policy.triton else self._by_torch)(logits, teacher_logits, factor)
        return kl, grad if grad is None or slope is None else grad.mul_(slope)

    def _by_torch(self, logits: Tensor, teacher_logits: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logp = self.policy.scaled(logits).log_softmax(-1).clamp_(min=SMALLEST_LOGP)
        difference = logp - self.teacher.scaled(teacher_logits).log_softmax(-1)
        p = logp.exp_()
        kl = (p * difference).sum(-1)
        if factor is None:
            return kl, None
        # d KL/dz = p (log p - log q - KL).
        grad = difference.sub_(kl[:, None]).mul_(p).mul_((factor / self.policy.temperature)[:, None])
        return kl, grad.to(logits.dtype)

    def _by_triton(self, logits: Tensor, teacher_logits: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
        from qerl_kernels import triton_logprob

        statistics = triton_logprob.divergence(logits, teacher_logits, self.policy.temperature)
        if factor is None:
            return statistics[0], None
        return statistics[0], triton_logprob.divergence_gradient_(
            logits, teacher_logits, *statistics, factor, self.policy.temperature
        )


class _EagerReverseKL(torch.autograd.Function):
    """Frozen lm_head: forward computes the gradient, up to a factor per token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, *rest: Any) -> Tensor:
        pair = _Pair(hidden, lm_head, *rest)
        kl, jacobian = per_token(hidden), torch.empty_like(hidden)
        ones = torch.ones_like(kl)
        for rows in pair.policy.rows():
            kl[rows], grad = pair.divergence(rows, ones[rows])
            assert grad is not None
            torch.mm(grad, lm_head, out=jacobian[rows])
        ctx.save_for_backward(jacobian)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        (jacobian,) = ctx.saved_tensors
        return times_rows(jacobian, grad_kl), *[None] * 7


class _RecomputedReverseKL(torch.autograd.Function):
    """Backward recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, *rest: Any
    ) -> Tensor:
        pair, kl = _Pair(hidden, lm_head, teacher_hidden, teacher_head, *rest), per_token(hidden)
        for rows in pair.policy.rows():
            kl[rows], _ = pair.divergence(rows, None)
        ctx.save_for_backward(hidden, lm_head, teacher_hidden, teacher_head)
        ctx.rest = rest
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, *teacher = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        pair = _Pair(hidden, lm_head, *teacher, *ctx.rest)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # The sum over chunks has the divergence's precision.
        grad_head = torch.zeros_like(lm_head, dtype=grad_kl.dtype) if wants_head else None
        for rows in pair.policy.rows():
            _, grad = pair.divergence(rows, grad_kl[rows])
            assert grad is not None
            if grad_hidden is not None:
                torch.mm(grad, lm_head, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head += grad.T @ hidden[rows]
        return grad_hidden, None if grad_head is None else grad_head.to(lm_head.dtype), *[None] * 6
