"""Checkpoints to resume from: every so many rollouts, and when the process is asked to go."""

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, LambdaCallback
from lightning.pytorch.trainer.states import TrainerFn

from qerl_pl.distributed.communicator import writes_files
from qerl_pl.errors import Preempted, require_at_least
from qerl_pl.persistence.atomic_files import atomic_write, remove_unwritten
from qerl_pl.persistence.checkpoint_io import FOLDER, digest_path, resume_files
from qerl_pl.persistence.signals import StopSignals

log = logging.getLogger(__name__)


class ResumeCheckpoint(Checkpoint):
    """Saves RUN/checkpoints/step=N.ckpt, from which `--resume auto` goes on bit for bit.

    On SIGTERM or SIGINT the step in hand is finished, a checkpoint is written, and the run ends with `Preempted`; a
    second signal ends it at once. Lightning runs checkpoint callbacks after all others, so a checkpoint holds what
    they did in its step; list ModelCheckpoint before this one, so that it holds what is the best, too. Where a step is
    validated, the checkpoint is written after that, and the run stops then: a resumed run does not go back to it, and
    one that was killed while it validated goes back to the checkpoint before and comes to the same validation.

    Args:
        every_n_rollouts: Rollouts between checkpoints; a run that dies loses at most so many.
        keep: How many of the newest to keep. With more than one a damaged file costs one interval, not the run.
    """

    def __init__(self, every_n_rollouts: int = 10, keep: int = 2) -> None:
        super().__init__()
        require_at_least(1, {"ResumeCheckpoint's every_n_rollouts": every_n_rollouts, "ResumeCheckpoint's keep": keep})
        self.every_n_rollouts = every_n_rollouts
        self.keep = keep
        self._signal: int | None = None
        # Taken after Lightning, whose own handler breaks off a validation and ends the process as if all were done.
        self._signals = StopSignals(self._on_signal)
        self._stop: Preempted | None = None
        self._front = LambdaCallback(on_train_batch_start=self._end, on_train_epoch_end=self._end)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have a run that is to stop end once Lightning has logged its step, before any callback begins another."""
        trainer.callbacks = [self._front, *_without(trainer, self._front)]  # type: ignore[attr-defined]

    def _end(self, *_: Any) -> None:
        if self._stop is not None:
            raise self._stop

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen for the signals that precede the end of a preemptible machine."""
        self._signals.take()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen, where nothing was validated first; set aside what `--resume auto` must not go back to.

        What a kill in the middle of a save has left goes: a stop has a step of its own, and no save comes to it again.
        """
        self._signals.take()
        if writes_files(trainer):
            _set_aside(_folder(trainer), trainer.fit_loop.total_batch_idx + 1)
            remove_unwritten(_folder(trainer), "*.ckpt*")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back, and forget what they asked for."""
        self._give_back(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where a run breaks off, also by its stop: Lightning tears no callback down then."""
        self._give_back(trainer)

    def _give_back(self, trainer: Trainer) -> None:
        trainer.callbacks = _without(trainer, self._front)  # type: ignore[attr-defined]
        self._signals.give_back()
        self._signal = self._stop = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # asked twice: go now
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signal = number
        log.warning("%s: finishing this step, then saving; once more to stop at once", signal.Signals(number).name)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where it is time, and stop where it was asked for."""
        if not _is_validated(trainer, batch_idx):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the step with its validation where it is time, and stop where it was asked for."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._save_if_due(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the run, its last validation included; resumed there, it goes on if it now may."""
        done = trainer.fit_loop.total_batch_idx + 1
        self._save(trainer, done, ".end")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep an epoch open that ends in its middle, by a limit on steps or time: Lightning counts it as done."""
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress
        counted = epochs.current.completed and epochs.total.completed == epochs.total.ready
        if counted and not loop.batch_progress.is_last_batch:
            for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():  # in all, and in this run
                count["processed"] -= 1
                count["completed"] -= 1

    def _save_if_due(self, trainer: Trainer) -> None:
        done = trainer.fit_loop.total_batch_idx + 1
        stop = self._asked_to_stop(trainer)
        if stop or done % self.every_n_rollouts == 0:
            path = self._save(trainer, done)
            if stop:
                self._stop = Preempted(stop, path)

    def _asked_to_stop(self, trainer: Trainer) -> int | None:
        if trainer.world_size == 1:
            return self._signal
        number = torch.tensor(self._signal or 0, device=trainer.strategy.root_device)  # one process may see it first
        return int(trainer.strategy.reduce(number, reduce_op="max")) or None

    def _save(self, trainer: Trainer, done: int, suffix: str = "") -> Path:
        folder = _folder(trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return folder
        path = folder / f"step={done}{suffix}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            steps = {old: rollouts for old, (rollouts, _) in resume_files(folder).items()}
            older = sorted((old for old in steps if old != path and steps[old] <= done), key=lambda old: -steps[old])
            for old in older[self.keep - 1 :]:
                trainer.strategy.remove_checkpoint(old)
        return path


def _without(trainer: Trainer, callback: Callback) -> list[Callback]:
    return [one for one in trainer.callbacks if one is not callback]  # type: ignore[attr-defined]


def _folder(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / FOLDER


def _set_aside(folder: Path, done: int) -> None:
    """Move checkpoints of more than `done` rollouts, of a branch that this run leaves, to the folder abandoned."""
    for path in [path for path, (rollouts, _) in resume_files(folder).items() if rollouts > done]:
        aside = folder / "abandoned" / path.name
        if (digest := digest_path(path)).is_file():  # first there, then gone here: the file is never without it
            atomic_write(digest_path(aside), digest.read_bytes())
        aside.parent.mkdir(exist_ok=True)
        path.replace(aside)
        digest.unlink(missing_ok=True)
        log.warning("this run goes another way than %s: it is in %s now", path.name, aside.parent)


def _is_validated(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning validates after this training step; by the clock (`every` is None) nobody knows before."""
    every_epochs, every = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or (every_epochs and (trainer.current_epoch + 1) % every_epochs):
        return False
    if every is None or (trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)):  # none to validate
        return False
    if every == float("inf"):
        return trainer.is_last_batch
    done = batch_idx + 1 if every_epochs else trainer.fit_loop.total_batch_idx + 1
    return done % every == 0
