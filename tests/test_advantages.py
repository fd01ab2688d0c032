"""Advantages against numbers worked by hand."""

import pytest
import torch

from qerl_pl.algorithm.advantages import group_advantages, informative_groups
from qerl_pl.errors import UserError

# Group one: mean 1, deviations -1 -1 -1 3, unbiased std sqrt(12 / 3) = 2. Group two: all equal.
REWARDS = torch.tensor([0, 0, 0, 4, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)


def test_group_divides_by_the_unbiased_std_of_the_group() -> None:
    expected = [-1 / 2.0001, -1 / 2.0001, -1 / 2.0001, 3 / 2.0001, 0, 0, 0, 0]
    assert group_advantages(REWARDS, 4, "group").tolist() == pytest.approx(expected, abs=1e-12)


def test_batch_divides_by_the_std_of_all_rewards() -> None:
    # Mean 4.4 / 8 = 0.55, sum of squares 16.04, variance (16.04 - 8 * 0.55^2) / 7 = 13.62 / 7.
    std = (13.62 / 7) ** 0.5
    expected = [value / (std + 1e-4) for value in (-1, -1, -1, 3, 0, 0, 0, 0)]
    assert group_advantages(REWARDS, 4, "batch").tolist() == pytest.approx(expected, abs=1e-12)


def test_none_only_subtracts_the_mean_of_the_group() -> None:
    assert group_advantages(torch.tensor([0, 1, 5, 2]), 2, "none").tolist() == [-0.5, 0.5, 1.5, -1.5]


@pytest.mark.parametrize("normalize", ["group", "batch", "none"])
@pytest.mark.filterwarnings("error")
def test_without_groups_there_are_no_advantages(normalize) -> None:
    assert group_advantages(torch.zeros(0), 4, normalize).shape == (0,)


@pytest.mark.parametrize("normalize", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(normalize) -> None:
    # In float32 the mean of seven times 0.1 is not 0.1.
    rewards = torch.full((7,), 0.1)
    assert (rewards - rewards.mean()).any()
    assert group_advantages(rewards, 7, normalize).tolist() == [0.0] * 7


def test_informative_groups_have_right_and_wrong_answers_and_unequal_rewards() -> None:
    right = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    # All right and all wrong with unequal totals, by a reward for form; some right; some right with equal totals.
    rewards = torch.tensor([1.0, 1.2, 0.0, 0.2, 1.0, 0.0, 0.5, 0.5])
    assert informative_groups(rewards, right, 2).tolist() == [False, False, True, False]
    assert informative_groups(REWARDS, REWARDS > 0.5, 4).tolist() == [True, False]


@pytest.mark.parametrize(("group_size", "found"), [(1, "got group size 1"), (3, "got 8 rewards in groups of 3")])
def test_sizes_that_cannot_be_grouped_are_a_user_error(group_size, found) -> None:
    with pytest.raises(UserError, match=found):
        group_advantages(REWARDS, group_size, "group")
    with pytest.raises(UserError, match=found):
        informative_groups(REWARDS, REWARDS > 0.5, group_size)
