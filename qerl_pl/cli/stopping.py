"""Evaluations that are asked to stop: at once, for what they have sampled is kept."""

import signal
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.errors import Stopped


class StopsAtOnce(Callback):
    """Ends an evaluation on SIGTERM or SIGINT, wherever it is.

    Lightning itself heeds SIGTERM between batches alone, and a whole set may be one; on SIGINT its status is 1.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen, in place of Lightning's own handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, _stop)

    on_validation_start = on_test_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where it breaks off: Lightning tears no callback down then."""
        self.teardown(trainer, pl_module, "")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
