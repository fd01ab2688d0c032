"""Completions for human eyes: a text panel in TensorBoard, and all of them as JSON lines on request."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from qerl_pl.distributed.communicator import writes_files
from qerl_pl.errors import require_at_least
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rollout.experience import CompletionRecord, Experience


class CompletionLog(Callback):
    """Shows a few completions with their rewards, and keeps all of them if asked to.

    Args:
        every_n_rollouts: Rollouts between two text panels.
        panel_size: Completions in a panel.
        jsonl: Write every completion of every rollout to RUN/completions.jsonl, once, those that dynamic sampling
            drops with `"trained": false`. A resumed run first takes out those of rollouts that it repeats, one that
            starts fresh all.
    """

    def __init__(self, every_n_rollouts: int = 10, panel_size: int = 4, jsonl: bool = False) -> None:
        require_at_least(
            1, {"CompletionLog's every_n_rollouts": every_n_rollouts, "CompletionLog's panel_size": panel_size}
        )
        self.every_n_rollouts = every_n_rollouts
        self.panel_size = panel_size
        self.jsonl = jsonl

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take out what is about to be written again."""
        if self.jsonl and writes_files(trainer):
            assert isinstance(pl_module, QeRLModule)
            _cut(_path(trainer), pl_module.policy_version)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Experience],  # type: ignore[override]
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write what is due of one rollout."""
        if not writes_files(trainer):
            return
        experience = outputs["experience"]
        if self.jsonl:
            _append(_path(trainer), experience)
        if experience.version % self.every_n_rollouts == 0:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    table = _table(experience.records[: self.panel_size])
                    logger.experiment.add_text("completions", table, experience.version)


def _path(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "completions.jsonl"


def _cut(path: Path, version: int) -> None:
    """Drop the rollouts from `version` on, and a line that a kill has left half written."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["version"] >= version:
                break
            end += len(line)
        file.truncate(end)


def _append(path: Path, experience: Experience) -> None:
    with path.open("a") as file:
        for record in experience.records:
            file.write(json.dumps({"version": experience.version, **asdict(record)}) + "\n")


def _table(records: Sequence[CompletionRecord]) -> str:
    def cell(text: str) -> str:
        return escape(text).replace("\n", "<br>").replace("|", "&#124;")

    lines = ["| prompt | completion | reference | rewards |", "|---|---|---|---|"]
    for record in records:
        rewards = ", ".join(f"{name} {value:.2f}" for name, value in record.rewards.items())
        lines.append(f"| {cell(record.prompt)} | {cell(record.completion)} | {cell(record.reference)} | {rewards} |")
    return "\n".join(lines)
