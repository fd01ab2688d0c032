"""Environments: what the contract takes and refuses, and the processes that run them."""

import asyncio
import functools
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from light_helpers import gone

from qerl_pl.environments import EnvironmentPool, Opening, ToolAnswer
from qerl_pl.environments.contract import load_factory, methods_of, row_arguments, takes_row
from qerl_pl.environments.worker import Worker
from qerl_pl.errors import UserError

ROOT = Path(__file__).parents[1]


class Guess:
    """TRL's contract: a number is guessed by asking."""

    def __init__(self, highest: int = 10) -> None:
        self.highest = highest
        self.resets = 0

    def reset(self, secret: int, **row: Any) -> str:
        self.secret, self.guesses = secret, 0
        self.resets += 1
        return f"Guess a number up to {self.highest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            higher, lower or right.
        """
        self.guesses += 1
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def _private(self) -> str:
        return "not a tool"

    def process(self) -> list[int]:
        """The process, and how often the environment was reset."""
        return [os.getpid(), self.resets]

    async def wait(self, seconds: float = 0.0) -> dict[str, float]:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return {"waited": seconds}

    def get_reward(self) -> float:
        return 1 / self.guesses if self.guesses else 0.0


GUESS_SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The guess."}},
            "required": ["number"],
        },
        "return": {"type": "string", "description": "higher, lower or right."},
    },
}


class Echo:
    """Answers text, three times."""

    def reset(self, row_id: str = "none") -> None:
        self.left, self.row_id = 3, row_id

    def helper(self, untyped: Any = None) -> None:  # public, and no tool: there is `step`
        pass

    async def step(self, text: str) -> tuple[str, bool]:
        self.left -= 1
        return f"{self.row_id}: {text}", self.left == 0


class EndsByItself(Guess):
    """Ends the dialogue by a tool."""

    dialogue_done = False

    def reset(self, secret: int, **row: Any) -> str:
        self.dialogue_done = False
        return super().reset(secret)

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self.dialogue_done = number == self.secret
        return super().guess(number)


class Dice:
    """Draws random numbers of `random` and of NumPy."""

    def reset(self, **row: Any) -> str:
        return f"{random.random()} {numpy.random.random()}"

    def roll(self) -> float:
        """Draw a number."""
        return random.random()


def by_row(row: Mapping[str, Any], highest: int = 5) -> Any:
    """An environment by the row's kind."""
    ends = {"True": True, "1": 1, "numpy": numpy.bool_(True)}
    if row["kind"] in ends:
        return Finds(ends[row["kind"]])
    kinds = {"echo": Echo, "ends": EndsByItself, "dice": Dice, "untyped": NoHints, "fails": FailsToReset}
    kinds["method"] = FindsByMethod
    return kinds[row["kind"]]() if row["kind"] in kinds else Guess(highest)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(Guess, time_limit=20.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def rows() -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(f"{__file__}:by_row", time_limit=8.0)  # the workers load a file
    yield pool
    pool.close()


# The contract ---------------------------------------------------------------------------------------------------------


def test_a_dialogue_by_calls(pool: EnvironmentPool) -> None:
    session = pool.open({"secret": 7, "question": "?"})
    opening = session.opened.result()
    assert pool.check() == Opening(None, opening.tools, False)
    assert (opening.observation, opening.steps) == ("Guess a number up to 10.", False)
    assert [tool["function"]["name"] for tool in opening.tools] == ["guess", "process", "wait"]
    assert opening.tools[0] == GUESS_SCHEMA
    answers = [session.call("guess", {"number": number}) for number in (5, 8, 7)]  # in turn, though not awaited
    assert [(answer.result().text, answer.result().done) for answer in answers] == [
        *[("higher", False), ("lower", False), ("right", False)]
    ]
    assert session.call("wait", {"seconds": 0.01}).result().text == '{"waited": 0.01}'
    assert session.reward().result() == pytest.approx(1 / 3)
    assert session.step("7").result().text == "Error: the environment answers tool calls, and has no step"
    session.close()


def test_a_dialogue_by_steps(rows: EnvironmentPool) -> None:
    session = rows.open({"kind": "echo", "row_id": "a", "other": 1})
    assert rows.check() is None  # before it has a row
    assert session.opened.result() == Opening(None, [], True)
    answers = [session.step(text).result() for text in ("one", "two", "three")]
    assert [(answer.text, answer.done) for answer in answers] == [
        ("a: one", False),
        ("a: two", False),
        ("a: three", True),
    ]
    assert session.call("helper", {}).result().text == "Error: there is no tool helper; the tools are none"
    assert session.reward().result() is None
    session.close()


def test_a_tool_may_end_the_dialogue(rows: EnvironmentPool) -> None:
    for _ in range(2):
        session = rows.open({"kind": "ends", "secret": 2})
        assert [session.call("guess", {"number": number}).result().done for number in (1, 2)] == [False, True]
        assert session.reward().result() == 0.5
        session.close()


class Finds(Guess):
    """Ends with the number, by a value that is true."""

    def __init__(self, true: Any) -> None:
        super().__init__()
        self.true, self.dialogue_done = true, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.guesses += 1
        self.dialogue_done = self.true if number == self.secret else False
        return "seen"

    def get_reward(self) -> float:
        return float(self.guesses)


class FindsByMethod(Guess):
    """Has a tool of that name."""

    def dialogue_done(self) -> bool:
        """Whether all is said."""
        return True


@pytest.mark.parametrize("kind", ["True", "1", "numpy", "method"])
def test_after_a_call_that_ends_the_dialogue_no_other_is_made(rows: EnvironmentPool, kind: str) -> None:
    for _ in range(2):  # also with a worker that has served a dialogue
        session = rows.open({"kind": kind, "secret": 2})
        answers = [session.call("guess", {"number": number}).result() for number in (1, 2, 3)]
        if kind == "method":
            assert [(answer.text, answer.done) for answer in answers] == [
                ("higher", False), ("right", False), ("lower", False)
            ]  # fmt: skip
        else:
            over = "Error: the dialogue is over: a call before this one ended it"
            assert [answer.text for answer in answers] == ["seen", "seen", over] and session.reward().result() == 2.0
            assert [answer.done for answer in answers[:2]] == [False, True]
        session.close()


FILE = """
class Game:
    def __init__(self, word='x'):
        self.word = word

    def reset(self, **row):
        return self.word

    def say(self) -> str:
        "Say the word."
        return self.word


def of_row(row, times=1):
    return Game(row['word'] * times)


def trl_factory():
    return Game('made')


number = 3
"""


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("FILE:Game", "x"),
        ({"class_path": "FILE:Game", "init_args": {"word": "y"}}, "y"),
        ("FILE:of_row", "ab"),
        ({"class_path": "FILE:of_row", "init_args": {"times": 2}}, "abab"),
        ("FILE:trl_factory", "made"),
        ("test_environments.Guess", "Guess a number up to 10."),
        (partial(Guess, highest=3), "Guess a number up to 3."),
        (lambda: Guess(4), "Guess a number up to 4."),
        ({"class_path": "test_environments:by_row", "init_args": {"highest": 6}}, "Guess a number up to 6."),
    ],
)
def test_every_way_to_name_an_environment(tmp_path: Path, factory: Any, expected: str) -> None:
    path = tmp_path / "my_game.py"
    path.write_text(FILE)
    if isinstance(factory, str):
        factory = factory.replace("FILE", str(path))
    elif isinstance(factory, dict):
        factory = {**factory, "class_path": factory["class_path"].replace("FILE", str(path))}
    row = {"word": "ab", "secret": 1, "kind": "guess"}
    made = load_factory(factory)
    environment = made(row) if takes_row(made) else made()
    assert environment.reset(**row) == expected


