"""What a policy learns by, as loops, for tests: advantages and losses, token by token, from the papers' formulas.

It shares no code with `qerl_pl`. Numbers are float64; of a token's quantities only its log-probability has a gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from plain_policy import Sample, Sampling
from torch import Tensor

AGGREGATION = {
    "GRPO": "sequence_mean",
    "GSPO": "sequence_mean",
    "DAPO": "token_mean",
    "CISPO": "token_mean",
    "DrGRPO": "constant",
    "BNPO": "token_mean",
    "SAPO": "sequence_mean",
    "DPPO": "token_mean",
}
STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Question:
    """A row of the data."""

    id: str
    tokens: list[int]
    """The rendered prompt."""
    text: str


@dataclass(frozen=True)
class Recipe:
    """What a run is told. The names are those of the configuration."""

    algorithm: str
    sampling: Sampling
    rewards: Mapping[str, tuple[float, Callable[[Sample], float]]]
    """Weight and value of each; the first tells whether a completion is right (above 0.5)."""
    beta: float = 0.3
    epsilon_low: float = 0.1
    epsilon_high: float = 0.15
    importance_cap: float | None = 1.05
    mask_truncated: bool = False
    group_size: int = 3
    batch_size: int = 4
    resample_rounds: int = 2
    update_epochs: int = 2
    minibatches: int = 2
    max_grad_norm: float = math.inf
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-4
    weight_decay: float = 0.1
    warmup_ratio: float = 0.2
    max_epochs: int = 1
    sigma_start: float = 0.03
    sigma_end: float = 0.01
    stages: int = 2
    noiseless_first_stage: bool = False
    eval_samples: int = 2
    seed: int = 3
    data_seed: int = 5
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the objective: correction (all of its settings), delta, advantage_norm,
    entropy_coefficient."""


@dataclass
class Member:
    """One completion of a group, and what the update needs to know of it."""

    question: Question
    sample: Sample
    rewards: dict[str, float]
    total: float
    advantage: float = math.nan
    old: list[float] = field(default_factory=list)
    """Log-probabilities of the clean policy when the rollout was sampled."""
    reference: list[float] = field(default_factory=list)


def advantages(totals: Sequence[float], algorithm: str, norm: str = "group") -> list[float]:
    """Reward minus the group's mean, divided by the group's standard deviation; Dr. GRPO does not divide.

    RLOO: reward minus the mean of the others. MaxRL: reward divided by the group's mean, minus 1.
    """
    mean = fmean(totals)
    if all(other == totals[0] for other in totals):
        return [0.0] * len(totals)
    if norm == "rloo":
        return [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]
    if norm == "maxrl":
        return [total / mean - 1 for total in totals]
    divisor = 1.0 if algorithm == "DrGRPO" else stdev(totals) + STD_EPSILON
    return [(total - mean) / divisor for total in totals]


def importance_weights(correction: Mapping[str, Any], log_ratios: Sequence[float]) -> list[tuple[float, bool, bool]]:
    """Of one completion's tokens: importance weight, whether it is rejected, and whether it was capped.

    Args:
        correction: All settings of a `RolloutCorrection`.
        log_ratios: Trainer's log-probability minus sampler's, of each token.
    """
    total = sum(log_ratios)

    def ratio(level: str | None, token: float) -> float:
        return math.exp({None: 0.0, "token": token, "sequence": total, "geometric": total / len(log_ratios)}[level])

    def inside(value: float, low: float | None, high: float | None) -> bool:
        return (low or 0.0) <= value <= (math.inf if high is None else high)

    outlier = any(
        not inside(math.exp(token), correction["outlier_low"], correction["outlier_high"]) for token in log_ratios
    )
    found = []
    for token in log_ratios:
        weight, capped = ratio(correction["weights"], token), False
        if correction["weights"] is not None and correction["cap"] is not None:
            capped = weight > correction["cap"]
            weight = min(weight, correction["cap"])
        rejected = outlier
        if correction["rejection"] is not None:
            rejected |= not inside(ratio(correction["rejection"], token), correction["low"], correction["high"])
        found.append((0.0, True, False) if rejected else (weight, False, capped))
    return found


