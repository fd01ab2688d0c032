"""Ranks as threads of one process: the real path of each rank, with an exchange in place of a network."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from qerl_pl.runtime.communicator import Communicator

T = TypeVar("T")


@dataclass
class Exchange:
    """What the threads of one run share."""

    size: int
    slots: list[Any] = field(default_factory=list)
    exchanges: int = 0
    """All-reduces of tensors so far."""

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size)


@dataclass(frozen=True)
class ThreadRanks(Communicator):
    """One thread among those of a run."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def all_gather(self, value: T) -> list[T]:
        self.exchange.slots[self.rank] = value
        self.exchange.barrier.wait(timeout=60)
        found = list(self.exchange.slots)
        self.exchange.barrier.wait(timeout=60)
        return found

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        own = list(tensors)
        parts = self.all_gather([tensor.clone() for tensor in own])
        for index, tensor in enumerate(own):
            tensor.zero_()
            for part in parts:
                tensor += part[index]
        self.exchange.exchanges += self.rank == 0

    def barrier(self) -> None:
        self.exchange.barrier.wait(timeout=60)


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returns on each of `size` ranks; the first error of any of them."""
    exchange = Exchange(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, exchange=exchange))
        except BaseException as error:  # told by the caller; the others must not wait for it
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
