"""Pieces of the policy losses, one formula each, pure over tensors.

Shapes: B completions, T token positions. Log-probabilities are natural logs of the probability of the token that was
sampled. Three policies appear: the current one (`logprobs`, with gradient), the clean trainer at the time of the
rollout (`old`), and the noisy, quantized sampler (`sampler`).
"""

from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
LARGEST_LOG_RATIO = 20.0
"""Beyond, far outside of every clip, a ratio is held: an infinite one times a clipped token's zero gradient is nan.
k3 is held there too, for one token's infinity would end the run."""


class Surrogate(NamedTuple):
    """What the policy maximizes, before aggregation."""

    value: Tensor
    """[B, T]."""
    clipped_low: Tensor
    """bool [B, T]: the lower clip decided this token's value."""
    clipped_high: Tensor
    """bool [B, T]: the upper clip decided this token's value."""


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Importance ratio of each token, pi(token) / pi_old(token). PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300).

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T].

    Returns:
        [B, T].
    """
    return torch.exp((logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Importance ratio of the whole completion, length-normalized, at each of its tokens.

    s_i = exp(mean over the completion's tokens of (logprob - old logprob)); the value at token t is
    sg[s_i] * pi_t / sg[pi_t], where sg stops the gradient: s_i at every token, with the gradient s_i * grad log pi_t.
    GSPO (arXiv 2507.18071), in its GSPO-token form, sec. 4.3, whose gradient is GSPO's where a completion's tokens
    share one advantage and one weight; the correction for the sampler (`importance_cap`) gives each token its own.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T].
        mask: bool [B, T], tokens of the mean.

    Returns:
        [B, T]; 1 in completions without a token in the mask.
    """
    log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = mean.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.exp(mean + (logprobs - logprobs.detach()))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> Surrogate:
    """min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A).

    PPO (arXiv 1707.06347), eq. 7; separate bounds ("clip-higher") from DAPO (arXiv 2503.14476), sec. 3.1. The minimum
    drops the gradient of tokens that already moved past the bound the advantage pushes them to, and of no others.

    Args:
        ratio: r, [B, T], with gradient.
        advantages: A, [B].
        epsilon_low: Distance of the lower bound from 1.
        epsilon_high: Distance of the upper bound from 1.

    Returns:
        Surrogate of [B, T].
    """
    advantage = advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    value = torch.minimum(ratio * advantage, clipped * advantage)
    low, high = ratio.detach() < 1 - epsilon_low, ratio.detach() > 1 + epsilon_high
    return Surrogate(value, low & (advantage < 0), high & (advantage > 0))


def cispo_surrogate(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Surrogate:
    """sg[clip(r, 1 - epsilon_low, 1 + epsilon_high)] A log pi, where sg stops the gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585), sec. 3.1: the clip bounds a token's weight but never drops its gradient.

    Args:
        ratio: r, [B, T].
        logprobs: log pi, [B, T], with gradient.
        advantages: A, [B].
        epsilon_low: Distance of the lower bound from 1; 1 or more is no bound.
        epsilon_high: Distance of the upper bound from 1.

    Returns:
        Surrogate of [B, T].
    """
    ratio = ratio.detach()
    low, high = 1 - epsilon_low, 1 + epsilon_high
    value = ratio.clamp(low, high) * advantages[:, None] * logprobs
    return Surrogate(value, ratio < low, ratio > high)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate at each sampled token of KL(policy || reference), with d = log reference - log policy.

    - "k1": -d. Unbiased, of high variance; as a penalty useless: its gradient is zero in expectation.
    - "k2": d^2 / 2. Biased, of low variance; its gradient is that of the divergence, in expectation.
    - "k3": exp(d) - 1 - d. Unbiased and never negative; what GRPO uses (arXiv 2402.03300, eq. 4). Beyond d = 20 it is
      held, and has no gradient: held in the exponent alone, d would push the policy farther away.

    Source: John Schulman, "Approximating KL Divergence" (2020). The statements on bias hold for tokens that the policy
    itself sampled.

    Args:
        logprobs: [B, T], with gradient.
        ref_logprobs: [B, T].
        estimator: See above.

    Returns:
        [B, T], in nats.
    """
    difference = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(max=LARGEST_LOG_RATIO)
            return torch.expm1(difference) - difference
        case _:
            assert_never(estimator)


def truncated_importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old(token) / pi_sampler(token), cap): corrects for tokens drawn from the sampler, not from the trainer.

    Source: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (2025). The cap trades a little bias for bounded variance.

    Args:
        old_logprobs: [B, T], clean trainer at the time of the rollout.
        sampler_logprobs: [B, T], noisy, quantized sampler.
        cap: Largest weight.

    Returns:
        [B, T], without gradient.
    """
    return torch.exp(old_logprobs - sampler_logprobs).clamp(max=cap).detach()


def token_weights(mask: Tensor, kind: Aggregation, *, completions: float, tokens: float, max_tokens: int) -> Tensor:
    """Weight of each token's loss, so that loss = sum(weights * per-token loss).

    - "sequence_mean": 1 / (length_i * completions): mean over each completion, then over completions.
      GRPO (arXiv 2402.03300), eq. 3.
    - "token_mean": 1 / tokens: every token counts the same. DAPO (arXiv 2503.14476), sec. 3.3.
    - "constant": 1 / (completions * max_tokens): no length in it at all. Dr. GRPO (arXiv 2503.20783), sec. 3.2.

    The totals are those of the whole batch, so the weights of a micro-batch are rows of the whole batch's weights, and
    losses and gradients of micro-batches add up to the whole batch's. With gradients averaged over N processes, pass
    the totals over all processes divided by N.

    Args:
        mask: bool [B, T], completion tokens that train.
        kind: See above.
        completions: Completions of the whole batch, those without a token in the mask included.
        tokens: Tokens in the mask of the whole batch.
        max_tokens: Most tokens of a completion.

    Returns:
        float32 [B, T], 0 outside the mask.
    """
    weights = mask.float()
    match kind:
        case "sequence_mean":
            return weights / weights.sum(dim=1, keepdim=True).clamp(min=1) / completions
        case "token_mean":
            return weights / tokens if tokens else weights  # no tokens: all weights are 0 already
        case "constant":
            return weights / (completions * max_tokens)
        case _:
            assert_never(kind)
