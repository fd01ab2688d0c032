"""Which of a run's processes writes, and how its batches go onto them."""

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from qerl_pl.errors import UserError


def planned_ranks(trainer: Trainer) -> int:
    """Processes that the run will have, also before they are started."""
    return trainer.num_devices * trainer.num_nodes


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that shard what is trained, or that are for several devices where there is one.

    Raises:
        UserError: The trainer has such a strategy.
    """
    several = planned_ranks(trainer) > 1
    if type(trainer.strategy) is not DDPStrategy if several else not isinstance(trainer.strategy, SingleDeviceStrategy):
        found = type(trainer.strategy).__name__
        raise UserError(
            f"training is one process a device, each with all that is trained; found the strategy {found} for "
            f"{planned_ranks(trainer)} devices; leave trainer.strategy at auto"
        )


def check_ranks_divide(batch_size: int, ranks: int) -> None:
    """Refuse a batch that does not go evenly onto the ranks.

    Raises:
        UserError: It does not.
    """
    if batch_size % ranks:
        raise UserError(
            f"data.batch_size must be a multiple of the number of devices; found {batch_size} for {ranks}; change one "
            "of them"
        )


def is_first_process() -> bool:
    """Whether this is the process of rank 0, by what launchers tell; known from the start."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]


def writes_files(trainer: Trainer) -> bool:
    """Whether this process writes the run's files: the first, and not in a trial by `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
