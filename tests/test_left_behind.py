"""What dialogues leave: processes, flags, environments to close, failing resets, and variables that workers get."""

import asyncio
import json
import logging
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from qerl_pl.environments import EnvironmentPool
from qerl_pl.environments.contract import methods_of
from qerl_pl.environments.worker import Worker
from qerl_pl.errors import UserError
from qerl_pl.runtime.process_pool import cores, worker_variables


def note(file: str, text: str) -> int:
    """Write a line; gives the number of lines."""
    with open(file, "a") as log:
        log.write(f"{text}\n")
    return len(Path(file).read_text().splitlines())


class Shell:
    """Starts processes, beside one of its own, which stays."""

    def __init__(self) -> None:
        self._own = subprocess.Popen(["tail", "-f", "/dev/null"])

    def reset(self, **row: Any) -> None:
        """Begin."""

    def run(self, command: str) -> int:
        """Run a command.

        Args:
            command: For the shell.
        """
        return subprocess.run(command, shell=True, stdout=subprocess.DEVNULL).returncode

    def daemon(self, then: str) -> str:
        """Fork twice, as daemons do.

        Args:
            then: What this process does next.
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "600"])
            os._exit(0)
        os.wait()
        if then == "hang":
            time.sleep(600)
        elif then == "crash":
            os._exit(3)
        return "done"

    def variables(self) -> dict[str, str]:
        """Variables of the process."""
        return dict(os.environ)

    def process(self) -> int:
        """Its number."""
        return os.getpid()


SECRETS = {"HF_TOKEN": "s1", "LC_SECRET": "s2", "WANDB_API_KEY": "s3", "HTTPS_PROXY": "http://user:s4@proxy:80"}
GIVEN = {"HTTP_PROXY": "http://proxy:80", "GAME_KEY": "s5", "LC_ALL": "C.UTF-8", **SECRETS}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in GIVEN.items():
            patch.setenv(name, value)
        pool = EnvironmentPool(Shell, time_limit=5.0, workers=1, variables=["GAME_KEY"])
        pool.check()
    yield pool
    pool.close()


def sleeping(pool: EnvironmentPool) -> list[str]:
    """The pool's processes that sleep, once those that are killed have gone."""
    assert pool._processes is not None
    first = psutil.Process(pool._processes.server.pid)
    for _ in range(100):
        left = []
        for process in first.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                left += [str(process.pid)] if process.name() == "sleep" else []
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(
    "command",
    [
        "sleep 600 &",
        "setsid sleep 600 &",
        "setsid sh -c 'sleep 600 & setsid sleep 600 & exit' & sleep 0.1",
    ],
)
def test_what_a_shell_leaves_ends_with_its_dialogue(pool: EnvironmentPool, command: str) -> None:
    session = pool.open({})
    session.call("run", {"command": command}).result()
    session.close()
    after = pool.open({})
    assert after.opened.result() and sleeping(pool) == []
    after.close()


@pytest.mark.parametrize("then", ["return", "hang", "crash"])
def test_what_a_daemon_leaves_ends_with_its_dialogue(pool: EnvironmentPool, then: str) -> None:
    session = pool.open({})
    session.call("daemon", {"then": then}).result()
    session.close()
    assert sleeping(pool) == []


def test_a_worker_is_replaced_only_if_a_tool_left_a_process(pool: EnvironmentPool) -> None:
    pids = []
    for command in ("true", "sleep 600 &", "true"):
        session = pool.open({})
        pids.append(session.call("process", {}).result().text)
        session.call("run", {"command": command}).result()
        session.close()
    assert pids[0] == pids[1] != pids[2]


