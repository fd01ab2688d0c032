"""Ctrl-C ends `qerl` with exit status 130 and without a traceback, from its imports on."""

import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from qerl_pl import __main__ as program
from qerl_pl.cli import main as main_module
from qerl_pl.cli.main import main

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
    """Run `qerl export`, which imports Lightning, with Ctrl-C while it does."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, "export", *words], capture_output=True, text=True, timeout=800, cwd=ROOT
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["swallowed"]])
def test_ctrl_c_while_it_imports_ends_it_without_a_traceback(words: list[str]) -> None:
    assert importing(*words) == (130, "", "")


@pytest.mark.nightly
def test_what_ignores_ctrl_c_goes_on() -> None:
    status, _, error = importing("ignored")
    assert status == 2 and error.startswith("qerl: ")  # it lacks an argument


def test_the_handler_is_given_back_to_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def run() -> int:
        found.append(signal.getsignal(signal.SIGINT))
        return 7

    monkeypatch.setattr("qerl_pl.cli.main.main", run)
    monkeypatch.setattr(sys, "argv", ["qerl", "fit"])
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert program.main() == 7 and found == [main_module.interrupt]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_installed_program_is_the_one_that_runs_as_a_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert resolve_name(scripts["qerl"]) is program.main


def interrupted(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def default_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's own handler of Ctrl-C, in place of which Lightning leaves another; `main` changes the arguments, too."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


PROMPTS = ["-c", str(ROOT / "configs" / "quickstart.yaml"), "--data", "TableDataModule"]
CONVERSATIONS = ["-c", str(ROOT / "configs" / "sft.yaml"), "--data", "ConversationDataModule"]


@pytest.mark.parametrize(
    "words", [["fit", *PROMPTS], ["validate", *PROMPTS], ["test", *PROMPTS], ["fit", *CONVERSATIONS]]
)
@pytest.mark.parametrize("during", ["datasets.load_dataset", "qerl_pl.cli.main.refuse_null"])
@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_before_the_first_step_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], during: str
) -> None:
    """While a data set of the hub is read, where Lightning exits with status 1, and while the keys are."""
    monkeypatch.setattr(during, interrupted)
    assert main([*words, "--data.path", "some/data", "--trainer.default_root_dir", str(tmp_path / "run")]) == 130
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "qerl: stopped by SIGINT; give the same command again" and "Traceback" not in error


@pytest.mark.usefixtures("default_handler")
def test_an_error_that_an_extension_raises_at_ctrl_c_is_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reads_a_tensor() -> None:
        try:
            interrupted()
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None  # as safetensors 0.8

    monkeypatch.setattr("qerl_pl.cli.commands.list_configs", reads_a_tensor)
    monkeypatch.setattr(main_module, "_interrupts", [])
    signal.signal(signal.SIGINT, main_module.interrupt)
    assert main(["configs"]) == 130
    assert capsys.readouterr().err == "qerl: stopped by SIGINT; give the same command again\n"


@pytest.mark.usefixtures("default_handler")
def test_another_exit_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl_pl.cli.commands.list_configs", lambda *_: sys.exit(7))
    with pytest.raises(SystemExit) as end:
        main(["configs"])
    assert end.value.code == 7
