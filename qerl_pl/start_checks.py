"""Checks of a run's settings, also of Lightning's Trainer, before anything is loaded or written."""

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from qerl_pl.distributed.communicator import planned_ranks
from qerl_pl.distributed.slurm import check_world
from qerl_pl.errors import UserError


class ChecksFirst:
    """A module or callback that can refuse a run by its settings alone."""

    fills_batches = False
    """Whether it fills in the batches that training, validation and test steps read."""

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Check the settings without a policy or an engine; may be called more than once.

        Args:
            trainer: With all of its callbacks, its module and its data module.
            stage: fit, validate or test.

        Raises:
            UserError: A setting is wrong.
        """
        raise NotImplementedError


def check_first(trainer: Trainer, stage: str) -> None:
    """Call `check_first` of all callbacks, then of the module."""
    for hook in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if isinstance(hook, ChecksFirst):
            hook.check_first(trainer, stage)


def no_sampling_callback(needed_by: str) -> UserError:
    """The error of a trainer without a callback that `fills_batches`."""
    return UserError(
        f"{needed_by} needs a callback that samples completions; trainer.callbacks has none; "
        "add qerl_pl.callbacks.RolloutCallback"
    )


def require_planned_end(trainer: Trainer) -> None:
    """Refuse a run without a planned end, which schedules need.

    Raises:
        UserError: It has no limit on epochs or steps.
    """
    if max(trainer.max_epochs or 0, trainer.max_steps or 0) < 1:
        raise UserError(
            "schedules of noise and learning rate need a planned end; the run has none; "
            "set trainer.max_epochs or trainer.max_steps"
        )


def within_limit(trainer: Trainer | None, batches: int) -> int:
    """Training batches of an epoch within the trainer's `limit_train_batches`."""
    limit = trainer.limit_train_batches if trainer else None
    if isinstance(limit, float):
        return int(batches * limit)
    return batches if limit is None else min(batches, limit)


def check_intervals(trainer: Trainer, batches: int) -> None:
    """Check the trainer's limits and intervals before an engine is started.

    Args:
        trainer: The run's trainer.
        batches: Training batches of an epoch, within the trainer's limit.

    Raises:
        UserError: The run has no step or epoch, an epoch has no batch, or the validation interval is zero, a time, or
            longer than an epoch.
    """
    if trainer.max_steps == 0:
        raise UserError(
            "a run needs at least one step; trainer.max_steps=0 allows none; raise it, or set it to -1 for no limit"
        )
    if trainer.max_epochs == 0:
        raise UserError("a run needs at least one epoch; trainer.max_epochs=0 allows none; raise it")
    if batches < 1:
        raise UserError(
            f"an epoch needs at least one batch; trainer.limit_train_batches={trainer.limit_train_batches} allows "
            "none; raise it"
        )
    epochs, interval = trainer.check_val_every_n_epoch, vars(trainer).get("val_check_interval")  # none by the clock
    if interval is None or interval <= 0 or (epochs is not None and epochs < 1):
        raise UserError(
            "validation intervals are counted in batches or epochs, not in time; got "
            f"val_check_interval={interval} and check_val_every_n_epoch={epochs}; set them above 0, or "
            "trainer.limit_val_batches to 0 for none"
        )
    if isinstance(interval, int) and epochs is not None and interval > batches:
        raise UserError(
            f"val_check_interval must not exceed an epoch's {batches} batches; got {interval}; "
            "lower it, or set trainer.check_val_every_n_epoch to null, which counts on over epochs"
        )


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that shard the trained weights, strategies of several devices on a single one, and other
    numbers of processes than devices.

    Raises:
        UserError: The trainer has such a strategy, or SLURM or torchrun has started such a number.
    """
    check_world(trainer)
    world_size, strategy = planned_ranks(trainer), trainer.strategy
    if type(strategy) is not DDPStrategy if world_size > 1 else not isinstance(strategy, SingleDeviceStrategy):
        raise UserError(
            f"training runs one process per device, each with all trained weights; got the strategy "
            f"{type(strategy).__name__} for {world_size} devices; leave trainer.strategy at auto"
        )


def check_ranks_divide(batch_size: int, ranks: int) -> None:
    """Refuse a batch size that the number of ranks does not divide.

    Raises:
        UserError: It does not.
    """
    if batch_size % ranks:
        raise UserError(
            f"data.batch_size must be a multiple of the number of devices; got {batch_size} for {ranks}; change one "
            "of them"
        )


def check_monitors(trainer: Trainer, sets: Sequence[str]) -> None:
    """Refuse callbacks that monitor a metric of another validation set: Lightning would stop at the first validation.

    Args:
        trainer: With its callbacks.
        sets: Names of the validation sets; "" for a single set.

    Raises:
        UserError: Such a callback is there.
    """
    prefixes = [f"val/{name}/" if name else "val/" for name in sets]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = callback.monitor if isinstance(callback, ModelCheckpoint | EarlyStopping) else None
        if not sets or monitor is None or not monitor.startswith("val/"):
            continue
        if not any(monitor.startswith(prefix) and "/" not in monitor.removeprefix(prefix) for prefix in prefixes):
            raise UserError(
                f"a monitored metric must be logged; {type(callback).__name__} monitors {monitor}, and the validation "
                f"sets log {', '.join(f'{prefix}accuracy' for prefix in prefixes)}; set best.monitor to one of these, "
                "or best to null"
            )
