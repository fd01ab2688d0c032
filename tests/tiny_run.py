"""A run of a module of one number, within moments: for what depends on when things happen, not on a policy."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY, AtomicCheckpointIO

VALIDATED = 1000
"""Added to a validation's number among the events."""


class Numbers(IterableDataset[int]):
    """Those from 0 to 5, without saying how many."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)


class Tiny(LightningModule):
    """Trains on the numbers from 0, six an epoch, validates twice a validation, and keeps what happened.

    Args:
        signals: The signal to raise at an event.
        sized: Whether it is known how many numbers there are.
    """

    def __init__(self, signals: dict[int, int] | None = None, sized: bool = True) -> None:
        super().__init__()
        self.sized = sized
        self.weight = nn.Parameter(torch.ones(1))
        self.signals = signals or {}
        self.events: list[int] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = {"policy_version": 0}  # the trainer's own, or reading refuses it

    def _happens(self, event: int) -> None:
        self.events.append(event)
        if event in self.signals:
            signal.raise_signal(self.signals[event])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._happens(int(batch))
        return (self.weight * batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._happens(VALIDATED + int(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> StatefulDataLoader[int]:
        return StatefulDataLoader(range(6) if self.sized else Numbers(), batch_size=1)

    def val_dataloader(self) -> StatefulDataLoader[int]:
        return StatefulDataLoader(range(2), batch_size=1)


def quiet_trainer(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """A trainer of one epoch on the CPU, which prints and logs nothing, unless settings say otherwise."""
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, **off, **settings}
    return Trainer(default_root_dir=folder, callbacks=[*callbacks], plugins=[AtomicCheckpointIO()], **given)


def trainer_of(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    return quiet_trainer(folder, *callbacks, **{"limit_val_batches": 0} | settings)
