"""Reward functions with TRL's signature, named by import path or file."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.rewards.base import Reward, RewardSample
from qerl_pl.runtime.import_path import import_path_of, load_named

Function = Callable[..., Any]

_RULE = "a reward is a class of rewards, or a function named module.function or file.py:function"


_OWN_TAGS = (
    "(reward|policy|optim|completions|environment|mismatch|aqn|time|perf|memory|val|test)/.*|epoch|step|rollouts"
)
"""Tags that a run logs itself."""
_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "answer",
    "solution",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""Arguments of a function that are no columns of the data."""


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, by the names of transformers' TrainerState."""

    global_step: int = 0
    """Optimizer steps so far."""
    max_steps: int = 0
    """Planned optimizer steps; 0 outside of training."""
    epoch: float = 0.0
    """Passes over the data so far."""
    num_train_epochs: int = 0
    """Planned passes; 0 outside of training, or where steps are planned."""


class RewardFunction(Reward):
    """Scores completions with a function as TRL's GRPOTrainer takes it.

    It is called as `function(prompts=..., completions=..., completion_ids=..., trainer_state=..., log_extra=...,
    log_metric=..., **columns)` and returns a number for each completion, or None where it does not apply.
    `log_extra(column, values)` adds a value to each completion in the logs, and `log_metric(name, value)` logs the mean
    of a rollout's values; evaluations log neither. Each other argument is a list of B items; a column of the data is
    passed by its name, the reference answer as `answer` (and as `solution`) unless the data has such a column.
    Arguments that the function does not take are left out. Prompts are text, or lists of messages where the data has
    conversations; then a completion is a list of one message. With an environment a completion is the list of the
    dialogue's messages.
    `async def` functions run beside the other rewards.

    Args:
        function: The function, or its name: `my_rewards.exact`, `my_rewards:exact` or `folder/my_rewards.py:exact`.
        weight: Factor of this reward in the total.
        name: Logged as `reward/<name>`; null takes the function's.
    """

    def __init__(self, function: str | Function, weight: float = 1.0, name: str | None = None) -> None:
        self.function = load_function(function) if isinstance(function, str) else function
        self.weight = weight
        self.name = getattr(self.function, "__name__", type(self.function).__name__) if name is None else name
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._needs = [p.name for p in named if p.default is p.empty]
        self.trainer_state = TrainerState()
        self.data_columns: Collection[str] = ()
        """Columns of all rows; the function gets None for a column that a batch lacks."""
        self.logged_columns: dict[str, list[Any]] = {}
        """Columns that the last call logged."""
        self.logged_metrics: dict[str, list[float]] = {}
        """Metrics that the last call logged."""
        self._takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}

    def __call__(self, samples: Sequence[RewardSample]) -> Any:
        self.logged_columns, self.logged_metrics = {}, {}
        arguments: dict[str, Any] = {
            **{name: [None] * len(samples) for name in self.data_columns},
            **trl_arguments(samples),
            "trainer_state": self.trainer_state,
            "log_extra": partial(self._log_extra, len(samples)),
            "log_metric": self._log_metric,
        }
        if samples:
            self._check_needs(arguments)
        if self._takes is not None:
            arguments = {name: values for name, values in arguments.items() if name in self._takes}
        return self.function(**arguments)

    def _check_needs(self, given: Collection[str]) -> None:
        """Refuse data whose columns, which are `given` beside `_ARGUMENTS`, lack one that the function needs."""
        if missing := [name for name in self._needs if name not in given and name not in _ARGUMENTS]:
            columns = ", ".join(name for name in given if name not in _ARGUMENTS)
            raise UserError(
                f"a reward function takes {', '.join(_ARGUMENTS[:-1])}, {_ARGUMENTS[-1]} and the columns of the data; "
                f"reward {self.name!r} also needs {', '.join(missing)}, and the data has "
                f"{columns or 'no columns'}; correct the argument's name, or give it a default"
            )

    def check_references(self, references: Mapping[str, str]) -> None:
        """Refuse data without a column that the function needs, or without any reference if it takes them."""
        self._check_needs(self.data_columns)
        taken = [name for name in ("answer", "solution") if name in self._needs and name not in self.data_columns]
        if taken and not any(references.values()):
            raise UserError(
                f"a reward function that takes {taken[0]} needs reference answers; reward {self.name!r} does, and the "
                "data has none; name their column by data.answer, or give the argument a default"
            )

    def _log_extra(self, size: int, column: str, values: Sequence[Any]) -> None:
        """Log a value for each of `size` completions."""
        given = list(values)
        if len(given) != size:
            raise UserError(
                f"log_extra takes a value for each completion; reward {self.name!r} gave {len(given)} values of "
                f"{column!r} for {size}; give as many, in their order"
            )
        plain = str | int | float | None
        self.logged_columns[str(column)] = [value if isinstance(value, plain) else str(value) for value in given]

    def _log_metric(self, name: str, value: float) -> None:
        """Log a number; the values of a rollout are averaged."""
        if re.fullmatch(_OWN_TAGS, name):
            raise UserError(
                f"log_metric's names are not those that the run logs itself; reward {self.name!r} has {name!r}; choose "
                f"another, {self.name}_{name.rpartition('/')[2]}, say"
            )
        try:
            self.logged_metrics.setdefault(name, []).append(float(value))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"log_metric takes a number; reward {self.name!r} gave {value!r:.60} for {name!r}; give one"
            ) from error


