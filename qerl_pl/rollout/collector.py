"""The collector: prompts, weights and noise in, experience out. It drives the engine and knows no trainer."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.algorithm.advantages import informative_groups
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards import OverlongPenalty, Reward, check_rewards, extract_answers
from qerl_pl.rollout.agreement import CheckedPolicy, check_agreement
from qerl_pl.rollout.experience import Experience, pad_completions, require_finite_logprobs
from qerl_pl.rollout.scoring import Group, reward_metrics, score_groups, totals
from qerl_pl.run.random_state import random_state_kept
from qerl_pl.run.seeding import stream_seed
from qerl_pl.types import (
    Completion,
    EvaluatedPrompt,
    Evaluation,
    GradedAnswer,
    PolicyWeights,
    Prompt,
    RolloutRequest,
    SamplingConfig,
)

log = logging.getLogger("qerl_pl")

OtherPrompts = Callable[[Sequence[int | str], int, Collection[str]], Sequence[Prompt]]
"""Prompts to sample in place of others: (key of the draw, how many, ids that must not come) -> as many or fewer."""


@dataclass(frozen=True)
class CollectorConfig:
    """What is sampled, how much of it, and how it is scored.

    Raises:
        UserError: A size is too small, the rewards are none, or the settings contradict each other.
    """

    rewards: Sequence[Reward]
    group_size: int
    """Completions a prompt (G)."""
    sampling: SamplingConfig
    """How training completions are sampled; evaluation has its token limit and stop strings."""
    resample_rounds: int
    """How often groups that teach nothing are replaced (dynamic sampling); 0 keeps every group."""
    eval_samples: int
    """Samples a held-out prompt beside the greedy one."""
    mismatch_bound: float
    """Nats a token that engine and trainer may differ by without noise."""
    check_every: int
    """Rollouts between self-checks; the first two have one, too."""
    accuracy_reward: str | None = None
    """Name of the reward that tells by a value above 0.5 that a completion is right; None takes the first."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UserError(
                f"a group needs at least 2 completions; found group_size={self.group_size}; set it to 2 or more"
            )
        require_at_least(0, {"resample_rounds": self.resample_rounds})
        require_at_least(1, {"eval_samples": self.eval_samples, "check_every": self.check_every})
        if self.sampling.temperature == 0:
            raise UserError("training samples, so sampling.temperature must be above 0; found 0; 1.0 is usual")
        check_rewards(self.rewards)
        names = [reward.name for reward in self.rewards]
        if self.accuracy_reward is not None and self.accuracy_reward not in names:
            raise UserError(f"accuracy_reward must name a reward; found {self.accuracy_reward!r}; choose among {names}")
        for reward in self.rewards:
            if isinstance(reward, OverlongPenalty) and reward.max_length > self.sampling.max_tokens:
                log.warning(
                    "OverlongPenalty is full at %d tokens, which no completion of at most %d reaches: lower max_length",
                    reward.max_length,
                    self.sampling.max_tokens,
                )

    @property
    def answers(self) -> Reward:
        """The reward that tells which completions are right."""
        return next(one for one in self.rewards if self.accuracy_reward in (None, one.name))

    def correct(self, group: Group) -> Tensor:
        """Which completions of a group are right, bool [G]."""
        return group.parts[self.answers.name] > 0.5

    def graded(self, group: Group) -> list[GradedAnswer]:
        """The answers of a group's completions."""
        answers = extract_answers(self.answers, group.texts)
        correct = self.correct(group).tolist()
        return [GradedAnswer(right, answer) for right, answer in zip(correct, answers, strict=True)]


