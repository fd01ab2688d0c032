"""Metrics of a rollout, by TensorBoard tag, over the completions of all ranks."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from qerl_pl.rollout.scoring import Group
from qerl_pl.runtime.communicator import Communicator


def rollout_metrics(
    groups: Sequence[Group], without_signal: int, logged: Mapping[str, Sequence[float]], ranks: Communicator
) -> dict[str, float]:
    """All metrics of a rollout but its times. Collective.

    Args:
        groups: All groups, those of other ranks without completions.
        without_signal: Number of groups whose rewards are all equal, as the advantages combine them.
        logged: What reward functions have logged on this rank, by name.
        ranks: All training processes.
    """
    metrics = reward_metrics(groups) | {"completions/groups_without_signal_frac": without_signal / len(groups)}
    return metrics | environment_metrics(groups) | completion_metrics(groups, ranks) | logged_means(logged, ranks)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean and standard deviation of the rewards of all sampled completions, dropped groups included.

    A reward that applies to no completion has no metric of its own.
    """
    total = torch.cat([group.total for group in groups])
    applies = total[~total.isnan()]
    metrics = {"reward/mean": applies.mean().item()}
    metrics["reward/std"] = applies.std().item() if len(applies) > 1 else math.nan  # of which PyTorch would warn
    for name in groups[0].rewards:
        values = torch.cat([group.rewards[name] for group in groups])
        if not values.isnan().all():
            metrics[f"reward/{name}"] = values.nanmean().item()
    return metrics


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all dialogues; the share of failed calls is of all calls. Empty without an environment."""
    dialogues = [dialogue for group in groups for dialogue in group.dialogues]
    if not dialogues:
        return {}
    calls = sum(dialogue.calls for dialogue in dialogues)
    return {
        "environment/turns": sum(dialogue.turns for dialogue in dialogues) / len(dialogues),
        "environment/calls": calls / len(dialogues),
        "environment/failed_calls_frac": sum(dialogue.failed_calls for dialogue in dialogues) / (calls or math.nan),
        "environment/tool_s": math.fsum(dialogue.tool_seconds for dialogue in dialogues) / len(dialogues),
    }


def completion_metrics(groups: Sequence[Group], ranks: Communicator) -> dict[str, float]:
    """Lengths, truncation and entropy of the completions; means are NaN if no group trains. Collective.

    Args:
        groups: All groups; those of other ranks have no completions.
        ranks: All training processes.
    """
    training = [group for group in groups if group.trains]
    lengths = torch.tensor([float(length) for group in training for length in group.lengths])
    truncated = torch.tensor([ended for group in training for ended in group.truncated], dtype=torch.bool)
    return {
        "completions/groups_dropped_frac": (len(groups) - len(training)) / len(groups),
        "completions/sampled_tokens": sum(length for group in groups for length in group.lengths),
        "completions/length_mean": lengths.mean().item(),
        "completions/length_max": lengths.max().item() if len(lengths) else math.nan,
        "completions/truncated_frac": truncated.float().mean().item(),
        "completions/sampler_entropy": _sampler_entropy(groups, ranks),
    }


def logged_means(logged: Mapping[str, Sequence[float]], ranks: Communicator) -> dict[str, float]:
    """Means over all ranks of what reward functions have logged, by name. Collective."""
    everywhere = ranks.all_gather(dict(logged))
    values = {name: [value for one in everywhere for value in one.get(name, ())] for one in everywhere for name in one}
    return {name: math.fsum(one) / len(one) for name, one in values.items()}


def _sampler_entropy(groups: Sequence[Group], ranks: Communicator) -> float:
    """Mean of -log p of all ranks' sampled tokens, in nats: an unbiased estimate of the sampler's entropy."""
    completions = [completion for group in groups for completion in group.completions]
    nats = -math.fsum(math.fsum(completion.logprobs) for completion in completions)
    gathered = ranks.all_gather((nats, sum(len(completion.sampled_ids) for completion in completions)))
    all_nats, tokens = (sum(values) for values in zip(*gathered, strict=True))
    return all_nats / (tokens or math.nan)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time of the block to that of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def slowest_seconds(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each phase's time on its slowest rank, of the times by phase of every rank."""
    return {f"time/{phase}_s": max(seconds[phase] for seconds in ranks) for phase in ranks[0]}
