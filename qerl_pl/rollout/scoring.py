"""Scoring completions: a rollout's and an evaluation's alike."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.rewards import Reward, RewardSample, check_rewards, functions_among, score
from qerl_pl.rewards import accuracy_reward as find_accuracy_reward
from qerl_pl.runtime.communicator import Communicator
from qerl_pl.types import Completion, CompletionRecord, DialogueFacts, Prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The G scored completions of one prompt."""

    prompt: Prompt
    completions: Sequence[Completion]
    """Empty if another rank sampled them."""
    texts: Sequence[str]
    """Decoded completions, without end and padding tokens; of a dialogue the last turn."""
    total: Tensor
    """Weighted sums of the rewards that apply, float32 [G]; NaN where none does."""
    rewards: Mapping[str, Tensor]
    """Each reward before its weight, float32 [G], by name; NaN where it does not apply."""
    correct: Tensor
    """1 for a right answer, 0 for a wrong one, float32 [G]; NaN where the accuracy reward does not apply."""
    lengths: Sequence[int]
    """Sampled tokens of each completion."""
    truncated: Sequence[bool]
    """Whether the token limit ended each completion."""
    trains: bool = True
    """False if dynamic sampling drops the group."""
    signal: bool = True
    """False if dynamic sampling found no difference among the rewards."""
    dialogues: Sequence[DialogueFacts] = ()
    """Facts of each dialogue; empty without an environment."""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values [G] that reward functions log, by column."""

    def records(self) -> list[CompletionRecord]:
        """One record for each completion."""
        return [
            CompletionRecord(
                prompt_id=self.prompt.id,
                prompt=self.prompt.text,
                completion=text,
                reference=self.prompt.reference,
                rewards={
                    name: None if values[row].isnan() else values[row].item()
                    for name, values in {**self.rewards, "total": self.total}.items()
                },
                truncated=self.truncated[row],
                tokens=self.lengths[row],
                trained=self.trains,
                messages=self.dialogues[row].messages if self.dialogues else None,
                extra={name: values[row] for name, values in self.extra.items()} or None,
            )
            for row, text in enumerate(self.texts)
        ]


class Scorer:
    """Scores completions by the rewards of a run.

    Args:
        rewards: Score the completions' texts.
        accuracy_reward: Name of the reward whose value above 0.5 means that a completion is right; None takes the
            first.

    Raises:
        UserError: The rewards are unusable, or none has that name.
    """

    def __init__(self, rewards: Sequence[Reward], accuracy_reward: str | None = None) -> None:
        check_rewards(rewards)
        self.rewards = rewards
        self.accuracy = find_accuracy_reward(rewards, accuracy_reward)

    def score(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        ends: Collection[int] = (),
    ) -> list[Group]:
        """Score the completions of each prompt (as many for each), with a single call of each reward.

        Args:
            tokenizer: Decodes them.
            prompts: P prompts.
            completions: The completions of each.
            ends: Token ids that end a completion, beside the tokenizer's end-of-sequence token.
        """
        if not prompts:
            return []
        pairs = [(prompt, one) for prompt, group in zip(prompts, completions, strict=True) for one in group]
        texts = completion_texts(tokenizer, [last_turn(completion) for _, completion in pairs], ends)
        samples = [
            RewardSample(
                prompt=prompt.text,
                completion=text,
                reference=prompt.reference,
                truncated=completion.truncated,
                num_tokens=len(completion.sampled_ids),
                prompt_id=prompt.id,
                token_ids=completion.sampled_ids,
                messages=prompt.messages,
                columns=prompt.columns,
                dialogue=None if completion.dialogue is None else completion.dialogue.messages,
                environment_reward=None if completion.dialogue is None else completion.dialogue.reward,
            )
            for (prompt, completion), text in zip(pairs, texts, strict=True)
        ]
        scored = score(self.rewards, samples)
        values = scored.rewards[self.accuracy.name]
        correct = torch.where(values.isnan(), values, (values > 0.5).float())
        extra = {name: values for one in functions_among(self.rewards) for name, values in one.logged_columns.items()}
        size = len(completions[0])
        return [
            Group(
                prompt=prompt,
                completions=group,
                texts=texts[start : start + size],
                lengths=[len(completion.sampled_ids) for completion in group],
                truncated=[completion.truncated for completion in group],
                total=scored.total[start : start + size],
                rewards={name: values[start : start + size] for name, values in scored.rewards.items()},
                correct=correct[start : start + size],
                dialogues=[completion.dialogue for completion in group if completion.dialogue is not None],
                extra={name: values[start : start + size] for name, values in extra.items()},
            )
            for prompt, group, start in zip(prompts, completions, range(0, len(pairs), size), strict=True)
        ]


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], ends: Collection[int]
) -> list[str]:
    """Texts of sampled tokens without special ones that end or pad; other special tokens stay, as tags may be some."""
    ending = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, *ends) if token is not None]
    texts = tokenizer.batch_decode([[token] for token in ending], skip_special_tokens=True)
    left_out = {token for token, text in zip(ending, texts, strict=True) if not text}
    kept = [[token for token in row if token not in left_out] for row in rows]
    return list(tokenizer.batch_decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def without_none(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Fields without those of the named ones that are None."""
    return {key: value for key, value in fields.items() if key not in names or value is not None}


def last_turn(completion: Completion) -> list[int]:
    """The tokens sampled after the environment's last ones."""
    if completion.sampled is None:
        return list(completion.token_ids)
    start = len(completion.sampled)
    while start and completion.sampled[start - 1]:
        start -= 1
    return list(completion.token_ids[start:])


def gather_by_index(ranks: Communicator, indices: Sequence[int], values: Sequence[T]) -> list[T]:
    """All-gather of the ranks' values, ordered by their indices in the batch."""
    gathered = ranks.all_gather(list(zip(indices, values, strict=True)))
    return [value for _, value in sorted(chain.from_iterable(gathered), key=lambda pair: pair[0])]
