"""Ctrl-C ends `qerl` with exit status 130 and without a traceback, from its imports on."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from qerl_pl import __main__ as program

ROOT = Path(__file__).parents[1]
IMPORTING = """
import runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "lightning":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if sys.argv[2:] != ["swallowed"]:
                    raise

signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2:] == ["ignored"] else signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("qerl_pl", run_name="__main__")
"""


def importing(*words: str) -> tuple[int, str, str]:
    """Run `qerl configs` with Ctrl-C while it imports."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, "configs", *words], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["swallowed"]])
def test_ctrl_c_while_it_imports_ends_it_without_a_traceback(words: list[str]) -> None:
    assert importing(*words) == (130, "", "")


def test_what_ignores_ctrl_c_goes_on() -> None:
    status, _, error = importing("ignored")
    assert status == 2 and error.startswith("qerl: ") and "ignored" in error  # no configuration has that name


def test_the_handler_is_given_back_to_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def run() -> int:
        found.append(signal.getsignal(signal.SIGINT))
        return 7

    monkeypatch.setattr("qerl_pl.cli.main.main", run)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert program.main() == 7 and found == [signal.default_int_handler]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_installed_program_is_the_one_that_runs_as_a_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert resolve_name(scripts["qerl"]) is program.main
