"""Checks of a run's settings, also of Lightning's Trainer, before anything is loaded or written."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import SingleDeviceStrategy

from qerl_pl.errors import UserError
from qerl_pl.runtime.communicator import planned_ranks
from qerl_pl.runtime.strategy import UnwrappedDDPStrategy

log = logging.getLogger(__name__)


class ChecksFirst:
    """A module or callback that can refuse a run by its settings alone."""

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Raise a UserError if a setting is wrong. Starts nothing and changes nothing; called once a stage.

        Args:
            trainer: With all of its callbacks, its module and its data module.
            stage: fit, validate or test.
        """
        raise NotImplementedError


class SamplingCallback(ChecksFirst):
    """A callback that fills in the batches that training, validation and test steps read."""

    def open_environments(self, trainer: Trainer) -> Sequence[Mapping[str, Any]]:
        """Start the environments that prompts are played with; the checks have passed.

        Returns:
            JSON schemas of the tools that prompts offer.
        """
        return ()


def check_first(trainer: Trainer, stage: str) -> None:
    """Call `check_first` of all callbacks, then of the module."""
    for hook in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if isinstance(hook, ChecksFirst):
            hook.check_first(trainer, stage)


def no_sampling_callback(needed_by: str) -> UserError:
    """The error of a trainer without a `SamplingCallback`."""
    remedy = "add qerl_pl.callbacks.RolloutCallback"
    return UserError(f"{needed_by} needs a callback that samples completions; trainer.callbacks has none; {remedy}")


def limit_epochs(trainer: Trainer) -> None:
    """Limit a run without any limit to one epoch, before Lightning does to 1000, over which schedules would stretch."""
    has_timer = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.max_epochs is None and trainer.max_steps == -1 and not has_timer:
        trainer.fit_loop.max_epochs = max(trainer.min_epochs or 0, 1)
        log.info("neither trainer.max_epochs nor trainer.max_steps is set: max_epochs is %d", trainer.max_epochs)


def require_planned_end(trainer: Trainer) -> None:
    """Raise a UserError if a run has no limit on epochs or steps, which schedules need, or trains on nothing."""
    if max(trainer.max_epochs or 0, trainer.max_steps or 0) < 1:
        raise UserError(
            "schedules of noise and learning rate need a planned end; the run has none; "
            "set trainer.max_epochs or trainer.max_steps"
        )
    if trainer.limit_train_batches == 0:
        raise UserError("a run trains on batches; got trainer.limit_train_batches=0; raise it, or use validate")


def check_monitors(trainer: Trainer) -> None:
    """Refuse checkpoints and early stops by a metric that the validation which has just ended did not log."""
    logged = {one.meta.name for one in (trainer._results or {}).values()}  # also by subclasses and callbacks
    for one in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks):
        monitor = getattr(one, "monitor", None) or ""
        if monitor.startswith("val/") and monitor not in logged:
            tags = ", ".join(sorted(tag for tag in logged if tag.startswith("val/")))
            raise UserError(f"{type(one).__name__}.monitor must be one of {tags}; got {monitor}; correct it")


def check_devices(trainer: Trainer) -> None:
    """Refuse a run of several processes by another strategy than this package's: each would train by itself."""
    world_size, strategy = planned_ranks(trainer), trainer.strategy
    alone = isinstance(strategy, SingleDeviceStrategy) and world_size == 1
    if not alone and not isinstance(strategy, UnwrappedDDPStrategy):
        raise UserError(
            f"a run on several devices needs this package's strategy; got {type(strategy).__name__} for {world_size}; "
            "give the Trainer devices=1, or strategy=UnwrappedDDPStrategy() of qerl_pl.runtime.strategy; leave the "
            "key trainer.strategy at auto"
        )


def check_world(trainer: Trainer) -> None:
    """Refuse another number of processes than the trainer has devices, where torchrun or SLURM starts them.

    Those of a node are compared by Lightning.

    Raises:
        UserError: They differ.
    """
    if TorchElasticEnvironment.detect():
        command, started = "torchrun --nnodes {} --nproc-per-node {}", TorchElasticEnvironment().world_size()
    elif SLURMEnvironment.detect():
        command, started = "srun --nodes {} --ntasks-per-node {}", SLURMEnvironment().world_size()
    else:
        return
    if started != planned_ranks(trainer):
        raise UserError(
            f"a run has one process for each device; got {started} for trainer.devices {trainer.num_devices} and "
            f"trainer.num_nodes {trainer.num_nodes}; start it by "
            f"{command.format(trainer.num_nodes, trainer.num_devices)}, or set these keys to what was started"
        )


def check_ranks_divide(batch_size: int, ranks: int) -> None:
    """Refuse a batch size that the number of ranks does not divide."""
    if batch_size % ranks:
        found = f"got {batch_size} for {ranks}; change one of them"
        raise UserError(f"data.batch_size must be a multiple of the number of devices; {found}")
