"""Group-relative advantages.

Rewards are [B] with the G completions of each prompt next to each other, so that B = prompts * G.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from qerl_pl.errors import UserError

AdvantageNorm = Literal["group", "batch", "none", "rloo", "maxrl"]
MultiObjectiveAggregation = Literal["sum_then_normalize", "normalize_then_sum"]

STD_EPSILON = 1e-4
"""Added to the standard deviation, which is tiny in a group whose rewards almost agree."""

CANCELLED = 1e-5
"""Share of the size of its terms below which a sum is rounding."""


@dataclass(frozen=True)
class Scores:
    """Rewards of B completions, the G of each prompt next to each other; NaN where none applies."""

    total: Tensor
    """Weighted sums, [B]."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Each reward before its weight, [B], by name."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factor of each reward, by name."""


def advantages_and_signal(
    scores: Scores, group_size: int, normalize: AdvantageNorm, aggregation: MultiObjectiveAggregation
) -> tuple[Tensor, Tensor]:
    """Advantages [B], of the weighted sums or GDPO's, and `group_signal`; errors as `group_advantages`."""
    combined = _combined(scores, group_size, aggregation)
    if aggregation == "normalize_then_sum":
        advantages = _normalized_over_batch(combined)
    else:
        advantages = group_advantages(combined, group_size, normalize)
    return advantages, have_differences(grouped(combined, group_size))


def group_signal(scores: Scores, group_size: int, aggregation: MultiObjectiveAggregation) -> Tensor:
    """Whether the rewards of each group, as the advantages combine them, differ: bool [B / G]."""
    return have_differences(grouped(_combined(scores, group_size, aggregation), group_size))


def _combined(scores: Scores, group_size: int, aggregation: MultiObjectiveAggregation) -> Tensor:
    """The weighted sums of the rewards, or of their group advantages, [B]."""
    if aggregation == "normalize_then_sum":
        return summed_group_advantages(scores.rewards, scores.weights, group_size)
    return scores.total


def group_advantages(rewards: Tensor, group_size: int, normalize: AdvantageNorm) -> Tensor:
    """Reward minus the group's mean reward, divided as `normalize` says.

    - "group": by (std of the group + 1e-4). GRPO (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2).
    - "batch": by (std of all B rewards + 1e-4). Lite PPO (arXiv 2508.08221).
    - "none": not divided, so that easy and hard prompts do not weigh more. Dr. GRPO (arXiv 2503.20783).
    - "rloo": by 1 - 1/G, which leaves the reward minus the mean of the others. RLOO (arXiv 2402.14740), sec. 2.
    - "maxrl": by the group's mean reward, so that hard prompts weigh more. MaxRL (arXiv 2602.02710), for rewards that
      are 0 or 1; others must be at least 0.

    The standard deviation is unbiased (n - 1), which the papers leave open. A NaN, where no reward applies, counts
    neither in the mean nor in the standard deviation, and its advantage is 0.

    Returns:
        [B], floating point; exactly 0 in a group whose rewards are all equal. B may be 0.

    Raises:
        UserError: G < 2, or G does not divide B; or for "maxrl", a reward is negative.
    """
    groups = grouped(rewards, group_size)
    if normalize == "maxrl" and (groups < 0).any():
        raise UserError(
            "advantage_norm maxrl divides by the mean reward of a group, so rewards must be at least 0; got "
            f"{groups[groups < 0].min().item():g}; use another advantage_norm, or rewards without penalties."
        )
    if not len(groups):
        return groups.flatten()
    if groups.isnan().any():
        return _of_those_that_apply(groups, normalize)
    centered = groups - groups.mean(dim=1, keepdim=True)
    if normalize == "group":
        centered = centered / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    elif normalize == "batch":
        centered = centered / (groups.std() + STD_EPSILON)
    elif normalize == "rloo":
        centered = centered / (1 - 1 / group_size)
    elif normalize == "maxrl":
        centered = centered / groups.mean(dim=1, keepdim=True)
    # The mean of equal numbers may be off by rounding, which the division would amplify.
    return torch.where(have_differences(groups)[:, None], centered, 0.0).flatten()