def test_a_function_makes_an_environment_for_each_row(rows: EnvironmentPool) -> None:
    for row, steps in (({"kind": "echo"}, True), ({"kind": "guess", "secret": 2}, False)) * 2:
        session = rows.open(row)
        assert session.opened.result().steps is steps
        if not steps:
            assert session.call("process", {}).result().text.endswith(", 1]")  # the first reset of a new one
        session.close()


class NoReset:
    def tool(self) -> str:
        """A tool."""
        return ""


class NoTools:
    def reset(self) -> None:
        pass


class NoHints(NoTools):
    def tool(self, number) -> str:  # type: ignore[no-untyped-def]
        """A tool.

        Args:
            number: A number.
        """
        return ""


class StepOfTwo(NoTools):
    def step(self, text: str, more: str) -> str:
        return text


class RewardOfOne(NoTools):
    def get_reward(self, answer: str) -> float:
        return 1.0

    def tool(self) -> str:
        """A tool."""
        return ""


class ResetIsNoMethod:
    reset = 3

    def tool(self) -> str:
        """A tool."""
        return ""


class RewardIsNoMethod(NoHints):
    reward = 1.0

    @property
    def get_reward(self) -> float:
        return self.reward


class StepIsNoMethod(RewardOfOne):
    step = "walk"


