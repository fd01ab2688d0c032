"""Progress of a run, a log line for each rollout and validation, and its summary: a table, a plot and summary.json."""

import io
import json
import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table

from qerl_pl.callbacks.loggers import address_of
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import PROGRESS_BAR, QeRLModule, require_qerl_module
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.files import atomic_write

log = logging.getLogger(__name__)

HELD_OUT = {"accuracy": "greedy accuracy", "pass@1": "sampled pass@1", "reward_mean": "mean reward"}
HELD_OUT |= {"loss": "loss", "mean_token_accuracy": "token accuracy"}
"""Metrics of a validation, those of supervised fine-tuning last, and how a line names them."""
PHASES = ("sync", "rollout", "reward", "update")
PANELS = {
    "reward": {"reward/mean": "training", "reward_mean": "held-out"},
    "held-out accuracy": {"accuracy": "greedy", "pass@1": "one sample (pass@1)"},
    "policy entropy (nats)": {"policy/entropy": ""},
    "length (tokens)": {"completions/length_mean": ""},
    "groups without signal": {"completions/groups_without_signal_frac": ""},
    "noise of the sampler's norms": {"aqn/sigma": "set", "aqn/measured_std": "measured in the sampler"},
}
"""Curves of each panel of the plot and their labels: a tag of training, or a metric of each validation set."""
METRICS = [metric for curves in PANELS.values() for metric in curves] + [f"time/{phase}_s" for phase in PHASES]
AVERAGED = 3
"""Rollouts that first and last values are averaged over."""
_MANY_TRUNCATED = 0.1
"""Share of completions without an end from which on a rollout's line tells it."""


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
            nats = "-" if math.isnan(entropy) else f"{entropy:.3f}"  # of no completion that is trained
            line = f"rollout {step}/{planned}: reward {reward:.3f}, entropy {nats}, length {length:.0f} tokens"
            if (truncated := float(metrics["completions/truncated_frac"])) >= _MANY_TRUNCATED:
                line += f", {truncated:.0%} cut off"
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
            metrics, unit = held_out_metrics(pl_module.validation_metrics()), "rollouts"
        else:
            metrics, unit = held_out_metrics({} if trainer.sanity_checking else trainer.callback_metrics), "steps"
        if metrics:
            values = ", ".join(f"{label} {value:.3f}" for label, value in metrics.items())
            log.info("validation after %d %s: %s", pl_module.policy_version, unit, values)


