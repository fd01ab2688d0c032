"""The order of the training prompts, kept in checkpoints."""

from collections.abc import Iterator

import torch
from torch.utils.data import DistributedSampler

from qerl_pl.run.seeding import stream_seed


class PromptSampler(DistributedSampler[int]):
    """Indices of the prompts in the order of (seed, epoch), whole batches only, resumable at any of them.

    A `DistributedSampler`, so that Lightning sets its epoch and does not put its own in its place; but every rank sees
    the whole batch, and what samples deals it out: a run may go on with another number of ranks. Nothing is decided
    before the first index is asked for: loaders are restored before Lightning tells them their epoch.

    Args:
        size: number of prompts of the training set.
        batch_size: prompts of a batch; the rest of an epoch is left out.
        seed: of the order.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.epoch = 0
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._yielded = 0
        self._start = 0

    def __len__(self) -> int:
        return self._size // self._batch_size * self._batch_size

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        generator = torch.Generator().manual_seed(stream_seed(self._seed, "order", self.epoch))
        order = torch.randperm(self._size, generator=generator)
        for position in range(start, len(self)):
            self._yielded = position + 1
            yield int(order[position])

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew for another epoch; the same one goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self._yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its indices were seen."""
        return {"epoch": self.epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved position."""
        self.epoch, self._yielded, self._start = state["epoch"], state["yielded"], state["yielded"]
