"""Reward functions with TRL's signature: what they are given, what they may return, and what happens otherwise."""

import asyncio
import functools
import inspect
import json
import math
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import built

from qerl_pl.errors import UserError
from qerl_pl.rewards import Format, Reward, RewardFunction, RewardSample, as_rewards, check_references, score

ROOT = Path(__file__).parents[1]


def sample(completion: str, row: str = "row-0", **settings: Any) -> RewardSample:
    given: dict[str, Any] = {"prompt": "2 + 2?", "reference": "4", "truncated": False, "num_tokens": 2}
    return RewardSample(completion=completion, prompt_id=row, **given | settings)


SAMPLES = [sample("four", "row-1"), sample("4", "row-2"), sample("", "row-3")]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's file of functions, in a folder that is on the path."""
    path = tmp_path / "trl_rewards.py"
    path.write_text(
        "loaded = []\n"
        "loaded.append(1)\n"
        "def exact(completions, answer, **kwargs):\n"
        "    return [float(text == right) for text, right in zip(completions, answer)]\n"
        "async def shout(prompts, completions, **kwargs):\n"
        "    return [float(text.isupper()) for text in completions]\n"
        "class Other:\n"
        "    pass\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    for name in ("trl_rewards", "qerl_reward_trl_rewards"):
        sys.modules.pop(name, None)


# Arguments -----------------------------------------------------------------------------------------------------------


def arguments(samples: Sequence[RewardSample]) -> dict[str, Any]:
    """What a function that takes everything is given."""
    found: dict[str, Any] = {}

    def takes(trainer_state: Any, log_extra: Any, log_metric: Any, **given: Any) -> list[float]:
        found.update(given)
        return [0.0] * len(samples)

    score([RewardFunction(takes)], samples)
    return found


def test_a_function_is_given_lists_by_name_as_trl_has_them() -> None:
    rows = [
        sample("four", token_ids=(7, 8), columns={"level": 3, "tags": ["a"]}),
        sample("4", prompt="3 + 1?", reference="IV", token_ids=(9,), columns={"tags": []}),
    ]
    assert arguments(rows) == {
        "prompts": ["2 + 2?", "3 + 1?"],
        "completions": ["four", "4"],
        "completion_ids": [[7, 8], [9]],
        "answer": ["4", "IV"],
        "solution": ["4", "IV"],
        "level": [3, None],
        "tags": [["a"], []],
    }


def test_a_column_of_the_data_comes_before_the_reference_but_not_before_the_completions() -> None:
    found = arguments([sample("four", columns={"solution": "2 + 2 = 4", "completions": "old"})])
    assert (found["solution"], found["answer"], found["completions"]) == (["2 + 2 = 4"], ["4"], ["four"])


def test_conversations_come_as_messages() -> None:
    conversation = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"})
    found = arguments([sample("four", messages=conversation), sample("4")])
    assert found["prompts"] == [[*conversation], "2 + 2?"]
    assert found["completions"] == [[{"role": "assistant", "content": "four"}], "4"]


def test_arguments_that_a_function_does_not_take_are_left_out() -> None:
    def length(completions: list[str], level: list[int]) -> list[float]:
        return [len(text) / one for text, one in zip(completions, level, strict=True)]

    def keyword_only(*, completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    samples = [sample("four", columns={"level": 2, "topic": "sums"})]
    scored = score([RewardFunction(length), RewardFunction(keyword_only)], samples)
    assert {name: values.tolist() for name, values in scored.rewards.items()} == {"length": [2], "keyword_only": [4]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_column_that_the_data_lacks_is_one_line(asynchronous: bool) -> None:
    def needs(completions: list[str], level: list[int]) -> list[float]:
        return []

    async def needs_async(completions: list[str], level: list[int]) -> list[float]:
        return []

    samples = [sample("four", columns={"levle": 3, "topic": "sums"})]
    with pytest.raises(UserError) as found:
        score([RewardFunction(needs_async if asynchronous else needs, name="mine")], samples)
    said = "reward 'mine' also needs level, and the data has levle, topic; correct the argument's name, or give it a"
    assert said in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(UserError, match="needs level, and the data has no columns; "):
        score([RewardFunction(needs)], SAMPLES)


def test_a_column_that_other_rows_of_the_data_have_is_none_here() -> None:
    def unit(completions: list[str], unit: list[str | None]) -> list[float | None]:
        return [None if one is None else 1.0 for one in unit]

    reward = RewardFunction(unit)
    reward.data_columns = {"unit": None, "level": None}
    assert score([reward], SAMPLES).rewards["unit"].isnan().all()
    assert score([reward], [*SAMPLES[:2], sample("2 m", columns={"unit": "m"})]).rewards["unit"][2] == 1.0
    check_references([reward], {})
    reward.data_columns = ["level"]
    with pytest.raises(UserError, match="needs unit, and the data has level; "):
        score([reward], SAMPLES)
    with pytest.raises(UserError, match="needs unit, and the data has level; "):
        check_references([reward], {})  # before the engine starts


def test_a_function_that_takes_answers_is_refused_where_the_data_has_none() -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return []

    reward, without = RewardFunction(exact), RewardFunction(lambda completions, answer=None: [], name="other")
    with pytest.raises(UserError, match="takes answer needs reference answers; reward 'exact' does, .* by data.answer"):
        check_references([without, reward], {"row-0": "", "row-1": ""})
    check_references([reward, without], {"row-0": "", "row-1": "4"})
    reward.data_columns = ["answer"]
    check_references([reward], {"row-0": ""})


def test_an_argument_with_a_default_needs_no_column() -> None:
    def optional(completions: list[str], level: list[int] | None = None) -> list[float]:
        return [float(level is None)] * len(completions)

    bound = functools.partial(lambda completions, level: [float(level)] * len(completions), level=2)
    scored = score([RewardFunction(optional), RewardFunction(bound, name="bound")], SAMPLES)
    assert {name: values.tolist() for name, values in scored.rewards.items()} == {
        "optional": [1.0] * 3,
        "bound": [2.0] * 3,
    }


# Values --------------------------------------------------------------------------------------------------------------


def returns(values: object, name: str = "mine", weight: float = 1.0, asynchronous: bool = False) -> RewardFunction:
    def function(completions: list[str]) -> object:
        return values

    async def later(completions: list[str]) -> object:
        await asyncio.sleep(0)
        return values

    return RewardFunction(later if asynchronous else function, weight, name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_are_weighted_and_summed_and_none_counts_for_nothing(asynchronous: bool) -> None:
    first = returns([True, None, None], "first", 2.0, asynchronous)
    second = returns(torch.tensor([0.5, -1.0, 3.0]).tolist()[:2] + [None], "second", 0.5)
    scored = score([first, second], SAMPLES)
    assert scored.total[:2].tolist() == [2.25, -0.5] and scored.total[2].isnan()
    assert scored.rewards["first"][0] == 1 and scored.rewards["first"][1:].isnan().all()
    assert scored.rewards["first"].nanmean() == 1  # as it is logged
    assert scored.rewards["second"][:2].tolist() == [0.5, -1.0]


def test_a_reward_that_is_only_logged_gives_no_completion_a_total() -> None:
    graded, logged = returns([None, 2.0, 3.0], "graded"), returns([1.0, 1.0, 1.0], "logged", 0.0)
    total = score([graded, logged], SAMPLES).total
    assert total[0].isnan() and total[1:].tolist() == [2, 3]
    assert score([logged], SAMPLES).total.tolist() == [0, 0, 0]  # where all are


def test_a_reward_that_applies_nowhere_has_a_mean_of_nan_and_changes_nothing() -> None:
    scored = score([returns([None] * 3, "none", 5.0), returns([1.0, 2.0, 3.0])], SAMPLES)
    assert scored.total.tolist() == [1, 2, 3] and math.isnan(scored.rewards["none"].nanmean())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 2, "reward 'mine' must return one value a sample; got 2 for 3 samples, the first of which is row row"),
        ([1.0, math.nan, 1.0], "reward 'mine' must return finite numbers; got nan on row row-2, prompt '2 + 2?', "),
        ([1.0, 1e39, 1.0], "reward 'mine' must return finite numbers; got 1e+39 on row row-2"),
        ([1.0, b"1", 1.0], "reward 'mine' must return numbers; got b'1', a bytes, on row row-2"),
        (torch.ones(3, 3), "reward 'mine' must return numbers; got tensor([1., 1., 1.]), a Tensor, on row row-1"),
        ([1.0, 1.0, math.inf], "reward 'mine' must return finite numbers; got inf on row row-3"),
        ([1.0, "1.0", 1.0], "reward 'mine' must return numbers; got '1.0', a str, on row row-2"),
        (1.0, "reward 'mine' must return a list with one value a sample; got 1.0, a float; return a list."),
        (
            {0: 1.0, 1: 1.0, 2: 1.0},
            "reward 'mine' must return a list with one value a sample; got {0: 1.0, 1: 1.0, ",
        ),
        ({0.0, 1.0, 2.0}, "reward 'mine' must return a list with one value a sample; got {0.0, 1.0, 2.0}, a set; "),
    ],
)
def test_other_values_are_one_line_that_names_reward_and_row(values: object, message: str, asynchronous: bool) -> None:
    with pytest.raises(UserError) as raised:
        score([returns(values, asynchronous=asynchronous)], SAMPLES)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


async def waits(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.filterwarnings("error")
def test_an_asynchronous_reward_in_a_plain_function_is_refused() -> None:
    with pytest.raises(UserError, match="that of reward 'wrapped' returns a coroutine and is none; make the function"):
        score(as_rewards({"wrapped": lambda completions, **_: waits(completions)}), SAMPLES)


def picky(completions: list[str]) -> list[float]:
    if "4" in completions:
        raise KeyError("no\nsuch key")
    return [0.0] * len(completions)


def leaves(completions: list[str]) -> list[float]:
    return [0.0] if "4" not in completions else sys.exit("no")


def test_an_exception_is_one_line_that_names_the_place_reward_and_row() -> None:
    line = inspect.getsourcelines(picky)[1] + 2
    with pytest.raises(UserError) as raised:
        score([RewardFunction(picky)], SAMPLES)
    assert str(raised.value) == (
        f"reward 'picky' raised KeyError: 'no\\nsuch key' (line {line} of {__file__}) on row row-2, prompt '2 + 2?', "
        "completion '4'; make it return a number for every completion."
    )
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(UserError, match="reward 'leaves' raised SystemExit: no .*on row row-2"):
        score([RewardFunction(leaves)], SAMPLES)


def test_an_exception_inside_a_library_names_the_line_that_called_it() -> None:
    def parse(completions: list[str]) -> list[float]:
        return [json.loads(text)["score"] for text in completions]

    with pytest.raises(UserError) as raised:
        score([RewardFunction(parse)], [sample("no JSON")])
    line = inspect.getsourcelines(parse)[1] + 1
    assert f"raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line {line} of" in str(raised.value)


def test_a_user_error_is_passed_on() -> None:
    async def away(completions: list[str]) -> list[float]:
        raise UserError("the judge is away")

    with pytest.raises(UserError, match="^the judge is away$"):
        score([RewardFunction(away)], SAMPLES)


def test_the_log_names_a_slow_reward_and_its_line_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl_pl.rewards.base.SLOW_S", 3.0)

    def until_told(times: int) -> None:
        deadline = time.monotonic() + 60
        while len(caplog.messages) < times and time.monotonic() < deadline:
            time.sleep(0.01)

    def slow(completions: list[str]) -> list[float]:
        until_told(2)
        return [0.0] * len(completions)

    async def slow_async(completions: list[str]) -> list[float]:
        await asyncio.to_thread(until_told, 3)
        return [0.0] * len(completions)

    score([RewardFunction(slow)], SAMPLES)
    first = inspect.getsourcelines(until_told)[1]
    locations = [f"(line {line} of {__file__})" for line in (first + 2, first + 3)]
    for message, seconds in zip(caplog.messages, (3, 6), strict=True):
        text, _, location = message.partition(" s ")
        assert text == f"reward 'slow' has been scoring 3 samples for {seconds}" and location in locations
    score([RewardFunction(slow_async)], SAMPLES)
    assert caplog.messages[2:] == ["reward 'slow_async' has been scoring 3 samples for 3 s"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slow reward")]


# Asynchronous functions ----------------------------------------------------------------------------------------------


def test_asynchronous_functions_run_beside_each_other_and_beside_the_rest() -> None:
    started = [threading.Event() for _ in range(3)]

    async def one(completions: list[str]) -> list[float]:
        started[0].set()
        while not all(event.is_set() for event in started):
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    async def two(completions: list[str]) -> list[float]:
        started[1].set()
        while not all(event.is_set() for event in started):
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    def plain(completions: list[str]) -> list[float]:
        assert all(event.wait(timeout=30) for event in started[:2])  # both are on their way
        started[2].set()
        return [3.0] * len(completions)

    scored = score([RewardFunction(plain), RewardFunction(one), RewardFunction(two)], SAMPLES)
    assert scored.total.tolist() == [6, 6, 6] and list(scored.rewards) == ["plain", "one", "two"]


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt()])
def test_what_still_waits_is_cancelled_when_another_reward_fails(error: BaseException) -> None:
    events: list[str] = []
    waiting = threading.Event()

    async def endless(completions: list[str]) -> list[float]:
        waiting.set()
        try:
            await asyncio.sleep(3600)
        finally:
            events.append("cancelled")
        return []

    def fails(completions: list[str]) -> list[float]:
        assert waiting.wait(timeout=30)
        raise error

    with pytest.raises(type(error)):
        score([RewardFunction(fails), RewardFunction(endless)], SAMPLES)
    assert events == ["cancelled"]


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trl_rewards.exact", "trl_rewards:exact", "{file}:exact"])
def test_a_function_goes_by_import_path_or_file(module: Path, name: str) -> None:
    (reward,) = as_rewards([name.format(file=module)])
    assert (reward.name, reward.weight) == ("exact", 1.0)
    assert score([reward], SAMPLES).total.tolist() == [0, 1, 0]


def test_a_file_is_loaded_once_and_relative_to_the_working_directory(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(module.parent)
    rewards = as_rewards({"a": "trl_rewards.py:exact", "b": f"{module}:shout"})
    assert [type(reward) for reward in rewards] == [RewardFunction] * 2 and [one.name for one in rewards] == ["a", "b"]
    functions = [one.function for one in rewards if isinstance(one, RewardFunction)]
    assert functions[0].__globals__ is functions[1].__globals__ and functions[0].__globals__["loaded"] == [1]
    assert score(rewards, [sample("A", reference="A")]).total.tolist() == [2.0]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    functions = []
    for folder, value in (("a", 0.0), ("b", 1.0), ("a", 0.0)):
        file = tmp_path / folder / "same_name.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"def constant(completions):\n    return [{value}] * len(completions)\n")
        (reward,) = as_rewards([f"{file}:constant"])
        assert isinstance(reward, RewardFunction)
        functions.append(reward.function)
        assert reward([sample("4")]) == [value]
    first, second, again = functions
    assert again is first and first.__module__ == "qerl_reward_same_name" and second.__module__ != first.__module__
    for function in (first, second):
        assert pickle.loads(pickle.dumps(function)) is function
        del sys.modules[function.__module__]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("two words.exact", "got 'two words.exact'; choose one of qerl_pl.rewards"),
        ("no_such_module.exact", "'no_such_module.exact' cannot be imported .*; correct the name"),
        ("{file}:missing", "'.*' cannot be imported .*'missing'.*; correct the name"),
        ("{file}x.py:exact", "'.*' cannot be imported .no file .*x.py.; correct the name"),
        ("trl_rewards.number", "'trl_rewards.number' is a int; name a function"),
        ("{file}:Other", "'.*:Other' is a class; name it by import path, trl_rewards.Other"),
        ("pathlib.Path", r"'pathlib.Path' is a class without name, weight and __call__\(self, samples\); derive it"),
    ],
)
def test_other_names_are_one_line(module: Path, name: str, found: str) -> None:
    with pytest.raises(UserError, match=f"a reward is a class of rewards, or a function named .*; {found}"):
        as_rewards([name.format(file=module)])


