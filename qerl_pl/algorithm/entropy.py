"""Entropy of the policy as a control: an adaptive bonus, and training on the tokens of highest entropy."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.errors import UserError

TIE = 1e-4
"""Nats by which equal entropies may differ by rounding. The first tokens of a group are equal: rounding, by which
micro-batches and ranks differ, must not choose between them."""


@dataclass(frozen=True)
class AdaptiveEntropy:
    """An entropy bonus whose coefficient rises while the entropy is below a target, and falls while it is above.

    After a rollout of entropy e, the coefficient c becomes c + step if e < target, c - step if e > target, within
    [minimum, maximum]. The next rollout's bonus has the coefficient c if e <= target, and 0 otherwise.

    Source: Skywork-OR1 (arXiv 2505.22312), adaptive entropy control. The entropy is that of the rollout before.

    Args:
        target: Entropy in nats per token; choose it below the policy/entropy of the first rollouts.
        step: Change of the coefficient after each rollout.
        minimum: Smallest coefficient.
        maximum: Largest coefficient.

    Raises:
        UserError: A number is negative or not finite, or the minimum exceeds the maximum.
    """

    target: float
    step: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"adaptive_entropy.{name} must be a number of at least 0; got {value}; correct it.")
        if self.minimum > self.maximum:
            raise UserError(
                "adaptive_entropy.minimum must be at most adaptive_entropy.maximum; got "
                f"{self.minimum} and {self.maximum}; swap them."
            )


@dataclass(frozen=True)
class EntropyState:
    """State of an entropy bonus between two rollouts."""

    coefficient: float
    """c, see `AdaptiveEntropy`."""
    entropy: float | None = None
    """Entropy of the last rollout that trained a token, in nats per token; None before the first."""

    def applied(self, control: AdaptiveEntropy | None) -> float:
        """Coefficient of the next rollout's bonus; constant without a control."""
        above = control is not None and self.entropy is not None and self.entropy > control.target
        return 0.0 if above else self.coefficient

    def after(self, control: AdaptiveEntropy | None, entropy: float) -> "EntropyState":
        """State after a rollout of this entropy; NaN, if no token trained, changes nothing."""
        if control is None or math.isnan(entropy):
            return self
        direction = (entropy < control.target) - (entropy > control.target)
        coefficient = min(max(self.coefficient + direction * control.step, control.minimum), control.maximum)
        return EntropyState(coefficient, entropy)


def top_entropy_threshold(entropies: Tensor, share: float) -> float:
    """Smallest entropy among the `share` of tokens with the highest entropy, less a tolerance for ties.

    "Beyond the 80/20 Rule" (arXiv 2506.01939), sec. 5: the policy gradient of these tokens alone trains as well as that
    of all.

    Args:
        entropies: Of all tokens that train, [N]; N may be 0.
        share: In (0, 1].

    Returns:
        Nats; the tokens with at least this entropy are `share` of all, rounded, or more if some tie.
    """
    if not len(entropies):
        return -math.inf
    count = min(max(round(share * len(entropies)), 1), len(entropies))
    return float(torch.topk(entropies, count).values[-1].item()) - TIE
