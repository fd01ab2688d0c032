"""Evaluations that are asked to stop: at once, for what they have sampled is kept."""

from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.errors import Stopped
from qerl_pl.run.signals import StopSignals


class StopsAtOnce(Callback):
    """Ends an evaluation on SIGTERM or SIGINT, wherever it is.

    Lightning itself heeds SIGTERM between batches alone, and a whole set may be one; on SIGINT its status is 1.
    """

    def __init__(self) -> None:
        self._signals = StopSignals(_stop)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen, in place of Lightning's own handlers."""
        self._signals.take()

    on_validation_start = on_test_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where it breaks off: Lightning tears no callback down then."""
        self.teardown(trainer, pl_module, "")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
