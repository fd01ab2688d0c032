"""Packed sequences: their partition into micro-batches, and the layout of their tokens without padding.

The tokens of a batch are concatenated; attention is masked to each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from qerl_kernels import SharedPrompts
from torch import Tensor
from torch.nn import functional


def partition_micro_batches(lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
    """Partition sequences into few micro-batches with balanced numbers of tokens.

    "First-fit decreasing" bounds the number of micro-batches; "longest processing time first" balances them where it
    fits `max_tokens` with as many or fewer. Depends on the lengths alone.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Most tokens of a micro-batch; a longer sequence gets its own. None returns a single micro-batch.

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


def partition_groups(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], max_tokens: int | None
) -> list[list[int]]:
    """`partition_micro_batches` of sequences whose prompt is there once in each micro-batch.

    Args:
        lengths: Tokens of each sequence.
        prompts: Tokens of each sequence's prompt.
        groups: A number for each, equal where the prompt is the same.
        max_tokens: As there.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    parts: list[list[int]] = []
    costs: list[int] = []
    for indices in members.values():
        for index in indices:
            own = lengths[index] - prompts[index]
            if index == indices[0] or (max_tokens is not None and costs[-1] + own > max_tokens):
                parts.append([])
                costs.append(prompts[index])
            parts[-1].append(index)
            costs[-1] += own
    micro_batches = partition_micro_batches(costs, max_tokens)
    return [sorted(index for part in micro_batch for index in parts[part]) for micro_batch in micro_batches]


class Prompts(NamedTuple):
    """What precedes the first masked token of each of B sequences."""

    lengths: Tensor
    """Tokens of each prompt, int64 [B]."""
    groups: Tensor
    """A number for each sequence, equal where the prompt is the same, int64 [B]."""

    @classmethod
    def of(cls, tokens: Tensor, mask: Tensor) -> "Prompts":
        """Prompts of sequences with these tokens, int64 [B, T], and mask, bool [B, T]."""
        if not len(tokens):  # maybe without columns
            return cls(*tokens.new_empty(2, 0))
        lengths = mask.int().argmax(dim=1)
        rows, ends = tokens[:, : int(lengths.max())].tolist(), lengths.tolist()
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(row[:end]), len(numbers)) for row, end in zip(rows, ends, strict=True)]
        return cls(lengths, torch.tensor(groups, device=tokens.device))


@dataclass(frozen=True)
class Packing:
    """Layout of B sequences concatenated to S tokens: their prompts included, or first each different prompt once."""

    mask: Tensor
    """bool [B, T]: real tokens of the padded batch."""
    index: Tensor
    """Index of each packed token in the flattened padded batch [B * T], int64 [S]."""
    positions: Tensor
    """Position of each token in its sequence, int64 [S]."""
    cu_seqlens: Tensor
    """Cumulative lengths, int32: of the sequences [B + 1], or of prompts and completions, each by itself."""
    max_seqlen: int
    """Tokens of the longest of them."""
    packed_index: Tensor | None = None
    """Index among the packed tokens of each real token of the padded batch, int64; None if they are the same ones."""
    shared: SharedPrompts | None = None
    """Which completions have which prompt; None if each sequence has its own."""
    routing: Tensor | None = None
    """Experts that the sampler chose in each layer, int64 [layers, S, k], -1 for none; None: the router selects."""

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> "Packing":
        """Packing of right-padded rows [B, width]; row i has `lengths[i]` real tokens."""
        mask = torch.arange(width, device=lengths.device) < lengths[:, None]
        index = mask.flatten().nonzero().squeeze(1)
        return cls(mask, index, index % width, _cumulative(lengths), int(lengths.max()))

    @classmethod
    def with_shared_prompts(cls, lengths: Tensor, width: int, prompts: Tensor, groups: Tensor) -> "Packing":
        """Packing of right-padded rows [B, width] that has each prompt once.

        Args:
            lengths: Real tokens of each row, int64 [B], more than its prompt has.
            width: Width of the rows.
            prompts: Tokens of each row's prompt, int64 [B], at least one.
            groups: int64 [B], equal for rows that begin with the same prompt.
        """
        rows, at = torch.arange(len(lengths), device=lengths.device), torch.arange(width, device=lengths.device)
        first = (groups[:, None] == groups).int().argmax(dim=1)  # row whose prompt is packed
        order = first.argsort(stable=True)  # the rows of a group next to each other
        in_prompt, real = at < prompts[:, None], at < lengths[:, None]
        prompt, completion = in_prompt & (first == rows)[:, None], (real & ~in_prompt)[order]
        row, column = completion.nonzero(as_tuple=True)
        index = torch.cat((prompt.flatten().nonzero().squeeze(1), order[row] * width + column))
        before = len(index) - len(row)
        packed_prompt = prompt.flatten().cumsum(0).view(prompt.shape)[first]
        packed_completion = completion.flatten().cumsum(0).view(completion.shape)[order.argsort()] + before
        packed_index = torch.where(in_prompt, packed_prompt, packed_completion) - 1
        of_prompts, completions = prompts[first == rows], (lengths - prompts)[order]
        is_last = functional.pad(first[order].diff() != 0, (0, 1), value=True)
        cu_completions = functional.pad(completions.cumsum(0)[is_last], (1, 0))
        shared = SharedPrompts(
            before, _cumulative(of_prompts), cu_completions.int(), int(of_prompts.max()),
            int(cu_completions.diff().max()),
        )  # fmt: skip
        parts = torch.cat((of_prompts, completions))
        bounds = _cumulative(parts), int(parts.max())
        return cls(real, index, index % width, *bounds, packed_index[real], shared)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, T, ...] -> [S, ...]."""
        return padded.flatten(0, 1)[self.index]

    def pad(self, packed: Tensor) -> Tensor:
        """[S, ...] -> [B, T, ...], zeros where nothing is, a prompt in each of its rows."""
        values = packed if self.packed_index is None else packed[self.packed_index]
        return packed.new_zeros(*self.mask.shape, *packed.shape[1:]).index_put((self.mask,), values)

    def before(self, chosen: Tensor) -> Tensor:
        """Packed indices of the tokens before the M chosen ones: bool [B, T], False at position 0 -> int64 [M]."""
        real = chosen[self.mask].nonzero().squeeze(1) - 1
        return real if self.packed_index is None else self.packed_index[real]


def _cumulative(lengths: Tensor) -> Tensor:
    return functional.pad(lengths.cumsum(0), (1, 0)).int()
