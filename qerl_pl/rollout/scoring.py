"""From completions to scored groups: what a rollout has gathered, and what it has to log."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.rewards import Reward, RewardSample, ScoredBatch, score
from qerl_pl.rollout.experience import CompletionRecord
from qerl_pl.types import Completion, Prompt


class Groups:
    """What a rollout has gathered so far: the groups that train, and a record of every completion."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.completions: list[list[Completion]] = []
        self.rewards: list[float] = []
        self.records: list[CompletionRecord] = []

    def extend(
        self, prompts: list[Prompt], completions: list[list[Completion]], records: list[CompletionRecord], keep: Tensor
    ) -> None:
        """Add P groups, those to train on for which `keep` (bool [P]) is true."""
        size = len(completions[0])
        for group, kept in enumerate(keep.tolist()):
            part = [replace(record, trained=kept) for record in records[group * size : (group + 1) * size]]
            self.records += part
            if kept:
                self.prompts.append(prompts[group])
                self.completions.append(completions[group])
                self.rewards += [record.rewards["total"] for record in part]


def score_completions(
    rewards: Sequence[Reward],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
) -> tuple[ScoredBatch, list[CompletionRecord]]:
    """Rewards of the completions of each prompt, in order, and each as a reader wants to see it."""
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
    records = [
        CompletionRecord(
            prompt_id=prompt.id,
            prompt=prompt.text,
            completion=sample.completion,
            reference=prompt.reference,
            rewards={name: values[row].item() for name, values in scored.parts.items()}
            | {"total": scored.total[row].item()},
            truncated=one.truncated,
            tokens=len(one.token_ids),
        )
        for row, ((prompt, one), sample) in enumerate(zip(pairs, samples, strict=True))
    ]
    return scored, records


def reward_metrics(scores: Sequence[ScoredBatch]) -> dict[str, float]:
    """Mean and spread over everything that was sampled, dropped groups included: what the policy really earns."""
    total = torch.cat([scored.total for scored in scores])
    metrics = {"reward/mean": total.mean().item(), "reward/std": total.std().item()}
    for name in scores[0].parts:
        metrics[f"reward/{name}"] = torch.cat([scored.parts[name] for scored in scores]).mean().item()
    return metrics
