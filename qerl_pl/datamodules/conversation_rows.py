"""Rendered conversations of a data set, in flat tensors, which a cache on disk may hold for all ranks of a machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conversation:
    """One row of a data set, rendered."""

    id: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """Of each token, whether the loss counts it; False for the first, which nothing predicts."""

    @property
    def prompt_and_answer(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before the last that train, and those; all and none where the whole conversation trains."""
        start = len(self.trained) - self.trained[::-1].index(False) if False in self.trained else 0
        start = start if start > 1 else len(self.token_ids)
        return self.token_ids[:start], self.token_ids[start:]


class Conversations(Sequence[Conversation]):
    """Conversations that are made when they are read: as Python's numbers they take seven times the memory.

    Args:
        use: First part of their ids.
        tensors: Of all rows, see `packed`.
        rows: Indices of those that are in it.
    """

    def __init__(self, use: str, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        self._use, self._tensors, self.rows = use, tensors, rows
        self._ends = tensors["lengths"].cumsum(0)

    @staticmethod
    def packed(conversations: Iterable[Conversation]) -> dict[str, Tensor]:
        """Tokens int32 [T] and what trains of them bool [T], of all rows, and each row's length int64."""
        tokens, trained = [], []
        for conversation in conversations:
            tokens.append(torch.tensor(conversation.token_ids, dtype=torch.int32))
            trained.append(torch.tensor(conversation.trained, dtype=torch.bool))
        lengths = torch.tensor([len(row) for row in tokens])
        return {"tokens": torch.cat(tokens), "trained": torch.cat(trained), "lengths": lengths}

    def name(self, row: int) -> str:
        """Id of a row."""
        return f"{self._use}-{row}"

    def take(self, rows: Sequence[int]) -> "Conversations":
        """Those of other rows."""
        return Conversations(self._use, self._tensors, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> "Conversations": ...
    def __getitem__(self, index: int | slice) -> "Conversation | Conversations":
        if isinstance(index, slice):
            return self.take(self.rows[index])
        row = self.rows[index]
        end = int(self._ends[row])
        start = end - int(self._tensors["lengths"][row])
        tokens, trained = (self._tensors[name][start:end].tolist() for name in ("tokens", "trained"))
        return Conversation(self.name(row), tuple(tokens), tuple(trained))
