"""The signals that ask a process to stop."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignals:
    """Takes SIGTERM and SIGINT from whoever has them, until they are given back.

    Args:
        handler: Called with the signal's number and the frame it came in.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._previous: dict[int, Any] = {}

    def take(self) -> None:
        """Have the handler called; what is taken already stays so."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._handler)

    def give_back(self) -> None:
        """Restore the handlers that were there; nothing where none were taken."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
