"""What a reward is, and the weighted sum of several."""

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
    """What a reward sees of one completion."""

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
    """What the values are multiplied by in the total; 0 only logs them."""
    name: str
    """Logged as `reward/<name>`; unique within a run."""

    # The parser of configurations takes a class for a reward only if its annotations are these to the letter; Any lets
    # a user write list[float], or nothing. `score` checks the values.
    def __call__(self, samples: Any, /) -> Any:
        """One finite value a sample: from Sequence[RewardSample] to Sequence[float], in the same order."""
        ...


@runtime_checkable
class AnswerReward(Protocol):
    """What a reward may have besides: evaluation then keeps what was answered, for majority votes."""

    def extract_answer(self, completion: str) -> str | None:
        """What counts as the completion's answer, the same text for the same answer; None where there is none."""
        ...


@runtime_checkable
class ReferenceReward(Protocol):
    """What a reward may have besides: a look at the data's references before the first completion."""

    def check_references(self, references: Mapping[str, str]) -> None:
        """Warn of references, by the names of their rows, that it cannot grade well, or raise a UserError."""
        ...


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of B completions."""

    total: Tensor
    """Weighted sum, float32 [B]."""
    parts: dict[str, Tensor]
    """Each reward's own values before its weight, float32 [B], by name."""


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Check a list of rewards without calling any.

    Raises:
        UserError: it is no list, there is none, a name occurs twice or stands for something else, or a name or weight
            is missing or of another type.
    """
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise UserError(f"rewards must be a list of them; found {rewards!r:.60}; put what it names in a list")
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
    if taken := sorted({"mean", "std", "total"}.intersection(names)):
        raise UserError(f"mean, std and total are logged of all rewards; {taken[0]} is the name of one; rename it.")


def refuse_empty_references(reward: Reward, references: Mapping[str, str]) -> None:
    """Refuse rows without a reference for a reward that compares answers with it: no completion would be right.

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
    """Show the references of the data, by the names of their rows, to the rewards that want to see them."""
    for reward in rewards:
        if isinstance(reward, ReferenceReward):
            reward.check_references(references)


def score(rewards: Sequence[Reward], samples: Sequence[RewardSample]) -> ScoredBatch:
    """Score B completions with every reward.

    Args:
        rewards: at least one, with different names and finite weights.
        samples: the B completions.

    Raises:
        UserError: the list is refused by `check_rewards`, or a reward raises or returns something other than B finite
            numbers. Names the reward and, where one is to blame, the sample; a UserError of the reward's own stays.
    """
    check_rewards(rewards)
    parts: dict[str, Tensor] = {}
    total = torch.zeros(len(samples), dtype=torch.float64)
    for reward in rewards:
        values = torch.tensor(_values(reward, samples), dtype=torch.float64)
        parts[reward.name] = values.float()
        total += reward.weight * values
    if not total.float().isfinite().all():
        raise UserError(f"the sum of all rewards must be a float32 number; got {total.tolist()}; lower the weights.")
    return ScoredBatch(total.float(), parts)


def _values(reward: Reward, samples: Sequence[RewardSample]) -> list[float]:
    """The reward's values, checked."""
    try:
        returned = list(reward(samples))
        # Text is left to the check below: "1.0" would pass for a number, and "01" for two.
        values = [math.nan if isinstance(value, str | bytes) else float(value) for value in returned]
    except UserError:  # names rule and remedy itself
        raise
    except Exception as error:  # whatever a user's reward raises stops the run under the reward's name
        culprit = _culprit(reward, samples)
        raise UserError(
            f"reward {reward.name!r} raised {type(error).__name__}: {_shorten(str(error))} "
            f"on {culprit}; make it return a number for every completion."
        ) from error
    if len(values) != len(samples):
        raise UserError(
            f"reward {reward.name!r} must return one value a sample; got {len(values)} for {len(samples)} samples, "
            f"the first of which is {_describe(samples[0]) if samples else 'missing'}; return them in order."
        )
    for sample, value, given in zip(samples, values, returned, strict=True):
        if isinstance(given, str | bytes):
            raise UserError(
                f"reward {reward.name!r} must return numbers; got {given!r:.40}, a {type(given).__name__}, on "
                f"{_describe(sample)}; return float of it."
            )
        if not abs(value) <= _LARGEST:  # nan is not
            raise UserError(
                f"reward {reward.name!r} must return finite numbers; got {value} on {_describe(sample)}; "
                "return 0 where there is nothing to score."
            )
    return values


def _culprit(reward: Reward, samples: Sequence[RewardSample]) -> str:
    """The first sample that makes the reward raise when it is scored alone."""
    for sample in samples:
        try:
            list(map(float, reward([sample])))
        except Exception:
            return _describe(sample)
    return f"a batch of {len(samples)} samples, though on none of them alone"


def _describe(sample: RewardSample) -> str:
    return f"prompt {_shorten(sample.prompt)!r}, completion {_shorten(sample.completion)!r}"


def _shorten(text: str, limit: int = 120) -> str:
    """One line of at most `limit` characters; the end stays, for answers stand there."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


def extract_answers(reward: Reward, completions: Sequence[str]) -> list[str | None]:
    """What a reward takes for the answers of completions; None where it finds none, or tells none.

    Raises:
        UserError: it raises, or returns something else than text or None.
    """
    if not isinstance(reward, AnswerReward):
        return [None] * len(completions)
    answers = []
    for completion in completions:
        try:
            answer = reward.extract_answer(completion)
        except Exception as error:  # as in `score`: it is a user's
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
