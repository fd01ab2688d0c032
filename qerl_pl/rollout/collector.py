"""Samples and scores the completions of a training batch, spread over the ranks."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.algorithm.advantages import Scores, have_differences
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards import EnvironmentReward, OverlongPenalty, functions_among
from qerl_pl.rollout.dialogue_sampler import DialogueJob, DialogueSampler
from qerl_pl.rollout.metrics import rollout_metrics, slowest_seconds, timed
from qerl_pl.rollout.scoring import Group, Scorer, gather_by_index
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Completion, Experience, Prompt, RolloutRequest, SamplingConfig

log = logging.getLogger("qerl_pl")

ReplacementPrompts = Callable[[Sequence[int | str], int, Collection[str]], Sequence[Prompt]]
"""Draws prompts to replace dropped groups: (key of the draw, count, ids to exclude) -> up to `count` prompts."""


def no_replacements(key: Sequence[int | str], count: int, exclude: Collection[str]) -> Sequence[Prompt]:
    """Replaces no group."""
    return []


@dataclass(frozen=True)
class CollectorConfig:
    """Settings of training rollouts; see `RolloutCallback`.

    Raises:
        UserError: A size is too small, or training would sample greedily.
    """

    scorer: Scorer
    group_size: int = 8
    sampling: SamplingConfig = SamplingConfig()
    resample_rounds: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UserError(
                f"a group needs at least 2 completions; got group_size={self.group_size}; set it to 2 or more"
            )
        require_at_least(0, {"resample_rounds": self.resample_rounds})
        if self.sampling.temperature == 0:
            raise UserError(
                "training samples, so sampling.temperature must be above 0; got 0; 1.0 is usual; an evaluation has "
                "rollout.evaluation.sampling.temperature"
            )
        for reward in self.scorer.rewards:
            if isinstance(reward, OverlongPenalty):
                reward.set_limit(self.sampling.max_tokens)


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


@dataclass(eq=False)
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

    config: CollectorConfig
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    seed: int
    ranks: Communicator = SINGLE_PROCESS
    dialogues: DialogueSampler | None = None
    ends: Collection[int] = ()

    def __post_init__(self) -> None:
        self.expected_lengths: dict[str, float] = {}
        """Mean tokens of each prompt's last completions, by id, for `partition_prompts`."""
        self._logged: dict[str, list[float]] = {}
        """What reward functions have logged in this rollout, by name."""
        self._missing_rewards: set[str] = set()

    def collect(
        self, prompts: Sequence[Prompt], version: int, replacements: ReplacementPrompts = no_replacements
    ) -> Experience:
        """Sample and score completions of a batch, by an engine that is awake and synced.

        Args:
            prompts: The batch of all ranks.
            version: Policy version.
            replacements: Draws the prompts that replace dropped groups.

        Raises:
            UserError: A reward fails, or a log-probability is not finite.
        """
        seconds, self._logged = {"wait": 0.0}, {}
        groups = self._sample_informative(prompts, version, replacements, seconds)
        training = [group for group in groups if group.trains]
        advantages, signal = self.objective.advantages(self._scores(training), self.config.group_size)
        self._warn(groups, training, advantages, version)
        without_signal = signal.tolist().count(False) + sum(not group.signal for group in groups if not group.trains)
        return self._experience(groups, training, advantages, version, without_signal, seconds)

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
            groups += sampled if config.resample_rounds == 0 else self._mark(sampled)
            if any(group.dialogues for group in groups) and all(group.total.isnan().all() for group in groups):
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

    def _mark(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, of which those train that have right and wrong answers (DAPO, arXiv 2503.14476, eq. 11).

        A group whose rewards, as the advantages combine them, are all equal has no advantages and is dropped too.
        """
        signal = self.objective.signal(self._scores(groups), self.config.group_size)
        trains = signal & have_differences(torch.stack([group.correct for group in groups]))
        return [
            replace(group, signal=has_signal, trains=informative)
            for group, has_signal, informative in zip(groups, signal.tolist(), trains.tolist(), strict=True)
        ]

    def _sample(self, prompts: Sequence[Prompt], version: int, seconds: dict[str, float]) -> list[Group]:
        """Scored groups of all prompts; other ranks' groups come without completions."""
        scorer, ranks = self.config.scorer, self.ranks
        indices = partition_prompts([prompt.id for prompt in prompts], self.expected_lengths, ranks.size)[ranks.rank]
        local = [prompts[index] for index in indices]
        with timed(seconds, "rollout"):
            wanted = [(prompt, range(self.config.group_size)) for prompt in local]
            stream = ("rollout", version)
            completions = sample_completions(
                self.engine, self.dialogues, wanted, self.config.sampling, self.seed, stream
            )
        with timed(seconds, "reward"):
            groups = scorer.score(self.tokenizer, local, completions, self.ends)
        for function in functions_among(scorer.rewards) if local else ():
            for name, values in function.logged_metrics.items():
                self._logged.setdefault(name, []).extend(values)
        if ranks.size == 1:
            return groups
        with timed(seconds, "wait"):
            ranks.barrier()
        gathered = gather_by_index(ranks, indices, [replace(group, completions=()) for group in groups])
        for index, group in zip(indices, groups, strict=True):
            gathered[index] = group
        self.expected_lengths |= {group.prompt.id: sum(group.lengths) / len(group.lengths) for group in gathered}
        return gathered

    def _scores(self, groups: Sequence[Group]) -> Scores:
        """Rewards [B] of the completions of some groups."""
        weights = {reward.name: reward.weight for reward in self.config.scorer.rewards}
        none = torch.zeros(0)  # without groups
        rewards = {name: torch.cat([none, *(group.rewards[name] for group in groups)]) for name in weights}
        return Scores(torch.cat([none, *(group.total for group in groups)]), rewards, weights)

    def _experience(
        self,
        groups: Sequence[Group],
        training: Sequence[Group],
        advantages: Tensor,
        version: int,
        without_signal: int,
        seconds: Mapping[str, float],
    ) -> Experience:
        """The completions of this rank among those that train; metrics and advantages [B] are of all ranks."""
        size, sampling = self.config.group_size, self.config.sampling
        local = [index for index, group in enumerate(training) if group.completions]
        rows = torch.tensor([index * size + sample for index in local for sample in range(size)], dtype=torch.int64)
        prompts = [training[index].prompt for index in local]
        completions = [training[index].completions for index in local]
        require_finite_logprobs(prompts, completions, type(self.engine).__name__, version)
        pad = self.tokenizer.pad_token_id
        tokens, lengths, mask, logprobs = pad_completions(prompts, completions, 0 if pad is None else int(pad))
        routing = pad_routing(completions, tokens.shape)
        metrics = rollout_metrics(groups, without_signal, self._logged, self.ranks)
        return Experience(
            version=version,
            tokens=tokens,
            lengths=lengths,
            mask=mask,
            sampler_logprobs=logprobs,
            advantages=advantages[rows],
            truncated=torch.tensor([ended for index in local for ended in training[index].truncated], dtype=torch.bool),
            sampled_tokens=int(metrics["completions/sampled_tokens"]),
            seconds=sum(seconds.values()),
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            indices=rows,
            routing=routing,
            metrics=metrics | self._reduce_seconds(seconds),
            records=tuple(record for group in groups for record in group.records()),
        )

    def _reduce_seconds(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Each phase's time on its slowest rank, and the mean time that ranks waited."""
        gathered = self.ranks.all_gather(dict(seconds))
        metrics = slowest_seconds(gathered)
        metrics["time/wait_s"] = sum(times["wait"] for times in gathered) / len(gathered)
        return metrics

    def _warn(self, groups: Sequence[Group], training: Sequence[Group], advantages: Tensor, version: int) -> None:
        """Log a warning if nothing trains, and, once for each, about rewards that apply to no completion."""
        if training and not advantages.any() and not self.objective.needs_teacher:
            log.warning(
                "rollout %d has no advantages: each group's rewards are equal or missing; the first completion, of row "
                "%s, ends with %r, and its reference is %.80r",
                version,
                groups[0].prompt.id,
                groups[0].texts[0][-80:],
                groups[0].prompt.reference,
            )
        for name in groups[0].rewards.keys() - {EnvironmentReward.name} - self._missing_rewards:
            if all(group.rewards[name].isnan().all() for group in groups):
                self._missing_rewards.add(name)
                log.warning(
                    "reward %s is None for all %d completions of rollout %d, the first of them of row %s: %r",
                    name,
                    sum(len(group.lengths) for group in groups),
                    version,
                    groups[0].prompt.id,
                    groups[0].texts[0][-200:],
                )


def sample_completions(
    engine: RolloutEngine,
    dialogues: DialogueSampler | None,
    wanted: Sequence[tuple[Prompt, Sequence[int]]],
    sampling: SamplingConfig,
    seed: int,
    stream: Sequence[int | str],
) -> list[list[Completion]]:
    """Completions, or dialogues, of prompts.

    Args:
        engine: Rollout engine, awake and synced.
        dialogues: Samples dialogues; None samples one completion for each sample.
        wanted: Each prompt with the indices of its samples.
        sampling: Sampling parameters.
        seed: Seed of the run.
        stream: Name of the random stream within the run.
    """
    if not wanted:
        return []
    if dialogues is None:
        requests = [
            RolloutRequest(prompt.token_ids, tuple(stream_seed(seed, *stream, prompt.id, sample) for sample in samples))
            for prompt, samples in wanted
        ]
        return engine.generate(requests, sampling)
    jobs = [DialogueJob(prompt, sample) for prompt, samples in wanted for sample in samples]
    sampled = iter(dialogues.sample(engine, jobs, sampling, seed, *stream))
    return [[next(sampled) for _ in samples] for _, samples in wanted]


def pad_completions(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-pad P prompts with their completions, B in all.

    Returns:
        (tokens int64 [B, T], lengths int64 [B], mask of the sampled tokens bool [B, T], sampler_logprobs float32
        [B, T]).
    """
    rows = [
        (prompt.token_ids if completion.prompt_ids is None else completion.prompt_ids, completion)
        for prompt, group in zip(prompts, completions, strict=True)
        for completion in group
    ]
    sizes = [len(prompt_ids) + len(completion.token_ids) for prompt_ids, completion in rows]
    lengths = torch.tensor(sizes, dtype=torch.int64)
    tokens = torch.full((len(rows), max(sizes, default=0)), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    for row, (prompt_ids, completion) in enumerate(rows):
        start, end = len(prompt_ids), sizes[row]
        tokens[row, :end] = torch.tensor(prompt_ids + completion.token_ids)
        mask[row, start:end] = True if completion.sampled is None else torch.tensor(completion.sampled)
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return tokens, lengths, mask, logprobs


def pad_routing(completions: Sequence[Sequence[Completion]], shape: Sequence[int]) -> Tensor | None:
    """The experts that the sampler chose for the tokens that `pad_completions` padded.

    Args:
        completions: The completions of each prompt, B in all.
        shape: (B, T).

    Returns:
        int16 [B, T, layers, k], -1 for tokens that the sampler did not compute; None where experts were not recorded.
    """
    recorded = [completion.routing for group in completions for completion in group]
    first = next((experts for experts in recorded if experts is not None), None)
    if first is None:
        return None
    routing = first.new_full((*shape, *first.shape[1:]), -1)
    for row, experts in zip(routing, recorded, strict=True):
        if experts is not None:  # a dialogue may end before its first turn
            row[: len(experts)] = experts
    return routing


def require_finite_logprobs(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], engine: str, version: int
) -> None:
    """Stop the run at a log-probability that is not finite, before the loss becomes NaN.

    Raises:
        UserError: A log-probability is NaN or infinite; names the first such completion.
    """
    for prompt, group in zip(prompts, completions, strict=True):
        for sample, completion in enumerate(group, start=1):
            logprobs = completion.logprobs
            bad = next((token for token, value in enumerate(logprobs) if not math.isfinite(value)), None)
            if bad is not None:
                raise UserError(
                    f"the sampler's log-probabilities must be finite; at policy version {version} {engine} gave "
                    f"{logprobs[bad]} at token {bad + 1} of {len(logprobs)} of completion {sample} of prompt "
                    f"{prompt.id}; the policy diverged, or overflows there: lower the learning rate or the noise, or "
                    "set another model.policy.dtype, and go on from a checkpoint before"
                )
