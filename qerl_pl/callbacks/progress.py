"""Progress of a run: a log line for each rollout and validation."""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import PROGRESS_BAR, QeRLModule

log = logging.getLogger(__name__)

HELD_OUT = {"accuracy": "greedy accuracy", "pass@1": "sampled pass@1", "reward_mean": "mean reward"}
HELD_OUT |= {"loss": "loss", "mean_token_accuracy": "token accuracy"}
"""Metrics of a validation, those of supervised fine-tuning last, and how a line names them."""


def held_out_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of `HELD_OUT` of each validation set by label, from values by tag."""
    labeled = {}
    for tag, value in metrics.items():
        stage, _, rest = tag.partition("/")
        name, _, metric = rest.rpartition("/")
        if stage == "val" and metric in HELD_OUT:
            labeled[HELD_OUT[metric] + (f" on {name}" if name else "")] = float(value)
    return labeled


class RolloutLines(ProgressBar):
    """Logs a line for each rollout, with reward, entropy, completion length and time left, and for each validation.

    In supervised fine-tuning, a line for each logged step (`trainer.log_every_n_steps`) has its loss. The time left is
    estimated from the mean time of this process's rollouts or steps, validations included.
    """

    _enabled = True

    def disable(self) -> None:
        """Log nothing."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if isinstance(pl_module, PolicyModule):
            self._began, self._first = time.perf_counter(), pl_module.policy_version

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Log the line of the rollout, or of a step as often as the loggers get it."""
        if not self._enabled or not isinstance(pl_module, PolicyModule):
            return
        step, planned, metrics = pl_module.policy_version, pl_module.planned_batches(), trainer.callback_metrics
        if isinstance(pl_module, QeRLModule):
            reward, entropy, length = (float(metrics[tag]) for tag in PROGRESS_BAR)
            line = f"rollout {step}/{planned}: reward {reward:.3f}, entropy {entropy:.3f}, length {length:.0f} tokens"
        elif step == planned or step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            line = f"step {step}/{planned}: loss {float(metrics['optim/loss']):.3f}"
        else:
            return
        mean = (time.perf_counter() - self._began) / (step - self._first)
        log.info("%s, %s left", line, timedelta(seconds=round(mean * (planned - step))))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation's line."""
        if not self._enabled or trainer.state.fn != TrainerFn.FITTING or not isinstance(pl_module, PolicyModule):
            return
        if isinstance(pl_module, QeRLModule):
            found, kind = held_out_metrics(pl_module.validation_metrics()), "rollouts"
        else:
            found, kind = held_out_metrics({} if trainer.sanity_checking else trainer.callback_metrics), "steps"
        if found:
            values = ", ".join(f"{label} {value:.3f}" for label, value in found.items())
            log.info("validation after %d %s: %s", pl_module.policy_version, kind, values)
