"""Objectives against plain loops over tokens, hand derivations, and their own micro-batches."""

import math
from dataclasses import fields, replace

import pytest
import torch
from jsonargparse import auto_cli
from torch import Tensor

from qerl_pl.algorithm import RolloutCorrection
from qerl_pl.algorithm.advantages import Scores
from qerl_pl.algorithm.objectives import (
    BNPO,
    CISPO,
    DAPO,
    DPPO,
    GRPO,
    GSPO,
    SAPO,
    DrGRPO,
    LossInputs,
    Objective,
    OnPolicyDistillation,
)
from qerl_pl.errors import UserError

OBJECTIVES = [
    GRPO(beta=0.04),
    DAPO(),
    DrGRPO(beta=0.1, kl_estimator="k2"),
    BNPO(entropy_coefficient=0.01),
    GSPO(epsilon_low=0.1, epsilon_high=0.1),
    CISPO(epsilon_high=0.3),
    GRPO(beta=0.04, correction="sequence_tis"),
    GRPO(beta=0.04, delta=1.3, correction="off"),
    SAPO(),
    DPPO(epsilon_low=0.02, epsilon_high=0.03),
    DAPO(correction=RolloutCorrection("geometric", 1.1, "token", 0.4, 4.0, 0.1)),
    OnPolicyDistillation(epsilon_low=0.1),
]
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_batch(objective: Objective, mask: Tensor = MASK, masked: bool = False) -> LossInputs:
    """Random float64 inputs whose ratios reach beyond every clip bound, weighted as the objective asks."""
    generator = torch.Generator().manual_seed(7)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old = -normal(1.0).abs() - 0.1
    weights = objective.weights(mask, max_tokens=mask.shape[1], completions=mask.shape[0], tokens=int(mask.sum()))
    return LossInputs(
        logprobs=(old + normal(0.4)).requires_grad_(),
        old_logprobs=old,
        sampler_logprobs=old + normal(0.7),
        advantages=torch.randn(mask.shape[0], generator=generator, dtype=torch.float64),
        mask=mask,
        weights=weights,
        ref_logprobs=old + normal(0.3),
        entropy=normal(1.0).abs().requires_grad_(),
        teacher_logprobs=old + normal(0.5),
    )


def plain_grpo(batch: LossInputs, beta: float, epsilon: float, cap: float) -> tuple[float, list[list[float]]]:
    """GRPO's loss and its gradient by the log-probabilities, token by token, with the derivatives written out."""
    rows, columns = batch.mask.shape
    total, gradient = 0.0, [[0.0] * columns for _ in range(rows)]
    for i in range(rows):
        tokens = [t for t in range(columns) if batch.mask[i, t]]
        for t in tokens:
            now, old, ref, sampler = (
                values[i, t].item()
                for values in (batch.logprobs, batch.old_logprobs, batch.ref_logprobs, batch.sampler_logprobs)
            )
            advantage = float(batch.advantages[i])
            ratio, slope = math.exp(now - old), math.exp(now - old)
            if advantage > 0 and ratio > 1 + epsilon:
                ratio, slope = 1 + epsilon, 0.0
            if advantage < 0 and ratio < 1 - epsilon:
                ratio, slope = 1 - epsilon, 0.0
            weight = min(math.exp(old - sampler), cap)
            kl = math.exp(ref - now) - (ref - now) - 1
            scale = 1 / len(tokens) / rows
            total += scale * (-weight * ratio * advantage + beta * kl)
            gradient[i][t] = scale * (-weight * slope * advantage + beta * (1 - math.exp(ref - now)))
    return total, gradient


def test_grpo_matches_plain_loops() -> None:
    objective = GRPO(beta=0.3)
    batch = make_batch(objective, torch.rand(12, 9, generator=torch.Generator().manual_seed(0)) < 0.6)
    outputs = objective.loss(batch)
    outputs.loss.backward()
    loss, gradient = plain_grpo(batch, beta=0.3, epsilon=0.2, cap=2.0)
    # Both clips, both sides of the cap and free tokens occur, so the comparison covers every branch.
    assert outputs.metrics["clip_low"] > 0 and outputs.metrics["clip_high"] > 0
    assert outputs.metrics["clip_low"] + outputs.metrics["clip_high"] < outputs.metrics["tokens"]
    drift = (batch.old_logprobs - batch.sampler_logprobs)[batch.mask].exp()
    assert drift.max() > 2 and drift.min() < 2
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-6)
    # Weights are float32, hence not 1e-12.
    torch.testing.assert_close(batch.logprobs.grad, f64(gradient), rtol=1e-6, atol=1e-9)


