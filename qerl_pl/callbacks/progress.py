"""Progress of a run: a bar in a terminal, else a log line for each rollout."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich import get_console

from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import QeRLModule

log = logging.getLogger(__name__)

LABELS = {"reward/mean": "reward", "policy/entropy": "entropy", "completions/length_mean": "length"}
"""Tags of a rollout's metrics, and how a terminal names them."""
HELD_OUT = {"accuracy": "greedy accuracy", "pass@1": "sampled pass@1", "reward_mean": "mean reward"}
HELD_OUT |= {"loss": "loss", "mean_token_accuracy": "token accuracy"}
"""Metrics of a validation, those of supervised fine-tuning last, and how a terminal names them."""
WIDE, SHORT_BAR = 200, 10
"""Columns of a terminal that has room for all that Lightning's bar shows, and of the bar itself on a narrower one."""


def progress_bar() -> ProgressBar:
    """A `RunBar` on a terminal or in a notebook, elsewhere `RolloutLines`."""
    console = get_console()
    return RunBar() if console.is_terminal or console.is_jupyter else RolloutLines()


def held_out_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of `HELD_OUT` of each validation set by label, from values by tag."""
    labeled = {}
    for tag, value in metrics.items():
        stage, _, rest = tag.partition("/")
        name, _, metric = rest.rpartition("/")
        if stage == "val" and metric in HELD_OUT:
            labeled[HELD_OUT[metric] + (f" on {name}" if name else "")] = float(value)
    return labeled


class TimeLeft:
    """Estimates the rest of a run from the mean time of this process's rollouts or steps, validations included."""

    def start_clock(self, module: PolicyModule) -> None:
        """Start before the first one."""
        self._began, self._first = time.perf_counter(), module.policy_version

    def time_left(self, module: PolicyModule) -> str:
        """Hours, minutes and seconds after a rollout or step, as in 1:02:03."""
        mean = (time.perf_counter() - self._began) / (module.policy_version - self._first)
        return str(timedelta(seconds=round(mean * (module.planned_batches() - module.policy_version))))


class RunBar(TimeLeft, RichProgressBar):
    """Lightning's bar with reward, entropy, completion length in tokens, greedy accuracy and the run's time left.

    It is one line: a terminal below 200 columns shows the time left and as many metrics as it has room for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._left = None
        if isinstance(pl_module, QeRLModule):
            self.start_clock(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Estimate the time left, and draw the bar."""
        if isinstance(pl_module, QeRLModule):
            self._left = self.time_left(pl_module)
        super().on_train_batch_end(trainer, pl_module, *batch)

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Columns beside the metrics: on a narrow terminal a short bar, and in training no times of the epoch."""
        columns: list[Any] = super().configure_columns(trainer)
        if get_console().width >= WIDE:
            return columns
        columns[1].bar_width = SHORT_BAR
        return columns[:3] if trainer.state.fn == TrainerFn.FITTING else columns

    def _get_train_description(self, current_epoch: int) -> str:
        endless = self.trainer.max_epochs == -1  # as max_steps has it
        return f"Epoch {current_epoch}" if endless else super()._get_train_description(current_epoch)

    def _stop_progress(self) -> None:
        with suppress(OSError):  # of a terminal that has gone: callbacks after this one save the run
            super()._stop_progress()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The bar's metrics by their labels; of a narrow terminal those that fit beside the time left."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown = {label: metrics.pop(tag) for tag, label in LABELS.items() if tag in metrics}
        if "length" in shown:
            shown["length"] = f"{shown['length']:.0f}"
        shown |= held_out_metrics(metrics)
        shown |= {tag: value for tag, value in metrics.items() if not tag.startswith("val/")}
        shown |= {"run left": self._left} if self._left else {}
        width, batches = get_console().width, self.total_train_batches
        if width >= WIDE:
            return shown
        fixed = (self._get_train_description(trainer.current_epoch), "-" * SHORT_BAR, f"{batches}/{batches}")
        room, fitting = width - sum(len(text) + 1 for text in fixed), set()
        for name in sorted(shown, key=lambda name: name != "run left"):
            value = shown[name]
            text = value if isinstance(value, str) else format(value, self.theme.metrics_format)
            if (room := room - len(f"{name}: {text} ")) >= -1:
                fitting.add(name)
        return {name: value for name, value in shown.items() if name in fitting}


class RolloutLines(TimeLeft, ProgressBar):
    """Logs a line for each rollout, with reward, entropy, completion length and time left, and for each validation.

    In supervised fine-tuning, a line for each logged step (`trainer.log_every_n_steps`) has its loss.
    """

    _enabled = True

    def disable(self) -> None:
        """Log nothing."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if isinstance(pl_module, PolicyModule):
            self.start_clock(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Log the line of the rollout, or of a step as often as the loggers get it."""
        if not self._enabled or not isinstance(pl_module, PolicyModule):
            return
        step, planned, metrics = pl_module.policy_version, pl_module.planned_batches(), trainer.callback_metrics
        if isinstance(pl_module, QeRLModule):
            reward, entropy, length = (float(metrics[tag]) for tag in LABELS)
            text = f"reward {reward:.3f}, entropy {entropy:.3f}, length {length:.0f} tokens"
            log.info("rollout %d/%d: %s, %s left", step, planned, text, self.time_left(pl_module))
        elif step == planned or step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            loss = float(metrics["optim/loss"])
            log.info("step %d/%d: loss %.3f, %s left", step, planned, loss, self.time_left(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation's line."""
        if not self._enabled or trainer.state.fn != TrainerFn.FITTING:
            return
        if isinstance(pl_module, QeRLModule):
            found, kind = held_out_metrics(pl_module.validation_metrics()), "rollouts"
        else:
            found, kind = held_out_metrics({} if trainer.sanity_checking else trainer.callback_metrics), "steps"
        if isinstance(pl_module, PolicyModule) and found:
            values = ", ".join(f"{label} {value:.3f}" for label, value in found.items())
            log.info("validation after %d %s: %s", pl_module.policy_version, kind, values)
