"""A rollout that several ranks make together is that of one, and its times are those that were spent."""

import threading
from typing import Any

import pytest
import torch
from rank_helpers import ThreadRanks, on_ranks
from scripted import PROMPTS, Even, Long, Scripted, Watched, Words, config_of, evaluator_of, nobody

from qerl_pl.algorithm import DrGRPO
from qerl_pl.algorithm.advantages import AdvantageNorm
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.rollout.collector import Collector, partition_prompts
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.types import Evaluation

BATCHES = PROMPTS[:3], PROMPTS[1:]


def collector_on(
    ranks: Communicator, engine: Scripted, objective: Objective | None = None, **changes: Any
) -> Collector:
    return Collector(config_of(**changes), engine, Words(), objective or DrGRPO(), seed=7, ranks=ranks)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_ranks_make_together_the_rollout_of_one(size: int, norm: AdvantageNorm) -> None:
    def work(ranks: Communicator) -> tuple[list[Any], list[Any], dict[str, float]]:
        engine = Scripted()
        collector, found, asked = collector_on(ranks, engine, DrGRPO(advantage_norm=norm)), [], []
        for version, batch in enumerate(BATCHES):
            found.append(collector.collect(batch, version, nobody))
            asked.append([call[1] for call in engine.calls if call[0] == "generate"][-1])
        return found, asked, collector.expected_lengths

    alone, _, _ = work(SINGLE_PROCESS)
    together = on_ranks(size, work)
    expected_lengths: dict[str, float] = {}
    for turn, (single, batch) in enumerate(zip(alone, BATCHES, strict=True)):
        shards = partition_prompts([prompt.id for prompt in batch], expected_lengths, size)
        indices = []
        for (found, asked, _), shard in zip(together, shards, strict=True):
            local, rows = found[turn], found[turn].indices
            indices += rows.tolist()
            assert asked[turn] == [batch[index].token_ids for index in shard]
            assert rows.tolist() == [4 * index + sample for index in shard for sample in range(4)]
            for name in ("lengths", "advantages", "truncated"):
                assert torch.equal(getattr(local, name), getattr(single, name)[rows])
            for name in ("tokens", "mask", "sampler_logprobs"):
                width = local.tokens.shape[1]
                assert torch.equal(getattr(local, name), getattr(single, name)[rows, :width])
            for name in ("records", "sampled_tokens", "version"):
                assert getattr(local, name) == getattr(single, name)
            same = {name: value for name, value in single.metrics.items() if not name.startswith("time/")}
            assert same == {name: value for name, value in local.metrics.items() if not name.startswith("time/")}
            assert local.metrics == together[0][0][turn].metrics
        assert sorted(indices) == single.indices.tolist() == list(range(4 * len(batch)))
        for index, prompt in enumerate(batch):
            expected_lengths[prompt.id] = sum(record.tokens for record in single.records[4 * index : 4 * index + 4]) / 4
    assert [known for _, _, known in together] == [expected_lengths] * size and len(expected_lengths) == 6


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_make_together_the_evaluation_of_one(size: int) -> None:
    def work(ranks: Communicator) -> tuple[Evaluation, list[list[tuple[int, ...]]]]:
        engine, policy = Scripted(), Watched()
        found = evaluator_of(engine, ranks).evaluate(PROMPTS, policy.weights(5), "hard")
        return found, [call[1] for call in engine.calls if call[0] == "generate"]

    alone, _ = work(SINGLE_PROCESS)
    for rank, (found, asked) in enumerate(on_ranks(size, work)):
        assert found == alone and asked == [[prompt.token_ids for prompt in PROMPTS[rank::size]]] * 2


class Clock(threading.local):
    """A clock for each thread, that stands still but for what a test lets pass."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Scripted):
    """An engine that takes some seconds to sample."""

    def __init__(self, clock: Clock, sampling: float = 4.0) -> None:
        super().__init__()
        self.clock, self.sampling = clock, sampling

    def generate(self, requests: Any, sampling: Any) -> Any:
        self.clock.now += self.sampling
        return super().generate(requests, sampling)


class SlowReward(Even):
    """A reward that takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, samples: Any) -> list[float]:
        self.clock.now += 16
        return super().__call__(samples)


def test_each_phase_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("qerl_pl.rollout.metrics.time", clock)
    collector = collector_on(SINGLE_PROCESS, Slow(clock), rewards=[SlowReward(clock), Long()])
    found = collector.collect(PROMPTS[:3], 4, nobody)
    times = {name[5:-2]: value for name, value in found.metrics.items() if name.startswith("time/")}
    assert times == {"wait": 0.0, "rollout": 4.0, "reward": 16.0} and found.seconds == 20.0


@pytest.mark.parametrize("waits", [(6.0, 0.0, 4.5), (5.0, 0.0)])
def test_times_are_those_of_the_slowest_rank(waits: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sampling = Clock(), (4.0, 10.0, 6.0)
    monkeypatch.setattr("qerl_pl.rollout.metrics.time", clock)

    def waits_by_the_clock(ranks: ThreadRanks) -> None:
        clock.now += waits[ranks.rank]

    monkeypatch.setattr(ThreadRanks, "barrier", waits_by_the_clock)

    def work(ranks: Communicator) -> dict[str, float]:
        collector = collector_on(ranks, Slow(clock, sampling[ranks.rank]))
        return dict(collector.collect(PROMPTS, 9, nobody).metrics)

    for metrics in on_ranks(len(waits), work):  # of a phase, but how long ranks waited on average
        assert metrics["time/rollout_s"] == 10
        assert metrics["time/wait_s"] == sum(waits) / len(waits)


# Which rank samples which prompts -------------------------------------------------------------------------------------


def test_unknown_lengths_are_partitioned_round_robin() -> None:
    assert partition_prompts(["a", "b", "c", "d", "e"], {}, 2) == [[0, 2, 4], [1, 3]]
    assert partition_prompts(["a"], {}, 3) == [[0], [], []]
    assert partition_prompts(["a", "b", "c"], {"z": 100.0}, 1) == [[0, 1, 2]]


def test_the_longest_first_to_the_rank_with_the_fewest_tokens() -> None:
    expected_lengths = {"a": 10.0, "b": 500.0, "c": 20.0, "d": 400.0, "e": 300.0, "f": 10.0}
    # b to 0, d to 1, e to 1 (400 < 500), c to 0, and rank 1 (700) has room for one, rank 0 (520) too: a to 0, f to 1.
    assert partition_prompts("abcdef", expected_lengths, 2) == [[0, 1, 2], [3, 4, 5]]
    # an unknown one counts as the mean, 206: after e, before c
    assert partition_prompts("gbde", expected_lengths, 2) == [[0, 1], [2, 3]]
    # and not as one token, nor as none: a to 0, g (50) to 1, c to 1 (50 < 100), and b to 0, the last
    assert partition_prompts("gabc", {"a": 100.0, "b": 10.0, "c": 40.0}, 2) == [[1, 2], [0, 3]]


@pytest.mark.parametrize(("prompts", "size"), [(7, 3), (8, 3), (9, 3), (2, 4)])
def test_counts_differ_by_one_at_most_and_every_prompt_is_in_one_shard(prompts: int, size: int) -> None:
    names = [str(number) for number in range(prompts)]
    shards = partition_prompts(names, {name: float(int(name) ** 3) for name in names}, size)
    assert sorted(index for shard in shards for index in shard) == list(range(prompts))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
