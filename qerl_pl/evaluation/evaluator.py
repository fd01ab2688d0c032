"""Samples of held-out prompts that outlive their process."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from lightning.pytorch.utilities.seed import isolate_rng
from transformers import PreTrainedTokenizerBase

from qerl_pl.engines.base import RolloutEngine
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.rollout.config import CollectorConfig
from qerl_pl.rollout.experience import score_groups
from qerl_pl.types import EvaluatedPrompt, GradedAnswer, Prompt, RolloutRequest, SamplingConfig

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


class SampleCache:
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


GREEDY = None

"""Number of the greedy sample."""

Job = tuple[int, int | None]

"""A prompt's place, and the number of a sample."""


def sample_seeds(seed: int, stream: Sequence[int | str], prompt: Prompt, samples: Iterable[int]) -> tuple[int, ...]:
    """Seeds of a prompt's samples.

    Args:
        seed: Of the run.
        stream: What is sampled, such as ("rollout", version).
        prompt: Whose completions these are.
        samples: Their numbers.
    """
    return tuple(stream_seed(seed, *stream, prompt.id, sample) for sample in samples)


@dataclass(frozen=True)
class Evaluator:
    """Samples held-out prompts, greedily and not, as many completions at once as the engine is to have."""

    config: CollectorConfig
    engine: RolloutEngine
    """Awake, with the weights to evaluate."""
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def evaluate(self, prompts: Sequence[Prompt], name: str, kept: Samples | None) -> list[EvaluatedPrompt]:
        """All answers to some prompts of a set; only what is not kept is sampled, and then kept."""
        numbers = [GREEDY, *range(self.config.eval_samples)]
        found: dict[Job, GradedAnswer] = {}
        if kept is not None:
            for place, prompt in enumerate(prompts):
                for sample in numbers:
                    if (answer := kept.find(name, prompt, sample)) is not None:
                        found[place, sample] = answer
        sampling = self.config.evaluation_sampling()
        for greedy in (True, False):
            jobs = [
                (place, sample)
                for place in range(len(prompts))
                for sample in numbers
                if (sample is GREEDY) == greedy and (place, sample) not in found
            ]
            settings = SamplingConfig(sampling.max_tokens, 0.0, stop=sampling.stop) if greedy else sampling
            for part in self._parts(jobs):
                found |= self._sample(prompts, part, settings, name, kept)
        return [
            EvaluatedPrompt(
                prompt.id, found[place, GREEDY], [found[place, sample] for sample in range(self.config.eval_samples)]
            )
            for place, prompt in enumerate(prompts)
        ]

    def _parts(self, jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
        size = self.config.eval_batch or max(1, len(jobs))
        return (jobs[start : start + size] for start in range(0, len(jobs), size))

    def _sample(
        self, prompts: Sequence[Prompt], jobs: Sequence[Job], sampling: SamplingConfig, name: str, kept: Samples | None
    ) -> dict[Job, GradedAnswer]:
        # The same streams at every evaluation: differences come from the policy, not from the draw.
        stream = ("evaluation", name) if name else ("evaluation",)
        groups = [(prompts[place], [one for _, one in group]) for place, group in groupby(jobs, lambda job: job[0])]
        requests = [
            RolloutRequest(prompt.token_ids, sample_seeds(self.seed, stream, prompt, [one or 0 for one in samples]))
            for prompt, samples in groups
        ]
        completions = [[one] for group in self.engine.generate(requests, sampling) for one in group]
        with isolate_rng():  # a reward may draw, and how often one evaluates must not change the training
            asked = [prompts[place] for place, _ in jobs]
            scored = score_groups(self.config.rewards, self.tokenizer, asked, completions)
            answers = [self.config.graded(group)[0] for group in scored]
        if kept is not None:
            records = [group.records()[0] for group in scored]
            kept.keep(
                [
                    SampleRecord(
                        set=name,
                        prompt_id=record.prompt_id,
                        sample=sample,
                        correct=answer.correct,
                        answer=answer.answer,
                        reference=record.reference,
                        tokens=record.tokens,
                        truncated=record.truncated,
                        rewards=record.rewards,
                        prompt=record.prompt,
                        completion=record.completion,
                    )
                    for record, answer, (_, sample) in zip(records, answers, jobs, strict=True)
                ]
            )
        return dict(zip(jobs, answers, strict=True))
