"""Packed sequences: their partition into micro-batches, and the layout of their tokens without padding.

The tokens of a batch are concatenated; attention is masked to each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def partition_micro_batches(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Partition sequences into few micro-batches with balanced numbers of tokens.

    "First-fit decreasing" bounds the number of micro-batches; "longest processing time first" balances them where it
    fits `max_tokens` with as many or fewer. Depends on the lengths alone.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Of a micro-batch; a longer sequence gets its own. None returns a single micro-batch.

    Returns:
        Ascending indices into `lengths` for each micro-batch; a single empty one where there are no sequences. The
        largest micro-batch comes first, so that memory does not grow later.
    """
    if max_tokens is None:
        return [list(range(len(lengths)))]
    by_length = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    single = [[index] for index in by_length if lengths[index] >= max_tokens]
    others = by_length[len(single) :]

    def tokens(indices: Sequence[int]) -> int:
        return sum(lengths[index] for index in indices)

    micro_batches = _first_fit_decreasing(others, lengths, max_tokens)
    for count in range(-(-tokens(others) // max_tokens), len(micro_batches) + 1):
        balanced = _longest_processing_time_first(others, lengths, count)
        if all(tokens(indices) <= max_tokens for indices in balanced):
            micro_batches = balanced
            break
    largest_first = sorted(single + micro_batches, key=lambda indices: -tokens(indices))
    return [sorted(indices) for indices in largest_first] or [[]]


def _longest_processing_time_first(by_length: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in by_length:
        least = loads.index(min(loads))
        bins[least].append(index)
        loads[least] += lengths[index]
    return bins


def _first_fit_decreasing(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in by_length:
        first = next((i for i, load in enumerate(loads) if load + lengths[index] <= max_tokens), len(bins))
        if first == len(bins):
            bins.append([])
            loads.append(0)
        bins[first].append(index)
        loads[first] += lengths[index]
    return bins


@dataclass(frozen=True)
class Packing:
    """Layout of B sequences concatenated to S tokens."""

    mask: Tensor
    """bool [B, T]: real tokens of the padded batch; in row-major order the S packed ones."""
    positions: Tensor
    """Position of each token in its sequence, int64 [S]."""
    cu_seqlens: Tensor
    """Cumulative sequence lengths, int32 [B + 1]."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    routing: Tensor | None = None
    """Experts that the sampler chose in each layer, int64 [layers, S, k], -1 for none; None: the router selects."""

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> "Packing":
        """Packing of right-padded rows [B, width]; row i has `lengths[i]` real tokens."""
        index = torch.arange(width, device=lengths.device)
        mask = index < lengths[:, None]
        cu_seqlens = functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(mask, index.expand(mask.shape)[mask], cu_seqlens, int(lengths.max()))
