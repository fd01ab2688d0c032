"""The reward interface, and the weighted sum of several rewards."""

import asyncio
import inspect
import logging
import math
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qerl_pl.errors import Stopped, UserError

log = logging.getLogger(__name__)

SLOW_S = 60.0
"""Seconds after which the log names the reward that a rollout waits for; again each time they have doubled."""
_LARGEST = torch.finfo(torch.float32).max
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of code that raises for a user's reason: this package and installed libraries."""


@dataclass(frozen=True)
class RewardSample:
    """One completion, as rewards see it."""

    prompt: str
    """The question as the user reads it, without the chat template."""
    completion: str
    """The completion's text without end and padding tokens; of a dialogue the last turn."""
    reference: str
    """The data set's answer."""
    truncated: bool
    """Whether the token limit ended the completion."""
    num_tokens: int
    """Sampled tokens, the end-of-sequence token included."""
    prompt_id: str = ""
    """Name of the data set's row."""
    token_ids: Sequence[int] = ()
    """The sampled tokens."""
    messages: Sequence[Mapping[str, str]] | None = None
    """The conversation that was completed, for rows that have one in place of a question."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The data set's other columns."""
    dialogue: Sequence[Mapping[str, Any]] | None = None
    """Messages after the prompt of a dialogue with an environment."""
    environment_reward: float | None = None
    """The environment's own reward."""


class Reward(Protocol):
    """Scores completions. Any class with these three members is a reward; name it in YAML by its import path."""

    weight: float
    """Factor of the values in the total; 0 only logs them."""
    name: str
    """Logged as `reward/<name>`; unique within a run."""

    # jsonargparse accepts a class as a reward only if its annotations equal these; Any also allows list[float], or no
    # annotation. `score` checks the values.
    def __call__(self, samples: Any, /) -> Any:
        """One finite value for each sample, None where the reward does not apply: Sequence[RewardSample] ->
        Sequence[float | None], in the same order. With `async def`, it runs while other rewards do."""
        ...


class EnvironmentReward(Reward):
    """The number that the environment's `get_reward` returned; does not apply if there is none.

    Args:
        weight: Factor of this reward in the total.
    """

    name = "environment"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float | None]:
        return [sample.environment_reward for sample in samples]


def with_environment_reward(rewards: Sequence[Reward], environment: bool, weight: float) -> list[Reward]:
    """The rewards of a run; with an environment, its own reward is appended unless it is listed.

    Raises:
        UserError: The environment's reward is listed without an environment.
    """
    listed = any(isinstance(reward, EnvironmentReward) for reward in rewards)
    if listed and not environment:
        raise UserError(
            "EnvironmentReward needs an environment; rollout.environment.factory is null; set it, or leave the reward "
            "out"
        )
    return [*rewards, EnvironmentReward(weight)] if environment and not listed else [*rewards]


@runtime_checkable
class AnswerReward(Protocol):
    """A reward that also extracts answers, for majority voting in evaluations."""

    def extract_answer(self, completion: str) -> str | None:
        """The completion's answer, the same text for the same answer; None if there is none."""
        ...


@runtime_checkable
class NormalizingReward(Protocol):
    """An `AnswerReward` that also normalizes what it extracts, which may cost more than the extraction."""

    def normalize_answers(self, answers: Sequence[str]) -> Sequence[str]:
        """A text for each answer, the same for equal answers."""
        ...


@runtime_checkable
class ReferenceReward(Protocol):
    """A reward that also checks the data's references before the first rollout."""

    def check_references(self, references: Mapping[str, str]) -> None:
        """Log a warning about references (by row id) that it cannot grade well, or raise a UserError."""
        ...


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of B completions."""

    total: Tensor
    """Weighted sum of the rewards that apply, float32 [B]; NaN where none does."""
    rewards: dict[str, Tensor]
    """Each reward before its weight, float32 [B], by name; NaN where it does not apply."""


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
        raise UserError(f"rewards must be a list of at least one, with different names; got {names}; list each once.")
    if reserved := sorted({"mean", "std", "total"}.intersection(names)):
        raise UserError(
            f"mean, std and total are logged for the sum of rewards; got a reward named {reserved[0]}; rename it."
        )


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
            f"{type(reward).__name__} compares with references, which must not be empty; {len(empty)} of "
            f"{len(references)} are, the first that of {empty[0]}; correct these rows, or leave them out"
        )


def check_references(rewards: Sequence[Reward], references: Mapping[str, str]) -> None:
    """Call `check_references` of each `ReferenceReward` with the data's references (by row id)."""
    for reward in rewards:
        if isinstance(reward, ReferenceReward):
            reward.check_references(references)


