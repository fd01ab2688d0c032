"""Group-relative advantages: how much better a completion did than the others of its prompt.

Rewards come as [B] with the G completions of each prompt next to each other, so B = prompts * G.
"""

from typing import Literal

import torch
from torch import Tensor

from qerl_pl.errors import UserError

AdvantageNorm = Literal["group", "batch", "none"]

STD_EPSILON = 1e-4
"""Added to the standard deviation: keeps the advantages of a group whose rewards almost agree from exploding."""


def group_advantages(rewards: Tensor, group_size: int, normalize: AdvantageNorm) -> Tensor:
    """Reward minus the group's mean reward, scaled as `normalize` says.

    - "group": divided by (std of the group + 1e-4). GRPO (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2).
    - "batch": divided by (std of all B rewards + 1e-4). Lite PPO (arXiv 2508.08221).
    - "none": not divided, which keeps easy and hard prompts from weighing more. Dr. GRPO (arXiv 2503.20783).

    Standard deviations are the unbiased ones (divided by n - 1). The papers leave this open; with n they would be
    smaller by sqrt((n - 1) / n).

    Args:
        rewards: [B], completions of one prompt next to each other.
        group_size: G, completions a prompt.
        normalize: See above.

    Returns:
        [B], floating point. Exactly 0 for every completion of a group whose rewards are all equal; B may be 0.

    Raises:
        UserError: G < 2, or G does not divide B.
    """
    groups = _grouped(rewards, group_size)
    if not len(groups):
        return groups.flatten()
    centered = groups - groups.mean(dim=1, keepdim=True)
    if normalize == "group":
        centered = centered / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    elif normalize == "batch":
        centered = centered / (groups.std() + STD_EPSILON)
    # The mean of equal numbers may be off by rounding, which the division would blow up.
    return torch.where(_differs(groups)[:, None], centered, 0.0).flatten()


def informative_groups(rewards: Tensor, correct: Tensor, group_size: int) -> Tensor:
    """Groups that dynamic sampling keeps: 0 < right answers < G (DAPO, arXiv 2503.14476, eq. 11).

    That is about answers, whatever else is rewarded. A group that other rewards make equal all the same has no
    advantages, which the condition is there for (sec. 3.2); it is not kept either.

    Args:
        rewards: Weighted sums [B], completions of one prompt next to each other.
        correct: bool [B], whether a completion's answer is right.
        group_size: G, completions a prompt.

    Returns:
        bool [B / G].

    Raises:
        UserError: G < 2, or G does not divide B.
    """
    return _differs(_grouped(correct, group_size)) & _differs(_grouped(rewards, group_size))


def _grouped(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise UserError(
            "Advantages compare the completions of one prompt, so a group needs at least 2; found group size "
            f"{group_size}; raise the number of completions per prompt."
        )
    if rewards.numel() % group_size:
        raise UserError(
            f"The number of rewards must be a multiple of the group size; found {rewards.numel()} rewards in groups of "
            f"{group_size}; choose sizes that divide."
        )
    groups = rewards.reshape(rewards.numel() // group_size, group_size)
    return groups if groups.is_floating_point() else groups.float()


def _differs(groups: Tensor) -> Tensor:
    return (groups != groups[:, :1]).any(dim=1)
