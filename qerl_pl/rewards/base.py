"""The reward interface, and the weighted sum of several rewards."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qerl_pl.errors import UserError

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardSample:
    """One completion, as rewards see it."""

    prompt: str
    """The question as the user reads it, without the chat template."""
    completion: str
    """The completion's text without special tokens."""
    reference: str
    """The data set's answer."""
    truncated: bool
    """Whether the token limit ended the completion."""
    num_tokens: int
    """Sampled tokens, the end-of-sequence token included."""


class Reward(Protocol):
    """Scores completions. Any class with these three members is a reward; name it in YAML by its import path."""

    weight: float
    """Factor of the values in the total; 0 only logs them."""
    name: str
    """Logged as `reward/<name>`; unique within a run."""

    # jsonargparse accepts a class as a reward only if its annotations equal these; Any also allows list[float], or no
    # annotation. `score` checks the values.
    def __call__(self, samples: Any, /) -> Any:
        """One finite value for each sample: Sequence[RewardSample] -> Sequence[float], in the same order."""
        ...


@runtime_checkable
class AnswerReward(Protocol):
    """A reward that also extracts answers, which evaluation needs for majority votes."""

    def extract_answer(self, completion: str) -> str | None:
        """The completion's answer, the same text for the same answer; None if there is none."""
        ...


@runtime_checkable
class ReferenceReward(Protocol):
    """A reward that also checks the data's references before the first rollout."""

    def check_references(self, references: Mapping[str, str]) -> None:
        """Warn of references (by row id) that it cannot grade well, or raise a UserError."""
        ...


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of B completions."""

    total: Tensor
    """Weighted sum, float32 [B]."""
    rewards: dict[str, Tensor]
    """Each reward before its weight, float32 [B], by name."""


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Check a list of rewards without calling any.

    Raises:
        UserError: Not a list, empty, a name is missing, reserved or used twice, or a weight is not a finite number.
    """
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise UserError(f"rewards must be a list of them; got {rewards!r:.60}; put what it names in a list")
    for reward in rewards:
        name, weight = getattr(reward, "name", None), getattr(reward, "weight", None)
        if not isinstance(name, str) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(
                f"a reward needs a text `name` and a finite number `weight`; {type(reward).__name__} has "
                f"name={name!r} and weight={weight!r}; set both in its class."
            )
    names = [reward.name for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise UserError(f"rewards must be at least one, with different names; got {names}; list each once.")
    if reserved := sorted({"mean", "std", "total"}.intersection(names)):
        raise UserError(f"mean, std and total are logged of all rewards; {reserved[0]} is the name of one; rename it.")


def accuracy_reward(rewards: Sequence[Reward], name: str | None) -> Reward:
    """The reward whose value above 0.5 means that a completion is right: by name, or the first one.

    Raises:
        UserError: No reward has that name.
    """
    for reward in rewards:
        if name in (None, reward.name):
            return reward
    names = [reward.name for reward in rewards]
    raise UserError(f"accuracy_reward must name a reward; got {name!r}; choose among {names}")


def refuse_empty_references(reward: Reward, references: Mapping[str, str]) -> None:
    """Refuse rows without a reference, for a reward that compares answers with it.

    Raises:
        UserError: Some references are empty.
    """
    empty = [name for name, reference in references.items() if not reference.strip()]
    if empty:
        raise UserError(
            f"a reference must not be empty where {type(reward).__name__} compares with it; {len(empty)} of "
            f"{len(references)} prompts have such a one, the first {empty[0]}; correct them, or leave them out"
        )


def check_references(rewards: Sequence[Reward], references: Mapping[str, str]) -> None:
    """Have each `ReferenceReward` check the data's references (by row id)."""
    for reward in rewards:
        if isinstance(reward, ReferenceReward):
            reward.check_references(references)


def score(rewards: Sequence[Reward], samples: Sequence[RewardSample]) -> ScoredBatch:
    """Score B completions with every reward.

    Raises:
        UserError: `check_rewards` refuses the list, or a reward raises or does not return B finite numbers; names the
            reward and, if possible, the sample. A UserError that a reward raises is passed on.
    """
    check_rewards(rewards)
    scored: dict[str, Tensor] = {}
    total = torch.zeros(len(samples), dtype=torch.float64)
    for reward in rewards:
        values = torch.tensor(_checked_values(reward, samples), dtype=torch.float64)
        scored[reward.name] = values.float()
        total += reward.weight * values
    if not total.float().isfinite().all():
        raise UserError(f"the sum of all rewards must be a float32 number; got {total.tolist()}; lower the weights.")
    return ScoredBatch(total.float(), scored)


def _checked_values(reward: Reward, samples: Sequence[RewardSample]) -> list[float]:
    try:
        returned = list(reward(samples))
        # Text is left to the check below: float("1.0") would pass, and list("01") be two values.
        values = [math.nan if isinstance(value, str | bytes) else float(value) for value in returned]
    except UserError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UserError(
            f"reward {reward.name!r} raised {type(error).__name__}: {_shorten(str(error))} "
            f"on {_failing_sample(reward, samples)}; make it return a number for every completion."
        ) from error
    if len(values) != len(samples):
        raise UserError(
            f"reward {reward.name!r} must return one value a sample; got {len(values)} for {len(samples)} samples, "
            f"the first of which is {_describe(samples[0]) if samples else 'missing'}; return them in order."
        )
    for sample, value, raw in zip(samples, values, returned, strict=True):
        if isinstance(raw, str | bytes):
            raise UserError(
                f"reward {reward.name!r} must return numbers; got {raw!r:.40}, a {type(raw).__name__}, on "
                f"{_describe(sample)}; return float of it."
            )
        if not abs(value) <= _LARGEST:  # NaN fails this too
            raise UserError(
                f"reward {reward.name!r} must return finite numbers; got {value} on {_describe(sample)}; "
                "return 0 where there is nothing to score."
            )
    return values


def _failing_sample(reward: Reward, samples: Sequence[RewardSample]) -> str:
    """The first sample on which the reward raises when called with it alone."""
    for sample in samples:
        try:
            list(map(float, reward([sample])))
        except Exception:
            return _describe(sample)
    return f"a batch of {len(samples)} samples, though on none of them alone"


def _describe(sample: RewardSample) -> str:
    return f"prompt {_shorten(sample.prompt)!r}, completion {_shorten(sample.completion)!r}"


def _shorten(text: str, limit: int = 120) -> str:
    """Text on one line of at most `limit` characters; keeps the end, where answers stand."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


def extract_answers(reward: Reward, completions: Sequence[str]) -> list[str | None]:
    """The answers that a reward extracts from completions; None without an answer, or if it extracts none.

    Raises:
        UserError: `extract_answer` raises, or returns neither text nor None.
    """
    if not isinstance(reward, AnswerReward):
        return [None] * len(completions)
    answers = []
    for completion in completions:
        try:
            answer = reward.extract_answer(completion)
        except Exception as error:  # a user's code may raise anything
            raise UserError(
                f"extract_answer of reward {reward.name!r} raised {type(error).__name__}: {_shorten(str(error))} on "
                f"completion {_shorten(completion)!r}; make it return the answer, or None where there is none."
            ) from error
        if not isinstance(answer, str | None):
            raise UserError(
                f"extract_answer of reward {reward.name!r} must return text or None; got a {type(answer).__name__} on "
                f"completion {_shorten(completion)!r}; return str(answer)."
            )
        answers.append(answer)
    return answers
