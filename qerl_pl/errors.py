"""What a user is told: mistakes, which the command line prints as one line, exiting with 2, and the end by a signal."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path


class UserError(ValueError):
    """Input that breaks a rule of this package.

    The message is one line that names the rule, what was found, and the remedy.
    """


def require_at_least(least: int, values: Mapping[str, int | None]) -> None:
    """Refuse settings that are too small.

    Args:
        least: The smallest that is allowed.
        values: What was set, by name; None was left out.

    Raises:
        UserError: One is smaller.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}; found {value}; set it to {least} or more")


def require_one_of(choices: Sequence[str], name: str, value: object) -> None:
    """Refuse a setting that is none of its choices.

    Args:
        choices: All there are.
        name: Of the setting.
        value: What was set.

    Raises:
        UserError: It is another.
    """
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}; found {value!r}; choose one of them.")


class Preempted(Exception):
    """The run was asked to stop (SIGTERM, SIGINT); its state is saved.

    Args:
        signal_number: Which signal asked.
        checkpoint: Where the state is.
    """

    def __init__(self, signal_number: int, checkpoint: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; state saved in {checkpoint}")
        self.signal_number = signal_number
        self.checkpoint = checkpoint


class Stopped(SystemExit):
    """An evaluation was asked to stop (SIGTERM, SIGINT), and does so at once.

    No `Exception`: rewards are a user's code, and what they raise is told as theirs.

    Args:
        signal_number: Which signal asked.
    """

    def __init__(self, signal_number: int) -> None:
        self.status = 128 + signal_number
        super().__init__(self.status)
        self.signal_number = signal_number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signal_number).name}"
