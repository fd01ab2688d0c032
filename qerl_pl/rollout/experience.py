"""What the module learns from: completions as tensors, with their advantages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.errors import UserError
from qerl_pl.rewards import Reward, RewardSample, score
from qerl_pl.types import Completion, Prompt


@dataclass(frozen=True)
class CompletionRecord:
    """One completion as a reader wants to see it."""

    prompt_id: str
    prompt: str
    completion: str
    reference: str
    rewards: dict[str, float]
    """Each reward by name, before its weight, and their weighted sum under "total"."""
    truncated: bool
    tokens: int
    trained: bool = True
    """Whether the update has this completion's group; dynamic sampling drops others."""


@dataclass(frozen=True)
class Experience:
    """The completions of one rollout that train, the G of each prompt next to each other; B may be 0."""

    version: int
    """Policy version that sampled them."""
    tokens: Tensor
    """Prompt and completion, right-padded, int64 [B, T]."""
    lengths: Tensor
    """Tokens of each row that are no padding, int64 [B]."""
    mask: Tensor
    """Sampled tokens, bool [B, T]."""
    sampler_logprobs: Tensor
    """The sampler's own log-probabilities, float32 [B, T]; 0 outside the mask."""
    advantages: Tensor
    """float32 [B]."""
    truncated: Tensor
    """Whether the token limit ended the completion, bool [B]."""
    sampled_tokens: int
    """Tokens of all completions, of those too that do not train."""
    seconds: float
    """What sampling and scoring took, checks and syncs included."""
    temperature: float
    """Of the sampling; the trainer divides its logits by it too."""
    max_tokens: int
    """Most tokens that a completion could have had."""
    indices: Tensor | None = None
    """Place of each row among the completions of all ranks, int64 [B], on the CPU; None where they are all here."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the rollout has to log, by TensorBoard tag."""
    records: Sequence[CompletionRecord] = ()
    """Every completion that was sampled, in that order; the B that train are those marked so."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "Experience":
        """The same experience with its tensors on `device`."""
        names = ("tokens", "lengths", "mask", "sampler_logprobs", "advantages", "truncated")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def pad_completions(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, lengths, mask and sampler log-probabilities of a batch, right-padded.

    Args:
        prompts: P prompts.
        completions: The completions of each; B in all.
        pad_id: Fills the right end.

    Returns:
        (tokens int64 [B, T], lengths int64 [B], mask bool [B, T], sampler_logprobs float32 [B, T]).
    """
    rows = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
    sizes = [len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in rows]
    lengths = torch.tensor(sizes, dtype=torch.int64)
    tokens = torch.full((len(rows), max(sizes, default=0)), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    for row, (prompt, completion) in enumerate(rows):
        start = len(prompt.token_ids)
        end = start + len(completion.token_ids)
        tokens[row, :end] = torch.tensor(prompt.token_ids + completion.token_ids)
        mask[row, start:end] = True
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return tokens, lengths, mask, logprobs


def require_finite_logprobs(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], engine: str, version: int
) -> None:
    """Stop the run at a log-probability that is none, before it makes the loss one.

    Args:
        prompts: P prompts.
        completions: The completions of each.
        engine: Name of what sampled them.
        version: Of the policy.

    Raises:
        UserError: One is NaN or infinite; names the first such completion.
    """
    for prompt, group in zip(prompts, completions, strict=True):
        for sample, one in enumerate(group):
            wrong = [token for token, value in enumerate(one.logprobs) if not math.isfinite(value)]
            if wrong:
                raise UserError(
                    f"the sampler's log-probabilities must be finite; at policy version {version} {engine} gave "
                    f"{one.logprobs[wrong[0]]} at token {wrong[0] + 1} of {len(one.logprobs)} of completion "
                    f"{sample + 1} of prompt {prompt.id}; look for an overflow there: lower the noise, or set another "
                    "engine or model.policy.dtype, and go on with --resume auto"
                )


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
