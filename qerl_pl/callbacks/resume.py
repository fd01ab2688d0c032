"""Checkpoints for resuming, also on SIGTERM, SIGINT, SIGHUP and SLURM's SIGUSR1."""

import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

from qerl_pl.errors import Preempted, StopSignals, UserError, install_sigusr1_handler, require_at_least
from qerl_pl.runtime.checkpoint_io import CHECKPOINTS, resume_files
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.random_state import random_state, set_random_state

log = logging.getLogger(__name__)

REPEATED_S = 1.0
"""Seconds within which a signal repeats the first: a terminal and a wrapper, say, both send the same request."""
_REQUEUE_TIMEOUT_S = 60


class ResumeCheckpoint(Checkpoint):
    """Saves RUN/checkpoints/step=N.ckpt, from which `--resume auto` continues bit for bit.

    Each has the state at the end of a step and of the step's validation, and is saved when Lightning has logged both,
    before the next step: a run killed in a validation resumes before the step and repeats both. On SIGTERM, SIGINT or
    SIGHUP the current step, or the validation before the first step, is finished, the last step is saved, and the run
    ends with `Preempted`; a second SIGTERM or SIGINT, a second or more after the first, ends it at once. In a job of
    SLURM, SIGUSR1 (`--signal=USR1@300`) is SIGTERM, after which the job is requeued.

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
        self._step_end: dict[str, Any] = {}
        """Rollouts, epoch, state of Lightning's loops with the data loader, and random state at a step's end."""
        self._saves = False
        self._first = LambdaCallback(on_train_batch_start=self._start_step, on_train_epoch_end=self._begin_epoch_end)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Insert a first callback, which saves before the others begin a step, and be the last to end an epoch."""
        install_sigusr1_handler()
        if self._first not in trainer.callbacks:  # type: ignore[attr-defined]
            others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
            trainer.callbacks = [self._first, *others, self]  # type: ignore[attr-defined]

    def _start_step(self, trainer: Trainer, *_: Any) -> None:
        """Save the step before if due, and set the step that loggers get.

        Lightning (2.6) counts the step again that a validation followed, as which it takes up a checkpoint of the end.
        """
        if trainer.fit_loop.batch_idx > 0 or not self._step_end:  # or it is saved with the end of the epoch
            self._save_if_due(trainer)
        trainer.fit_loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": trainer.fit_loop.total_batch_idx})

    def _begin_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save, if due, in a run of so many steps: Lightning (2.6) ends the epoch again when that is resumed."""
        if trainer.max_steps != -1:
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: Trainer) -> None:
        """Save at an interval's end or a signal, and stop at a signal."""
        stop, path = self._stop_signal(trainer), None
        if self._step_end and (stop or self._step_end["rollouts"] % self.every_n_rollouts == 0):
            path = self._save(trainer)
        if stop:
            raise Preempted(stop, path)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Name the files of a moved or copied run by where they are now, or ModelCheckpoint forgets its best score."""
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if state and isinstance(callback, ModelCheckpoint) and callback.dirpath:
                moved = _moved(state, state["dirpath"], str(callback.dirpath))
                if Path(moved["best_model_path"]).is_file():
                    checkpoint["callbacks"][callback.state_key] = moved

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers."""
        self._signals.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the handlers if there was no sanity check; set aside newer checkpoints; remove incomplete files."""
        self._signals.install()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.wait_count >= max(callback.patience, 1):
                log.warning("EarlyStopping by %s has ended this run: to go on, leave it out", callback.monitor)
                trainer.should_stop = True
        if writes_files(trainer):
            _set_aside(_folder(trainer), trainer.fit_loop.total_batch_idx + 1)
            for unfinished in _folder(trainer).glob(".*.ckpt*.tmp"):
                unfinished.unlink()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Remember the state at the end of a step."""
        self._step_end = {
            "rollouts": trainer.fit_loop.total_batch_idx + 1,
            "epoch": trainer.current_epoch,
            "loops": trainer.fit_loop.state_dict(),
            "random_state": random_state(),
        }

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the state at the end of the step's validation."""
        if self._step_end:
            self.on_train_batch_end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if due, what the other callbacks have made of the epoch: a resumed run does not end it again."""
        if trainer.max_steps == -1:
            if self._step_end and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # or a stop has ended it
                self._step_end["loops"] = trainer.fit_loop.state_dict()
            self._save_if_due(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step; with higher limits, the run can resume from there."""
        if self._step_end:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a warning if a finished run was resumed, which has nothing to do."""
        if not self._step_end and not trainer.should_stop:
            done = trainer.fit_loop.total_batch_idx + 1
            log.warning(
                "all %d training batches of this run are done: to go on, raise trainer.max_epochs or max_steps", done
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state before a rollout that a UserError has ended; restore the signal handlers; requeue the job."""
        try:
            if isinstance(exception, UserError) and (path := self._save_before_rollout(trainer)):
                exception.add_note(f"the state is saved in {path}; continue with the same command and --resume auto")
        finally:
            self.teardown()
        if isinstance(exception, Preempted) and exception.signal_number == signal.SIGUSR1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which SLURM requeues; Lightning's teardown restores it
            if writes_files(trainer):
                _requeue_job()

    def teardown(self, *_: Any, **__: Any) -> None:
        """Restore the signal handlers, and forget the run."""
        self._signals.restore()
        self._signal, self._step_end, self._saves = None, {}, False

    def _save_before_rollout(self, trainer: Trainer) -> Path | None:
        """The checkpoint of the state before the current rollout; None outside of a rollout, or with several ranks."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        in_rollout = batches.ready > batches.started  # type: ignore[attr-defined]
        if not in_rollout or trainer.world_size > 1 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        if not self._step_end:  # it may be the rollout that the run has resumed at
            done, files = trainer.fit_loop.total_batch_idx, resume_files(_folder(trainer))
            return next((path for path, rollouts in files.items() if rollouts == done), None)
        return self._save(trainer)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._signalled = number, time.monotonic()
            name = signal.Signals(number).name
            again = "Ctrl-C or SIGTERM after a second stops at once"
            log.warning("%s: finishing this step or validation, then saving; %s", name, again)
            return
        at_limit = (self._signal, number) == (signal.SIGUSR1, signal.SIGTERM)  # that SIGUSR1 has announced
        if number != signal.SIGHUP and not at_limit and time.monotonic() - self._signalled >= REPEATED_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _stop_signal(self, trainer: Trainer) -> int | None:
        number = torch.tensor(self._signal or 0, device=trainer.strategy.root_device)  # a rank may get it first
        return int(trainer.strategy.reduce(number, reduce_op="max")) or None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the loops at the end of the last step, also where another callback saves within one that failed."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        within_step = bool(self._step_end) and batches.ready > batches.processed  # type: ignore[attr-defined]
        failed = within_step and trainer.state.status == TrainerStatus.INTERRUPTED
        if failed:
            set_random_state(self._step_end["random_state"])
        if self._saves or failed:
            checkpoint["epoch"], checkpoint["loops"]["fit_loop"] = self._step_end["epoch"], self._step_end["loops"]

    def _save(self, trainer: Trainer) -> Path:
        """Save the state at the end of the last step, and remove all but the newest checkpoints."""
        path = _folder(trainer) / f"step={self._step_end['rollouts']}.ckpt"
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._saves = True
            trainer.save_checkpoint(path)
            self._saves = False
            if trainer.is_global_zero:
                for old in [*resume_files(path.parent)][self.keep :]:
                    trainer.strategy.remove_checkpoint(old)
        return path


def _folder(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / CHECKPOINTS


def _moved(value: Any, old: str, new: str) -> Any:
    """A state in which paths of the folder `old` are those of `new`."""
    if isinstance(value, dict):
        return {_moved(key, old, new): _moved(one, old, new) for key, one in value.items()}
    is_inside = isinstance(value, str) and Path(value).is_relative_to(old)
    return str(new / Path(value).relative_to(old)) if is_inside else value


def _set_aside(folder: Path, done: int) -> None:
    """Move checkpoints of more than `done` rollouts, which this run replaces, to the folder abandoned."""
    for path in [path for path, rollouts in resume_files(folder).items() if rollouts > done]:
        aside = folder / "abandoned" / path.name
        aside.parent.mkdir(exist_ok=True)
        path.replace(aside)
        log.warning("%s is newer than where this run starts: moved to %s", path.name, aside.parent)


def _requeue_job() -> None:
    """Have SLURM start this job again; log a warning if it does not."""
    variables = os.environ
    job = variables.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in variables:
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the job is not requeued (%s): submit it again, with --resume auto", error)
