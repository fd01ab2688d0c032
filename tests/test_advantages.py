"""Advantages against numbers worked by hand."""

import math
from typing import get_args

import pytest
import torch

from qerl_pl.algorithm import GRPO
from qerl_pl.algorithm.advantages import (
    AdvantageNorm,
    Scores,
    group_advantages,
    grouped,
    have_differences,
    normalized_then_summed,
    summed_group_advantages,
)
from qerl_pl.errors import UserError

# Group one: mean 1, deviations -1 -1 -1 3, unbiased std sqrt(12 / 3) = 2. Group two: all equal.
REWARDS = torch.tensor([0, 0, 0, 4, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)

NORMS = get_args(AdvantageNorm)


def informative(rewards: torch.Tensor, right: torch.Tensor, group_size: int) -> torch.Tensor:
    """The groups that dynamic sampling trains on."""
    return GRPO().signal(Scores(rewards), group_size) & have_differences(grouped(right, group_size))


# Mean 4.4 / 8 = 0.55, sum of squares 16.04, variance (16.04 - 8 * 0.55^2) / 7 = 13.62 / 7.
BATCH_STD = (13.62 / 7) ** 0.5 + 1e-4
RIGHT = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0])  # means 1/4, 3/4, 0


@pytest.mark.parametrize(
    ("rewards", "group_size", "normalize", "expected"),
    [
        (REWARDS, 4, "group", [-1 / 2.0001, -1 / 2.0001, -1 / 2.0001, 3 / 2.0001, 0, 0, 0, 0]),
        (REWARDS, 4, "batch", [value / BATCH_STD for value in (-1, -1, -1, 3, 0, 0, 0, 0)]),
        (torch.tensor([0, 1, 5, 2]), 2, "none", [-0.5, 0.5, 1.5, -1.5]),
        (REWARDS, 4, "rloo", [-4 / 3, -4 / 3, -4 / 3, 4, 0, 0, 0, 0]),  # others' means of 0 0 0 4: 4/3, 4/3, 4/3, 0
        (RIGHT, 4, "maxrl", [-1, -1, -1, 3, 1 / 3, 1 / 3, -1, 1 / 3, 0, 0, 0, 0]),
    ],
)
def test_each_norm_worked_out(rewards, group_size, normalize, expected) -> None:
    tolerance = 1e-12 if rewards is REWARDS else 1e-6  # float64, or float32
    assert group_advantages(rewards, group_size, normalize).tolist() == pytest.approx(expected, abs=tolerance)


def test_maxrl_takes_no_negative_reward() -> None:
    with pytest.raises(UserError, match="advantage_norm maxrl .* must be at least 0; got -0.5; use another"):
        group_advantages(torch.tensor([1.0, -0.5, 0.0, torch.nan]), 2, "maxrl")


@pytest.mark.parametrize("normalize", NORMS)
@pytest.mark.filterwarnings("error")
def test_without_groups_there_are_no_advantages(normalize) -> None:
    assert group_advantages(torch.zeros(0), 4, normalize).shape == (0,)


def test_informative_groups_have_right_and_wrong_answers_and_unequal_rewards() -> None:
    right = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    # All right and all wrong with unequal totals, by a reward for form; some right; some right with equal totals.
    rewards = torch.tensor([1.0, 1.2, 0.0, 0.2, 1.0, 0.0, 0.5, 0.5])
    assert informative(rewards, right, 2).tolist() == [False, False, True, False]
    assert informative(REWARDS, REWARDS > 0.5, 4).tolist() == [True, False]


@pytest.mark.parametrize(("group_size", "found"), [(1, "got group size 1"), (3, "got 8 rewards in groups of 3")])
def test_sizes_that_cannot_be_grouped_are_a_user_error(group_size, found) -> None:
    with pytest.raises(UserError, match=found):
        group_advantages(REWARDS, group_size, "group")
    with pytest.raises(UserError, match=found):
        informative(REWARDS, REWARDS > 0.5, group_size)


# NaN: no reward applies ----------------------------------------------------------------------------------------------

# Group one: 1 and 3 apply, mean 2, unbiased std sqrt(2). Group two: 6 alone. Group three: none. Group four: 0, 2, 4.
PARTIAL = torch.tensor([1, math.nan, 3, 6, math.nan, math.nan, *[math.nan] * 3, 0, 2, 4], dtype=torch.float64)


