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
from qerl_pl.modules.sft import SFTModule

log = logging.getLogger(__name__)

LABELS = {"reward/mean": "reward", "policy/entropy": "entropy", "completions/length_mean": "length"}
"""Tags of a rollout's metrics, and how a terminal names them."""
SFT_LABELS = {"val/loss": "loss", "val/mean_token_accuracy": "token accuracy"}
"""Tags of a validation in supervised fine-tuning, and how a log line names them."""
WIDE, SHORT_BAR = 200, 10
"""Columns of a terminal that has room for all that Lightning's bar shows, and of the bar itself on a narrower one."""


def progress_bar() -> ProgressBar:
    """A `RunBar` on a terminal or in a notebook, elsewhere `RolloutLines`."""
    console = get_console()
    return RunBar() if console.is_terminal or console.is_jupyter else RolloutLines()


def held_out_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Greedy accuracy, and of the samples pass@1 and the mean reward, of each validation set, by label.

    Args:
        metrics: Values by tag.
    """
    labels = {"accuracy": "greedy accuracy", "pass@1": "sampled pass@1", "reward_mean": "mean reward"}
    labeled = {}
    for tag, value in metrics.items():
        stage, _, rest = tag.partition("/")
        name, _, metric = rest.rpartition("/")
        if stage == "val" and metric in labels:
            labeled[labels[metric] + (f" on {name}" if name else "")] = float(value)
    return labeled


class TimeLeft:
    """Estimates the rest of a run from the mean time of this process's rollouts, validations included."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first = 0

    def start(self, module: PolicyModule) -> None:
        """Start the clock before the first rollout, or step of supervised fine-tuning."""
        self._began = time.perf_counter()
        self._first = module.policy_version

    def text(self, module: PolicyModule) -> str:
        """Hours, minutes and seconds after a rollout or step, as in 1:02:03."""
        mean = (time.perf_counter() - self._began) / (module.policy_version - self._first)
        return str(timedelta(seconds=round(mean * (module.planned_batches() - module.policy_version))))


class RunBar(RichProgressBar):
    """Lightning's bar with reward, entropy, completion length in tokens, greedy accuracy and the run's time left.

    It is one line: a terminal below 200 columns shows the time left and as many metrics as it has room for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._time_left = TimeLeft()
        self._left: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._left = None
        if isinstance(pl_module, QeRLModule):
            self._time_left.start(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Estimate the time left, and draw the bar."""
        if isinstance(pl_module, QeRLModule):
            self._left = self._time_left.text(pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Columns beside the metrics: on a narrow terminal a short bar, and in training no times of the epoch."""
        columns: list[Any] = super().configure_columns(trainer)
        if get_console().width >= WIDE:
            return columns
        description, bar, batches, *times = columns
        bar.bar_width = SHORT_BAR
        return [description, bar, batches, *(() if trainer.state.fn == TrainerFn.FITTING else times)]

    def _get_train_description(self, current_epoch: int) -> str:
        endless = self.trainer.max_epochs == -1  # as max_steps has it
        return f"Epoch {current_epoch}" if endless else super()._get_train_description(current_epoch)

    def _stop_progress(self) -> None:
        with suppress(OSError):  # of a terminal that has gone: callbacks after this one save the run
            super()._stop_progress()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The bar's metrics by their labels."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown = {LABELS[tag]: metrics.pop(tag) for tag in LABELS if tag in metrics}
        if "length" in shown:
            shown["length"] = f"{shown['length']:.0f}"
        shown |= held_out_metrics(metrics)
        shown |= {tag: value for tag, value in metrics.items() if not tag.startswith("val/")}
        shown |= {"run left": self._left} if self._left else {}
        return shown if get_console().width >= WIDE else self._fitting(shown, trainer.current_epoch)

    def _fitting(self, shown: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The time left, and the first of the metrics that fit into the bar's line with it."""
        batches = self.total_train_batches
        fixed = (self._get_train_description(epoch), "-" * SHORT_BAR, f"{batches}/{batches}")
        room = get_console().width - sum(len(text) + 1 for text in fixed)
        fitting = set()
        for name in sorted(shown, key=lambda name: name != "run left"):
            value = shown[name]
            text = value if isinstance(value, str) else format(value, self.theme.metrics_format)
            if (room := room - len(f"{name}: {text} ")) >= -1:
                fitting.add(name)
        return {name: value for name, value in shown.items() if name in fitting}


class RolloutLines(ProgressBar):
    """Logs a line for each rollout, with reward, entropy, completion length and time left, and for each validation.

    In supervised fine-tuning, a line for each logged step (`trainer.log_every_n_steps`) has its loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._time_left = TimeLeft()

    def disable(self) -> None:
        """Log nothing."""
        self._enabled = False

    def enable(self) -> None:
        """Log again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if isinstance(pl_module, PolicyModule):
            self._time_left.start(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the line of the rollout or step."""
        if self._enabled and isinstance(pl_module, QeRLModule):
            self._log_rollout(trainer, pl_module)
        if self._enabled and isinstance(pl_module, SFTModule):
            self._log_step(trainer, pl_module)

    def _log_rollout(self, trainer: Trainer, module: QeRLModule) -> None:
        """Log the line of a rollout."""
        reward, entropy, length = (float(trainer.callback_metrics[tag]) for tag in LABELS)
        log.info(
            "rollout %d/%d: reward %.3f, entropy %.3f, length %.0f tokens, %s left",
            module.policy_version,
            module.planned_rollouts(),
            reward,
            entropy,
            length,
            self._time_left.text(module),
        )

    def _log_step(self, trainer: Trainer, module: SFTModule) -> None:
        """Log the line of a step of supervised fine-tuning, as often as the loggers get it."""
        step, planned = module.policy_version, module.planned_batches()
        if step == planned or step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            loss = float(trainer.callback_metrics["optim/loss"])
            log.info("step %d/%d: loss %.3f, %s left", step, planned, loss, self._time_left.text(module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation's line."""
        partial = trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches
        if not self._enabled or partial or trainer.state.fn != TrainerFn.FITTING:
            return
        if isinstance(pl_module, QeRLModule) and (accuracies := held_out_metrics(pl_module.validation_metrics())):
            values = ", ".join(f"{label} {value:.3f}" for label, value in accuracies.items())
            log.info("validation after %d rollouts: %s", pl_module.policy_version, values)
        if isinstance(pl_module, SFTModule) and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            values = ", ".join(f"{label} {float(metrics[tag]):.3f}" for tag, label in SFT_LABELS.items())
            log.info("validation after %d steps: %s", pl_module.policy_version, values)
