"""Sampling and grading of held-out prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from qerl_pl.engines.base import RolloutEngine
from qerl_pl.rollout.config import CollectorConfig
from qerl_pl.rollout.kept import SampleRecord, Samples
from qerl_pl.rollout.scoring import score_groups
from qerl_pl.run.random_state import random_state_kept
from qerl_pl.run.seeding import stream_seed
from qerl_pl.types import EvaluatedPrompt, GradedAnswer, Prompt, RolloutRequest, SamplingConfig

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
class HeldOut:
    """Samples held-out prompts, greedily and not, as many completions at once as the engine is to have."""

    config: CollectorConfig
    engine: RolloutEngine
    """Awake, with the weights to evaluate."""
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def answered(self, prompts: Sequence[Prompt], name: str, kept: Samples | None) -> list[EvaluatedPrompt]:
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
        with random_state_kept():  # a reward may draw, and how often one evaluates must not change the training
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
