"""Scoring completions, and padding them into tensors."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.errors import UserError
from qerl_pl.rewards import Reward, RewardSample, functions_among, score
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
    lengths: Sequence[int]
    """Sampled tokens of each completion."""
    truncated: Sequence[bool]
    """Whether the token limit ended each completion."""
    trains: bool = True
    """False if dynamic sampling drops the group."""
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


def score_groups(
    rewards: Sequence[Reward],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    ends: Collection[int] = (),
) -> list[Group]:
    """Score the completions of each prompt (as many for each), with a single call of each reward.

    Args:
        rewards: Score the completions' texts.
        tokenizer: Decodes them.
        prompts: P prompts.
        completions: The completions of each.
        ends: Token ids that end a completion, beside the tokenizer's end-of-sequence token.
    """
    if not prompts:
        return []
    pairs = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
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
    scored = score(rewards, samples)
    extra = {name: values for one in functions_among(rewards) for name, values in one.logged_columns.items()}
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
    gathered = ranks.concatenate(zip(indices, values, strict=True))
    return [value for _, value in sorted(gathered, key=lambda pair: pair[0])]


def totals(groups: Sequence[Group]) -> Tensor:
    """Weighted sums of the rewards of all completions, float32 [B]; B is 0 without groups."""
    return torch.cat([torch.zeros(0), *(group.total for group in groups)])


def pad_completions(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-pad P prompts with their completions, B in all.

    Returns:
        (tokens int64 [B, T], lengths int64 [B], mask of the sampled tokens bool [B, T], sampler_logprobs float32
        [B, T]).
    """
    rows = [
        (prompt.token_ids if completion.prompt_ids is None else completion.prompt_ids, completion)
        for prompt, group in zip(prompts, completions, strict=True)
        for completion in group
    ]
    sizes = [len(prompt_ids) + len(completion.token_ids) for prompt_ids, completion in rows]
    lengths = torch.tensor(sizes, dtype=torch.int64)
    tokens = torch.full((len(rows), max(sizes, default=0)), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    for row, (prompt_ids, completion) in enumerate(rows):
        start, end = len(prompt_ids), sizes[row]
        tokens[row, :end] = torch.tensor(prompt_ids + completion.token_ids)
        mask[row, start:end] = True if completion.sampled is None else torch.tensor(completion.sampled)
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return tokens, lengths, mask, logprobs


def pad_routing(completions: Sequence[Sequence[Completion]], shape: Sequence[int]) -> Tensor | None:
    """The experts that the sampler chose for the tokens that `pad_completions` padded.

    Args:
        completions: The completions of each prompt, B in all.
        shape: (B, T).

    Returns:
        int16 [B, T, layers, k], -1 for tokens that the sampler did not compute; None where experts were not recorded.
    """
    recorded = [completion.routing for group in completions for completion in group]
    first = next((experts for experts in recorded if experts is not None), None)
    if first is None:
        return None
    routing = first.new_full((*shape, *first.shape[1:]), -1)
    for row, experts in zip(routing, recorded, strict=True):
        if experts is not None:  # a dialogue may end before its first turn
            row[: len(experts)] = experts
    return routing


def require_finite_logprobs(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], engine: str, version: int
) -> None:
    """Stop the run at a log-probability that is not finite, before the loss becomes NaN.

    Args:
        prompts: P prompts.
        completions: The completions of each.
        engine: Name of the engine, for the message.
        version: Policy version, for the message.

    Raises:
        UserError: A log-probability is NaN or infinite; names the first such completion.
    """
    for prompt, group in zip(prompts, completions, strict=True):
        for sample, completion in enumerate(group, start=1):
            logprobs = completion.logprobs
            bad = next((token for token, value in enumerate(logprobs) if not math.isfinite(value)), None)
            if bad is not None:
                raise UserError(
                    f"the sampler's log-probabilities must be finite; at policy version {version} {engine} gave "
                    f"{logprobs[bad]} at token {bad + 1} of {len(logprobs)} of completion {sample} of prompt "
                    f"{prompt.id}; the policy diverged, or overflows there: lower the learning rate or the noise, or "
                    "set another model.policy.dtype, and go on from a checkpoint before"
                )