@pytest.mark.parametrize(
    ("normalize", "stds"),
    [
        ("group", (2**0.5 + 1e-4, 2 + 1e-4)),
        # 1, 3, 6, 0, 2, 4: mean 16 / 6, sum of squares 66, variance (66 - 256 / 6) / 5 = 14 / 3.
        ("batch", ((14 / 3) ** 0.5 + 1e-4,) * 2),
        ("none", (1, 1)),
        ("rloo", (1 / 2, 2 / 3)),
        ("maxrl", (2, 2)),
    ],
)
def test_a_completion_without_a_reward_counts_for_nothing(normalize, stds) -> None:
    found = group_advantages(PARTIAL, 3, normalize).tolist()
    expected = [-1 / stds[0], 0, 1 / stds[0], *[0] * 6, -2 / stds[1], 0, 2 / stds[1]]
    assert found == pytest.approx(expected, abs=1e-12)
    assert group_advantages(torch.full((4,), torch.nan), 2, normalize).tolist() == [0.0] * 4


# GDPO ----------------------------------------------------------------------------------------------------------------


def test_each_reward_is_normalized_in_its_group_before_the_sum_which_is_normalized_over_the_batch() -> None:
    # Of "a": 0, 2 are -+ 1 / sqrt(2), 5, 5 are 0. Of "b", however large its scale: 100, 300 and 300, 100 the same.
    rewards = {"a": torch.tensor([0.0, 2.0, 5.0, 5.0]), "b": torch.tensor([100.0, 300.0, 300.0, 100.0])}
    rewards = {name: values.double() for name, values in rewards.items()}
    a, b = 1 / (2**0.5 + 1e-4), 100 / (100 * 2**0.5 + 1e-4)
    summed = [-2 * a - b / 2, 2 * a + b / 2, b / 2, -b / 2]  # mean 0
    std = (sum(value**2 for value in summed) / 3) ** 0.5
    found = normalized_then_summed(rewards, {"a": 2.0, "b": 0.5}, 2).tolist()
    assert found == pytest.approx([value / (std + 1e-4) for value in summed], abs=1e-9)


def test_rewards_with_equal_totals_train_where_their_advantages_differ_and_cancel_exactly_where_not() -> None:
    right = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    rewards = {"right": right, "form": 0.1 * (1 - right)}
    # Totals of weights 1 and 10 are 1 everywhere. "right" is (2, -1, -1) / 3 over its standard deviation 1 / sqrt(3).
    unit = 1 / 3**0.5
    size = 1 / (unit + 1e-4) - 10 * 0.1 / (0.1 * unit + 1e-4)
    found = summed_group_advantages(rewards, {"right": 1.0, "form": 10.0}, 3)
    assert found[:3].tolist() == pytest.approx([2 / 3 * size, -size / 3, -size / 3], rel=1e-4)
    assert informative(found, right, 3).tolist() == [True] * 3
    assert informative(rewards["right"] + 10 * rewards["form"], right, 3).tolist() == [False] * 3
    # With the same weights and sizes they cancel: here but for rounding.
    rewards = {"right": right / 3, "form": 0.7 - right / 3, "late": torch.tensor([torch.nan] * 8 + [1.0])}
    found = summed_group_advantages(rewards, {"right": 1e3, "form": 1e3, "late": 1.0}, 3)
    assert found.tolist() == [0.0] * 9 and not informative(found, right, 3).any()
    terms = [group_advantages(rewards[name], 3, "group") for name in ("right", "form")]
    assert (terms[0] + terms[1]).any()


def test_a_reward_of_weight_0_makes_no_completion_count() -> None:
    graded, logged = torch.tensor([torch.nan, 0.2, 0.4, 0.6]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    alone = normalized_then_summed({"graded": graded}, {"graded": 1.0}, 4)
    both = normalized_then_summed({"graded": graded, "logged": logged}, {"graded": 1.0, "logged": 0.0}, 4)
    assert both.tolist() == alone.tolist() and both[0] == 0
    assert summed_group_advantages({"logged": logged}, {"logged": 0.0}, 4).tolist() == [0] * 4


def test_without_differences_or_groups_gdpo_has_no_advantages() -> None:
    equal = {"a": torch.tensor([1.0, 1.0, 2.0, 2.0]), "b": torch.full((4,), torch.nan)}
    assert normalized_then_summed(equal, {"a": 1.0, "b": 1.0}, 2).tolist() == [0.0] * 4
    assert normalized_then_summed({"a": torch.zeros(0)}, {"a": 1.0}, 2).shape == (0,)
    with pytest.raises(UserError, match="got group size 1"):
        normalized_then_summed({"a": REWARDS}, {"a": 1.0}, 1)