def _of_those_that_apply(groups: Tensor, normalize: AdvantageNorm) -> Tensor:
    """`group_advantages` [B] of groups [B / G, G] with NaN."""
    applies = ~groups.isnan()
    advantages = torch.zeros_like(groups)
    for group, mask, row in zip(groups, applies, advantages, strict=True):
        rewards = group[mask]
        if (rewards != rewards[:1]).any():
            row[mask] = rewards - rewards.mean()
            if normalize == "group":
                row[mask] /= rewards.std() + STD_EPSILON
            elif normalize == "rloo":
                row[mask] /= 1 - 1 / len(rewards)
            elif normalize == "maxrl":
                row[mask] /= rewards.mean()
    if normalize == "batch" and applies.sum() > 1:
        advantages /= groups[applies].std() + STD_EPSILON
    return advantages.flatten()


def summed_group_advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_size: int) -> Tensor:
    """Weighted sum of the group advantages of several rewards: GDPO before its normalization over the batch.

    Args:
        rewards: Each reward [B] by name; NaN where it does not apply.
        weights: Factor of each reward, by name.
        group_size: G.

    Returns:
        [B], floating point; NaN where no reward of a weight other than 0 applies, exactly 0 in a group whose rewards
        cancel each other. B may be 0. Errors as `group_advantages`.
    """
    terms = [weights[name] * group_advantages(values, group_size, "group") for name, values in rewards.items()]
    summed, size = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term in terms:
        summed, size = summed + term, size + term.abs()
    largest, scale = (grouped(values, group_size).amax(dim=1) for values in (summed.abs(), size))
    cancelled = (largest <= CANCELLED * scale).repeat_interleave(group_size)
    weighted = [values for name, values in rewards.items() if weights[name]] or list(rewards.values())
    applies = torch.stack([~values.isnan() for values in weighted]).any(dim=0)
    return summed.masked_fill(cancelled, 0.0).masked_fill(~applies, torch.nan)


def normalized_then_summed(rewards: Mapping[str, Tensor], weights: Mapping[str, float], group_size: int) -> Tensor:
    """Advantages of several rewards, each normalized within its groups first: GDPO (arXiv 2601.05242).

    `summed_group_advantages`, normalized over the batch: minus its mean, divided by its standard deviation + 1e-4.

    Returns [B], floating point; 0 where no reward applies. B may be 0. Errors as `group_advantages`.
    """
    return _normalized_over_batch(summed_group_advantages(rewards, weights, group_size))


def _normalized_over_batch(summed: Tensor) -> Tensor:
    applies = ~summed.isnan()
    values = summed[applies]
    if not (values != values[:1]).any():
        return torch.zeros_like(summed)
    return torch.where(applies, (summed - values.mean()) / (values.std() + STD_EPSILON), 0.0)


def grouped(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards [B] as [B / G, G], floating point; UserError if G < 2, or G does not divide B."""
    if group_size < 2:
        raise UserError(
            "Advantages compare the completions of one prompt, so a group needs at least 2; got group size "
            f"{group_size}; raise the number of completions per prompt."
        )
    if rewards.numel() % group_size:
        raise UserError(
            f"The number of rewards must be a multiple of the group size; got {rewards.numel()} rewards in groups of "
            f"{group_size}; choose sizes that divide."
        )
    groups = rewards.reshape(rewards.numel() // group_size, group_size)
    return groups if groups.is_floating_point() else groups.float()


def have_differences(groups: Tensor) -> Tensor:
    """Whether each group of [groups, G] has different values, bool [groups]; NaN does not count."""
    largest, smallest = (torch.where(groups.isnan(), bound, groups) for bound in (-torch.inf, torch.inf))
    return largest.amax(dim=1) > smallest.amin(dim=1)
