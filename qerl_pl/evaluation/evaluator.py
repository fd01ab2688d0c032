"""Samples and grades held-out prompts, with a cache of samples that outlives the process."""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from transformers import PreTrainedTokenizerBase

from qerl_pl.engines.base import RolloutEngine
from qerl_pl.errors import require_at_least
from qerl_pl.rewards import AnswerReward, extract_answers, normalize_answers
from qerl_pl.rollout.collector import require_finite_logprobs, sample_completions
from qerl_pl.rollout.dialogue_sampler import DialogueSampler
from qerl_pl.rollout.scoring import Scorer, gather_by_index, without_none
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.types import (
    EvaluatedPrompt,
    Evaluation,
    GradedAnswer,
    PolicyWeights,
    Prompt,
    SamplingConfig,
)

log = logging.getLogger(__name__)

CACHE_FORMAT = 6
"""Version of the sample cache: raise it with every change of its lines or of grading."""


@dataclass(frozen=True)
class SampleRecord:
    """One graded completion of a held-out prompt, a line of the cache."""

    set: str
    """Name of the prompt's set; empty if there is only one set."""
    prompt_id: str
    sample: int | None
    """Index of the sample; null is the greedy one."""
    correct: bool
    answer: str | None
    """Extracted answer, normalized if it is wrong."""
    reference: str
    tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    prompt: str
    completion: str
    row: str
    """`row_digest` of the prompt."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """Messages of a dialogue with an environment; without one, the line leaves them out."""

    @property
    def graded(self) -> GradedAnswer:
        """The record without texts."""
        return GradedAnswer(self.correct, self.answer, self.tokens, self.truncated, self.rewards)


def row_digest(prompt: Prompt) -> str:
    """Digest of all that a sample and its grade take from the row: prompt, reference, and columns for the rewards."""
    return hashlib.sha256(prompt.fingerprint().encode()).hexdigest()[:12]


class SampleCache:
    """Cache of graded samples in a JSON Lines file.

    Args:
        path: File that this process appends to; an incomplete last line, left by a kill, is removed, and so is all from
            a damaged one on.
        others: Files of other processes, which are only read.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._samples: dict[tuple[str, str, int | None, str], GradedAnswer] = {}
        for file in (path, *others):
            self._read(file, repair=file == path)

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, name: str, prompt: Prompt, sample: int | None) -> GradedAnswer | None:
        """The cached sample; None if there is none of the row as it is."""
        return self._samples.get((name, prompt.id, sample, row_digest(prompt)))

    def put(self, records: Sequence[SampleRecord]) -> None:
        """Append lines and flush them to the disk."""
        lines = "".join(json.dumps(without_none(asdict(record), "messages")) + "\n" for record in records)
        with self._path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        for record in records:
            self._add(record)

    def _add(self, record: SampleRecord) -> None:
        # Without completions, of which there may be many.
        self._samples[record.set, record.prompt_id, record.sample, record.row] = record.graded

    def _read(self, file: Path, repair: bool) -> None:
        if not file.is_file():
            return
        with file.open("rb+" if repair else "rb") as lines:
            end = 0
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    self._add(SampleRecord(**json.loads(line)))
                except (ValueError, TypeError):
                    log.warning("%s is damaged after %d bytes, as by a power cut: the rest is not used", file, end)
                    break
                end += len(line)
            if repair:
                lines.truncate(end)


GREEDY = None
"""Index of the greedy sample."""

Job = tuple[int, int | None]
"""Index of a prompt in the batch, and index of one of its samples."""


@dataclass(frozen=True)
class EvaluatorConfig:
    """Settings of an evaluation.

    Raises:
        UserError: A size is below 1.
    """

    scorer: Scorer
    sampling: SamplingConfig
    """Sampling parameters of the samples; the greedy one has their token limit and stop strings."""
    samples: int = 1
    """Samples a prompt, beside the greedy one."""
    batch: int | None = None
    """Most completions of a call of the engine; None for all of a batch of prompts."""

    def __post_init__(self) -> None:
        require_at_least(1, {"evaluation.samples": self.samples, "evaluation.batch": self.batch})

    @property
    def extracts_answers(self) -> bool:
        """Whether the accuracy reward extracts answers, and not only grades completions."""
        return isinstance(self.scorer.accuracy, AnswerReward)


