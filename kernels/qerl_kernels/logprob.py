"""Token log-probabilities, entropies and reverse KL divergence, in chunks of tokens: [M, V] logits never exist."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels.backend import runs_triton

CHUNK_BYTES = 320 * 2**20
"""Memory for a chunk's logits and their temporaries."""
SMALLEST_LOGP = -1e4
"""Replaces minus infinity where it is multiplied by a zero probability."""


def chunked_token_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = True,
    chunk: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution.

    Gradients flow through both results to `hidden`, and to `lm_head` where it requires them. With a frozen lm_head and
    without the entropy's gradient the forward pass saves d logprob/d hidden, [M, D], and backward is one product with
    it: two GEMMs in all. Otherwise backward recomputes the logits: three.

    Args:
        hidden: [M, D], the last norm's output at the positions that predict `targets`.
        lm_head: [V, D].
        targets: int64 [M].
        temperature: Divides the logits, above 0.
        entropy_gradient: Whether the entropy has a gradient; without it the entropy is detached.
        chunk: Tokens in a chunk; by default as many as fit CHUNK_BYTES.
        soft_cap: The logits z become soft_cap * tanh(z / soft_cap), before the temperature; None leaves them.

    Returns:
        Log-probability and entropy in nats, each float32 [M] (float64 for float64 input).
    """
    if temperature <= 0:
        raise ValueError(f"The temperature must be above 0, got {temperature}; use 1.0 for greedy completions.")
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    chunk = chunk or default_chunk(hidden, lm_head, soft_cap)
    inputs = (hidden, lm_head, targets, float(temperature), chunk, soft_cap)
    if wants_gradient and not (lm_head.requires_grad or entropy_gradient):
        return _EagerLogprobs.apply(*inputs)
    logprob, entropy = _RecomputedLogprobs.apply(*inputs)
    return logprob, entropy if entropy_gradient else entropy.detach()


def default_chunk(hidden: Tensor, lm_head: Tensor, soft_cap: float | None = None) -> int:
    """Tokens whose logits fit CHUNK_BYTES, a multiple of 128 where that many fit."""
    # The plain path holds the logits, their float32 copy and two temporaries of it; a soft cap needs its slope.
    held = hidden.element_size() * (1 if soft_cap is None else 2) + (0 if runs_triton(hidden) else 12)
    return chunk_of(held * lm_head.shape[0])


def chunk_of(token_bytes: int) -> int:
    """Tokens that fit CHUNK_BYTES at `token_bytes` each, a multiple of 128 where that many fit."""
    tokens = CHUNK_BYTES // token_bytes
    return max(1, tokens // 128 * 128 or tokens)


@dataclass
class ChunkedLogits:
    """Logits of an output layer, a chunk of tokens at a time, on the selected backend."""

    hidden: Tensor
    """[M, D]."""
    lm_head: Tensor
    """[V, D]."""
    temperature: float
    """Divides the logits in `scaled`."""
    chunk: int
    """Tokens in a chunk."""
    soft_cap: float | None
    """As for `chunked_token_logprobs`."""

    def __post_init__(self) -> None:
        hidden = self.hidden
        self.triton = runs_triton(hidden)
        self.buffer = hidden.new_empty(min(self.chunk, len(hidden)), len(self.lm_head)) if self.triton else None

    def rows(self) -> list[slice]:
        return [slice(i, min(i + self.chunk, len(self.hidden))) for i in range(0, len(self.hidden), self.chunk)]

    def logits(self, rows: slice) -> Tensor:
        """Logits before the temperature in the dtype of the hidden states; valid until the next call."""
        hidden = self.hidden[rows]
        logits = torch.mm(hidden, self.lm_head.t(), out=None if self.buffer is None else self.buffer[: len(hidden)])
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of capped logits to those before the cap; None without a cap."""
        return None if self.soft_cap is None else (logits / self.soft_cap).square_().neg_().add_(1.0)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits over the temperature in float32, or float64."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, log-partition and entropy of rows of logits, for their targets."""
        if self.triton:
            from qerl_kernels import triton_logprob

            return triton_logprob.statistics(logits, targets, self.temperature)
        scaled = self.scaled(logits)
        lse = scaled.logsumexp(-1)
        logp = scaled.sub_(lse[:, None])
        logprob = logp.gather(-1, targets[:, None]).squeeze(-1)
        logp.clamp_(min=SMALLEST_LOGP)
        return logprob, lse, -(logp.exp().mul_(logp)).sum(-1)

    def gradient(
        self, logits: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor
    ) -> Tensor:
        """Gradient of sum(grad_logprob * logprob + grad_entropy * entropy) to the logits before their soft cap.

        May overwrite the logits.
        """
        slope = self.slope(logits)
        if self.triton:
            from qerl_kernels import triton_logprob

            statistics = (lse, entropy, grad_logprob, grad_entropy)
            grad = triton_logprob.gradient_(logits, targets, *statistics, self.temperature)
        else:
            logp = self.scaled(logits).sub_(lse[:, None])
            p = logp.exp()
            # d logprob/dz = onehot - p and d entropy/dz = -p (log p + entropy).
            weight = logp.clamp_(min=SMALLEST_LOGP).add_(entropy[:, None])
            weight.mul_(grad_entropy[:, None]).add_(grad_logprob[:, None])
            grad = p.mul_(weight).neg_()
            grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None].to(grad.dtype))
            grad = grad.div_(self.temperature).to(self.hidden.dtype)
        return grad if slope is None else grad.mul_(slope)


