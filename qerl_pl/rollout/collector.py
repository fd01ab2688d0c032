"""Samples and scores the completions of a training batch, spread over the ranks."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from qerl_pl.algorithm.advantages import informative_groups, normalized_then_summed, summed_group_advantages
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.environments.sampler import DialogueJob, DialogueSampler
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards import (
    EnvironmentReward,
    OverlongPenalty,
    Reward,
    accuracy_reward,
    check_rewards,
    functions_among,
)
from qerl_pl.rollout.experience import (
    Group,
    gather_by_index,
    pad_completions,
    pad_routing,
    require_finite_logprobs,
    score_groups,
    totals,
)
from qerl_pl.rollout.metrics import completion_metrics, environment_metrics, logged_means, reward_metrics
from qerl_pl.rollout.parity_check import CheckedPolicy, check_logprob_parity
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.seeds import sample_seeds, stream_seed
from qerl_pl.types import Completion, Experience, PolicyWeights, Prompt, RolloutRequest, SamplingConfig

log = logging.getLogger("qerl_pl")

WAIT_WARNING = 0.25
"""Mean time that ranks wait for the slowest, as a fraction of its rollout, above which the log warns."""

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

ReplacementPrompts = Callable[[Sequence[int | str], int, Collection[str]], Sequence[Prompt]]
"""Draws prompts to replace dropped groups: (key of the draw, count, ids to exclude) -> up to `count` prompts."""


def no_replacements(key: Sequence[int | str], count: int, exclude: Collection[str]) -> Sequence[Prompt]:
    """Replaces no group."""
    return []


@dataclass(frozen=True)
class CollectorConfig:
    """Settings of training rollouts; see `RolloutCallback`.

    Raises:
        UserError: A size is too small, the rewards are unusable, or settings contradict each other.
    """

    rewards: Sequence[Reward]
    group_size: int = 8
    sampling: SamplingConfig = SamplingConfig()
    resample_rounds: int = 0
    mismatch_bound: float = 0.25
    check_every: int = 50
    accuracy_reward: str | None = None
    multi_objective_aggregation: Aggregation = "sum_then_normalize"

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UserError(
                f"a group needs at least 2 completions; got group_size={self.group_size}; set it to 2 or more"
            )
        require_at_least(0, {"resample_rounds": self.resample_rounds})
        require_at_least(1, {"check_every": self.check_every})
        if self.sampling.temperature == 0:
            raise UserError("training samples, so sampling.temperature must be above 0; got 0; 1.0 is usual")
        check_rewards(self.rewards)
        accuracy_reward(self.rewards, self.accuracy_reward)
        for reward in self.rewards:
            if not isinstance(reward, OverlongPenalty):
                continue
            longest = reward.set_limit(self.sampling.max_tokens)
            if longest > self.sampling.max_tokens:
                log.warning(
                    "OverlongPenalty reaches -1 at %d tokens, but completions have at most %d: lower max_length",
                    longest,
                    self.sampling.max_tokens,
                )

    def check_objective(self, objective: Objective) -> None:
        """Refuse an objective whose `advantage_norm` the aggregation does not take.

        Raises:
            UserError: It is another than the aggregation's own.
        """
        norm = objective.advantage_norm
        if self.multi_objective_aggregation == "normalize_then_sum" and norm != "group":
            raise UserError(
                "normalize_then_sum (GDPO) divides each reward by its group's standard deviation; got "
                f"model.objective.advantage_norm {norm} ({type(objective).__name__}); set it to group, or "
                "rollout.multi_objective_aggregation to sum_then_normalize"
            )


def partition_prompts(prompts: Sequence[str], expected_lengths: Mapping[str, float], size: int) -> list[list[int]]:
    """Partition a batch over the ranks: as many prompts on each (up to one), and about as many tokens.

    Greedy: the longest prompt first, each to the rank with the fewest tokens among those that have room.

    Args:
        prompts: Ids, in the order of the batch.
        expected_lengths: Mean tokens of the completions of prompts that were sampled before; other prompts count as
            the mean of these.
        size: Number of ranks.

    Returns:
        Ascending indices of each rank's prompts, the same on all ranks.
    """
    mean = sum(expected_lengths.values()) / len(expected_lengths) if expected_lengths else 1.0
    lengths = [expected_lengths.get(prompt, mean) for prompt in prompts]
    smallest, larger = divmod(len(prompts), size)
    shards: list[list[int]] = [[] for _ in range(size)]
    tokens = [0.0] * size
    for index in sorted(range(len(prompts)), key=lambda index: (-lengths[index], index)):
        all_larger = sum(len(shard) > smallest for shard in shards) == larger
        open_ranks = [rank for rank in range(size) if len(shards[rank]) < smallest + (not all_larger)]
        rank = min(open_ranks, key=lambda rank: (tokens[rank], len(shards[rank]), rank))
        shards[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(shard) for shard in shards]


class Collector:
    """Samples and scores a training batch, and makes it an `Experience`.

    A completion's seed depends only on (run seed, policy version, prompt, sample index).

    Args:
        config: Settings.
        engine: Launched rollout engine.
        tokenizer: The policy's tokenizer.
        objective: Computes the advantages.
        seed: Seed of the run.
        ranks: Ranks that share each batch; all return the same metrics.
        dialogues: Samples dialogues with environments; None samples one completion of each prompt.
        ends: Token ids that end a completion, beside the tokenizer's end-of-sequence token.
    """

    def __init__(
        self,
        config: CollectorConfig,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        seed: int,
        ranks: Communicator = SINGLE_PROCESS,
        dialogues: DialogueSampler | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.objective = objective
        self.seed = seed
        self.ranks = ranks
        self.dialogues = dialogues
        self.ends = ends
        self.expected_lengths: dict[str, float] = {}
        """Mean tokens of each prompt's last completions, by id, for `partition_prompts`."""
        self._rollouts = 0
        self._logged: dict[str, list[float]] = {}
        """What reward functions have logged in this rollout, by name."""
        self._missing_rewards: set[str] = set()

    def collect(
        self,
        prompts: Sequence[Prompt],
        weights: PolicyWeights,
        policy: CheckedPolicy,
        replacements: ReplacementPrompts = no_replacements,
    ) -> Experience:
        """Sample and score completions of a batch.

        Args:
            prompts: The batch of all ranks.
            weights: The sampler's weights, with its noise.
            policy: The trained policy, for the log-probability parity check.
            replacements: Draws the prompts that replace dropped groups; by default there are none.

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
        self._logged = {}
        metrics: dict[str, float] = {}
        with _timed(seconds, "sync"):
            noise_std = self.engine.sync(weights).noise_std
        groups = self._sample_informative(prompts, weights.version, replacements, seconds)
        if weights.noise is not None:
            metrics |= {"aqn/sigma": weights.noise.sigma, "aqn/measured_std": noise_std}
        with _timed(seconds, "sleep"):
            self.engine.sleep()
        slowest = self._reduce_seconds(seconds, weights.version)
        metrics |= {f"time/{phase}_s": value for phase, value in slowest.items()}
        return self._experience(groups, weights.version, sum(seconds.values()), metrics)

    def _sample_informative(
        self,
        prompts: Sequence[Prompt],
        version: int,
        replacements: ReplacementPrompts,
        seconds: dict[str, float],
    ) -> list[Group]:
        """All sampled groups; with dynamic sampling, uninformative groups are marked and replaced."""
        config, wanted = self.config, len(prompts)
        groups: list[Group] = []
        for attempt in range(config.resample_rounds + 1):
            sampled = self._sample(prompts, version, seconds)
            if config.resample_rounds > 0:
                accuracy = accuracy_reward(config.rewards, config.accuracy_reward).name
                values = torch.cat([group.rewards[accuracy] for group in sampled])
                correct = torch.where(values.isnan(), values, (values > 0.5).float())
                informative = informative_groups(self._combined(sampled), correct, config.group_size).tolist()
                sampled = [replace(group, trains=trains) for group, trains in zip(sampled, informative, strict=True)]
            groups += sampled
            if any(group.dialogues for group in groups) and totals(groups).isnan().all():
                raise UserError(
                    "a rollout needs rewards; none of its completions has one; define get_reward in the environment, "
                    "or set rollout.rewards"
                )
            missing = wanted - sum(group.trains for group in groups)
            if missing <= 0 or attempt == config.resample_rounds:
                break
            prompts = replacements(("resample", version, attempt), missing, {group.prompt.id for group in groups})
            if not prompts:
                break
        if missing == wanted:
            log.warning(
                "rollout %d trains nothing: none of %d groups has both right and wrong answers", version, len(groups)
            )
        return groups

    def _sample(self, prompts: Sequence[Prompt], version: int, seconds: dict[str, float]) -> list[Group]:
        """Scored groups of all prompts; other ranks' groups come without completions."""
        config, ranks = self.config, self.ranks
        indices = partition_prompts([prompt.id for prompt in prompts], self.expected_lengths, ranks.size)[ranks.rank]
        local = [prompts[index] for index in indices]
        with _timed(seconds, "rollout"):
            completions = self._completions(local, version) if local else []
        with _timed(seconds, "reward"):
            groups = score_groups(config.rewards, self.tokenizer, local, completions, self.ends)
        for function in functions_among(config.rewards) if local else ():
            for name, values in function.logged_metrics.items():
                self._logged.setdefault(name, []).extend(values)
        if ranks.size == 1:
            return groups
        with _timed(seconds, "wait"):
            ranks.barrier()
        gathered = gather_by_index(ranks, indices, [replace(group, completions=()) for group in groups])
        for index, group in zip(indices, groups, strict=True):
            gathered[index] = group
        self.expected_lengths |= {group.prompt.id: sum(group.lengths) / len(group.lengths) for group in gathered}
        return gathered

    def _completions(self, prompts: Sequence[Prompt], version: int) -> list[list[Completion]]:
        """G completions, or dialogues, of each prompt."""
        size, stream = self.config.group_size, ("rollout", version)
        if self.dialogues is None:
            requests = [
                RolloutRequest(prompt.token_ids, sample_seeds(self.seed, stream, prompt.id, range(size)))
                for prompt in prompts
            ]
            return self.engine.generate(requests, self.config.sampling)
        jobs = [DialogueJob(prompt, sample) for prompt in prompts for sample in range(size)]
        sampled = self.dialogues.sample(self.engine, jobs, self.config.sampling, self.seed, *stream)
        return [sampled[start : start + size] for start in range(0, len(sampled), size)]

    def _reduce_seconds(self, seconds: dict[str, float], version: int) -> dict[str, float]:
        """Each phase's time on its slowest rank, and the mean time that ranks waited."""
        gathered = self.ranks.all_gather(seconds)
        slowest = {phase: max(times[phase] for times in gathered) for phase in seconds}
        if self.ranks.size > 1:
            slowest["wait"] = sum(times["wait"] for times in gathered) / len(gathered)
            if slowest["wait"] > WAIT_WARNING * slowest["rollout"]:
                log.warning(
                    "rollout %d: ranks waited %.1f s on average for rank %d, which sampled for %.1f s: give each rank "
                    "more prompts, or limit the length of completions",
                    version,
                    slowest["wait"],
                    max(range(len(gathered)), key=lambda rank: gathered[rank]["rollout"]),
                    slowest["rollout"],
                )
        return slowest

    def _experience(
        self, groups: Sequence[Group], version: int, seconds: float, metrics: dict[str, float]
    ) -> Experience:
        config, training = self.config, [group for group in groups if group.trains]
        size = config.group_size
        local = [index for index, group in enumerate(training) if group.completions]
        rows = torch.tensor([index * size + sample for index in local for sample in range(size)], dtype=torch.int64)
        prompts = [training[index].prompt for index in local]
        completions = [training[index].completions for index in local]
        require_finite_logprobs(prompts, completions, type(self.engine).__name__, version)
        pad = self.tokenizer.pad_token_id
        tokens, lengths, mask, logprobs = pad_completions(prompts, completions, 0 if pad is None else int(pad))
        truncated = torch.tensor([ended for group in training for ended in group.truncated], dtype=torch.bool)
        advantages = self._advantages(training)
        if training and not advantages.any() and not self.objective.needs_teacher:
            log.warning("rollout %d has no advantages: each group's rewards are equal or missing", version)
        if training and self.objective.mask_truncated and truncated.all():
            log.warning(
                "rollout %d trains nothing: mask_truncated leaves out completions that reach max_tokens=%d, as all do: "
                "raise rollout.sampling.max_tokens",
                version,
                config.sampling.max_tokens,
            )
        metrics |= reward_metrics(groups, self._combined(groups)) | environment_metrics(groups)
        metrics |= completion_metrics(groups, self.ranks)
        if functions_among(config.rewards):
            metrics |= logged_means(self._logged, self.ranks)
        self._warn_of_missing_rewards(groups, version, metrics)
        return Experience(
            version=version,
            tokens=tokens,
            lengths=lengths,
            mask=mask,
            sampler_logprobs=logprobs,
            advantages=advantages[rows],
            truncated=truncated[rows],
            sampled_tokens=int(metrics["completions/sampled_tokens"]),
            seconds=seconds,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            indices=rows,
            routing=pad_routing(completions, tokens.shape),
            metrics=metrics,
            records=tuple(record for group in groups for record in group.records()),
        )

    def _warn_of_missing_rewards(self, groups: Sequence[Group], version: int, metrics: Mapping[str, float]) -> None:
        """Log a warning, once for each, about rewards that apply to no completion of a rollout."""
        for name in groups[0].rewards.keys() - {EnvironmentReward.name} - self._missing_rewards:
            if f"reward/{name}" not in metrics:
                self._missing_rewards.add(name)
                log.warning(
                    "reward %s is None for all %d completions of rollout %d, the first of them of row %s: %r",
                    name,
                    sum(len(group.lengths) for group in groups),
                    version,
                    groups[0].prompt.id,
                    groups[0].texts[0][-200:],
                )

    def _advantages(self, groups: Sequence[Group]) -> torch.Tensor:
        """Advantages [B] of all ranks' completions."""
        config = self.config
        if config.multi_objective_aggregation == "sum_then_normalize" or not groups:
            return self.objective.advantages(totals(groups), config.group_size)
        return normalized_then_summed(*self._weighted(groups), config.group_size)

    def _combined(self, groups: Sequence[Group]) -> torch.Tensor:
        """Rewards [B] of all ranks' completions as the advantages combine them: equal ones of a group train nothing."""
        if self.config.multi_objective_aggregation == "sum_then_normalize":
            return totals(groups)
        return summed_group_advantages(*self._weighted(groups), self.config.group_size)

    def _weighted(self, groups: Sequence[Group]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Each reward [B] of the completions of some groups, and its weight, by name."""
        rewards = {name: torch.cat([group.rewards[name] for group in groups]) for name in groups[0].rewards}
        return rewards, {reward.name: reward.weight for reward in self.config.rewards}


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