def test_rewards_of_a_dictionary_are_named_by_its_keys() -> None:
    def short(completions: list[str], limit: int = 3) -> list[float]:
        return [float(len(text) <= limit) for text in completions]

    rewards: list[Reward] = as_rewards({"form": Format(), "brief": short, "briefer": functools.partial(short, limit=1)})
    assert [reward.name for reward in rewards] == ["form", "brief", "briefer"]
    assert score(rewards, SAMPLES).rewards["briefer"].tolist() == [0, 1, 1]
    for given in ("trl_rewards.exact", 3):
        with pytest.raises(UserError, match="rewards must be a list of them; got"):
            as_rewards(given)  # type: ignore[arg-type]


def test_functions_and_weights_in_a_configuration(module: Path) -> None:
    config = module.with_name("rewards.yaml")
    config.write_text(
        "rollout:\n"
        "  rewards:\n"
        f"    accuracy: {module}:exact\n"
        "    shout:\n"
        "      class_path: RewardFunction\n"
        f"      init_args: {{function: '{module}:shout', weight: 0.25}}\n"
        "model: {objective: {init_args: {multi_objective_aggregation: normalize_then_sum}}}\n"
    )
    settings = built("fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(config))
    rewards = {reward.name: reward for reward in settings.rollout.scorer.rewards}
    assert {name: reward.weight for name, reward in rewards.items()} == {"accuracy": 1, "format": 0.1, "shout": 0.25}
    assert settings.model.objective.multi_objective_aggregation == "normalize_then_sum"
    scored = score([rewards["accuracy"], rewards["shout"]], [sample("IV", reference="IV"), sample("x")])
    assert scored.total.tolist() == [1.25, 0.0]


def test_a_file_that_fails_half_way_is_not_taken_for_a_module_the_second_time(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("def exact(completions):\n    return [1.0]\n\nraise ValueError('not yet')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            as_rewards([f"{file}:exact"])
    file.write_text("def exact(completions):\n    return [1.0]\n")
    (reward,) = as_rewards([f"{file}:exact"])
    assert list(reward([sample("4")])) == [1.0]