def score(rewards: Sequence[Reward], samples: Sequence[RewardSample]) -> ScoredBatch:
    """Score B completions with every reward; asynchronous rewards run beside the others.

    Raises:
        UserError: `check_rewards` refuses the list, or a reward raises or does not return B values, each a finite
            number or None; names the reward and, if possible, the row. A UserError that a reward raises is passed on.
    """
    check_rewards(rewards)
    scored: dict[str, Tensor] = {}
    total = torch.zeros(len(samples), dtype=torch.float64)
    applies = torch.zeros(len(samples), dtype=torch.bool)
    only_logged = not any(reward.weight for reward in rewards)
    with _started(rewards, samples) as started:
        for reward in rewards:
            checked = _checked_values(reward, samples, started.get(reward.name))
            values = torch.tensor([math.nan if value is None else value for value in checked], dtype=torch.float64)
            scored[reward.name] = values.float()
            total += reward.weight * values.nan_to_num(0.0)
            if reward.weight or only_logged:
                applies |= ~values.isnan()
    if not total.float().isfinite().all():
        raise UserError(f"the sum of all rewards must be a float32 number; got {total.tolist()}; lower the weights.")
    return ScoredBatch(total.float().masked_fill(~applies, math.nan), scored)


@contextmanager
def _started(rewards: Sequence[Reward], samples: Sequence[RewardSample]) -> Iterator[dict[str, "Future[Any]"]]:
    """Run the asynchronous rewards in an event loop in a thread; cancel those that still run at the end."""
    calls = [(reward, type(reward).__call__, getattr(reward, "function", None)) for reward in rewards]
    waiting = [reward for reward, *functions in calls if any(map(inspect.iscoroutinefunction, functions))]
    if not waiting:
        yield {}
        return
    running: Future[asyncio.AbstractEventLoop] = Future()
    ended: Future[None] = Future()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _run_until(ended, running))
        try:
            loop = running.result()
            yield {reward.name: asyncio.run_coroutine_threadsafe(_called(reward, samples), loop) for reward in waiting}
        finally:
            ended.set_result(None)


async def _run_until(ended: "Future[None]", running: "Future[asyncio.AbstractEventLoop]") -> None:
    """Keep an event loop running until `ended` is set."""
    running.set_result(asyncio.get_running_loop())
    await asyncio.wrap_future(ended)


async def _called(reward: Reward, samples: Sequence[RewardSample]) -> Any:
    """Await an asynchronous reward; also turns an exception of the call itself into the future's."""
    return await reward(samples)


def _checked_values(
    reward: Reward, samples: Sequence[RewardSample], started: "Future[Any] | None"
) -> list[float | None]:
    try:
        with _logged_if_slow(reward, len(samples)):
            answer = reward(samples) if started is None else started.result()
            if inspect.iscoroutine(answer):
                answer.close()
                raise UserError(
                    f"an asynchronous reward is an async def; that of reward {reward.name!r} returns a coroutine and "
                    "is none; make the function itself async."
                )
            if not isinstance(answer, Iterable) or isinstance(answer, Mapping | Set):
                raise UserError(
                    f"reward {reward.name!r} must return a list with one value a sample; got {answer!r:.40}, a "
                    f"{type(answer).__name__}; return a list."
                )
            returned = list(answer)
    except (UserError, Stopped):
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        failing = f"a batch of {len(samples)} samples" if started else _failing_sample(reward, samples)
        line = _user_line(traceback.extract_tb(error.__traceback__))
        raise UserError(
            f"reward {reward.name!r} raised {type(error).__name__}: {_shorten(str(error))}{line} on {failing}; make it "
            "return a number for every completion."
        ) from error
    if len(returned) != len(samples):
        raise UserError(
            f"reward {reward.name!r} must return one value a sample; got {len(returned)} for {len(samples)} samples, "
            f"the first of which is {_describe(samples[0]) if samples else 'missing'}; return them in order."
        )
    return [_checked_value(reward, sample, value) for sample, value in zip(samples, returned, strict=True)]


