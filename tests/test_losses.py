"""The pieces of the losses against numbers worked by hand."""

import math

import pytest
import torch
from torch import Tensor

from qerl_pl.algorithm import losses


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("far", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_far_off_the_clip_gives_finite_values_and_gradients(far: float, advantage: float) -> None:
    logprobs = torch.tensor([[far, 0.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for ratio in (
        losses.token_ratio(logprobs, torch.zeros(1, 2)),
        losses.sequence_ratio(logprobs, torch.zeros(1, 2), mask),
    ):
        assert ratio[0, 0].item() == pytest.approx(math.exp(math.copysign(20, far)))
        surrogate = losses.clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.28)
        (gradient,) = torch.autograd.grad(surrogate.value.sum(), logprobs)
        assert surrogate.value.isfinite().all() and gradient.isfinite().all()


def test_clip_edges_on_both_signs_of_the_advantage() -> None:
    ratio = f64([[0.5, 0.9, 1.2, 1.5], [0.5, 0.9, 1.2, 1.5], [0.5, 0.9, 1.2, 1.5]]).requires_grad_()
    surrogate = losses.clipped_surrogate(ratio, f64([2.0, -2.0, 0.0]), epsilon_low=0.2, epsilon_high=0.28)
    assert surrogate.value[0].tolist() == pytest.approx([1.0, 1.8, 2.4, 2.56])
    assert surrogate.value[1].tolist() == pytest.approx([-1.6, -1.8, -2.4, -3.0])
    surrogate.value.sum().backward()
    assert ratio.grad.tolist() == [[2, 2, 2, 0], [0, -2, -2, -2], [0, 0, 0, 0]]
    no, yes = False, True
    assert surrogate.clipped_high.tolist() == [[no, no, no, yes], [no] * 4, [no] * 4]
    assert surrogate.clipped_low.tolist() == [[no] * 4, [yes, no, no, no], [no] * 4]


def test_a_ratio_at_its_bound_is_not_clipped() -> None:
    ratio = f64([[0.75, 1.5], [0.75, 1.5]])
    advantages = f64([1.0, -1.0])
    for surrogate in (
        losses.clipped_surrogate(ratio, advantages, epsilon_low=0.25, epsilon_high=0.5),
        losses.cispo_surrogate(ratio, ratio.log(), advantages, epsilon_low=0.25, epsilon_high=0.5),
    ):
        assert not surrogate.clipped_low.any() and not surrogate.clipped_high.any()


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logprobs = f64([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]]).requires_grad_()
    ratio = torch.exp(logprobs - (logprobs.detach() - f64([0.1, 1.0, 6.0]).log()))
    surrogate = losses.cispo_surrogate(ratio, logprobs, f64([1.0, -0.5]), epsilon_low=0.5, epsilon_high=4.0)
    # Weights clip(0.1, 1, 6; 0.5, 5) = 0.5, 1, 5.
    assert surrogate.value.flatten().tolist() == pytest.approx([-0.5, -2.0, -15.0, 0.25, 1.0, 7.5])
    surrogate.value.sum().backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([0.5, 1.0, 5.0, -0.25, -0.5, -2.5])
    assert surrogate.clipped_low.tolist() == [[True, False, False]] * 2
    assert surrogate.clipped_high.tolist() == [[False, False, True]] * 2


def test_delta_bounds_a_large_ratio_of_a_negative_advantage() -> None:
    ratio = f64([[0.5, 0.9, 1.5, 3.5], [0.5, 0.9, 1.5, 3.5]]).requires_grad_()
    surrogate = losses.clipped_surrogate(ratio, f64([2.0, -2.0]), epsilon_low=0.2, epsilon_high=0.28, delta=3.0)
    assert surrogate.value[0].tolist() == pytest.approx([1.0, 1.8, 2.56, 2.56])
    assert surrogate.value[1].tolist() == pytest.approx([-1.6, -1.8, -3.0, -6.0])
    surrogate.value.sum().backward()
    assert ratio.grad.tolist() == [[2, 2, 0, 0], [0, -2, -2, 0]]
    no, yes = False, True
    assert surrogate.clipped_high.tolist() == [[no, no, yes, yes], [no, no, no, yes]]
    assert surrogate.clipped_low.tolist() == [[no] * 4, [yes, no, no, no]]


def test_delta_is_the_dual_clip_and_the_two_sided_clip() -> None:
    draw = torch.Generator().manual_seed(2)
    ratio = 2 * torch.randn(40, 30, generator=draw, dtype=torch.float64).exp()
    advantages = torch.randn(40, generator=draw, dtype=torch.float64)
    found = losses.clipped_surrogate(ratio, advantages, 0.2, 0.3, delta=1.8).value
    for row, advantage in enumerate(advantages.tolist()):
        for column, r in enumerate(ratio[row].tolist()):
            clipped = min(max(r, 0.8), 1.3)
            clip = min(r * advantage, clipped * advantage)
            dual = max(clip, 1.8 * advantage) if advantage < 0 else clip
            two_sided = min(min(r, 1.8) * advantage, clipped * advantage)
            assert found[row, column].item() == pytest.approx(dual) == pytest.approx(two_sided)
    assert (ratio > 1.8).any() and (ratio < 0.8).any()


def test_sapo_by_hand() -> None:
    # sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4; the slope is sigmoid * (1 - sigmoid) * 4 A.
    far = math.log(3)
    ratio = f64([[1.0, 1 + far, 1 - far], [1.0, 1 + far / 2, 1 - far / 2]]).requires_grad_()
    surrogate = losses.sapo_surrogate(ratio, f64([0.5, -2.0]), 1.0, 2.0, 0.2, 0.3)
    assert surrogate.value.flatten().tolist() == pytest.approx([1.0, 1.5, 0.5, -2.0, -3.0, -1.0])
    surrogate.value.sum().backward()
    assert ratio.grad.flatten().tolist() == pytest.approx([0.5, 0.375, 0.375, -2.0, -1.5, -1.5])
    assert surrogate.clipped_high.flatten().tolist() == [False, True, False, False, False, False]
    assert surrogate.clipped_low.flatten().tolist() == [False, False, False, False, False, True]


def test_dppo_masks_by_the_change_of_probability() -> None:
    # From 0.5 to 0.8, 0.6 and 0.2; and from 0.001 to 0.01: a ratio of 10 that hardly moves anything.
    sampler = f64([[0.5, 0.5, 0.5, 0.001]]).log().repeat(3, 1)
    logprobs = f64([[0.8, 0.6, 0.2, 0.01]]).log().repeat(3, 1).requires_grad_()
    ratio = torch.exp(logprobs - sampler)
    surrogate = losses.dppo_surrogate(ratio, logprobs, sampler, f64([2.0, -2.0, 0.0]), 0.25, 0.2)
    assert surrogate.value[0].tolist() == pytest.approx([0.0, 2.4, 0.8, 20.0])
    assert surrogate.value[1].tolist() == pytest.approx([-3.2, -2.4, 0.0, -20.0])
    surrogate.value.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 2.4, 0.8, 20.0])
    assert logprobs.grad[1].tolist() == pytest.approx([-3.2, -2.4, 0.0, -20.0])
    no, yes = False, True
    assert surrogate.clipped_high.tolist() == [[yes, no, no, no], [no] * 4, [no] * 4]
    assert surrogate.clipped_low.tolist() == [[no] * 4, [no, no, yes, no], [no] * 4]


def test_kl_estimators_by_hand() -> None:
    # Reference twice as likely: d = ln 2; k3 = 2 - 1 - ln 2. Half as likely: d = -ln 2; k3 = 1/2 - 1 + ln 2.
    logprobs, ref, two = f64([[-2.0, -2.0]]), f64([[-2.0 + math.log(2), -2.0 - math.log(2)]]), math.log(2)
    assert losses.kl_divergence(logprobs, ref, "k1")[0].tolist() == pytest.approx([-two, two])
    assert losses.kl_divergence(logprobs, ref, "k2")[0].tolist() == pytest.approx([two**2 / 2, two**2 / 2])
    assert losses.kl_divergence(logprobs, ref, "k3")[0].tolist() == pytest.approx([1 - two, two - 0.5])


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    totals = {"completions": 4, "tokens": 10, "max_tokens": 20}
    expected = {"sequence_mean": (1 / 16, 1 / 4), "token_mean": (1 / 10, 1 / 10), "constant": (1 / 80, 1 / 80)}
    for kind, (first, second) in expected.items():
        weights = losses.token_weights(mask, kind, **totals)
        assert weights.flatten().tolist() == pytest.approx([first] * 4 + [0, second] + [0] * 6), kind
