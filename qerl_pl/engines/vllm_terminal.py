"""vLLM's progress bars of capturing CUDA graphs, for which it has no setting: how long the start took is logged."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

BAR = "Capturing CUDA graphs"


class _WithoutBar(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.in_bar = False

    def write(self, text: str) -> int:
        """Pass on what is no part of the bar, nor the line end after it."""
        self.in_bar = BAR in text or (self.in_bar and not text.strip())
        if not self.in_bar:
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Inside the block what is written to standard error lacks these bars."""
    with contextlib.redirect_stderr(_WithoutBar(sys.stderr)):
        yield
