"""How many devices a run may have, and which of its processes writes."""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from qerl_pl.errors import UserError


def check_one_device(trainer: Trainer) -> None:
    """Refuse what Lightning would start several processes for, or a process group of one.

    Raises:
        UserError: The trainer asks for several devices, or for a strategy that is made for them.
    """
    if (devices := trainer.num_devices * trainer.num_nodes) > 1:
        raise UserError(f"training runs on one device so far; found {devices}; set trainer.devices to 1")
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        found = type(trainer.strategy).__name__
        raise UserError(
            f"training runs on one device so far; found the strategy {found}; leave trainer.strategy at auto"
        )


def writes_files(trainer: Trainer) -> bool:
    """Whether this process writes the run's files: the first, and not in a trial by `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
