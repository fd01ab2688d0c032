"""What the processes of a run tell each other; with one process, nothing.

Every rank walks the same path with the same global numbers: what differs between ranks (which prompts it samples, the
gradient of its completions) is put together here, in the order of ranks, so that sums have the same bits each time.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, distributed

from qerl_pl.errors import UserError


def warn_of_this_rank(log: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning that a user reads whichever rank has it, named with the rank where there are several.

    The command line keeps away what ranks above 0 log up to warnings, for the first one says the same.

    Args:
        log: What logs it.
        message: With places for the arguments.
        arguments: Those.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        message, arguments = f"rank %d: {message}", (distributed.get_rank(), *arguments)
    if log.getEffectiveLevel() <= logging.WARNING:  # `warning` would also ask what `logging.disable` keeps away
        log.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, message, arguments, None))


T = TypeVar("T")

BUCKET = 2**31

"""Bytes of tensors that are summed at once, in a copy; a larger tensor is summed alone, where it is."""


@dataclass(frozen=True)
class Communicator:
    """One process among those of a run; the default is a run of one.

    Every method is collective: all ranks call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    objects: Any = None
    """Process group for Python objects, over the CPUs."""

    def gather(self, value: T) -> list[T]:
        """Each rank's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.objects)
        return found

    def concatenate(self, values: Iterable[T]) -> list[T]:
        """All ranks' values in one list, by rank."""
        return [one for part in self.gather(list(values)) for one in part]

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks: one all-reduce of what fits `BUCKET`.

        Args:
            tensors: Float32 and on one device, of the same shapes on all ranks.
        """
        for parts in _buckets(tensors) if self.size > 1 else ():
            if len(parts) == 1 and parts[0].is_contiguous():
                distributed.all_reduce(parts[0])
                continue
            flat = torch.cat([part.flatten() for part in parts])
            distributed.all_reduce(flat)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.size > 1:
            distributed.barrier(group=self.objects)

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Refuse ranks that would not train the same run.

        Args:
            facts: What must be equal on all ranks, by a name that a user knows.

        Raises:
            UserError: One is not.
        """
        first, *others = self.gather(dict(facts))
        for rank, found in enumerate(others, start=1):
            for name, value in found.items():
                if value != first[name]:
                    raise UserError(
                        f"every rank must have the same {name}; found {value!s:.40} on rank {rank} and "
                        f"{first[name]!s:.40} on rank 0; give all the same files, on a shared file system"
                    )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that fit `BUCKET` together."""
    bucket, held = list[Tensor](), 0
    for tensor in tensors:
        if bucket and held + tensor.nbytes > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


SINGLE_PROCESS = Communicator()


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