def _checked_value(reward: Reward, sample: RewardSample, returned: Any) -> float | None:
    """A returned value as a float, or None."""
    if returned is None:
        return None
    try:
        value = None if isinstance(returned, str | bytes) else float(returned)  # float("1.0") would succeed
    except (TypeError, ValueError, RuntimeError):  # the last by a tensor of several elements
        value = None
    if value is None:
        raise UserError(
            f"reward {reward.name!r} must return numbers; got {returned!r:.40}, a {type(returned).__name__}, on "
            f"{_describe(sample)}; return one number a sample."
        )
    if not abs(value) <= _LARGEST:  # NaN fails this too
        raise UserError(
            f"reward {reward.name!r} must return finite numbers; got {value} on {_describe(sample)}; "
            "return 0 where there is nothing to score, or None where the reward does not apply."
        )
    return value


def _failing_sample(reward: Reward, samples: Sequence[RewardSample]) -> str:
    """The first sample on which the reward raises when called with it alone."""
    for sample in samples:
        try:
            list(reward([sample]))
        except (Exception, SystemExit):
            return _describe(sample)
    return f"a batch of {len(samples)} samples, though on none of them alone"


@contextmanager
def _logged_if_slow(reward: Reward, samples: int) -> Iterator[None]:
    """While a reward scores, log its name and its line after `SLOW_S` seconds, and each time they have doubled."""
    done, began, caller = threading.Event(), time.monotonic(), threading.get_ident()

    def watch() -> None:
        seconds = SLOW_S
        while not done.wait(began + seconds - time.monotonic()):
            line = _user_line(traceback.extract_stack(sys._current_frames()[caller]))
            log.warning("reward %r has been scoring %d samples for %.0f s%s", reward.name, samples, seconds, line)
            seconds *= 2

    thread = threading.Thread(target=watch, name=f"slow reward {reward.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _user_line(frames: traceback.StackSummary) -> str:
    """Where the reward's code is: the innermost line, up to this file, outside of this package and of libraries."""
    for frame in reversed(frames):
        file = os.path.abspath(frame.filename)
        if file == __file__:
            break
        if not frame.filename.startswith("<") and not file.startswith(_NOT_THE_USERS):
            return f" (line {frame.lineno} of {frame.filename})"
    return ""


def _describe(sample: RewardSample) -> str:
    row = f"row {sample.prompt_id}, " if sample.prompt_id else ""
    return f"{row}prompt {_shorten(sample.prompt)!r}, completion {_shorten(sample.completion)!r}"


def _shorten(text: str) -> str:
    """Text on one line of at most 120 characters; the end, with the answer, is not cut."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= 120 else f"{line[:60]} ... {line[-60:]}"


def extract_answers(reward: Reward, completions: Sequence[str]) -> list[str | None]:
    """The answers that a reward extracts from completions; None without an answer, or if it extracts none."""
    if not isinstance(reward, AnswerReward):
        return [None] * len(completions)
    return [reward.extract_answer(completion) for completion in completions]


def normalize_answers(reward: Reward, answers: Sequence[str | None], wrong: Sequence[bool]) -> list[str | None]:
    """Answers, of which the wrong ones are normalized for majority voting, if the reward does that."""
    texts = list(dict.fromkeys(answer for answer, is_wrong in zip(answers, wrong, strict=True) if answer and is_wrong))
    if not texts or not isinstance(reward, NormalizingReward):
        return list(answers)
    equal: dict[str | None, str] = dict(zip(texts, reward.normalize_answers(texts), strict=True))
    return [equal.get(answer, answer) if is_wrong else answer for answer, is_wrong in zip(answers, wrong, strict=True)]
