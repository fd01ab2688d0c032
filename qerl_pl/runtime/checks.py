"""Checks of a run's settings, also of Lightning's Trainer, before anything is loaded or written."""

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from qerl_pl.errors import UserError
from qerl_pl.runtime.communicator import planned_ranks
from qerl_pl.runtime.slurm import check_world
from qerl_pl.runtime.strategy import UnwrappedDDPStrategy

log = logging.getLogger(__name__)

OF_LIGHTNING = ("epoch", "step", "rollouts")
"""What ModelCheckpoint may monitor, too, though no step logs it."""


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


def warn_of_unused(owner: type, key: str, needed: str, given: Mapping[str, Any]) -> None:
    """Log a warning of arguments that differ from their defaults, and have no effect.

    Args:
        owner: Class of the arguments.
        key: Of the class in a configuration.
        needed: What they would need.
        given: Their values by name.
    """
    defaults = inspect.signature(owner).parameters
    if unused := [
        f"{key}.{name}" for name, value in given.items() if name in defaults and value != defaults[name].default
    ]:
        log.warning("%s %s no effect without %s", " and ".join(unused), "have" if unused[1:] else "has", needed)


def no_sampling_callback(needed_by: str) -> UserError:
    """The error of a trainer without a callback that `fills_batches`."""
    return UserError(
        f"{needed_by} needs a callback that samples completions; trainer.callbacks has none; "
        "add qerl_pl.callbacks.RolloutCallback"
    )


def limit_epochs(trainer: Trainer) -> None:
    """Limit a run without any limit to one epoch, before Lightning does to 1000, over which schedules would stretch."""
    has_timer = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.max_epochs is None and trainer.max_steps == -1 and not has_timer:
        trainer.fit_loop.max_epochs = max(trainer.min_epochs or 0, 1)
        log.info("neither trainer.max_epochs nor trainer.max_steps is set: max_epochs is %d", trainer.max_epochs)


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


def refuse_weight_averaging(trainer: Trainer) -> None:
    """Refuse callbacks that average all weights, the frozen 4-bit codes among them.

    Raises:
        UserError: The trainer has one.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        names = {base.__name__ for base in type(callback).__mro__}  # not every Lightning has the first
        if names & {"WeightAveraging", "StochasticWeightAveraging"}:
            raise UserError(
                f"weights are not averaged, as the base is frozen and packed; got {type(callback).__name__} among the "
                "callbacks; leave it out"
            )


def check_devices(trainer: Trainer) -> None:
    """Refuse a run of several processes by another strategy than this package's: each would train by itself.

    Raises:
        UserError: The trainer has such a strategy.
    """
    world_size, strategy = planned_ranks(trainer), trainer.strategy
    alone = isinstance(strategy, SingleDeviceStrategy) and world_size == 1
    if not alone and not isinstance(strategy, UnwrappedDDPStrategy):
        raise UserError(
            f"a run on several devices needs this package's strategy; got {type(strategy).__name__} for {world_size}; "
            "give the Trainer devices=1, or strategy=UnwrappedDDPStrategy() of qerl_pl.runtime.strategy"
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


def check_monitors(trainer: Trainer, sets: Sequence[str], names: Collection[str]) -> None:
    """Refuse callbacks that monitor a metric that no validation logs: Lightning would stop at the first one.

    Args:
        trainer: With its callbacks.
        sets: Names of the validation sets; "" for a single set.
        names: Metrics of a set. Callbacks and modules of the user may log others.

    Raises:
        UserError: Such a callback is there.
    """
    prefixes = [f"val/{name}/" if name else "val/" for name in sets]
    logged = [prefix + name for prefix in prefixes for name in names]
    for kind, monitor in _monitors(trainer) if sets else ():
        is_of_a_set = any(monitor.startswith(prefix) and "/" not in monitor.removeprefix(prefix) for prefix in prefixes)
        if monitor.startswith("val/") and monitor not in logged and not (is_of_a_set and _has_user_code(trainer)):
            raise _not_logged(kind, monitor, "validations log", logged)


def check_logged(trainer: Trainer) -> None:
    """The same of what has been logged, after a validation before training or after the first step.

    Raises:
        UserError: A callback monitors a metric of which there is none yet.
    """
    in_validation = trainer.sanity_checking
    for kind, monitor in _monitors(trainer):
        if monitor in trainer.callback_metrics or monitor.startswith("val/") != in_validation:
            continue
        if in_validation or not (monitor in OF_LIGHTNING or _has_user_code(trainer)):
            what = "validations log" if in_validation else "steps log"
            raise _not_logged(kind, monitor, what, [*trainer.callback_metrics])


def _monitors(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Class and metric of each callback that needs one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        is_strict = isinstance(callback, ModelCheckpoint) or (isinstance(callback, EarlyStopping) and callback.strict)
        if is_strict and callback.monitor is not None:
            yield type(callback).__name__, callback.monitor


def _has_user_code(trainer: Trainer) -> bool:
    """Whether a callback or the module, which may log metrics, is of neither this package nor Lightning."""
    hooks = (*trainer.callbacks, trainer.lightning_module)  # type: ignore[attr-defined]
    return any(type(hook).__module__.partition(".")[0] not in ("qerl_pl", "lightning") for hook in hooks)


def _not_logged(kind: str, monitor: str, what: str, logged: Sequence[str]) -> UserError:
    nearest = get_close_matches(monitor, logged) or logged[:3]
    return UserError(
        f"a monitored metric must be logged; {kind} monitors {monitor}, and {what} {', '.join(nearest)}; set "
        "best.monitor to one of these, or best to null"
    )