class Collector:
    """Samples and scores: for training to an `Experience`, of held-out prompts to an `Evaluation`.

    A completion's random stream depends only on (run seed, policy version, prompt, sample index).

    Args:
        config: What to collect.
        engine: What samples; launched.
        tokenizer: Of the policy.
        objective: Whose advantages the experience has.
        seed: Seed of the run.
    """

    def __init__(
        self,
        config: CollectorConfig,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        seed: int,
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.objective = objective
        self.seed = seed
        self._rollouts = 0

    def collect(
        self, prompts: Sequence[Prompt], weights: PolicyWeights, policy: CheckedPolicy, others: OtherPrompts
    ) -> Experience:
        """Completions of a batch of prompts, to train on.

        Args:
            prompts: The batch.
            weights: What samples, noise included.
            policy: Whose weights they are; the self-check compares the engine with it where one is due.
            others: Where prompts come from that replace those of dropped groups.

        Raises:
            UserError: Engine and policy disagree, a reward fails, or a log-probability is not finite.
        """
        config, seconds = self.config, {"check": 0.0}
        with _timed(seconds, "sleep"):
            self.engine.wake()
        if self._rollouts < 2 or self._rollouts % config.check_every == 0:
            with _timed(seconds, "check"):
                seed = stream_seed(self.seed, "probe", weights.version)
                longest, bound = config.sampling.max_tokens, config.mismatch_bound
                check_agreement(self.engine, policy, prompts[:2], weights.version, seed, longest, bound)
        self._rollouts += 1
        metrics: dict[str, float] = {}
        with _timed(seconds, "sync"):
            report = self.engine.sync(weights)
        if weights.noise is not None:
            metrics |= {"aqn/sigma": weights.noise.sigma, "aqn/measured_std": report.noise_std}
        groups = self._gather(prompts, weights.version, others, seconds)
        with _timed(seconds, "sleep"):
            self.engine.sleep()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        return self._experience(groups, weights.version, sum(seconds.values()), metrics)

    def _gather(
        self, prompts: Sequence[Prompt], version: int, others: OtherPrompts, seconds: dict[str, float]
    ) -> list[Group]:
        """Everything that is sampled for a batch, with what trains marked, by dynamic sampling where that is on."""
        config, wanted = self.config, len(prompts)
        groups: list[Group] = []
        for attempt in range(config.resample_rounds + 1):
            with _timed(seconds, "rollout"):
                completions = self._generate(prompts, config.sampling, config.group_size, ("rollout", version))
            with _timed(seconds, "reward"):
                new = score_groups(config.rewards, self.tokenizer, prompts, completions)
            if config.resample_rounds > 0:
                correct = torch.cat([config.correct(group) for group in new])
                keep = informative_groups(totals(new), correct, config.group_size).tolist()
                new = [replace(group, trains=kept) for group, kept in zip(new, keep, strict=True)]
            groups += new
            missing = wanted - sum(group.trains for group in groups)
            if missing <= 0 or attempt == config.resample_rounds:
                break
            used = {group.prompt.id for group in groups}
            prompts = others(("resample", version, attempt), missing, used)
            if not prompts:
                break
        if missing == wanted:
            log.warning(
                "rollout %d teaches nothing: none of %d groups has right and wrong answers", version, len(groups)
            )
        return groups

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, samples: int, stream: tuple[int | str, ...]
    ) -> list[list[Completion]]:
        requests = [
            RolloutRequest(
                prompt_ids=prompt.token_ids,
                seeds=tuple(stream_seed(self.seed, *stream, prompt.id, sample) for sample in range(samples)),
            )
            for prompt in prompts
        ]
        return self.engine.generate(requests, sampling)

    def _experience(
        self, groups: Sequence[Group], version: int, seconds: float, metrics: dict[str, float]
    ) -> Experience:
        training = [group for group in groups if group.trains]
        prompts, completions = [group.prompt for group in training], [group.completions for group in training]
        require_finite_logprobs(prompts, completions, type(self.engine).__name__, version)
        pad = self.tokenizer.pad_token_id
        tokens, lengths, mask, logprobs = pad_completions(prompts, completions, 0 if pad is None else int(pad))
        sampled = mask.sum(dim=1).float()
        truncated = torch.tensor([one.truncated for group in completions for one in group], dtype=torch.bool)
        sampled_tokens = sum(len(one.token_ids) for group in groups for one in group.completions)
        metrics |= reward_metrics(groups)
        metrics |= {
            "completions/groups_dropped_frac": (len(groups) - len(training)) / len(groups),
            "completions/sampled_tokens": sampled_tokens,
            "completions/length_mean": sampled.mean().item(),  # nan, as all means here, where nothing trains
            "completions/length_max": sampled.max().item() if len(sampled) else math.nan,
            "completions/truncated_frac": truncated.float().mean().item(),
        }
        return Experience(
            version=version,
            tokens=tokens,
            lengths=lengths,
            mask=mask,
            sampler_logprobs=logprobs,
            advantages=self.objective.advantages(totals(training), self.config.group_size),
            truncated=truncated,
            sampled_tokens=sampled_tokens,
            seconds=seconds,
            temperature=self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_tokens,
            metrics=metrics,
            records=tuple(record for group in groups for record in group.records()),
        )

    def evaluate(self, prompts: Sequence[Prompt], weights: PolicyWeights, name: str = "") -> Evaluation:
        """How held-out prompts go, greedily and sampled at temperature 1.

        Args:
            prompts: The batch.
            weights: What samples, without noise.
            name: Of the set that the prompts belong to, where there are several; each has its own random streams.
        """
        self.engine.wake()
        self.engine.sync(weights)
        limits = self.config.sampling
        answers: list[list[list[GradedAnswer]]] = []  # greedy, and sampled: by prompt
        for temperature, samples in ((0.0, 1), (1.0, self.config.eval_samples)):
            sampling = SamplingConfig(limits.max_tokens, temperature, stop=limits.stop)
            # The same streams at every evaluation: differences come from the policy, not from the draw.
            completions = self._generate(prompts, sampling, samples, ("evaluation", name) if name else ("evaluation",))
            with random_state_kept():  # a reward may draw, and how often one evaluates must not change the training
                groups = score_groups(self.config.rewards, self.tokenizer, prompts, completions)
                answers.append([self.config.graded(group) for group in groups])
        self.engine.sleep()
        rows = zip(prompts, *answers, strict=True)
        return Evaluation([EvaluatedPrompt(prompt.id, greedy[0], samples) for prompt, greedy, samples in rows], name)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
