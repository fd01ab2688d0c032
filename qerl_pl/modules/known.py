"""What an update knows of a rollout before its first step: log-probabilities that no step gives it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.algorithm.objectives import Objective
from qerl_pl.modules.policy import Policy
from qerl_pl.rollout.experience import Experience


@dataclass(frozen=True)
class Reference:
    """The reference policy's log-probabilities of a sample of the completions."""

    logprobs: Tensor
    """[B, T], 0 where they were not measured."""
    measured: Tensor
    """Of which rows, bool [B]."""
    factor: float
    """Completions of all ranks over those that were measured: what makes a sum over these one over all."""


@dataclass(frozen=True)
class Known:
    """What is known of a rollout before its first step."""

    experience: Experience
    mask: Tensor
    """Tokens that train, bool [B, T]."""
    old: Tensor
    """The clean policy's log-probabilities before the update [B, T]; of rows that the first step knows, from then."""
    reference: Reference | None


def logprobs_of(
    policy: Policy, objective: Objective, experience: Experience, mask: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [len(rows), T] of some completions."""
    return policy.token_logprobs(
        experience.tokens[rows],
        experience.lengths[rows],
        mask[rows],
        experience.temperature,
        objective.needs_entropy,
    )


@torch.no_grad()
def frozen_logprobs(
    policy: Policy, objective: Objective, experience: Experience, mask: Tensor, parts: Sequence[Tensor]
) -> Tensor:
    """Log-probabilities [B, T] without gradient or dropout of the rows in `parts`, a forward pass each, else 0."""
    policy.eval()
    found = torch.zeros_like(experience.sampler_logprobs)
    for part in parts:
        found[part] = logprobs_of(policy, objective, experience, mask, part)[0]
    return found


def drawn_places(share: float, completions: int, seed: int) -> Tensor:
    """Places, ascending, of a share of the completions of all ranks, one at least; equal on all ranks."""
    count = min(max(round(share * completions), 1), completions)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(completions, generator=generator)[:count].sort().values


def rows_at(wanted: Tensor, places: Tensor, completions: int) -> Tensor:
    """Own rows among the wanted places, in the order of those."""
    row_at = torch.full((completions,), -1, device=places.device)
    row_at[places] = torch.arange(len(places), device=places.device)
    rows = row_at[wanted.to(places.device)]
    return rows[rows >= 0]
