"""Summary of a run: a table, a plot and summary.json, in the loggers too."""

import io
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table

from qerl_pl.callbacks.loggers import adapters
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.files import atomic_write

PHASES = ("sync", "rollout", "reward", "update")
CURVES = (
    *("reward/mean", "policy/entropy", "completions/length_mean", "completions/groups_without_signal_frac"),
    *("aqn/sigma", "aqn/measured_std", *(f"time/{phase}_s" for phase in PHASES)),
)
AVERAGED = 3
"""Rollouts that first and last values are averaged over."""
SAVED = ("curves", "validations", "train_seconds")
"""Attributes in a checkpoint."""


class RunSummary(Callback):
    """Writes RUN/summary.json and RUN/run.png, logs both, and prints a table when a run ends.

    `accuracy_before` is pass@1 and `held_out_reward_before` the mean reward of the sanity check, if that covers all
    validation prompts (`trainer.num_sanity_val_steps: -1`), `…_after` those of the last validation; with several
    validation sets they are dictionaries by name.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self.validations: dict[str, list[tuple[int, float, float, float | None]]] = {}
        """(policy version, pass@1, greedy accuracy, mean reward) of each, by set; "" if there is only one set."""
        self.train_seconds = 0.0
        self._step_began = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the curves of an earlier fit."""
        if stage == "fit":
            self._clear()

    def state_dict(self) -> dict[str, Any]:
        """Curves so far, for a summary of the whole run."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load them."""
        for name in SAVED:
            setattr(self, name, state_dict[name])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._step_began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Record the step's metrics."""
        self._count_time()
        for name, values in self.curves.items():
            if name in trainer.callback_metrics:
                values.append(float(trainer.callback_metrics[name]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the accuracies and rewards; validation counts as training time."""
        assert isinstance(pl_module, QeRLModule)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._count_time()
        metrics = pl_module.validation_metrics()
        for tag in metrics:
            if match := re.fullmatch(r"(val/(?:(.+)/)?)pass@1", tag):
                values = metrics[tag], metrics[f"{match[1]}accuracy"], metrics.get(f"{match[1]}reward_mean")
                self.validations.setdefault(match[2] or "", []).append((pl_module.policy_version, *values))

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.train_seconds += now - self._step_began
        self._step_began = now

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the files and print the table, once the adapter is saved: a terminal or a logger may be gone."""
        if stage != "fit" or not writes_files(trainer) or not self.curves["reward/mean"]:
            return
        assert isinstance(pl_module, QeRLModule)
        folder, step = Path(trainer.default_root_dir), pl_module.policy_version - 1
        summary, loggers = self._summary(pl_module, folder), adapters(trainer.loggers)
        atomic_write(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self._plot(folder / "run.png")
        for logger in loggers:
            logger.log_summary(summary, step)
            logger.log_image("run", folder / "run.png", step)
        bar = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            bar.progress.stop()  # or it is drawn again below the table
        views = [view for logger in loggers if (view := logger.address())]
        self._print(summary, folder, pl_module.policy.trained.result, views)

    def _summary(self, module: QeRLModule, folder: Path) -> dict[str, Any]:
        reward, entropy, sigma = (self.curves[name] for name in ("reward/mean", "policy/entropy", "aqn/sigma"))
        ends = max(1, min(AVERAGED, len(reward) // 2))  # of a short run, halves
        noisy = [value for value in sigma if value > 0] or [0.0]
        return {
            "reward_first": _mean(reward[:ends]),
            "reward_last": _mean(reward[-ends:]),
            "accuracy_before": self._held_out(1, first=True),
            "accuracy_after": self._held_out(1, first=False),
            "held_out_reward_before": self._held_out(3, first=True),
            "held_out_reward_after": self._held_out(3, first=False),
            "entropy_first": _mean(entropy[:ends]),
            "entropy_last": _mean(entropy[-ends:]),
            "sigma_first": noisy[0],
            "sigma_last": noisy[-1],
            "steps": module.policy_version,
            "train_seconds": self.train_seconds,
            "quantization": module.policy_config.quantization,
            "run_dir": str(folder),
            **{f"{phase}_seconds": sum(self.curves[f"time/{phase}_s"]) for phase in PHASES},
        }

    def _held_out(self, column: int, first: bool) -> float | None | dict[str, float | None]:
        """A column of the validation before training or of the last one after it; of several sets, by name."""
        values = {}
        for name, rows in self.validations.items():
            row = rows[0 if first else -1]
            values[name] = row[column] if (row[0] == 0) == first else None
        return values if any(values) else values.get("")

    def _plot(self, path: Path) -> None:
        from matplotlib.figure import Figure  # slow to import, needed once

        curves, noisy = self.curves, any(self.curves["aqn/sigma"])
        figure = Figure(figsize=(10, 6), layout="constrained")
        reward, accuracy, entropy, length, signal, noise = figure.subplots(2, 3).flat
        reward.plot(curves["reward/mean"], color="tab:blue", label="training")
        for number, (name, values) in enumerate(self.validations.items(), start=1):  # C0 is the training's blue
            versions, sampled, greedy, held_out = zip(*values, strict=True)
            of = f" {name}" if name else ""
            if None not in held_out:
                reward.plot(versions, held_out, "o-", color=f"C{number}", label=f"held-out{of}")
            accuracy.plot(versions, greedy, "o-", color=f"C{number}", label=f"greedy{of}")
            accuracy.plot(versions, sampled, "s--", color=f"C{number}", alpha=0.6, label=f"one sample{of} (pass@1)")
        accuracy.set_ylim(-0.03, 1.03)
        entropy.plot(curves["policy/entropy"], color="tab:green")
        length.plot(curves["completions/length_mean"], color="tab:purple")
        signal.plot(curves["completions/groups_without_signal_frac"], color="tab:gray")
        signal.set_ylim(-0.03, 1.03)
        if noisy:
            noise.plot(curves["aqn/sigma"], "k--", label="set")
            noise.plot(curves["aqn/measured_std"], color="tab:red", alpha=0.7, label="measured in the sampler")
            noise.set_yscale("symlog", linthresh=1e-5)
        else:
            noise.remove()
        titles = {
            reward: "reward",
            accuracy: "held-out accuracy",
            entropy: "policy entropy (nats)",
            length: "length (tokens)",
            signal: "groups without signal",
            **({noise: "noise of the sampler's norms"} if noisy else {}),
        }
        for axis, title in titles.items():
            axis.set(title=title, xlabel="rollout")
            axis.grid(alpha=0.3)
            if len(axis.lines) > 1:
                axis.legend(fontsize="small")
        image = io.BytesIO()
        figure.savefig(image, dpi=120)
        atomic_write(path, image.getvalue())

    def _print(self, summary: dict[str, Any], folder: Path, result: str, views: list[str]) -> None:
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


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
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
    return [(label, _number(first), _number(last)) for label, first, last in rows]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
