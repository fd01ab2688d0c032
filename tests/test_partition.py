"""Partitions of a batch over the ranks, worked by hand."""

import pytest

from qerl_pl.rollout.collector import partition_prompts


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