def test_gspo_gradient_by_hand() -> None:
    """d/d logprob_t of -1/B sum_i min(s_i A_i, clip(s_i) A_i) = -s_i A_i / (B length_i), and 0 where clipped."""
    objective = GSPO(epsilon_low=0.1, epsilon_high=0.1, correction="off")
    old = torch.full((4, 3), -2.0, dtype=torch.float64)
    mean_ratio = [1.05, 1.5, 1.5, 0.95]  # of three tokens, of three, of three, of one
    spread = f64([-0.3, 0.1, 0.2])  # sums to 0, so token ratios differ from the completion's
    steps = torch.stack([math.log(mean) + spread for mean in mean_ratio])
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[3, 1:] = False
    steps[3, 0] = math.log(0.95)
    logprobs = (old + steps).requires_grad_()
    weights = objective.weights(mask, max_tokens=3, completions=4, tokens=10)
    outputs = objective.loss(LossInputs(logprobs, old, old, f64([1.0, 1.0, -1.0, 2.0]), mask, weights))
    # Values s A: 1.05; clipped 1.1; min(-1.5, -1.1) = -1.5; 1.9.
    assert outputs.loss.item() == pytest.approx(-(1.05 + 1.1 - 1.5 + 1.9) / 4)
    outputs.loss.backward()
    expected = [[-1.05 / 12] * 3, [0.0] * 3, [1.5 / 12] * 3, [-1.9 / 4, 0.0, 0.0]]
    torch.testing.assert_close(logprobs.grad, f64(expected), rtol=1e-6, atol=1e-9)
    assert outputs.metrics["clip_high"] == 3 and outputs.metrics["clip_low"] == 0
    assert outputs.metrics["ratio"].item() == pytest.approx(3 * (1.05 + 1.5 + 1.5) + 0.95)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
@pytest.mark.parametrize("split", [[1, 1, 1, 1], [3, 1], [1, 2, 1]], ids=str)
def test_micro_batches_add_up_to_the_whole_batch(objective, split) -> None:
    full_finetuning = make_batch(objective, masked=True)
    outputs = objective.loss(full_finetuning)
    outputs.loss.backward()
    parts = make_batch(objective, masked=True)
    tensors = {item.name: value for item in fields(parts) if isinstance(value := getattr(parts, item.name), Tensor)}
    rows = {name: value.split(split) for name, value in tensors.items()}
    loss, metrics = 0.0, dict.fromkeys(outputs.metrics, 0.0)
    for index in range(len(split)):
        part = objective.loss(LossInputs(**{name: values[index] for name, values in rows.items()}))
        part.loss.backward()
        loss += part.loss.item()
        metrics = {name: total + part.metrics[name].item() for name, total in metrics.items()}
    assert loss == pytest.approx(outputs.loss.item(), rel=1e-12)
    assert metrics == pytest.approx({name: value.item() for name, value in outputs.metrics.items()}, rel=1e-12)
    torch.testing.assert_close(parts.logprobs.grad, full_finetuning.logprobs.grad, rtol=1e-12, atol=0)
    if objective.needs_entropy:
        torch.testing.assert_close(parts.entropy.grad, full_finetuning.entropy.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_what_lies_outside_the_mask_has_no_effect(objective) -> None:
    clean, spoiled = make_batch(objective), make_batch(objective)
    for name in ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy", "teacher_logprobs"):
        getattr(spoiled, name).data[~MASK] = float("nan")
    first, second = objective.loss(clean), objective.loss(spoiled)
    first.loss.backward()
    second.loss.backward()
    assert first.loss.item() == second.loss.item() and first.metrics == second.metrics
    assert torch.equal(clean.logprobs.grad, spoiled.logprobs.grad)
    assert clean.logprobs.grad[MASK].any() and not clean.logprobs.grad[~MASK].any()


def test_metrics_are_sums_over_masked_tokens() -> None:
    objective = GRPO()
    old = f64([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0]])
    steps = f64([[0.0, math.log(2), 0.0], [0.0, 0.0, math.log(0.5)]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    sampler = old - f64([[9.0, math.log(4), 0.0], [9.0, 9.0, math.log(0.5)]])
    weights = objective.weights(mask, 3, 2, 3)
    inputs = LossInputs(
        old + steps, old, sampler, f64([1.0, -1.0]), mask, weights, ref_logprobs=old, entropy=torch.full_like(old, 0.5)
    )
    expected = {
        "tokens": 3,
        "ratio": 2 + 1 + 0.5,
        "clip_low": 1,
        "clip_high": 1,
        "is_weight": 2 + 1 + 0.5,  # ratios of trainer to sampler: 4, 1, 0.5
        "is_weight_squared": 4 + 1 + 0.25,
        "rejected": 0,
        "capped": 1,
        "mismatch_k3": (4 - 1 - math.log(4)) + (0.5 - 1 + math.log(2)),
        "mismatch_ratio_squared": 16 + 1 + 0.25,
        "logprob_abs": math.log(4) + math.log(2),
        "kl": (0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2)),
        "entropy": 1.5,
    }
    outputs = objective.loss(inputs)
    assert {name: value.item() for name, value in outputs.metrics.items()} == pytest.approx(expected)
    rejecting = replace(objective, correction=RolloutCorrection(rejection="token", low=0.6, high=3.0))
    outputs = rejecting.loss(inputs)
    names = ("rejected", "capped", "is_weight", "is_weight_squared")
    assert [outputs.metrics[name].item() for name in names] == [2, 0, 1, 1]


def test_entropy_bonus_lowers_the_loss_of_uncertain_tokens() -> None:
    batch = make_batch(DrGRPO())
    plain, bonus = DrGRPO().loss(batch).loss, DrGRPO(entropy_coefficient=0.5).loss(batch).loss
    bonus.backward()
    # Six tokens of weight 1 / (4 * 5).
    assert (plain - bonus).item() == pytest.approx(0.5 / 20 * batch.entropy[MASK].sum().item())
    torch.testing.assert_close(batch.entropy.grad, -0.5 / 20 * MASK.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [CISPO, SAPO, DPPO])
def test_delta_is_refused_without_a_ratio_clip(kind) -> None:
    with pytest.raises(UserError, match=f"delta bounds a ratio clip; got 9.0 for {kind.__name__}; leave delta out"):
        kind(delta=9.0)


@pytest.mark.parametrize("arguments", [{"tau_positive": 0.0}, {"tau_negative": math.nan}])
def test_a_temperature_that_is_none_is_refused(arguments) -> None:
    with pytest.raises(UserError, match=f"{next(iter(arguments))} must be a number above 0; got"):
        SAPO(**arguments)


def test_truncated_completions_leave_the_mask_where_asked() -> None:
    truncated = torch.tensor([True, False, False, True])
    assert DAPO().training_mask(MASK, truncated).any(dim=1).tolist() == [False, True, True, False]
    assert torch.equal(GRPO().training_mask(MASK, truncated), MASK)


def test_advantages_follow_the_norm_of_the_objective() -> None:
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0])
    assert GRPO().advantages(Scores(rewards), 4)[0].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-3)
    assert DrGRPO().advantages(Scores(rewards), 4)[0].tolist() == [-1.0, -1.0, -1.0, 3.0]
    assert GRPO(advantage_norm="maxrl").advantages(Scores(rewards), 4)[0].tolist() == [-1.0, -1.0, -1.0, 3.0]


