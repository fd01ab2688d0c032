"""Errors for the user (`UserError`: one line, exit status 2), checks of settings, and ends by a signal."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any


class UserError(ValueError):
    """Invalid input; the message is one line: the rule, the input, the remedy."""


def explain_file_error(error: OSError) -> str | None:
    """The line for a file that the system refuses; None without a file's name, and for one that is not there.

    This package checks that a user's files are there before it reads them.
    """
    if error.filename is None or error.errno == errno.ENOENT:
        return None
    path = os.fsdecode(error.filename)
    return f"a run must read and write its files; {path}: {error.strerror}; correct that, or choose another path"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question for the most similar of the names, and a space; empty if none is similar."""
    nearest = get_close_matches(name, [*names], n=1)
    return f"did you mean {nearest[0]}? " if nearest else ""


def require_at_least(least: int, values: Mapping[str, int | None]) -> None:
    """Refuse settings (by name) that are below `least`; None passes.

    Raises:
        UserError: A value is smaller.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}; got {value}; set it to {least} or more")


def require_type(kind: type, name: str, value: object) -> None:
    """Refuse a setting of another class: a script may give a dictionary, of which the command line makes one.

    Raises:
        UserError: It is of another class.
    """
    if not isinstance(value, kind):
        made = f"{kind.__module__}.{kind.__name__}"
        raise UserError(f"{name} must be of the class {kind.__name__}; got {value!r:.60}; make it by {made}")


def require_one_of(choices: Sequence[str], name: str, value: object) -> None:
    """Refuse a setting that is not among its choices.

    Raises:
        UserError: It is not.
    """
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}; got {value!r}; choose one of them.")


class Preempted(Exception):
    """SIGTERM, SIGINT, SIGHUP or SLURM's SIGUSR1 stopped the run, after its state was saved in `checkpoint`.

    Before the first step of a process nothing is saved, and `checkpoint` is None.
    """

    def __init__(self, signal_number: int, checkpoint: Path | None) -> None:
        saved = "before a step" if checkpoint is None else f"state saved in {checkpoint}"
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {saved}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint


class Stopped(SystemExit):
    """SIGTERM, SIGINT, SIGHUP or SLURM's SIGUSR1 stopped an evaluation at once.

    Not an `Exception`, which would be blamed on a user's reward.
    """

    def __init__(self, signal_number: int) -> None:
        self.status = 128 + signal_number
        super().__init__(self.status)
        self.signal_number = signal_number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signal_number).name}"


def sigusr1_as_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle SIGUSR1, by which SLURM announces a time limit, as SIGTERM."""
    signal.raise_signal(signal.SIGTERM)


def install_sigusr1_handler() -> None:
    """Handle SIGUSR1 as SIGTERM in a job of SLURM, unless it has a handler.

    To be called before Lightning installs its own, which saves in the middle of a step.
    """
    in_job = "SLURM_JOB_ID" in os.environ or "SLURM_NTASKS" in os.environ
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_job and in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, sigusr1_as_sigterm)


class StopSignals:
    """Installs a handler of SIGTERM, SIGINT and SIGHUP until the previous handlers are restored.

    SIGHUP, the end of a terminal or of an ssh connection, stays ignored where it is, as under nohup. SIGUSR1 is handled
    too where it is handled as SIGTERM.

    Args:
        handler: Called with the signal's number and the interrupted frame.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handler; repeated calls change nothing, nor do those of another thread than the main one."""
        if threading.current_thread() is not threading.main_thread():
            return
        requeues = signal.getsignal(signal.SIGUSR1) is sigusr1_as_sigterm
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *([signal.SIGUSR1] if requeues else [])):
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if number not in self._previous and not ignored:
                self._previous[number] = signal.signal(number, self._handler)

    def restore(self) -> None:
        """Restore the previous handlers, if the handler is installed."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
