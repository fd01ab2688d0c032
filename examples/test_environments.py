"""Environments of OpenEnv and verifiers behind the contract; `make nightly` installs each in a folder of its own."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fit_helpers import free_port

from qerl_pl.environments import EnvironmentPool
from qerl_pl.errors import UserError

HERE = Path(__file__).parent
GAMES, TASKS = HERE / "openenv" / "games.py", HERE / "verifiers" / "tasks.py"
PACKAGES = {
    name: Path(os.environ.get(f"QERL_TEST_{name.upper()}", Path(sys.prefix) / name))
    for name in ("openenv", "verifiers")
}


def needs(name: str) -> Any:
    """Tests that need a folder of packages, which the Makefile installs."""
    return pytest.mark.skipif(not PACKAGES[name].is_dir(), reason=f"needs {name}: make .venv/.installed-environments")


def started(monkeypatch: pytest.MonkeyPatch, package: str, adapter: str, **init_args: Any) -> EnvironmentPool:
    """A pool whose workers, and not this process, import the packages."""
    pool = EnvironmentPool({"class_path": f"{HERE / package / 'environment.py'}:{adapter}", "init_args": init_args})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(PACKAGES[package]), *sys.path])
        pool.check()
    return pool


@needs("openenv")
def test_an_openenv_action_is_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started(
        *(monkeypatch, "openenv", "OpenEnv"),
        environment=f"{GAMES}:Game",
        action=f"{GAMES}:Guess",
        tool="guess",
        columns=["seed"],
    )
    for _ in range(2):
        plays(pool)
    pool.close()


def plays(pool: EnvironmentPool) -> None:
    """A game in three guesses, of which one is no number."""
    session = pool.open({"seed": 17, "answer": "7"})
    opening = session.opened.result()
    assert (opening.observation, opening.steps) == ("Guess my number.", False)
    (tool,) = (tool["function"] for tool in opening.tools)
    assert tool["name"] == "guess" and tool["parameters"]["required"] == ["number"]
    assert tool["parameters"]["properties"]["number"]["description"] == "The guess."
    answers = [session.call("guess", {"number": number}).result() for number in (3, "x", 7, 7)]
    assert [(answer.text, answer.done) for answer in answers if not answer.failed] == [
        ("higher", False),
        ("found", True),
    ]
    assert answers[1].failed and answers[3].text == "Error: ValueError: the episode is over"
    assert session.reward().result() == pytest.approx(0.9)
    session.close()


@needs("openenv")
def test_openenv_tools_by_mcp_are_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started(monkeypatch, "openenv", "OpenEnv", environment=f"{GAMES}:Adder")
    session = pool.open({})
    tools = {tool["function"]["name"]: tool["function"] for tool in session.opened.result().tools}
    assert tools["add"]["description"] == "Add two numbers."
    assert tools["add"]["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": "integer", "default": 2},
    }
    assert session.call("add", {"a": 5}).result().text == "7"
    for name, arguments, message in (("fail", {}, "not today"), ("add", {"c": 1}, "a Missing required argument")):
        answer = session.call(name, arguments).result()
        assert answer.failed and message in answer.text and not answer.done
    assert session.reward().result() == 0.0
    pool.close()


@pytest.fixture
def server() -> Iterator[str]:
    """A server of OpenEnv."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES["openenv"])}
    with subprocess.Popen([sys.executable, GAMES, str(port)], env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.2)
        yield url
        process.terminate()


@needs("openenv")
def test_a_server_of_openenv(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    pool = started(monkeypatch, "openenv", "OpenEnv", environment=server, tool="guess", columns=["seed"])
    for _ in range(2):
        plays(pool)
    pool.close()


@needs("verifiers")
def test_a_verifiers_task_has_its_tools_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started(monkeypatch, "verifiers", "Verifiers", task=f"{TASKS}:Game")
    for secret in ("7", "8"):  # the same toolset for the next task
        session = pool.open({"answer": secret, "prompt": [{"role": "user", "content": "?"}], "id": "a", "other": 1})
        tools = {tool["function"]["name"]: tool["function"] for tool in session.opened.result().tools}
        assert sorted(tools) == ["fail", "guess"] and tools["guess"]["description"] == "Guess the number."
        assert tools["guess"]["parameters"]["properties"]["number"]["type"] == "integer"
        assert [session.call("guess", {"number": number}).result().text for number in (1, int(secret))] == [
            "wrong",
            "found",
        ]
        for name, arguments, message in (("fail", {}, "not today"), ("guess", {"number": "x"}, "valid integer")):
            answer = session.call(name, arguments).result()
            assert answer.failed and message in answer.text and "\n" not in answer.text
        messages = [
            {"role": "assistant", "content": "a call"},
            {"role": "tool", "name": "guess", "content": "found"},
            {"role": "assistant", "content": f"It is {secret}."},
        ]
        assert session.reward(messages).result() == 2.0 * 1.0 + 1 / 2  # right, and two calls that the tools counted
        session.close()
    pool.close()


@needs("verifiers")
def test_a_verifiers_task_without_tools_answers_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started(monkeypatch, "verifiers", "Verifiers", task=f"{TASKS}:Question")
    for text, reward in (("7", 1.0), ("8", 0.0)):
        session = pool.open({"answer": "7"})
        assert session.opened.result().steps
        answer = session.step(text).result()
        assert (answer.text, answer.done) == ("", True)
        assert session.reward([{"role": "assistant", "content": text}]).result() == reward
        session.close()
    with pytest.raises(UserError, match="must not fail in reset; .*answer Field required"):
        pool.open({"question": "?"}).opened.result()
    pool.close()