@pytest.mark.parametrize(
    ("aggregation", "signal"),
    [("sum_then_normalize", [False, True, False]), ("normalize_then_sum", [False, True, True])],
)
def test_a_group_has_a_signal_where_its_rewards_differ_as_they_are_combined(aggregation, signal) -> None:
    first = torch.tensor([0.5, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    second = torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0])
    scores = Scores(first + 0.5 * second, {"first": first, "second": second}, {"first": 1.0, "second": 0.5})
    objective = GRPO(multi_objective_aggregation=aggregation)
    # The last group's totals are 1 everywhere; weighted, the advantages of its rewards cancel but for the epsilon.
    assert objective.signal(scores, 3).tolist() == objective.advantages(scores, 3)[1].tolist() == signal


def test_missing_inputs_are_named() -> None:
    batch = make_batch(GRPO())
    with pytest.raises(ValueError, match="ref_logprobs"):
        GRPO(beta=0.04).loss(replace(batch, ref_logprobs=None))
    with pytest.raises(ValueError, match="entropy"):
        DAPO(entropy_coefficient=0.1).loss(replace(batch, entropy=None))
    assert "kl" not in DAPO().loss(replace(batch, ref_logprobs=None)).metrics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -0.1}, "beta must be a number of at least 0; got -0.1"),
        ({"epsilon_high": float("nan")}, "epsilon_high must be a number of at least 0; got nan"),
        (
            {"advantage_norm": "std"},
            "advantage_norm must be one of group, batch, none, rloo, maxrl; got 'std'; choose one of them",
        ),
        ({"delta": 1.2}, "delta must be a number above 1 .*=1.2; got 1.2; set it to 4, say"),
        ({"delta": math.inf}, "delta must be a number above 1 .*=1.2; got inf"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3; got 'k4'; choose one of them"),
    ],
)
def test_bad_numbers_are_a_user_error(arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        GRPO(**arguments)


def test_a_cap_below_one_is_taken() -> None:
    batch = make_batch(GRPO())
    outputs = GRPO(correction=RolloutCorrection(cap=0.5)).loss(replace(batch, sampler_logprobs=batch.old_logprobs))
    assert outputs.metrics["is_weight"] == 0.5 * outputs.metrics["tokens"]


def test_yaml_configures_an_objective() -> None:
    def configured(objective: Objective) -> Objective:
        return objective

    given = ["--objective=qerl_pl.algorithm.DAPO", "--objective.epsilon_high=0.3", "--objective.correction=off"]
    assert auto_cli(configured, args=given, as_positional=False) == DAPO(
        epsilon_high=0.3, correction="off", mask_truncated=True
    )
