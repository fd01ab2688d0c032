"""What answers come to, against numbers worked by hand and plain enumeration."""

import itertools
import math

import pytest
import torch

from qerl_pl.evaluation.metrics import (
    bootstrap_interval,
    evaluation_tag,
    k_values,
    majority_at_k,
    majority_is_right,
    pass_at_k,
    prompt_metrics,
)
from qerl_pl.types import EvaluatedPrompt, GradedAnswer

RIGHT, ALSO = GradedAnswer(True, "5"), GradedAnswer(True, "5.0")
SEVEN, EIGHT, NONE = GradedAnswer(False, "7"), GradedAnswer(False, "8"), GradedAnswer(False, None)


@pytest.mark.parametrize(
    ("samples", "correct", "k", "chance"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 1, 4, 1.0), (10, 3, 5, 11 / 12), (4, 0, 3, 0.0)],
)
def test_pass_at_k(samples: int, correct: int, k: int, chance: float) -> None:
    """4 samples, 2 right: of 6 pairs one has none. 10, 3 right, 5 drawn: C(7, 5) / C(10, 5) = 21 / 252 = 1 / 12."""
    assert pass_at_k(samples, correct, k) == pytest.approx(chance, abs=1e-15)
    draws = list(itertools.combinations(range(samples), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(min(draw) < correct for draw in draws) / len(draws))


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ([RIGHT, RIGHT, SEVEN], 1.0),
        ([RIGHT, SEVEN, SEVEN], 0.0),
        ([RIGHT, SEVEN], 0.5),
        ([RIGHT, SEVEN, EIGHT], 1 / 3),
        ([RIGHT, ALSO, SEVEN, SEVEN, EIGHT], 0.5),  # right ones vote together
        ([RIGHT, NONE, NONE, NONE], 1.0),
        ([NONE, NONE], 0.0),
    ],
)
def test_a_majority_votes(answers: list[GradedAnswer], right: float) -> None:
    assert majority_is_right(answers) == pytest.approx(right)
    assert majority_at_k(answers, len(answers), seed=0) == pytest.approx(right)


def test_a_majority_of_fewer_is_the_mean_over_subsets() -> None:
    """Two right and two times 7: of the six pairs one is right, one is 7, and four are even."""
    answers = [RIGHT, RIGHT, SEVEN, SEVEN]
    assert majority_at_k(answers, 2, seed=0) == pytest.approx((1 + 0 + 4 * 0.5) / 6)
    many = [RIGHT] * 12 + [SEVEN] * 8
    exact = sum(
        math.comb(12, c) * math.comb(8, 8 - c) * (c > 4 or (c == 4) / 2) for c in range(9)
    ) / math.comb(20, 8)  # of 125,970 subsets, 256 are drawn  # fmt: skip
    assert majority_at_k(many, 8, seed=1) == majority_at_k(many, 8, seed=1) != majority_at_k(many, 8, seed=2)
    assert majority_at_k(many, 8, seed=1) == pytest.approx(exact, abs=0.08)


def test_k_values_are_powers_of_two_and_all() -> None:
    assert [k_values(n) for n in (1, 2, 4, 6, 16)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16]]


def test_metrics_of_prompts() -> None:
    cut = GradedAnswer(False, None, tokens=8, truncated=True)
    prompts = [
        EvaluatedPrompt("a", RIGHT, [GradedAnswer(True, "5", 4), cut]),
        EvaluatedPrompt("b", SEVEN, [GradedAnswer(False, "7", 1), GradedAnswer(False, "8", 1)]),
    ]
    metrics = {name: values.tolist() for name, values in prompt_metrics(prompts).items()}
    assert metrics == {
        "accuracy": [1, 0],
        "pass@1": [0.5, 0],
        "pass@2": [1, 0],
        "maj@2": [1, 0],
        "length_mean": [6, 1],
        "truncated_frac": [0.5, 0],
        "unanswered_frac": [0.5, 0],
    }
    assert metrics.keys() - prompt_metrics(prompts, extracts_answers=False).keys() == {"maj@2", "unanswered_frac"}


def graded(**rewards: float | None) -> GradedAnswer:
    return GradedAnswer(False, None, rewards=rewards)


def test_rewards_are_averaged_over_the_samples_that_they_apply_to() -> None:
    """Prompt a: brief (0.5 + 1.5) / 2, polite of one sample, total (1 + 2) / 2; no reward applies to prompt b."""
    nothing = graded(brief=None, polite=None, total=None)
    first = graded(brief=0.5, polite=None, total=1.0), graded(brief=1.5, polite=0.25, total=2.0)
    prompts = [EvaluatedPrompt("a", nothing, first), EvaluatedPrompt("b", nothing, [nothing, nothing])]
    found = {name: values for name, values in prompt_metrics(prompts).items() if name.startswith("reward")}
    assert list(found) == ["reward_mean", "reward_brief", "reward_polite"]
    assert [values.tolist() for values in found.values()] == [[1.5], [1.0], [0.25]]  # prompt b has none
    assert not [name for name in prompt_metrics(prompts[1:]) if name.startswith("reward")]


def test_a_single_reward_has_its_weighted_mean_alone() -> None:
    samples = [graded(brief=0.5, total=1.0), graded(brief=0.0, total=0.0)]
    found = prompt_metrics([EvaluatedPrompt("a", SEVEN, samples)])
    rewards = {name: values.tolist() for name, values in found.items() if "reward" in name}
    assert rewards == {"reward_mean": [0.5]}


def test_the_interval_is_that_of_a_binomial() -> None:
    """400 prompts, 100 right: 0.25 and 1.96 sqrt(0.25 * 0.75 / 400) = 0.0424 to either side."""
    values = torch.tensor([1.0] * 100 + [0.0] * 300, dtype=torch.float64)
    low, high = bootstrap_interval(values, seed=3)
    assert (low, high) == bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    assert low == pytest.approx(0.25 - 0.0424, abs=0.005) and high == pytest.approx(0.25 + 0.0424, abs=0.005)
    assert bootstrap_interval(torch.ones(5, dtype=torch.float64), seed=0) == (1.0, 1.0)


def test_the_interval_of_equal_fractions_is_clopper_and_pearsons() -> None:
    """Of 30 prompts none is right: 1 - 0.025^(1/30) = 0.1157, as tables of the exact interval have it."""
    none = torch.zeros(30, dtype=torch.float64)
    assert bootstrap_interval(none, seed=0, fractions=True) == pytest.approx((0.0, 0.1157), abs=5e-5)
    assert bootstrap_interval(1 - none, seed=0, fractions=True) == pytest.approx((0.8843, 1.0), abs=5e-5)
    assert bootstrap_interval(none + 0.5, seed=0, fractions=True) == (0.5, 0.5)
    mixed = torch.tensor([1.0] * 100 + [0.0] * 300, dtype=torch.float64)
    assert bootstrap_interval(mixed, seed=3, fractions=True) == bootstrap_interval(mixed, seed=3)


@pytest.mark.parametrize(
    ("stage", "name", "tag"), [("val", "", "val/accuracy"), ("test", "math_500", "test/math_500/accuracy")]
)
def test_a_metric_is_found_under_its_stage_and_set(stage: str, name: str, tag: str) -> None:
    assert evaluation_tag(stage, name, "accuracy") == tag
