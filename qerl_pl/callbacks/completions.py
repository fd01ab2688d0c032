"""Logs completions as tables and, optionally, writes all of them to a JSON Lines file."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.callbacks.loggers import log_table
from qerl_pl.errors import require_at_least
from qerl_pl.modules.qerl import require_qerl_module
from qerl_pl.rollout.scoring import without_none
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.types import CompletionRecord, PromptBatch

log = logging.getLogger(__name__)


class CompletionLog(Callback):
    """Logs some completions with rewards and reference answers, and optionally writes all to a file.

    TensorBoard and W&B show them as a table.

    Args:
        every_n_rollouts: Rollouts between two that are logged.
        jsonl: Write all completions to RUN/completions.jsonl, those that dynamic sampling drops with
            `"trained": false`. A resumed run first removes the rollouts that it repeats, a new run all.
    """

    def __init__(self, every_n_rollouts: int = 10, jsonl: bool = False) -> None:
        require_at_least(1, {"CompletionLog's every_n_rollouts": every_n_rollouts})
        self.every_n_rollouts = every_n_rollouts
        self.jsonl = jsonl
        self._unlogged: tuple[int, Sequence[CompletionRecord]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the rollouts that will be repeated."""
        self._unlogged = None
        module = require_qerl_module(pl_module, "CompletionLog")
        if self.jsonl and writes_files(trainer):
            _truncate(_path(trainer), module.policy_version)

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
                    fields = without_none(asdict(record), "messages", "extra")
                    file.write(json.dumps({"version": experience.version, **fields}) + "\n")
        self._unlogged = experience.version, _of_several_prompts(experience.records)
        if experience.version % self.every_n_rollouts == 0:
            self._log(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last rollout."""
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if self._unlogged is not None:
            version, records = self._unlogged
            rows = [_row(version, record) for record in records]
            for logger in trainer.loggers:
                log_table(logger, "completions", COLUMNS, rows, version)
            self._unlogged = None


def _path(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "completions.jsonl"


def _truncate(path: Path, version: int) -> None:
    """Drop the rollouts from `version` on, and an incomplete last line."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = 0
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["version"] >= version:
                    break
            except ValueError:
                log.warning("%s is damaged after %d bytes, as by a power cut: the rest is removed", path, end)
                break
            end += len(line)
        file.truncate(end)


PANEL_SIZE = 4
"""Completions of a rollout that are logged, of as many prompts."""
COLUMNS = ["rollout", "prompt_id", "prompt", "completion", "reference", "reward", "rewards", "tokens", "truncated"]


def _of_several_prompts(records: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """Records in the order of logging: the first completion of each prompt, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    order = []
    for index, record in enumerate(records):
        order.append((seen[record.prompt_id], index))
        seen[record.prompt_id] += 1
    return [records[index] for _, index in sorted(order)[:PANEL_SIZE]]


def dialogue_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A dialogue as text, a line for each message; those of the assistant are marked as trained."""
    return "\n".join(f"[{_origin(message)}] {message['content']}" for message in messages)


def _origin(message: Mapping[str, Any]) -> str:
    return (
        "assistant, trained"
        if message["role"] == "assistant"
        else f"{message['role']} {message.get('name', '')}".strip()
    )


def _row(version: int, record: CompletionRecord) -> list[Any]:
    completion = record.completion if record.messages is None else dialogue_text(record.messages)
    parts = [record.prompt_id, record.prompt, completion, record.reference, record.rewards["total"]]
    return [version, *parts, _parts(record), record.tokens, record.truncated]


def _parts(record: CompletionRecord) -> str:
    named = ((name, value) for name, value in record.rewards.items() if name != "total")
    logged = (f"{name} {value}" for name, value in (record.extra or {}).items())
    return ", ".join([*(f"{name} {_number(value)}" for name, value in named), *logged])


def _number(value: float | None) -> str:
    return "not applicable" if value is None else f"{value:.3g}"
