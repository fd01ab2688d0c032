"""Which rank samples which prompts: whole groups, as many on each rank, and about as many tokens where known."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from qerl_pl.run.ranks import Ranks

T = TypeVar("T")


def deal(prompts: Sequence[str], foreseen: Mapping[str, float], size: int) -> list[list[int]]:
    """Places of the prompts of each rank, ascending; equal on all ranks, for all know the same.

    The longest is dealt first, each to the rank with the fewest tokens so far among those with room; numbers of prompts
    differ by one at most.

    Args:
        prompts: Ids, in the order of the batch.
        foreseen: Mean length of a prompt's completions where it was sampled before, in tokens. Others are taken for
            the mean of those.
        size: Number of ranks.
    """
    usual = sum(foreseen.values()) / len(foreseen) if foreseen else 1.0
    length = [foreseen.get(prompt, usual) for prompt in prompts]
    fewest, more = divmod(len(prompts), size)
    hands: list[list[int]] = [[] for _ in range(size)]
    tokens = [0.0] * size
    for place in sorted(range(len(prompts)), key=lambda place: (-length[place], place)):
        full = sum(len(hand) > fewest for hand in hands) == more
        open_ranks = [rank for rank in range(size) if len(hands[rank]) < fewest + (not full)]
        rank = min(open_ranks, key=lambda rank: (tokens[rank], len(hands[rank]), rank))
        hands[rank].append(place)
        tokens[rank] += length[place]
    return [sorted(hand) for hand in hands]


def in_order(ranks: Ranks, places: Sequence[int], own: Iterable[T]) -> list[T]:
    """What all ranks have, in the order of its places; collective.

    Args:
        ranks: Who takes part.
        places: Of what this rank has.
        own: That.
    """
    together = ranks.concatenate(zip(places, own, strict=True))
    return [one for _, one in sorted(together, key=lambda pair: pair[0])]
