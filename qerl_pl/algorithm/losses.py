"""Terms of the policy losses, as pure functions of tensors.

Shapes: B completions, T token positions. Log-probabilities are natural logs, of the sampled tokens, by three policies:
the current one (`logprobs`, with gradient), the clean trainer at the time of the rollout (`old`), and the noisy,
quantized sampler (`sampler`).
"""

from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here, far outside every clip range: an infinite ratio times a clipped token's zero gradient is
NaN. k3 is clamped too, or the infinity of one token would end the run."""


class Surrogate(NamedTuple):
    """The policy's objective at each token, before aggregation."""

    value: Tensor
    """[B, T]."""
    clipped_low: Tensor
    """Whether the lower clip decided the value, bool [B, T]."""
    clipped_high: Tensor
    """Whether the upper clip decided the value, bool [B, T]."""


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Importance ratio of each token, pi / pi_old, [B, T]. PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300)."""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalized importance ratio of the completion, at each of its tokens, [B, T].

    s_i = exp(mean over the masked tokens of (logprob - old logprob)); the value at token t is sg[s_i] * pi_t / sg[pi_t]
    (sg stops the gradient): s_i at every token, with the gradient s_i * grad log pi_t. This is GSPO-token (arXiv
    2507.18071, sec. 4.3), whose gradient is GSPO's if a completion's tokens share one advantage and one weight; with
    token-level importance weights each token has its own. Completions without a masked token have ratio 1.
    """
    log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(mean + (logprobs - logprobs.detach()))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), of ratios [B, T] and advantages [B] or [B, T].

    PPO (arXiv 1707.06347), eq. 7; separate bounds ("clip-higher") from DAPO (arXiv 2503.14476), sec. 3.1. The minimum
    drops the gradient of exactly those tokens that are past the bound towards which the advantage pushes them.

    The minimum does not bound a negative advantage times a large ratio; `delta` does. max(minimum, delta A) where A < 0
    is the dual clip of arXiv 1912.09729, eq. 5; min(min(r, delta) A, clip(r) A) is the two-sided clip of INTELLECT-2
    (arXiv 2505.07291). For delta > 1 + epsilon_high they are the same.
    """
    advantage = _by_token(advantages)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    value = torch.minimum(ratio * advantage, clipped * advantage)
    low, high = ratio.detach() < 1 - epsilon_low, ratio.detach() > 1 + epsilon_high
    low, high = low & (advantage < 0), high & (advantage > 0)
    if delta is not None:
        above = (ratio.detach() > delta) & (advantage < 0)
        value, high = torch.where(above, delta * advantage, value), high | above
    return Surrogate(value, low, high)


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float, epsilon_low: float, epsilon_high: float
) -> Surrogate:
    """4 / tau * sigmoid(tau (r - 1)) A, where tau depends on the sign of A: a soft clip, of slope A at r = 1.

    SAPO (arXiv 2511.20347), eq. 5 and 6. Tokens count as clipped where `clipped_surrogate` clips; nothing else depends
    on the epsilons. Shapes: ratios [B, T], advantages [B] or [B, T].
    """
    advantage = _by_token(advantages)
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    hard = clipped_surrogate(ratio.detach(), advantages, epsilon_low, epsilon_high)
    return hard._replace(value=4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage)


def dppo_surrogate(
    ratio: Tensor,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """r A where the probability of the sampled token is within its bounds, else 0.

    The bounds are those of pi - pi_sampler, at most epsilon_high where A > 0 and at least -epsilon_low where A < 0: the
    total variation of the sampled token against all others. DPPO (arXiv 2602.04879), Binary-TV. Shapes: advantages [B]
    or [B, T], others [B, T].
    """
    advantage = _by_token(advantages)
    change = (logprobs.exp() - sampler_logprobs.exp()).detach()
    low, high = (change < -epsilon_low) & (advantage < 0), (change > epsilon_high) & (advantage > 0)
    return Surrogate(torch.where(low | high, 0.0, ratio * advantage), low, high)


def cispo_surrogate(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Surrogate:
    """sg[clip(r, 1 - epsilon_low, 1 + epsilon_high)] A log pi, where sg stops the gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585), sec. 3.1: the clip bounds a token's weight but never drops its gradient. An
    `epsilon_low` of 1 or more is no bound. Shapes: advantages [B] or [B, T], others [B, T].
    """
    ratio = ratio.detach()
    low, high = 1 - epsilon_low, 1 + epsilon_high
    value = ratio.clamp(low, high) * _by_token(advantages) * logprobs
    return Surrogate(value, ratio < low, ratio > high)


def _by_token(advantages: Tensor) -> Tensor:
    """Advantages of completions [B] as [B, 1], of tokens [B, T] as they are."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def distillation_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """log teacher - log old at each sampled token, [B, T]: minus the sampled-token estimate of KL(old || teacher).

    The policy gradient with these advantages, E[A_t grad log pi_t], is minus the gradient of the reverse KL divergence
    of the next-token distributions, summed over the positions of the policy's own samples; a token gets no credit for
    later ones. Its variance vanishes with the divergence itself: where the policies agree, every advantage is 0.

    Source: Kevin Lu and Thinking Machines Lab, "On-Policy Distillation" (2025). Reverse KL on samples of the student:
    MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649).
    """
    return (teacher_logprobs - old_logprobs).detach()


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, in nats, [B, T], with d = log reference - log policy.

    - "k1": -d. Unbiased, of high variance; useless as a penalty: its gradient is zero in expectation.
    - "k2": d^2 / 2. Biased, of low variance; its gradient is that of the divergence, in expectation.
    - "k3": exp(d) - 1 - d. Unbiased and never negative; GRPO's (arXiv 2402.03300, eq. 4). d is clamped at 20, where the
      gradient is zero: with only the exponent clamped, it would push the policy farther away.

    Source: John Schulman, "Approximating KL Divergence" (2020). The bias is that on the policy's own samples.
    """
    difference = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(difference) - difference
        case _:
            assert_never(estimator)


def token_weights(mask: Tensor, kind: Aggregation, *, completions: float, tokens: float, max_tokens: int) -> Tensor:
    """Weight of each token, so that loss = sum(weights * per-token loss).

    - "sequence_mean": 1 / (length_i * completions): mean over each completion, then over completions.
      GRPO (arXiv 2402.03300), eq. 3.
    - "token_mean": 1 / tokens: every token counts the same. DAPO (arXiv 2503.14476), sec. 3.3.
    - "constant": 1 / (completions * max_tokens): independent of lengths. Dr. GRPO (arXiv 2503.20783), sec. 3.2.

    The totals are those of the batch, so that losses and gradients of its micro-batches add up. For gradients averaged
    over N processes, pass the totals over all processes divided by N.

    Args:
        mask: Completion tokens that train, bool [B, T].
        kind: See above.
        completions: Completions of the batch, including those without a masked token.
        tokens: Masked tokens of the batch.
        max_tokens: Token limit of a completion.

    Returns:
        float32 [B, T], 0 outside the mask.
    """
    weights = mask.float()
    match kind:
        case "sequence_mean":
            return weights / weights.sum(dim=1, keepdim=True).clamp(min=1) / completions
        case "token_mean":
            return weights / tokens if tokens else weights  # without tokens all weights are 0
        case "constant":
            return weights / (completions * max_tokens)
        case _:
            assert_never(kind)
