"""Which sequences share a forward pass."""

from collections.abc import Sequence


def deal_micro_batches(lengths: Sequence[int], most_tokens: int | None) -> list[list[int]]:
    """Deal sequences to few micro-batches of as even a number of tokens as that gives.

    The longest first, each to the micro-batch that has the fewest tokens so far. Where that makes one too large, each
    to the first that has room, if that needs no more of them; else there is one micro-batch more. The same lengths are
    dealt alike anywhere.

    Args:
        lengths: Tokens of each sequence.
        most_tokens: Of a micro-batch; a sequence of more goes alone. None takes one micro-batch of all.

    Returns:
        Indices into `lengths`, ascending in each micro-batch; at least one micro-batch, empty where there are no
        sequences. That of most tokens is the first, so that no later one needs memory that was not needed before.
    """
    if most_tokens is None:
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    alone = [[index] for index in longest_first if lengths[index] >= most_tokens]
    others = longest_first[len(alone) :]
    filled = _first_fit(others, lengths, most_tokens)
    parts = filled
    for count in range(-(-sum(lengths[index] for index in others) // most_tokens), len(filled) + 1):
        even = _evenly(others, lengths, count)
        if all(_tokens(part, lengths) <= most_tokens for part in even):
            parts = even
            break
    dealt = sorted(alone + parts, key=lambda part: -_tokens(part, lengths))
    return [sorted(part) for part in dealt] or [[]]


def _tokens(part: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in part)


def _evenly(indices: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in indices:
        least = tokens.index(min(tokens))
        parts[least].append(index)
        tokens[least] += lengths[index]
    return parts


def _first_fit(indices: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), len(parts))
        if place == len(parts):
            parts.append([])
            room.append(most_tokens)
        parts[place].append(index)
        room[place] -= lengths[index]
    return parts