@dataclass(eq=False)
class Evaluator:
    """Samples and grades held-out prompts.

    Seeds depend only on (run seed, set, prompt, sample index): evaluations of different policies, and samplings of one,
    draw alike.

    Args:
        config: Settings.
        engine: Launched rollout engine.
        tokenizer: The policy's tokenizer.
        seed: Seed of the run.
        ranks: Ranks that share each batch; all return the same evaluation.
        dialogues: Samples dialogues with environments; None samples one completion of each prompt.
        ends: Token ids that end a completion, beside the tokenizer's end-of-sequence token.
    """

    config: EvaluatorConfig
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    seed: int
    ranks: Communicator = SINGLE_PROCESS
    dialogues: DialogueSampler | None = None
    ends: Collection[int] = ()

    def __post_init__(self) -> None:
        self._cache: SampleCache | None = None
        self._version = 0

    def use_cache(self, cache: SampleCache | None) -> None:
        """Take samples from a cache, and add new ones to it; None stops that."""
        self._cache = cache

    def evaluate(self, prompts: Sequence[Prompt], weights: PolicyWeights, name: str = "") -> Evaluation:
        """Sample greedily and randomly, and grade.

        Args:
            prompts: The batch of all ranks.
            weights: The sampler's weights, without noise.
            name: Name of the prompts' set, which has its own random streams; empty if there is only one set.
        """
        self._version = weights.version
        self.engine.wake()
        self.engine.sync(weights)
        indices = range(self.ranks.rank, len(prompts), self.ranks.size)
        local = self._evaluate([prompts[index] for index in indices], name)
        self.engine.sleep()
        evaluated = gather_by_index(self.ranks, indices, local)
        return Evaluation(evaluated, name, self.config.extracts_answers)

    def _evaluate(self, prompts: Sequence[Prompt], name: str) -> list[EvaluatedPrompt]:
        samples = range(self.config.samples)
        jobs = [(index, sample) for index in range(len(prompts)) for sample in (GREEDY, *samples)]
        answers = self._answers(prompts, jobs, name)
        return [
            EvaluatedPrompt(prompt.id, answers[index, GREEDY], [answers[index, sample] for sample in samples])
            for index, prompt in enumerate(prompts)
        ]

    def _answers(self, prompts: Sequence[Prompt], jobs: Sequence[Job], name: str) -> dict[Job, GradedAnswer]:
        """Graded answers from the cache or the engine."""
        sampling, cache = self.config.sampling, self._cache
        answers: dict[Job, GradedAnswer] = {}
        if cache is not None:
            found = {(index, sample): cache.get(name, prompts[index], sample) for index, sample in jobs}
            answers = {job: answer for job, answer in found.items() if answer is not None}
        size = self.config.batch or max(1, len(jobs))
        greedy = SamplingConfig(sampling.max_tokens, temperature=0.0, stop=sampling.stop)
        for is_greedy, given in ((True, greedy), (False, sampling)):
            missing = [job for job in jobs if job not in answers and (job[1] is GREEDY) == is_greedy]
            for start in range(0, len(missing), size):
                part = missing[start : start + size]
                records = self._records(prompts, part, given, name)
                if cache is not None:
                    cache.put(records)
                answers |= {job: record.graded for job, record in zip(part, records, strict=True)}
        return answers

    def _records(
        self, prompts: Sequence[Prompt], jobs: Sequence[Job], sampling: SamplingConfig, name: str
    ) -> list[SampleRecord]:
        """Samples from the engine, graded."""
        stream = ("evaluation", name) if name else ("evaluation",)
        by_prompt = groupby(jobs, lambda job: job[0])
        wanted = [(prompts[index], [sample or 0 for _, sample in own]) for index, own in by_prompt]
        sampled = sample_completions(self.engine, self.dialogues, wanted, sampling, self.seed, stream)
        require_finite_logprobs([prompt for prompt, _ in wanted], sampled, type(self.engine).__name__, self._version)
        completions = [[completion] for group in sampled for completion in group]
        asked = [prompts[index] for index, _ in jobs]
        with isolate_rng():  # a reward may draw, and evaluating more often must not change training
            scorer = self.config.scorer
            groups = scorer.score(self.tokenizer, asked, completions, self.ends)
            extracted = extract_answers(scorer.accuracy, [group.texts[0] for group in groups])
            right = [group.correct[0].item() == 1 for group in groups]
            answers = normalize_answers(scorer.accuracy, extracted, [not correct for correct in right])
        records = []
        for group, answer, correct, (_, sample) in zip(groups, answers, right, jobs, strict=True):
            (completion,) = map(asdict, group.records())
            del completion["trained"], completion["extra"]
            row = row_digest(group.prompt)
            records.append(SampleRecord(set=name, sample=sample, correct=correct, answer=answer, row=row, **completion))
        return records