def test_workers_get_no_secrets(pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = pool.open({})
    text = session.call("variables", {}).result().text
    session.close()
    assert not [name for name in SECRETS if name in text] and '"GAME_KEY": "s5"' in text and '"PATH"' in text
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    from qerl_pl.rewards.math_answer import MathPool  # imports PyTorch, which environments of this file need not

    grading = MathPool(1.0, 1.0, 1)
    grading.equivalent([("1", "2/2")])
    assert grading.processes is not None
    found = psutil.Process(grading.processes.server.pid).environ()
    grading.processes.close()
    assert not {*SECRETS, "GAME_KEY"} & found.keys() and found["HTTP_PROXY"] == GIVEN["HTTP_PROXY"]
    assert found["PYTHONHASHSEED"] == "0"  # or sets of text would be iterated in another order in every run
    assert worker_variables(["HF_TOKEN", "NOT_SET"]).keys() - worker_variables().keys() == {"HF_TOKEN"}


@pytest.mark.parametrize(
    ("variables", "divided_by"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "1000"}, 1000),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_ON_NODE": "1"}, 2),  # a job's CPUs, which its tasks share
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_ON_NODE": "9999"}, 1),  # each task has CPUs of its own
    ],
)
def test_cores_are_those_of_a_rank(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], divided_by: int) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores() == max(1, len(os.sched_getaffinity(0)) // divided_by)


# A reset that fails --------------------------------------------------------------------------------------------------


class Failing:
    """Fails in some resets."""

    def reset(self, file: str, kind: str, times: int, **row: Any) -> Any:
        if note(file, "reset") <= times:
            if kind == "hang":
                time.sleep(600)
            if kind == "crash":
                os._exit(3)
            if kind == "number":
                return 3
            errors = {"exit": SystemExit(1), "error": ConnectionError("away"), "key": KeyError("GAME_KEY")}
            raise (errors | {"name": NameError("name 'gues' is not defined")})[kind]
        return None

    def look(self) -> str:
        """Look."""
        return "here"


@pytest.mark.parametrize(
    ("kind", "times", "patience", "resets", "error"),
    [
        ("error", 1, 30.0, 2, None),
        ("exit", 1, 30.0, 2, None),
        ("crash", 2, 30.0, 3, None),
        ("hang", 1, 30.0, 2, None),
        ("error", 99, 0.001, 4, "must not fail in reset; of_row: ConnectionError: away; correct it"),
        ("error", 1, 0.0, 1, "must not fail in reset; of_row: ConnectionError: away; correct it"),
        ("key", 99, 30.0, 1, "name GAME_KEY in rollout.environment.variables"),
        ("name", 99, 30.0, 1, "must not fail in reset; of_row: NameError: name 'gues' is not defined; correct it"),
        ("number", 1, 30.0, 1, "reset returns text or None; it returned a value of type int; return one of them"),
    ],
)
def test_a_reset_that_fails_is_repeated(
    rows: EnvironmentPool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    times: int,
    patience: float,
    resets: int,
    error: str | None,
) -> None:
    monkeypatch.setattr("qerl_pl.runtime.backoff.FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("GAME_KEY", "s5")
    file = tmp_path / "resets"
    monkeypatch.setattr("qerl_pl.environments.pool.BACKOFF", (3 if patience else 0, patience))
    session = rows.open({"file": str(file), "kind": kind, "times": times})
    if error is None:
        assert session.call("look", {}).result().text == "here"
    else:
        with pytest.raises(UserError, match=error):
            session.opened.result()
    session.close()
    assert len(file.read_text().splitlines()) == resets


# Flags, and environments to close ------------------------------------------------------------------------------------


class Flags:
    """Ends its dialogue at a call; what its row says remains.

    Args:
        row: With the kind of flag, and the file of what is closed.
    """

    def __init__(self) -> None:
        self._file = ""

    def reset(self, file: str = "", kind: str = "", **row: Any) -> None:
        self._file, self._kind = file, kind
        if kind == "in reset":
            self.dialogue_done = True
        if kind == "fails":
            raise ValueError("no")

    def call(self, ends: bool) -> str:
        """Call.

        Args:
            ends: Whether it ends the dialogue.
        """
        if ends:
            self.dialogue_done = True
        if self._kind == "leaves":
            subprocess.Popen(["sleep", "600"])
        return "called"

    def close(self) -> None:
        if self._file:
            note(self._file, "closed")
        if self._kind == "close fails":
            raise RuntimeError("still in use")


class Always(Flags):
    """Has dialogues of one call."""

    dialogue_done = True


class Slots:
    """Keeps its flag in a slot."""

    __slots__ = ("dialogue_done",)

    def reset(self, **row: Any) -> None: ...

    def call(self, ends: bool) -> str:
        """Call.

        Args:
            ends: Whether it ends the dialogue.
        """
        self.dialogue_done = ends
        return "called"


class Stale(Flags):
    """Computes its flag from what reset forgets."""

    @property
    def dialogue_done(self) -> bool:
        return self._ended

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    def call(self, ends: bool) -> str:
        """Call.

        Args:
            ends: Whether it ends the dialogue.
        """
        self._ended = self._ended or ends
        return "called"


class AsyncClose(Flags):
    """Closes in a coroutine."""

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


def of_row(row: Mapping[str, Any]) -> Any:
    """An environment for each row."""
    return Failing() if "times" in row else AsyncClose() if row.get("kind") == "async" else Flags()


@pytest.fixture(scope="module")
def rows() -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(of_row, time_limit=5.0, workers=1)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("kind", "second"),
    [(Flags, False), (Slots, False), (Always, True), (Stale, True)],
)
def test_a_flag_of_the_dialogue_before_ends_no_other(kind: type, second: bool) -> None:
    worker = Worker(kind, 100)
    worker.start()
    opened, done = [], []
    for ends in (True, False, False):
        opened.append(worker.answer_open(pickle.dumps({}), None)["done"])
        done.append(worker.answer_call("call", json.dumps({"ends": ends}))["done"])
    assert done == [True, second, second] and opened == [False, kind is Stale, kind is Stale]


@pytest.mark.parametrize(
    ("kind", "warnings"),
    [("", 0), ("leaves", 0), ("async", 0), ("fails", 0), ("close fails", 1), ("in reset", 1)],
)
def test_an_environment_of_a_row_is_closed_after_its_dialogue(
    rows: EnvironmentPool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    warnings: int,
) -> None:
    monkeypatch.setattr("qerl_pl.environments.pool.BACKOFF", (0, 0.0))
    file = tmp_path / "closed"
    with caplog.at_level(logging.WARNING):
        session = rows.open({"file": str(file), "kind": kind})
        session.call("call", {"ends": False}).result()
        session.close()
        after = rows.open({})  # waits until the other is closed
        after.opened.result()
        after.close()
    assert file.read_text() == "closed\n"
    assert len([record for record in caplog.records if record.name == "qerl_pl"]) == warnings


def test_an_environment_of_all_rows_is_closed_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "closed"
    row = {"file": str(file), "kind": ""}
    pool = EnvironmentPool(Flags, workers=3)
    sessions = [pool.open(row) for _ in range(3)]
    for session in sessions:
        session.opened.result()
    sessions[0].close()
    sessions[1].reward().result()
    again = pool.open(row)
    again.opened.result()
    assert not file.exists()
    pool.close()  # one is idle, two dialogues are open
    assert file.read_text() == "closed\n" * 3


@pytest.mark.parametrize(
    ("make", "tools"),
    [
        (lambda: type("Hook", (Slots,), {"close": lambda self: None}), ["call"]),
        (lambda: Flags, ["call"]),
        (lambda: AsyncClose, ["call"]),
        (lambda: Gate, ["call"]),
        (lambda: Door, ["close"]),
        (lambda: Lid, ["close"]),
    ],
)
def test_close_is_no_tool_unless_it_takes_or_answers_something(make: Callable[[], type], tools: list[str]) -> None:
    methods = methods_of(make()())
    assert list(methods.tools) == tools and (methods.close is None) == ("close" in tools)


class Door:
    """Has a tool of that name."""

    def reset(self, **row: Any) -> None: ...

    def close(self, door: str) -> None:
        """Close a door.

        Args:
            door: Which.
        """


class Gate(Slots):
    """Closes, and says so as in a file with `from __future__ import annotations`."""

    def close(self) -> "None": ...


class Lid:
    """Has a tool of that name."""

    def reset(self, **row: Any) -> None: ...

    def close(self) -> str:
        """Close the lid."""
        return "closed"