class CachedReward(NoTools):
    @functools.cache  # noqa: B019
    def get_reward(self) -> float:
        return 1.0


class OfTheClass(NoTools):
    """Its methods need no instance."""

    @classmethod
    def get_reward(cls) -> float:
        return 1.0

    @classmethod
    def double(cls, number: int) -> int:
        """Double.

        Args:
            number: A number.
        """
        return 2 * number


def test_methods_of_the_class_are_methods() -> None:
    methods = methods_of(OfTheClass())
    assert methods.get_reward is not None and methods.get_reward() == 1.0
    assert list(methods.tools) == ["double"] and methods.tools["double"](4) == 8


class NeedsPath(NoTools):
    def __init__(self, path: str) -> None:
        self.path = path


class FailsToStart(Guess):
    def __init__(self) -> None:
        raise OSError("no server\nat all")


class FailsToReset(Guess):
    def reset(self, secret: int, **row: Any) -> str:
        if secret == 0:
            os._exit(4)
        if secret == 1:
            time.sleep(100)
        return super().reset(secret)

    def get_reward(self) -> float:
        if self.secret == 8:
            time.sleep(100)
        return "much"  # type: ignore[return-value]


def two_rows(row: Any, other: Any) -> Any:
    """Not a factory."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Guess", "an environment is a class, .*; got 'Guess'; name its module or file"),
        ("no_module.Guess", "'no_module.Guess' cannot be imported .*; correct the name"),
        ("no_file.py:Guess", r"'no_file.py:Guess' cannot be imported \(no file no_file.py\); correct the name"),
        ("test_environments.ROOT", "'test_environments.ROOT' is a PosixPath; name a class or a function"),
        ({}, "got no key; set class_path"),
        ({"class_path": "test_environments.Guess", "args": {}}, "got the keys class_path, args; set class_path"),
        (
            {"class_path": "test_environments.Guess", "init_args": {"low": 1}},
            "Guess does not take its init_args .*'low'",
        ),
        (NeedsPath, "made without further arguments; NeedsPath needs path; give them in init_args"),
        (two_rows, "two_rows needs row, other; leave one argument, the row"),
        (NoReset, r"has a method reset\(\*\*row\); environment NoReset has none; add one"),
        (NoTools, r"public methods, which are its tools, or step\(text\); environment NoTools has neither; add one"),
        (NoHints, "NoHints's tool: Argument number is missing a type hint .*; complete it"),
        (StepOfTwo, r"step takes the text; environment StepOfTwo has step\(text: str, more: str\) -> str; take one"),
        (
            RewardOfOne,
            r"takes no argument, or messages; environment RewardOfOne has get_reward\(answer: str\) -> ",
        ),
        (RewardIsNoMethod, "are methods; environment RewardIsNoMethod's get_reward is a property; rename it"),
        (CachedReward, "are methods; environment CachedReward's get_reward is a _lru_cache_wrapper; rename it"),
        (dict, "dict does not take its init_args .*; correct them"),
        (StepIsNoMethod, "are methods; environment StepIsNoMethod's step is a str; rename it"),
        (ResetIsNoMethod, r"has a method reset\(\*\*row\); environment ResetIsNoMethod has none"),
        (lambda: 3, r"has a method reset\(\*\*row\); environment int has none"),
    ],
)
def test_what_breaks_the_contract_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        methods_of(load_factory(factory)())
    assert "\n" not in str(caught.value)


def test_a_run_is_refused_at_its_start(rows: EnvironmentPool) -> None:
    with pytest.raises(
        UserError, match="^a public method is a tool, .*: Argument number is missing a type hint .*; complete it"
    ):
        rows.open({"kind": "untyped"}).opened.result()
    pool = EnvironmentPool(FailsToStart)
    message = "must not fail in __init__; FailsToStart: OSError: no server at all; correct it"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            pool.check()
    pool.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_limit": 0.0}, "time limit of a tool is a positive number of seconds; got 0.0"),
        ({"time_limit": float("nan")}, "got nan"),
        ({"workers": 0}, "environment workers must be at least 1; got 0"),
        ({"max_chars": 0}, "max_chars of an environment must be at least 1"),
        ({"memory_gib": -1.0}, "positive number of GiB; got -1.0"),
    ],
)
def test_limits_are_positive(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvironmentPool(Guess, **settings)


def test_the_module_of_an_environment_may_fail(tmp_path: Path) -> None:
    for code, message in (
        ("raise SystemExit('not today')", "must not fail in import; .*SystemExit: not today; correct it"),
        ("import os; os._exit(3)", "must not fail in import; .*its process ended"),
    ):
        path = tmp_path / f"broken_{len(code)}.py"
        path.write_text(code)
        pool = EnvironmentPool(f"{path}:Game")
        with pytest.raises(UserError, match=message):
            pool.check()
        with pytest.raises(UserError, match=message):
            pool.open({}).opened.result()
        pool.close()


def test_reset_and_get_reward_must_not_fail(
    rows: EnvironmentPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl_pl.environments.pool.BACKOFF", (0, 0.0))
    for secret, message in enumerate((r"process ended \(exit status 4\)", "ended after its time limit of 8 s")):
        session = rows.open({"kind": "fails", "secret": secret})
        with pytest.raises(UserError, match=message):
            session.opened.result()
        assert session.call("guess", {"number": 1}).result().done
        assert session.reward().result() is None
        session.close()
    session = rows.open({"kind": "fails", "other": 1})
    with pytest.raises(UserError, match="it needs secret, the row has kind, other; rename it, or give it a default"):
        session.opened.result()
    session = rows.open({"kind": "fails", "secret": 8})
    assert session.reward().result() is None  # it takes too long
    assert "has no reward of its environment: get_reward: ended after its time limit of 8 s" in caplog.text
    session = rows.open({"kind": "fails", "secret": 9})
    with pytest.raises(UserError, match="must not fail in get_reward; .*:by_row: ValueError: could not convert"):
        session.reward().result()
    assert session.call("guess", {"number": 9}).result().text == "right"


def test_columns_that_reset_does_not_take_are_left_out() -> None:
    row = {"secret": 1, "x": 2}
    assert row_arguments(methods_of(Guess()).reset, row) == row
    assert row_arguments(methods_of(Echo()).reset, {"row_id": "a", "x": 2}) == {"row_id": "a"}


class CountsMessages(Guess):
    def get_reward(self, messages: Sequence[Any]) -> float:  # type: ignore[override]
        return float(len(messages))


class CountsGivenMessages(Guess):
    def get_reward(self, messages: Sequence[Any] = ()) -> float:  # type: ignore[override]
        return float(len(messages))


@pytest.mark.parametrize("kind", [CountsMessages, CountsGivenMessages])
def test_a_reward_that_takes_messages_gets_them(kind: type) -> None:
    worker = Worker(kind, 100)
    worker.start()
    worker.answer_open(pickle.dumps({"secret": 1}), None)
    assert worker.answer_reward([{"role": "assistant", "content": "1"}] * 3) == {"reward": 3.0}


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["guess", "close"])
def test_a_tool_may_bring_its_schema(name: str) -> None:
    """As tools of other libraries, which are known only when the environment is made."""

    def call(**arguments: Any) -> str:
        return str(arguments)

    vars(call)["json_schema"] = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    found = methods_of(type("Others", (NoTools,), {name: staticmethod(call)})())
    assert found.schemas == [vars(call)["json_schema"]] and found.close is None
    assert found.tools[name](number=3) == "{'number': 3}"


def worker_of(session: Any) -> list[int]:
    """Process id, and number of resets."""
    text = session.call("process", {}).result().text
    return [int(part) for part in text.strip("[]").split(",")]


def test_workers_are_reused_and_dialogues_beyond_them_wait() -> None:
    pool = EnvironmentPool(Guess, workers=2)
    sessions = [pool.open({"secret": index}) for index in range(5)]
    (one, _), (other, _) = worker_of(sessions[0]), worker_of(sessions[1])
    assert len({one, other, os.getpid()}) == 3
    with pytest.raises(TimeoutError):
        sessions[2].opened.result(timeout=0.3)
    waiting: Future[ToolAnswer] = sessions[4].call("guess", {"number": 4})
    sessions[0].close()
    assert worker_of(sessions[2]) == [one, 2]
    for session in sessions[1:4]:
        session.close()
    assert waiting.result().text == "right" and worker_of(sessions[4])[0] in (one, other)
    pool.close()


def test_random_numbers_go_by_the_seed_and_not_by_the_worker(rows: EnvironmentPool) -> None:
    drawn = {}
    for round_ in range(2):
        sessions = [rows.open({"kind": "dice"}, seed=seed) for seed in (1, 2, 2**70)]
        drawn[round_] = [
            (session.opened.result().observation, session.call("roll", {}).result().text) for session in sessions
        ]
        for session in sessions:
            session.close()
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    assert len({opening.split()[1] for opening, _ in drawn[0]}) == 3  # of NumPy's
    expected = random.Random(1)
    assert [drawn[0][0][0].split()[0], drawn[0][0][1]] == [str(expected.random()), str(expected.random())]


def test_many_dialogues_leave_no_process_and_no_file() -> None:
    def used() -> tuple[int, int]:
        gc.collect()  # what other tests have left: pools end with it, and files may warn
        this = psutil.Process()
        return len(this.children(recursive=True)), this.num_fds()

    before = used()
    pool = EnvironmentPool(Guess, workers=20)
    sessions = [pool.open({"secret": index % 10}) for index in range(100)]
    answers = []
    for session in sessions:
        answers.append(session.call("guess", {"number": 3}))
        session.close()
    assert [answer.result().text for answer in answers] == [
        "higher" if index % 10 > 3 else "lower" if index % 10 < 3 else "right" for index in range(100)
    ]
    assert used()[0] == before[0] + 21
    session = pool.open({"secret": 1})
    under_way = session.call("wait", {"seconds": 60})
    session.close()  # waits for the call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool.close()
        gc.collect()
    assert under_way.cancelled() and not caught  # such as of coroutines that were never awaited
    assert used() == before
    pool.workers, pool.time_limit = 2, 0.3  # it starts anew
    descriptors = []
    for _ in range(2):
        for _ in range(5):
            session = pool.open({"secret": 1})
            assert session.call("wait", {"seconds": 60}).result().done
            session.close()
        descriptors.append(used()[1])
    assert abs(descriptors[1] - descriptors[0]) <= 1
    assert pool._processes is not None
    first = psutil.Process(pool._processes.server.pid)
    for _ in range(200):
        if not (left := first.children()):
            break
        time.sleep(0.05)
    assert left == []  # all of them were killed at their limit, and collected
    pool.close()
    assert used() == before


def test_a_signal_to_all_processes_of_a_job_ends_no_dialogue_and_the_first_process_may_be_killed() -> None:
    """As SLURM sends SIGTERM before a time limit: the trainer finishes its step."""
    pool = EnvironmentPool(Guess, time_limit=5.0)
    session = pool.open({"secret": 1})
    worker, _ = worker_of(session)
    assert pool._processes is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pool._processes.server.pid, number)
        os.kill(worker, number)
    assert session.call("guess", {"number": 1}).result().text == "right"
    assert worker_of(session)[0] == worker
    pool._processes.server.kill()
    session.call("guess", {"number": 1}).result()
    with pytest.raises(UserError, match="must not fail in __init__; Guess: the environment's process ended"):
        for _ in range(2):  # the first may take the worker that is idle
            pool.open({"secret": 1}).opened.result()
    pool.close()
    assert gone(worker)


TRAINER = """
    import select, signal, sys
    from qerl_pl.environments import EnvironmentPool

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored

    class Here:  # a class of the main module, as in a notebook
        def reset(self): pass
        def process(self) -> int:
            "The process."
            import os
            return os.getpid()
        def hang(self) -> str:
            "Hang, and hold the interpreter's lock."
            return str(10**10**10)

    pool = EnvironmentPool(Here, time_limit=1000.0)
    sessions = [pool.open({}) for _ in range(3)]
    print(*[session.call("process", {}).result().text for session in sessions], pool._processes.server.pid, flush=True)
    sessions[0].call("hang", {})
    sessions[1].call("hang", {})
    # A blocking read would not see a signal that comes between Python's last check for signals and the system call.
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(end, marks=pytest.mark.nightly) for end in (None, signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_no_worker_outlives_the_trainer(tmp_path: Path, number: signal.Signals | None) -> None:
    path = tmp_path / "trainer.py"
    path.write_text(textwrap.dedent(TRAINER))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    with subprocess.Popen(
        [sys.executable, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=tmp_path,
    ) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
        if number is None:
            trainer.stdin.close()  # its end
        else:
            trainer.send_signal(number)
        trainer.wait(timeout=800)
    assert all(gone(pid) for pid in pids)
