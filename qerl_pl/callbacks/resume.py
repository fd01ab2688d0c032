"""Checkpoints for resuming, also on SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1."""

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from qerl_pl.errors import Preempted, StopSignals, UserError, require_at_least
from qerl_pl.runtime.checkpoint_io import FOLDER, resume_files
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.machine import installed_versions, machine_of, processor
from qerl_pl.runtime.random_state import random_state, set_random_state
from qerl_pl.runtime.slurm import requeue_job, take_sigusr1

log = logging.getLogger(__name__)

REPEATED_S = 1.0
"""Seconds within which a signal repeats the first: a terminal and a wrapper, say, both send the same request."""
MACHINE_KEY = "qerl_machine"
"""Checkpoint key of the processor and the versions."""


@dataclass(frozen=True)
class _StepEnd:
    """State at the end of the last step that a failing rollout may have changed."""

    epoch: int
    loops: dict[str, Any]
    """State of Lightning's loops and of the data loader."""
    random_state: dict[str, Any]


class ResumeCheckpoint(Checkpoint):
    """Saves RUN/checkpoints/step=N.ckpt, from which `--resume auto` continues bit for bit.

    On SIGTERM, SIGINT or SIGHUP the current step is finished and saved, and the run ends with `Preempted`; a second
    SIGTERM or SIGINT, a second or more after the first, ends it at once. Lightning runs checkpoint callbacks after all
    others, so that a checkpoint includes their state after its step; list ModelCheckpoint before this one. A step that
    is validated is saved, and the run stopped, after its validation: a run killed while validating resumes before the
    step and repeats the validation. In a job of SLURM, SIGUSR1 (`--signal=USR1@300`) is SIGTERM, after which the job is
    requeued.

    If a UserError ends a rollout, such as that of a reward, the state before the rollout is saved, and the error has a
    note that says so. Several ranks save nothing then: only the ranks that fail know of it.

    Args:
        every_n_rollouts: Rollouts between checkpoints.
        keep: Number of newest checkpoints to keep. With 2 or more, a damaged file costs one interval, not the run.
    """

    def __init__(self, every_n_rollouts: int = 10, keep: int = 2) -> None:
        super().__init__()
        require_at_least(1, {"ResumeCheckpoint's every_n_rollouts": every_n_rollouts, "ResumeCheckpoint's keep": keep})
        self.every_n_rollouts = every_n_rollouts
        self.keep = keep
        self._signal: int | None = None
        self._signalled = 0.0
        # Installed after Lightning's own handler, which interrupts validations and ends the process with success.
        self._signals = StopSignals(self._on_signal)
        self._stop: Preempted | None = None
        self._step_end: _StepEnd | None = None
        self._rollout_failed = False
        self._stopper = LambdaCallback(on_train_batch_start=self._start_step, on_train_epoch_end=self._raise_stop)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Insert a first callback that stops the run after Lightning has logged the step and before the next one."""
        take_sigusr1()
        trainer.callbacks = [self._stopper, *_without(trainer, self._stopper)]  # type: ignore[attr-defined]

    def _raise_stop(self, *_: Any) -> None:
        if self._stop is not None:
            raise self._stop

    def _start_step(self, trainer: Trainer, *_: Any) -> None:
        """Stop if asked to, or set the step that loggers get: a run that goes on after its end may count one more.

        Lightning (2.6) counts the step again that a validation followed, as which it takes up a checkpoint of the end.
        """
        self._raise_stop()
        trainer.fit_loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": trainer.fit_loop.total_batch_idx})

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers."""
        self._signals.take()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the handlers if there was no sanity check; set aside newer checkpoints; remove incomplete files."""
        self._signals.take()
        if writes_files(trainer):
            _set_aside(_folder(trainer), trainer.fit_loop.total_batch_idx + 1)
            for unfinished in _folder(trainer).glob(".*.ckpt*.tmp"):
                unfinished.unlink()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the signal handlers."""
        self._restore(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state before a rollout that a UserError has ended; restore the signal handlers; requeue the job."""
        try:
            if isinstance(exception, UserError) and (path := self._save_before_rollout(trainer)) is not None:
                exception.add_note(f"the state is saved in {path}; continue with the same command and --resume auto")
        finally:
            self._restore(trainer)
        if isinstance(exception, Preempted) and exception.signal_number == signal.SIGUSR1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which SLURM requeues; Lightning's teardown restores it
            if writes_files(trainer):
                requeue_job()

    def _save_before_rollout(self, trainer: Trainer) -> Path | None:
        """Save the state before the current rollout; None outside of a rollout, or with several ranks."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        in_rollout = batches.ready > batches.started  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING or trainer.world_size > 1 or not in_rollout:
            return None
        done = trainer.fit_loop.total_batch_idx
        for path, rollouts in resume_files(_folder(trainer)).items():
            if rollouts == done:
                return path
        if self._step_end is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        set_random_state(self._step_end.random_state)
        self._rollout_failed = True
        return self._save(trainer, done)

    def _restore(self, trainer: Trainer) -> None:
        trainer.callbacks = _without(trainer, self._stopper)  # type: ignore[attr-defined]
        self._signals.give_back()
        self._signal = self._stop = self._step_end = None
        self._rollout_failed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            at_limit = (self._signal, number) == (signal.SIGUSR1, signal.SIGTERM)  # that SIGUSR1 has announced
            if number != signal.SIGHUP and not at_limit and time.monotonic() - self._signalled >= REPEATED_S:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._signal, self._signalled = number, time.monotonic()
        log.warning("%s: finishing this step, then saving; send it again to stop at once", signal.Signals(number).name)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if due, unless the step is validated first."""
        if not _is_validated(trainer, batch_idx):
            self._end_step(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a validated step if due."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_step(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the run; with higher limits, it can resume from there."""
        self._save(trainer, trainer.fit_loop.total_batch_idx + 1, ".end")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn of another machine; name the best checkpoints where they are if the run's folder has moved."""
        if trainer.is_global_zero:
            _warn_of_another_machine(checkpoint.get(MACHINE_KEY, {}), trainer.strategy.root_device)
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state and callback.dirpath is not None:
                _follow_move(state, Path(callback.dirpath))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the processor and the versions, and the end of the last step in place of a rollout that failed.

        Otherwise count an epoch as unfinished if a limit on steps or time ended it: Lightning counts it as completed.
        """
        checkpoint[MACHINE_KEY] = machine_of(trainer.strategy.root_device)
        if self._rollout_failed and self._step_end is not None:
            checkpoint["epoch"] = self._step_end.epoch
            checkpoint["loops"]["fit_loop"] = self._step_end.loops
            return
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress
        counted = epochs.current.completed and epochs.total.completed == epochs.total.ready
        if counted and not loop.batch_progress.is_last_batch:
            for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                count["processed"] -= 1
                count["completed"] -= 1

    def _end_step(self, trainer: Trainer) -> None:
        """Remember this moment for a rollout that fails, and save if due."""
        self._step_end = _StepEnd(trainer.current_epoch, trainer.fit_loop.state_dict(), random_state())
        done = trainer.fit_loop.total_batch_idx + 1
        stop = self._stop_signal(trainer)
        if stop or done % self.every_n_rollouts == 0:
            path = self._save(trainer, done)
            if stop:
                self._stop = Preempted(stop, path)

    def _stop_signal(self, trainer: Trainer) -> int | None:
        if trainer.world_size == 1:
            return self._signal
        number = torch.tensor(self._signal or 0, device=trainer.strategy.root_device)  # a rank may get it first
        return int(trainer.strategy.reduce(number, reduce_op="max")) or None

    def _save(self, trainer: Trainer, done: int, suffix: str = "") -> Path:
        folder = _folder(trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return folder
        path = folder / f"step={done}{suffix}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            older = [old for old, rollouts in resume_files(folder).items() if old != path and rollouts <= done]
            for old in older[self.keep - 1 :]:
                trainer.strategy.remove_checkpoint(old)
        return path


def _without(trainer: Trainer, callback: Callback) -> list[Callback]:
    return [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]


def _folder(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / FOLDER


def _set_aside(folder: Path, done: int) -> None:
    """Move checkpoints of more than `done` rollouts, which this run replaces, to the folder abandoned."""
    for path in [path for path, rollouts in resume_files(folder).items() if rollouts > done]:
        aside = folder / "abandoned" / path.name
        aside.parent.mkdir(exist_ok=True)
        path.replace(aside)
        log.warning("%s is newer than where this run starts: moved to %s", path.name, aside.parent)


def _warn_of_another_machine(before: Mapping[str, str], device: torch.device) -> None:
    """Log in what this machine differs from that of a checkpoint, as `machine_of` has it."""
    now = {"processor": processor(device)} | installed_versions(before)
    changed = [
        f"{name} was {was} and is {now.get(name, 'missing')}" for name, was in before.items() if was != now.get(name)
    ]
    if changed:
        log.warning("this run goes on elsewhere, so that its results may be rounded otherwise: %s", "; ".join(changed))


def _follow_move(state: dict[str, Any], folder: Path) -> None:
    """Replace the folder in a ModelCheckpoint's state, if the best checkpoint is in `folder`."""

    def moved(path: str) -> str:
        return str(folder / Path(path).name) if path and str(Path(path).parent) == state["dirpath"] else path

    if (folder / Path(state["best_model_path"]).name).is_file():
        paths = {key: moved(state[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
        best = {moved(path): score for path, score in state["best_k_models"].items()}
        state |= paths | {"best_k_models": best, "dirpath": str(folder)}


def _is_validated(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning validates after this training step; unknown for time intervals (`every` is None)."""
    every_epochs, every = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or (every_epochs and (trainer.current_epoch + 1) % every_epochs):
        return False
    if every is None or (trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)):  # no prompts
        return False
    if every == float("inf"):
        return trainer.is_last_batch
    done = batch_idx + 1 if every_epochs else trainer.fit_loop.total_batch_idx + 1
    return done % every == 0
