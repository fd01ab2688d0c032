"""Rewards for the form of a completion: its tags and its length."""

import re
from collections.abc import Sequence

from qerl_pl.errors import UserError
from qerl_pl.rewards.base import RewardSample


def last_tagged(text: str, tag: str) -> str | None:
    """What the last complete `<tag>...</tag>` of `text` encloses, stripped; None without one."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = head.rpartition(f"<{tag}>")
    return content.strip() if closing and opening else None


class Format:
    """1 where the completion is exactly one block a tag, in order, none empty, with nothing but space around; else 0.

    Args:
        weight: Factor of this reward in the total.
        tags: Names of the blocks; the default asks for <think>...</think><answer>...</answer>.
    """

    name = "format"

    def __init__(self, weight: float = 1.0, tags: Sequence[str] = ("think", "answer")) -> None:
        if not tags:
            raise UserError("Format needs at least one tag; got none; name them, such as [think, answer].")
        self.weight = weight
        self.tags = tuple(tags)
        names = "|".join(map(re.escape, tags))
        inside = rf"((?:(?!</?(?:{names})>).)*)"  # no tag inside a block
        blocks = [rf"\s*<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags]
        self._pattern = re.compile("".join(blocks) + r"\s*", re.DOTALL)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        matches = [self._pattern.fullmatch(sample.completion) for sample in samples]
        return [float(match is not None and all(block.strip() for block in match.groups())) for match in matches]


class OverlongPenalty:
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length: DAPO's soft over-long punishment.

    arXiv 2503.14476, equation 13.

    Args:
        max_length: Tokens at which the penalty is full; the sampling limit, or less.
        buffer: Tokens before max_length over which the penalty grows.
        weight: Factor of this reward in the total.
    """

    name = "overlong"

    def __init__(self, max_length: int, buffer: int, weight: float = 1.0) -> None:
        if not 0 < buffer <= max_length:
            raise UserError(
                f"OverlongPenalty needs 0 < buffer <= max_length; got buffer={buffer}, max_length={max_length}; "
                "choose a buffer of about a fifth of max_length."
            )
        self.weight = weight
        self.max_length = max_length
        self.buffer = buffer

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        free = self.max_length - self.buffer
        return [-min(1.0, max(0.0, (sample.num_tokens - free) / self.buffer)) for sample in samples]
