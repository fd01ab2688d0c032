"""Handlers of the signals that stop a process."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignals:
    """Installs a handler of SIGTERM and SIGINT until the previous handlers are restored.

    Args:
        handler: Called with the signal's number and the interrupted frame.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._previous: dict[int, Any] = {}

    def take(self) -> None:
        """Install the handler; repeated calls change nothing."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._handler)

    def give_back(self) -> None:
        """Restore the previous handlers, if the handler is installed."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