def minibatch_loss(
    recipe: Recipe,
    minibatch: Sequence[Member],
    token_logprobs: Callable[[Member], tuple[Tensor, Tensor]],
    sums: dict[str, float],
) -> Tensor:
    """Sum over tokens of weight * (-importance weight * surrogate + beta * KL - coefficient * entropy).

    Args:
        recipe: Names the algorithm and its numbers.
        minibatch: The completions of one optimizer step.
        token_logprobs: Log-probabilities, with gradient, and entropies of a completion's tokens.
        sums: What is measured is added to it.
    """
    correction = recipe.more.get("correction") or {
        "weights": None if recipe.importance_cap is None else "token",
        "cap": recipe.importance_cap,
        **dict.fromkeys(("rejection", "outlier_low", "outlier_high")),
    }
    learned = [member for member in minibatch if not (recipe.mask_truncated and member.sample.truncated)]
    tokens = sum(len(member.sample.tokens) for member in learned)
    loss = torch.zeros((), dtype=torch.float64)
    for member in learned:
        weight = {
            "sequence_mean": 1 / (len(member.sample.tokens) * len(minibatch)),
            "token_mean": 1 / tokens,
            "constant": 1 / (recipe.sampling.max_tokens * len(minibatch)),
        }[AGGREGATION[recipe.algorithm]]
        logprobs, entropies = token_logprobs(member)
        drift = fmean(now - old for now, old in zip(logprobs.tolist(), member.old, strict=True))
        ratios = [old - sampler for old, sampler in zip(member.old, member.sample.logprobs, strict=True)]
        corrected = importance_weights(correction, ratios)
        rows = zip(logprobs, member.old, member.reference, member.sample.logprobs, entropies, strict=True)
        for number, (logprob, old, reference, sampler, entropy) in enumerate(rows):
            value, measured = surrogate(recipe, logprob, old, sampler, drift, member.advantage)
            importance, rejected, capped = corrected[number]
            kl = torch.exp(reference - logprob) - (reference - logprob) - 1
            bonus = recipe.more.get("entropy_coefficient", 0.0) * entropy
            loss = loss + weight * (recipe.beta * kl - importance * value - bonus)
            measured |= {"policy/kl": kl.item(), "policy/entropy": entropy.item(), "tokens": 1}
            measured |= {"mismatch/is_weight_mean": importance, "mismatch/logprob_abs_mean": abs(old - sampler)}
            mismatch = math.exp(old - sampler)
            measured |= {"mismatch/k3": mismatch - 1 - math.log(mismatch), "mismatch/chi2": mismatch**2 - 1}
            measured |= {"mismatch/capped_frac": capped, "mismatch/rejected_frac": rejected}
            measured |= {"weights squared": importance**2}
            for name, number in measured.items():
                sums[name] += number
    return loss


def surrogate(
    recipe: Recipe, logprob: Tensor, old: float, sampler: float, drift: float, advantage: float
) -> tuple[Tensor, dict[str, float]]:
    """What one token's policy ratio r makes of its advantage A, and what is measured of it.

    min(r A, clip(r) A), where r is the token's. GSPO: r is the whole completion's, exp(drift), its gradient that of the
    token. CISPO: clip(r) A log pi, of which only log pi has a gradient. SAPO: 4 / tau / (1 + exp(-tau (r - 1))) A.
    DPPO: r A unless the probability has moved too far from the sampler's. Dual clip: r is at most delta where A < 0.
    """
    low, high = 1 - recipe.epsilon_low, 1 + recipe.epsilon_high
    ratio = torch.exp(logprob - old)
    if recipe.algorithm == "GSPO":
        ratio = math.exp(drift) * torch.exp(logprob - logprob.item())
    r = ratio.item()
    below, above = r < low, r > high
    if recipe.algorithm == "CISPO":
        value = min(max(r, low), high) * advantage * logprob
    elif recipe.algorithm == "DPPO":
        moved = math.exp(logprob.item()) - math.exp(sampler)
        below, above = moved < -recipe.epsilon_low and advantage < 0, moved > recipe.epsilon_high and advantage > 0
        value = 0.0 * ratio if below or above else ratio * advantage
    elif recipe.algorithm == "SAPO":
        below, above = below and advantage < 0, above and advantage > 0
        tau = 1.0 if advantage > 0 else 1.05
        value = 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    elif advantage < 0 and r > recipe.more.get("delta", math.inf):
        value, below, above = 0.0 * ratio + recipe.more["delta"] * advantage, False, True
    else:
        below, above = below and advantage < 0, above and advantage > 0
        value = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
    return value, {"policy/ratio_mean": r, "policy/clip_frac_low": below, "policy/clip_frac_high": above}
