"""Completions for reading: a text panel in TensorBoard and, optionally, a JSON Lines file of all."""

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
from qerl_pl.types import CompletionRecord, PromptBatch


class CompletionLog(Callback):
    """Logs some completions with their rewards to TensorBoard, and optionally all of them to a file.

    Args:
        every_n_rollouts: Rollouts between two text panels.
        panel_size: Completions in a panel.
        jsonl: Write all completions to RUN/completions.jsonl, those that dynamic sampling drops with
            `"trained": false`. A resumed run first removes the rollouts that it repeats, a new run all.
    """

    def __init__(self, every_n_rollouts: int = 10, panel_size: int = 4, jsonl: bool = False) -> None:
        require_at_least(
            1, {"CompletionLog's every_n_rollouts": every_n_rollouts, "CompletionLog's panel_size": panel_size}
        )
        self.every_n_rollouts = every_n_rollouts
        self.panel_size = panel_size
        self.jsonl = jsonl

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the rollouts that will be repeated."""
        if self.jsonl and writes_files(trainer):
            assert isinstance(pl_module, QeRLModule)
            _truncate(_path(trainer), pl_module.policy_version)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Write the rollout."""
        if not writes_files(trainer):
            return
        experience = batch.experience
        assert experience is not None
        if self.jsonl:
            with _path(trainer).open("a") as file:
                for record in experience.records:
                    file.write(json.dumps({"version": experience.version, **asdict(record)}) + "\n")
        if experience.version % self.every_n_rollouts == 0:
            table = _table(experience.records[: self.panel_size])
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("completions", table, experience.version)


def _path(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "completions.jsonl"


def _truncate(path: Path, version: int) -> None:
    """Drop the rollouts from `version` on, and an incomplete last line."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["version"] >= version:
                break
            end += len(line)
        file.truncate(end)


def _table(records: Sequence[CompletionRecord]) -> str:
    def cell(text: str) -> str:
        return escape(text).replace("\n", "<br>").replace("|", "&#124;")

    lines = ["| prompt | completion | reference | rewards |", "|---|---|---|---|"]
    for record in records:
        rewards = ", ".join(f"{name} {value:.2f}" for name, value in record.rewards.items())
        lines.append(f"| {cell(record.prompt)} | {cell(record.completion)} | {cell(record.reference)} | {rewards} |")
    return "\n".join(lines)
