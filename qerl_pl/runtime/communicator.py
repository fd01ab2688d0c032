"""Collectives of a run's ranks; with one process they do nothing.

Every rank computes the same global numbers in the same order: prompts sampled and gradients accumulated per rank are
combined in the order of the ranks, so that sums have the same bits each time.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from torch import Tensor, distributed
from torch._utils import _take_tensors

from qerl_pl.errors import UserError

T = TypeVar("T")

BUCKET = 2**31
"""Bytes of tensors per all-reduce, which copies them; a larger tensor is reduced alone, in place."""


@dataclass(frozen=True)
class Communicator:
    """This process's rank and the collectives of all ranks; the default is a run of one process.

    All ranks call every method, in the same order.
    """

    rank: int = 0
    size: int = 1
    """World size."""
    gloo_group: Any = None
    """Process group of Python objects, over gloo."""

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.gloo_group)
        return values

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over all ranks in place, in flat buckets of at most `BUCKET` bytes.

        Args:
            tensors: Float32 and on one device, of the same shapes on all ranks.
        """
        for bucket in _take_tensors(tensors, BUCKET) if self.size > 1 else ():
            if len(bucket) == 1 and bucket[0].is_contiguous():
                distributed.all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            distributed.all_reduce(flat)
            for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            distributed.barrier(group=self.gloo_group)

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Refuse ranks that would train different runs.

        Args:
            facts: Values that must be equal on all ranks, by a name for the user.

        Raises:
            UserError: A value differs.
        """
        first, *others = self.all_gather(dict(facts))
        for rank, values in enumerate(others, start=1):
            for name, value in values.items():
                if value != first[name]:
                    raise UserError(
                        f"every rank must have the same {name}; got {value!s:.40} on rank {rank} and "
                        f"{first[name]!s:.40} on rank 0; give all the same files, on a shared file system"
                    )


SINGLE_PROCESS = Communicator()


def planned_ranks(trainer: Trainer) -> int:
    """World size of the run, also before its processes are started."""
    return trainer.num_devices * trainer.num_nodes


def warn_of_this_rank(log: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning of any rank, prefixed with the rank if there are several.

    The command line disables warnings on ranks above 0, as they repeat those of rank 0; this one passes.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        message, arguments = f"rank %d: {message}", (distributed.get_rank(), *arguments)
    if log.getEffectiveLevel() <= logging.WARNING:  # unlike `log.warning`, whatever `logging.disable` says
        log.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, message, arguments, None))


def is_first_process() -> bool:
    """Whether this is rank 0, by the launcher's variables; known before the process group."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]


def writes_files(trainer: Trainer) -> bool:
    """Whether this process writes the run's files: rank 0, except with `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
