"""Which rank samples which prompts: whole groups, as many on each rank, and about as many tokens where known."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from qerl_pl.algorithm.advantages import informative_groups
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.distributed.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.evaluation.evaluator import Evaluator, Samples, sample_seeds
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.rewards import AnswerReward
from qerl_pl.rollout.config import CollectorConfig
from qerl_pl.rollout.experience import (
    Experience,
    Group,
    pad_completions,
    require_finite_logprobs,
    reward_metrics,
    score_groups,
    totals,
)
from qerl_pl.rollout.parity_check import CheckedPolicy, check_logprob_parity
from qerl_pl.types import (
    Completion,
    Evaluation,
    PolicyWeights,
    Prompt,
    RolloutRequest,
    SamplingConfig,
)

T = TypeVar("T")


def partition_prompts(prompts: Sequence[str], expected_lengths: Mapping[str, float], size: int) -> list[list[int]]:
    """Places of the prompts of each rank, ascending; equal on all ranks, for all know the same.

    The longest is dealt first, each to the rank with the fewest tokens so far among those with room; numbers of prompts
    differ by one at most.

    Args:
        prompts: Ids, in the order of the batch.
        expected_lengths: Mean length of a prompt's completions where it was sampled before, in tokens. Others are taken for
            the mean of those.
        size: Number of ranks.
    """
    usual = sum(expected_lengths.values()) / len(expected_lengths) if expected_lengths else 1.0
    length = [expected_lengths.get(prompt, usual) for prompt in prompts]
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


def in_order(ranks: Communicator, indices: Sequence[int], own: Iterable[T]) -> list[T]:
    """What all ranks have, in the order of its places; collective.

    Args:
        ranks: Who takes part.
        places: Of what this rank has.
        own: That.
    """
    together = ranks.concatenate(zip(indices, own, strict=True))
    return [one for _, one in sorted(together, key=lambda pair: pair[0])]


log = logging.getLogger("qerl_pl")

WAITING = 0.25

"""Share of a rollout that ranks may wait for the slowest before the log says so."""

OtherPrompts = Callable[[Sequence[int | str], int, Collection[str]], Sequence[Prompt]]

"""Prompts to sample in place of others: (key of the draw, how many, ids that must not come) -> as many or fewer."""


class Collector:
    """Samples and scores: for training to an `Experience`, of held-out prompts to an `Evaluation`.

    A completion's random stream depends only on (run seed, policy version, prompt, sample index).

    Args:
        config: What to collect.
        engine: What samples; launched.
        tokenizer: Of the policy.
        objective: Whose advantages the experience has.
        seed: Seed of the run.
        ranks: Who samples with this process, each some of the prompts. All give the same metrics and evaluations.
    """

    def __init__(
        self,
        config: CollectorConfig,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        seed: int,
        ranks: Communicator = SINGLE_PROCESS,
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.objective = objective
        self.seed = seed
        self.ranks = ranks
        self.expected_lengths: dict[str, float] = {}
        """Mean length in tokens of each prompt's last completions, by id: what dealing goes by."""
        self._rollouts = 0

    def collect(
        self, prompts: Sequence[Prompt], weights: PolicyWeights, policy: CheckedPolicy, others: OtherPrompts
    ) -> Experience:
        """Completions of a batch of prompts, to train on.

        Args:
            prompts: The batch, of all ranks.
            weights: What samples, noise included.
            policy: Whose weights they are; the self-check compares the engine with it where one is due.
            others: Where prompts come from that replace those of dropped groups.

        Raises:
            UserError: Engine and policy disagree, a reward fails, or a log-probability is not finite.
        """
        config, seconds = self.config, {"check": 0.0, "wait": 0.0}
        with _timed(seconds, "sleep"):
            self.engine.wake()
        if self._rollouts < 2 or self._rollouts % config.check_every == 0:
            with _timed(seconds, "check"):
                seed = stream_seed(self.seed, "probe", weights.version)
                longest, bound = config.sampling.max_tokens, config.mismatch_bound
                check_logprob_parity(self.engine, policy, prompts[:2], weights.version, seed, longest, bound)
        self._rollouts += 1
        metrics: dict[str, float] = {}
        with _timed(seconds, "sync"):
            report = self.engine.sync(weights)
        if weights.noise is not None:
            measured = sum(self.ranks.gather(report.noise_std)) / self.ranks.size
            metrics |= {"aqn/sigma": weights.noise.sigma, "aqn/measured_std": measured}
        groups = self._gather(prompts, weights.version, others, seconds)
        with _timed(seconds, "sleep"):
            self.engine.sleep()
        metrics |= {f"time/{name}_s": value for name, value in self._slowest(seconds, weights.version).items()}
        return self._experience(groups, weights.version, sum(seconds.values()), metrics)

    def _slowest(self, seconds: dict[str, float], version: int) -> dict[str, float]:
        """Each phase on the rank that it took longest on, and how long ranks waited on average."""
        parts = self.ranks.gather(seconds)
        slowest = {name: max(part[name] for part in parts) for name in seconds}
        if self.ranks.size > 1:
            slowest["wait"] = sum(part["wait"] for part in parts) / len(parts)
            if slowest["wait"] > WAITING * slowest["rollout"]:
                last = max(range(len(parts)), key=lambda rank: parts[rank]["rollout"])
                log.warning(
                    "rollout %d: ranks waited %.1f s on average for rank %d, which sampled for %.1f s: give each rank "
                    "more prompts, or limit the length of completions",
                    version,
                    slowest["wait"],
                    last,
                    slowest["rollout"],
                )
        return slowest

    def _gather(
        self, prompts: Sequence[Prompt], version: int, others: OtherPrompts, seconds: dict[str, float]
    ) -> list[Group]:
        """Everything that is sampled for a batch, with what trains marked, by dynamic sampling where that is on."""
        config, wanted = self.config, len(prompts)
        groups: list[Group] = []
        for attempt in range(config.resample_rounds + 1):
            new = self._sample(prompts, version, seconds)
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

    def _sample(self, prompts: Sequence[Prompt], version: int, seconds: dict[str, float]) -> list[Group]:
        """Scored groups of all prompts, those of this rank with their completions."""
        config, ranks = self.config, self.ranks
        indices = partition_prompts([prompt.id for prompt in prompts], self.expected_lengths, ranks.size)[ranks.rank]
        own = [prompts[place] for place in indices]
        with _timed(seconds, "rollout"):
            completions = self._generate(own, config.sampling, config.group_size, ("rollout", version))
        with _timed(seconds, "reward"):
            groups = score_groups(config.rewards, self.tokenizer, own, completions)
        if ranks.size == 1:
            return groups
        with _timed(seconds, "wait"):
            ranks.wait()
        together = in_order(ranks, indices, (group.elsewhere() for group in groups))
        for place, group in zip(indices, groups, strict=True):
            together[place] = group
        self.expected_lengths |= {group.prompt.id: sum(group.lengths) / len(group.lengths) for group in together}
        return together

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, samples: int, stream: tuple[int | str, ...]
    ) -> list[list[Completion]]:
        requests = [
            RolloutRequest(prompt.token_ids, sample_seeds(self.seed, stream, prompt, range(samples)))
            for prompt in prompts
        ]
        return self.engine.generate(requests, sampling)

    def _experience(
        self, groups: Sequence[Group], version: int, seconds: float, metrics: dict[str, float]
    ) -> Experience:
        training = [group for group in groups if group.trains]
        size = self.config.group_size
        own = [place for place, group in enumerate(training) if group.completions]
        rows = torch.tensor([place * size + sample for place in own for sample in range(size)], dtype=torch.int64)
        prompts, completions = [training[place].prompt for place in own], [training[place].completions for place in own]
        require_finite_logprobs(prompts, completions, type(self.engine).__name__, version)
        pad = self.tokenizer.pad_token_id
        tokens, lengths, mask, logprobs = pad_completions(prompts, completions, 0 if pad is None else int(pad))
        sampled = torch.tensor([float(length) for group in training for length in group.lengths])
        truncated = torch.tensor([ended for group in training for ended in group.truncated], dtype=torch.bool)
        sampled_tokens = sum(length for group in groups for length in group.lengths)
        metrics |= reward_metrics(groups)
        metrics |= {
            "completions/groups_dropped_frac": (len(groups) - len(training)) / len(groups),
            "completions/sampled_tokens": sampled_tokens,
            "completions/length_mean": sampled.mean().item(),  # nan, as all means here, where nothing trains
            "completions/length_max": sampled.max().item() if len(sampled) else math.nan,
            "completions/truncated_frac": truncated.float().mean().item(),
            "completions/sampler_entropy": self._sampler_entropy(groups),
        }
        return Experience(
            version=version,
            tokens=tokens,
            lengths=lengths,
            mask=mask,
            sampler_logprobs=logprobs,
            advantages=self.objective.advantages(totals(training), size)[rows],
            truncated=truncated[rows],
            sampled_tokens=sampled_tokens,
            seconds=seconds,
            temperature=self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_tokens,
            indices=rows,
            metrics=metrics,
            records=tuple(record for group in groups for record in group.records()),
        )

    def _sampler_entropy(self, groups: Sequence[Group]) -> float:
        """Mean of -log p over all tokens of all ranks, p by what sampled them, its noise and filters included: an
        estimate without bias of the entropy per sampled token, in nats."""
        own = [one.logprobs for group in groups for one in group.completions]
        parts = self.ranks.gather((-math.fsum(map(math.fsum, own)), sum(map(len, own))))
        tokens = sum(count for _, count in parts)
        return sum(nats for nats, _ in parts) / tokens if tokens else math.nan

    def evaluate(
        self, prompts: Sequence[Prompt], weights: PolicyWeights, name: str = "", kept: Samples | None = None
    ) -> Evaluation:
        """How held-out prompts go, greedily and sampled.

        Args:
            prompts: The batch, of all ranks.
            weights: What samples, without noise.
            name: Of the set that the prompts belong to, where there are several; each has its own random streams.
            kept: Where samples are kept; what is there is not sampled again.
        """
        self.engine.wake()
        self.engine.sync(weights)
        ranks = self.ranks
        indices = list(range(ranks.rank, len(prompts), ranks.size))
        held_out = Evaluator(self.config, self.engine, self.tokenizer, self.seed)
        evaluated = held_out.evaluate([prompts[place] for place in indices], name, kept)
        self.engine.sleep()
        tells = isinstance(self.config.answers, AnswerReward)
        return Evaluation(in_order(ranks, indices, evaluated), name, tells)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
