"""What the module learns from: completions as tensors, with their advantages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qerl_pl.errors import UserError
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