def trl_arguments(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """The arguments of a TRL reward function, each a list of as many items as there are samples."""
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    references = [sample.reference for sample in samples]
    return {
        "answer": references,
        "solution": references,
        **{name: [sample.columns.get(name) for sample in samples] for name in columns},
        "prompts": [sample.prompt if sample.messages is None else list(sample.messages) for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(sample.token_ids) for sample in samples],
    }


def _completion(sample: RewardSample) -> Any:
    if sample.dialogue is not None:
        return [dict(message) for message in sample.dialogue]
    return sample.completion if sample.messages is None else [{"role": "assistant", "content": sample.completion}]


def load_function(name: str) -> Function:
    """Import a function by `module.function`, `module:function` or `file.py:function`.

    Raises:
        UserError: There is no such module, file or function, or it is no function.
    """
    function = load_named(name, _RULE, "choose one of qerl_pl.rewards, or name the function's module", "reward")
    if inspect.isclass(function):
        if import_path := import_path_of(name):
            raise UserError(f"{_RULE}; {name!r} is a class; name it by import path, {import_path}")
        raise UserError(
            f"{_RULE}; {name!r} is a class without name, weight and __call__(self, samples); derive it from "
            "qerl_pl.rewards.Reward"
        )
    if not callable(function):
        raise UserError(f"{_RULE}; {name!r} is a {type(function).__name__}; name a function")
    return function


def as_rewards(given: Mapping[str, Any] | Sequence[Any]) -> list[Reward]:
    """Rewards of a dictionary, whose keys name them, or of a list; functions and their names become `RewardFunction`.

    Raises:
        UserError: As `load_function`, or `given` is neither.
    """
    if isinstance(given, Mapping):
        rewards = [_as_reward(item) for item in given.values()]
        for name, reward in zip(given, rewards, strict=True):
            reward.name = name
        return rewards
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"rewards must be a list of them; got {given!r:.60}; put what it names in a list")
    return [_as_reward(item) for item in given]


def _as_reward(item: Any) -> Reward:
    is_function = isinstance(item, str | partial) or inspect.isroutine(item)
    if isinstance(item, type) or not (is_function or callable(item)):
        what = f"{item.__name__}() makes one" if isinstance(item, type) else "make one of a class of rewards"
        raise UserError(f"a reward is an object that scores samples, or a function; got {item!r:.60}; {what}")
    return RewardFunction(item) if is_function else item


def functions_among(rewards: Sequence[Reward]) -> list[RewardFunction]:
    """Rewards that are functions."""
    return [reward for reward in rewards if isinstance(reward, RewardFunction)]
