"""From completions to scored groups, and what of them there is to log and to show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.rewards import Reward, RewardSample, score
from qerl_pl.rollout.experience import CompletionRecord
from qerl_pl.types import Completion, Prompt


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt, scored."""

    prompt: Prompt
    completions: Sequence[Completion]
    """Empty where another rank has sampled them."""
    texts: Sequence[str]
    """What they say, without special tokens."""
    total: Tensor
    """Weighted sums of the rewards, float32 [G]."""
    parts: Mapping[str, Tensor]
    """Each reward's own values before its weight, float32 [G], by name."""
    lengths: Sequence[int]
    """Tokens of each completion."""
    truncated: Sequence[bool]
    """Whether the token limit ended it."""
    trains: bool = True
    """Whether the update has it; dynamic sampling drops others."""

    def elsewhere(self) -> "Group":
        """What other ranks need to know of it."""
        return replace(self, completions=())

    def records(self) -> list[CompletionRecord]:
        """Each completion as a reader wants to see it."""
        return [
            CompletionRecord(
                prompt_id=self.prompt.id,
                prompt=self.prompt.text,
                completion=text,
                reference=self.prompt.reference,
                rewards={name: values[row].item() for name, values in self.parts.items()}
                | {"total": self.total[row].item()},
                truncated=self.truncated[row],
                tokens=self.lengths[row],
                trained=self.trains,
            )
            for row, text in enumerate(self.texts)
        ]


def score_groups(
    rewards: Sequence[Reward],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
) -> list[Group]:
    """Score the completions of each prompt, as many of one as of the other, all in one call of each reward."""
    if not prompts:
        return []
    pairs = [(prompt, one) for prompt, group in zip(prompts, completions, strict=True) for one in group]
    texts = tokenizer.batch_decode([list(one.token_ids) for _, one in pairs], skip_special_tokens=True)
    samples = [
        RewardSample(
            prompt=prompt.text,
            completion=text,
            reference=prompt.reference,
            truncated=one.truncated,
            num_tokens=len(one.token_ids),
        )
        for (prompt, one), text in zip(pairs, texts, strict=True)
    ]
    scored = score(rewards, samples)
    size = len(completions[0])
    starts = range(0, len(pairs), size)
    return [
        Group(
            prompt=prompt,
            completions=group,
            texts=texts[start : start + size],
            lengths=[len(one.token_ids) for one in group],
            truncated=[one.truncated for one in group],
            total=scored.total[start : start + size],
            parts={name: values[start : start + size] for name, values in scored.parts.items()},
        )
        for prompt, group, start in zip(prompts, completions, starts, strict=True)
    ]


def totals(groups: Sequence[Group]) -> Tensor:
    """Weighted sums of the rewards of all completions, float32 [B]; B is 0 without groups."""
    return torch.cat([torch.zeros(0), *(group.total for group in groups)])


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean and spread over everything that was sampled, dropped groups included: what the policy really earns."""
    total = totals(groups)
    metrics = {"reward/mean": total.mean().item(), "reward/std": total.std().item()}
    silent = sum(bool((group.total == group.total[0]).all()) for group in groups)
    metrics["completions/groups_without_signal_frac"] = silent / len(groups)
    for name in groups[0].parts:
        metrics[f"reward/{name}"] = torch.cat([group.parts[name] for group in groups]).mean().item()
    return metrics
