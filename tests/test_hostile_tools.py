"""Tools that do what tools must not: one line each, and no other dialogue is harmed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile_environment import KINDS, SPECIAL
from light_helpers import gone

from qerl_pl.environments import EnvironmentPool, ToolAnswer
from qerl_pl.environments.pool import Session

CHARS = 1000
LIMIT_S = 5.0  # above what slow harms take beside the endless loops
GONE = "Error: the environment is gone: an earlier call ended its process"
TIMED_OUT = f"Error: ended after its time limit of {LIMIT_S:g} s"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEFT", str(tmp_path_factory.mktemp("left") / "pid"))
        pool = EnvironmentPool(
            "hostile_environment.Hostile", LIMIT_S, max_chars=CHARS, memory_gib=1.0, variables=["LEFT"]
        )
        pool.check()
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def neighbours(pool: EnvironmentPool) -> Iterator[list[Session]]:
    """Dialogues that are open while tools of others do harm."""
    sessions = [pool.open({"start": start}) for start in (10, 20)]
    yield sessions
    for start, session in zip((10, 20), sessions, strict=True):
        assert session.reward().result() == start + len(KINDS) - 1  # no call was lost, and none was made twice
        session.close()


ANSWERS = {
    "megabytes": "a" * CHARS + f"\n[cut after {CHARS} of 5000000 characters]",
    "special_tokens": SPECIAL,
    "surrogates": "a?b",
    "none": "null",
    "dictionary": '{"a": [1, 2.5, null, true, "ä"]}',
    "lying_text": "the truth",
    "coroutine": "awaited",
    "thread": "left",
    "fork": "parent",
    "multiprocessing": "7",
    "noise": "quiet",
    "closed_streams": "closed",
    "changed_process": "changed",
}
"""What is no failure."""

ERRORS = {
    "object": "a tool returns text or JSON; it returned a object",
    "deep_lists": "RecursionError: maximum recursion depth exceeded",
    "failing_coroutine": "ValueError: later",
    "exception": "ValueError: first line second line",
    "no_message": "ValueError",
    "system_exit": "SystemExit: 3",
    "keyboard_interrupt": "KeyboardInterrupt",
    "base_exception": "BaseException: base",
    "cancelled": "asyncio.exceptions.CancelledError",
    "exception_group": "ExceptionGroup: several (2 sub-exceptions)",
    "message_that_raises": "hostile_environment.Silent: <exception str() failed>",
    "message_of_megabytes": "ValueError: xxxxxxxx",
    "syntax_error": 'File "<text>", line 1 a b',
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "memory_bomb": "MemoryError",
}
"""Failures after which the dialogue goes on."""

ENDS = {
    "os_exit": "exit status 3",
    "segfault": "signal SIGSEGV",
    "closed_connection": "exit status",
}
"""Ends of the process."""

HANGS = ["endless_loop", "power", "stopped", "hanging_coroutine", "ignored_signals", "leave_process_and_hang"]


def test_every_harm_is_expected() -> None:
    assert sorted(KINDS) == sorted([*ANSWERS, *ERRORS, *ENDS, *HANGS, "process"])


def harmed(pool: EnvironmentPool, neighbours: list[Session], kind: str) -> tuple[Session, ToolAnswer]:
    """A dialogue after a tool of it did harm, while others are under way."""
    session = pool.open({"start": 0})
    answer = session.call("harm", {"kind": kind})
    counts = [neighbour.call("add", {"number": 1}) for neighbour in neighbours]
    assert all(not count.result().failed for count in counts)
    return session, answer.result()


@pytest.mark.parametrize("kind", ANSWERS)
def test_odd_answers_are_text(pool: EnvironmentPool, neighbours: list[Session], kind: str) -> None:
    session, answer = harmed(pool, neighbours, kind)
    assert (answer.text, answer.failed, answer.done) == (ANSWERS[kind], False, False)
    goes_on(session)


def goes_on(session: Session) -> None:
    """The dialogue is where it was."""
    answer = session.call("add", {"number": 5}).result()
    assert (answer.text, answer.failed) == ("5", False)
    assert session.reward().result() == 5.0
    session.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_one_line_and_the_dialogue_goes_on(
    pool: EnvironmentPool, neighbours: list[Session], kind: str
) -> None:
    session, answer = harmed(pool, neighbours, kind)
    assert answer.text.startswith(f"Error: {ERRORS[kind]}") and "\n" not in answer.text
    assert answer.failed and answer.raised and not answer.done and len(answer.text) < 500
    goes_on(session)


@pytest.fixture(scope="module")
def ending(pool: EnvironmentPool, neighbours: list[Session]) -> dict[str, tuple[Session, ToolAnswer]]:
    """Dialogues that hang and crash, all at the same time."""
    sessions = {kind: pool.open({"start": 0}) for kind in (*ENDS, *HANGS)}
    for session in sessions.values():
        session.opened.result()
    answers = {kind: session.call("harm", {"kind": kind}) for kind, session in sessions.items()}
    for _ in answers:
        for neighbour in neighbours:
            assert not neighbour.call("add", {"number": 1}).result().failed
    return {kind: (sessions[kind], answer.result()) for kind, answer in answers.items()}


@pytest.mark.parametrize("kind", [*ENDS, *HANGS])
def test_a_dialogue_whose_process_ends_is_over(ending: dict[str, tuple[Session, ToolAnswer]], kind: str) -> None:
    session, answer = ending[kind]
    if kind in HANGS:
        assert answer.text == TIMED_OUT and answer.seconds >= LIMIT_S
    else:
        assert answer.text.startswith(f"Error: the environment's process ended ({ENDS[kind]}")
    assert answer.failed and answer.done and answer.raised
    after = session.call("add", {"number": 5}).result()
    assert (after.text, after.failed, after.done) == (GONE, True, True)
    assert session.reward().result() is None
    session.close()
    if kind == "leave_process_and_hang":
        assert gone(int(Path(os.environ["LEFT"]).read_text()))


def test_what_a_tool_left_is_not_there_in_the_next_dialogue(pool: EnvironmentPool) -> None:
    states = []
    for kind in ("changed_process", "thread", "process", "none"):
        session = pool.open({"start": 0}, seed=7)
        states.append(json.loads(session.call("show", {}).result().text))
        session.call("harm", {"kind": kind}).result()
        session.close()
    assert states == [states[0]] * 4 and states[0][0] == os.getcwd() and states[0][2:] == [1, 0.0]


def test_processes_that_a_tool_left_end_with_the_pool() -> None:
    pool = EnvironmentPool("hostile_environment.Hostile", LIMIT_S)
    session = pool.open({"start": 0})
    pid = int(session.call("harm", {"kind": "process"}).result().text)
    assert psutil.pid_exists(pid)
    pool.close()
    assert gone(pid)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("nothing", {}, "there is no tool nothing; the tools are add, harm, nested, show"),
        ("reset", {"start": 3}, "there is no tool reset;"),
        ("get_reward", {}, "there is no tool get_reward;"),
        ("__class__", {}, "there is no tool __class__;"),
        ("", {}, "there is no tool ;"),
        ("n" * 10_000, {}, "there is no tool nnn"),
        ("\ud83d", {}, "there is no tool ?;"),  # loggers take no half pairs of surrogates
        ("add", {}, "wrong arguments: missing a required argument: 'number'; call add(number: int) -> int"),
        ("add", {"number": 1, "other": 2}, "wrong arguments: got an unexpected keyword argument 'other'; call add("),
        ("add", {"self": 1}, "wrong arguments: "),
        ("add", {"number": [1]}, "TypeError: unsupported operand"),
        ("add", {"number": object()}, "the arguments are no JSON: Object of type object is not JSON serializable"),
        ("nested", {"times": 10**6}, "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_wrong_calls_are_answered(pool: EnvironmentPool, name: str, arguments: dict[str, object], text: str) -> None:
    session = pool.open({"start": 0})
    answer = session.call(name, arguments).result()
    assert answer.text.startswith(f"Error: {text}") and answer.failed and len(answer.text) < 500
    assert answer.raised == text.startswith(("TypeError", "RecursionError"))  # else what the policy wrote is wrong
    goes_on(session)


def test_nested_calls_and_arguments_are_calls(pool: EnvironmentPool) -> None:
    session = pool.open({"start": 4})
    arguments: dict[str, object] = {"kind": "none"}
    for _ in range(100_000):
        arguments = {"kind": arguments}
    assert session.call("harm", arguments).result().text.startswith("Error: the arguments are no JSON: ")
    assert session.call("nested", {"times": 100}).result().text == "5"
    session.close()
