"""Samples of held-out prompts that outlive their process."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from qerl_pl.types import GradedAnswer, Prompt

FORMAT = 1
"""Of lines and grades: raise it with every change that makes earlier ones other than new ones would be."""


@dataclass(frozen=True)
class SampleRecord:
    """One graded completion of a held-out prompt, as a line of JSON keeps it."""

    set: str
    """Name of the prompt's set; empty where there is but one."""
    prompt_id: str
    sample: int | None
    """Number of the sample; null is the greedy one."""
    correct: bool
    answer: str | None
    """What was taken for the answer."""
    reference: str
    tokens: int
    truncated: bool
    rewards: dict[str, float]
    prompt: str
    completion: str

    @property
    def graded(self) -> GradedAnswer:
        """What statistics need of it."""
        return GradedAnswer(self.correct, self.answer, self.tokens, self.truncated)


class Samples(Protocol):
    """Where an evaluation keeps what it has sampled, and looks first."""

    def find(self, name: str, prompt: Prompt, sample: int | None) -> GradedAnswer | None:
        """What was sampled of a prompt of this set before."""

    def keep(self, records: Sequence[SampleRecord]) -> None:
        """Keep what was sampled now."""


class KeptSamples:
    """Samples in a file of JSON lines, one a line, whole or absent.

    Args:
        path: What this process appends to; half a line, which a kill has left, is taken out.
        others: Files of other processes, whose samples count too.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._found: dict[tuple[str, str, int | None], tuple[GradedAnswer, str, str]] = {}
        for file in (path, *others):
            self._read(file, mend=file == path)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, name: str, prompt: Prompt, sample: int | None) -> GradedAnswer | None:
        """What was sampled before; nothing where question or reference have changed since."""
        graded, *asked = self._found.get((name, prompt.id, sample), (None, "", ""))
        return graded if asked == [prompt.text, prompt.reference] else None

    def keep(self, records: Sequence[SampleRecord]) -> None:
        """Append lines; they are on the disk when this returns."""
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
        with self._path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        for record in records:
            self._remember(record)

    def _remember(self, record: SampleRecord) -> None:
        """Without its text, for there may be many."""
        self._found[record.set, record.prompt_id, record.sample] = (record.graded, record.prompt, record.reference)

    def _read(self, file: Path, mend: bool) -> None:
        if not file.is_file():
            return
        with file.open("rb+" if mend else "rb") as lines:
            end = 0
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._remember(SampleRecord(**json.loads(line)))
                end += len(line)
            if mend:
                lines.truncate(end)