class RunSummary(Callback):
    """Writes RUN/summary.json and RUN/run.png, and prints a table when a run ends.

    `accuracy_before` is pass@1 and `held_out_reward_before` the mean reward of the sanity check, if that covers all
    validation prompts (`trainer.num_sanity_val_steps: -1`), `…_after` those of the last validation; with several
    validation sets they are dictionaries by name.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the curves of an earlier fit."""
        self._began, self.train_seconds = time.perf_counter(), 0.0
        self.curves: dict[str, dict[str, list[tuple[int, float]]]] = {metric: {} for metric in METRICS}
        """Points (rollouts so far, value) by metric and validation set; "" for training or if there is only one set."""

    def state_dict(self) -> dict[str, Any]:
        """Time and curves so far, for a summary of the whole run."""
        return {"train_seconds": self.train_seconds, "points": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load them."""
        self.train_seconds, self.curves = state_dict["train_seconds"], state_dict["points"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        require_qerl_module(pl_module, "RunSummary")
        self._began = time.perf_counter() - self.train_seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Record the step's metrics."""
        assert isinstance(pl_module, QeRLModule)
        self.train_seconds = time.perf_counter() - self._began
        for tag in METRICS:
            if tag in trainer.callback_metrics:
                self._record(tag, "", pl_module.policy_version - 1, trainer.callback_metrics[tag])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the accuracies and rewards; validation counts as training time."""
        module = require_qerl_module(pl_module, "RunSummary")
        if not trainer.sanity_checking:
            self.train_seconds = time.perf_counter() - self._began
        for tag, value in module.validation_metrics().items():
            stage_and_set, _, metric = tag.rpartition("/")  # val, or val/NAME
            if metric in METRICS:
                self._record(metric, stage_and_set[4:], module.policy_version, value)

    def _record(self, metric: str, name: str, version: int, value: Any) -> None:
        self.curves[metric].setdefault(name, []).append((version, float(value)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the files and print the table, once the adapter is saved: a terminal may be gone."""
        if stage != "fit" or not writes_files(trainer) or not self.curves["reward/mean"]:
            return
        assert isinstance(pl_module, QeRLModule)
        folder, summary = Path(trainer.default_root_dir), self._summary(pl_module)
        atomic_write(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self._plot(folder / "run.png")
        views = [view for logger in trainer.loggers if (view := address_of(logger))]
        _print(summary, folder, pl_module.policy.trained.result, views)

    def _summary(self, module: QeRLModule) -> dict[str, Any]:
        reward, entropy, sigma = (self._values(tag) for tag in ("reward/mean", "policy/entropy", "aqn/sigma"))
        ends = max(1, min(AVERAGED, len(reward) // 2))  # of a short run, halves
        noisy = [value for value in sigma if value > 0] or [0.0]
        return {
            "reward_first": _mean(reward[:ends]),
            "reward_last": _mean(reward[-ends:]),
            "accuracy_before": self._held_out("pass@1", first=True),
            "accuracy_after": self._held_out("pass@1", first=False),
            "held_out_reward_before": self._held_out("reward_mean", first=True),
            "held_out_reward_after": self._held_out("reward_mean", first=False),
            "entropy_first": _mean(entropy[:ends]),
            "entropy_last": _mean(entropy[-ends:]),
            "sigma_first": noisy[0],
            "sigma_last": noisy[-1],
            "steps": module.policy_version,
            "train_seconds": self.train_seconds,
            "quantization": module.policy_config.quantization,
            **{f"{phase}_seconds": sum(self._values(f"time/{phase}_s")) for phase in PHASES},
        }

    def _values(self, tag: str) -> list[float]:
        return [value for _, value in self.curves[tag].get("", [])]

    def _held_out(self, metric: str, first: bool) -> float | None | dict[str, float | None]:
        """A metric of the validation before training or of the last one after it; of several sets, by name."""
        values = {}
        for name, points in self.curves[metric].items():
            version, value = points[0 if first else -1]
            values[name] = value if (version == 0) == first else None
        return values if any(values) else values.get("")

    def _plot(self, path: Path) -> None:
        from matplotlib.figure import Figure  # slow to import, needed once

        figure = Figure(figsize=(10, 6), layout="constrained")
        for axis, (title, curves) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            for style, (metric, label) in zip(("-", "--"), curves.items(), strict=False):
                marker = "" if "/" in metric else "o"
                for name, points in self.curves[metric].items():
                    axis.plot(*zip(*points, strict=True), style + marker, label=f"{label} {name}")
            axis.set(title=title, xlabel="rollout")
            axis.grid(alpha=0.3)
            if title in ("held-out accuracy", "groups without signal"):
                axis.set_ylim(-0.03, 1.03)
            if title.startswith("noise"):
                axis.set_yscale("symlog", linthresh=1e-5)
            if len(axis.lines) > 1:
                axis.legend(fontsize="small")
            if not axis.lines:
                axis.remove()
        image = io.BytesIO()
        figure.savefig(image, dpi=120)
        atomic_write(path, image.getvalue())


def _print(summary: dict[str, Any], folder: Path, result: str, views: list[str]) -> None:
    table = Table("", title=f"{summary['steps']} rollouts, base {summary['quantization']}")
    for header in ("before", "after"):
        table.add_column(header, justify="right")
    for row in summary_rows(summary):
        table.add_row(*row)
    seconds = ", ".join(f"{phase} {summary[f'{phase}_seconds']:.0f}" for phase in PHASES)
    console = Console()
    console.print(table)
    lines = [f"{summary['train_seconds']:.0f} s of training: {seconds}"]
    lines.append(f"plot {folder / 'run.png'}, numbers {folder / 'summary.json'}, {result} {folder / result}")
    for line in (*lines, *(f"watch it: {view}" for view in views)):
        console.print(line, soft_wrap=True)  # a path or address can be copied


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Label, value at the start and value at the end, of a table, from summary.json."""
    rows = [("reward (mean of the first and the last rollouts)", summary["reward_first"], summary["reward_last"])]
    for key, what, how in (("held_out_reward", "reward", "mean"), ("accuracy", "accuracy", "sampled pass@1")):
        before, after = summary[f"{key}_before"], summary[f"{key}_after"]
        if isinstance(before, dict):
            rows += [(f"{what} on {name} ({how})", before[name], after[name]) for name in before]
        else:
            rows.append((f"held-out {what} ({how})", before, after))
    rows.append(("policy entropy (nats)", summary["entropy_first"], summary["entropy_last"]))
    rows.append(("noise σ", summary["sigma_first"], summary["sigma_last"]))
    return [(label, *("-" if value is None else f"{value:.4g}" for value in ends)) for label, *ends in rows]