def per_token(hidden: Tensor) -> Tensor:
    """An empty tensor of a number for each of the hidden states [M, D], float32 or float64."""
    return hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))


def times_rows(jacobian: Tensor, factor: Tensor) -> Tensor:
    """Rows of [M, D] times a float32 factor each, [M], in the dtype of the rows."""
    return torch.mul(jacobian, factor[:, None], out=torch.empty_like(jacobian))  # `out` avoids a float32 product


class _EagerLogprobs(torch.autograd.Function):
    """Frozen lm_head, gradient of the log-probability only: forward computes it, up to a factor per token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        chunks = ChunkedLogits(hidden, lm_head, *rest)
        logprob, entropy, jacobian = per_token(hidden), per_token(hidden), torch.empty_like(hidden)
        ones, zeros = torch.ones_like(logprob), torch.zeros_like(logprob)
        for rows in chunks.rows():
            logits = chunks.logits(rows)
            logprob[rows], lse, entropy[rows] = chunks.statistics(logits, targets[rows])
            grad = chunks.gradient(logits, targets[rows], lse, entropy[rows], ones[rows], zeros[rows])
            torch.mm(grad, lm_head, out=jacobian[rows])
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (jacobian,) = ctx.saved_tensors
        return times_rows(jacobian, grad_logprob), *[None] * 5


class _RecomputedLogprobs(torch.autograd.Function):
    """Backward recomputes each chunk's logits: a GEMM more than plain PyTorch, [M, V] less memory."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        chunks = ChunkedLogits(hidden, lm_head, *rest)
        logprob, lse, entropy = per_token(hidden), per_token(hidden), per_token(hidden)
        for rows in chunks.rows():
            logprob[rows], lse[rows], entropy[rows] = chunks.statistics(chunks.logits(rows), targets[rows])
        ctx.save_for_backward(hidden, lm_head, targets, lse, entropy)
        ctx.rest = rest
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, targets, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        chunks = ChunkedLogits(hidden, lm_head, *ctx.rest)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # The sum over chunks has the statistics' precision.
        grad_head = torch.zeros_like(lm_head, dtype=lse.dtype) if wants_head else None
        for rows in chunks.rows():
            statistics = (lse[rows], entropy[rows], grad_logprob[rows], grad_entropy[rows])
            grad = chunks.gradient(chunks.logits(rows), targets[rows], *statistics)
            if grad_hidden is not None:
                torch.mm(grad, lm_head, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head += grad.T @ hidden[rows]
        return grad_hidden, None if grad_head is None else grad_head.to(lm_head.dtype), *[None] * 4


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
    """KL(policy || teacher) of the next-token distributions at each position.

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
        """The divergence at these rows, and factor times its gradient to the policy's logits before their soft cap."""
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
