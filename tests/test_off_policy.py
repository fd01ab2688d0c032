"""The correction between sampler and trainer against loops and numbers by hand, and its widening by the noise."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli
from plain_objective import importance_weights
from rank_helpers import on_ranks
from scripted import PROMPTS, SAMPLING, Scripted, Watched, Words, config_of, nobody, own, said
from torch import Tensor

from qerl_pl.algorithm import DAPO, DrGRPO, NormNoise, Objective, RolloutCorrection
from qerl_pl.algorithm.objectives import LossInputs
from qerl_pl.algorithm.off_policy import PRESETS, correction_weights, level_log_ratio
from qerl_pl.distributed.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.errors import UserError
from qerl_pl.rollout.collector import Collector
from qerl_pl.rollout.parity_check import measure_noise_widening
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig, SyncReport

CORRECTIONS = {
    **PRESETS,
    "all": RolloutCorrection("geometric", 1.1, "sequence", 0.2, 3.0, 0.1, 8.0, widen_with_noise=True),
    "wide": RolloutCorrection("token", 1.2, "token", 0.6, 1.5, widen_with_noise=True),
    "no limits": RolloutCorrection("sequence", None),
    "high alone": RolloutCorrection("token", 1.1, "token", 0.0, 1.2),
    "outliers above": RolloutCorrection(None, rejection="geometric", low=0.9, high=None, outlier_high=2.5),
}


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_weights(correction: RolloutCorrection, log_ratios: Sequence[float], widening: float) -> list[float]:
    return [weight for weight, _, _ in importance_weights(asdict(correction), log_ratios, widening)]


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """(old, sampler, mask) of 40 completions of up to 9 tokens; small and large differences, larger ones outside."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(40, 9, generator=draw) < torch.linspace(0, 1, 40)[:, None]
    old = -torch.rand(40, 9, generator=draw, dtype=torch.float64) - 0.1
    size = torch.tensor([0.001, 0.01, 0.3, 1.0], dtype=torch.float64).repeat(10)[:, None]
    sampler = old - size * torch.randn(40, 9, generator=draw, dtype=torch.float64)
    return old.where(mask, -1.0), sampler.where(mask, -9.0), mask


@pytest.mark.parametrize("widening", [1.0, 1.7])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_those_of_plain_loops(name: str, widening: float) -> None:
    correction, (old, sampler, mask) = CORRECTIONS[name], ragged()
    found = correction_weights(correction, old, sampler, mask, widening)
    for row in range(len(mask)):
        ratios = (old - sampler)[row][mask[row]].tolist()
        expected = plain_weights(correction, ratios, widening)
        assert found.weights[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-12)
        assert found.rejected[row][mask[row]].tolist() == [weight == 0 for weight in expected]
    assert not found.weights.requires_grad
    if correction.rejection is not None:  # both sides of each bound occur
        assert 0 < found.rejected[mask].sum() < mask.sum()
    if correction.cap is not None and correction.weights is not None:
        assert (0 < found.capped[mask].sum() < mask.sum()) == (name != "geometric_mask_token_tis")
        cap = correction.cap ** (widening if correction.widen_with_noise else 1.0)
        assert torch.equal(found.capped[mask], found.weights[mask] == cap)


def test_levels_by_hand() -> None:
    # Two tokens that train, with ratios 2 and 8: product 16, geometric mean 4. None: 1.
    log_ratio = f64([[9.0, math.log(2), math.log(8)], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    ratios = {level: level_log_ratio(log_ratio, mask, level).exp() for level in ("token", "sequence", "geometric")}
    assert ratios["token"][0, 1:].tolist() == pytest.approx([2, 8])
    assert ratios["sequence"].tolist() == [pytest.approx([16] * 3), [1] * 3]
    assert ratios["geometric"].tolist() == [pytest.approx([4] * 3), [1] * 3]


def test_presets_by_hand() -> None:
    # Ratios of three completions: 1.25, 4, 0.4 with product 2; 1, 1.005; 3, 3 with product 9.
    old = f64([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    sampler = -f64([[1.25, 4, 0.4], [1.0, 1.005, 1.0], [3.0, 3.0, 1.0]]).log()
    mean = 2 ** (1 / 3)
    assert mean > 1.01
    expected: dict[str, list[float]] = {
        "off": [1, 1, 1, 1, 1, 1, 1],
        "token_tis": [1.25, 2, 0.4, 1, 1.005, 2, 2],
        "sequence_tis": [2, 2, 2, 1.005, 1.005, 2, 2],
        "token_mask": [1.25, 0, 0.4, 1, 1.005, 0, 0],
        "sequence_mask": [2, 2, 2, 1.005, 1.005, 0, 0],
        "geometric_mask": [0, 0, 0, 1, 1, 0, 0],
        "geometric_mask_token_tis": [0, 0, 0, 1, 1.005, 0, 0],
        "icepop": [1.25, 4, 0, 1, 1.005, 3, 3],
    }
    assert expected.keys() == PRESETS.keys()
    for name, values in expected.items():
        correction = PRESETS[name]
        if name == "sequence_mask":  # a product of exactly 2 may be rounded to more
            correction = replace(correction, high=2.0001)
        weights = correction_weights(correction, old, sampler, mask).weights[mask]
        assert weights.tolist() == pytest.approx(values), name


def test_weights_far_off_are_finite() -> None:
    old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    weights = correction_weights(RolloutCorrection("sequence", None), old, old - 400, mask).weights
    assert weights.tolist() == [pytest.approx([math.exp(20)] * 2)]


def test_the_default_is_the_bits_of_truncated_token_weights() -> None:
    draw = torch.Generator().manual_seed(1)
    old, sampler = torch.randn(8, 50, generator=draw), torch.randn(8, 50, generator=draw)
    expected = torch.exp(old - sampler).clamp(max=2.0)
    mask = torch.ones(8, 50, dtype=torch.bool)
    for objective in (DAPO(), DAPO(correction="token_tis"), DAPO(correction=RolloutCorrection(widen_with_noise=True))):
        found = correction_weights(objective.rollout_correction, old, sampler, mask)
        assert torch.equal(found.weights, expected)
    assert DAPO(importance_cap=None).rollout_correction == PRESETS["off"]
    assert DAPO(importance_cap=math.inf).rollout_correction == RolloutCorrection(cap=None)
    assert DAPO(importance_cap=3.0).rollout_correction == RolloutCorrection(cap=3.0)


def loss_inputs(objective: Objective) -> LossInputs:
    old, sampler, mask = ragged()
    draw = torch.Generator().manual_seed(4)
    logprobs = (old + 0.2 * torch.randn(mask.shape, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(len(mask), generator=draw, dtype=torch.float64)
    weights = objective.weights(mask, 9, len(mask), int(mask.sum()))
    return LossInputs(logprobs, old, sampler, advantages, mask, weights, noise_widening=1.7)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_loss_and_gradient_are_those_of_plain_loops(name: str) -> None:
    objective = DrGRPO(correction=CORRECTIONS[name])
    batch = loss_inputs(objective)
    found = objective.loss(batch)
    found.loss.backward()
    total, gradient = 0.0, torch.zeros_like(batch.logprobs)
    for row in range(len(batch.mask)):
        positions = batch.mask[row].nonzero().flatten().tolist()
        ratios = [(batch.old_logprobs - batch.sampler_logprobs)[row, t].item() for t in positions]
        weights = plain_weights(CORRECTIONS[name], ratios, 1.7)
        for t, weight in zip(positions, weights, strict=True):
            ratio = math.exp(batch.logprobs[row, t].item() - batch.old_logprobs[row, t].item())
            advantage = batch.advantages[row].item()
            clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
            total -= weight * advantage * min(max(ratio, 0.8), 1.2) / 360 if clipped else 0.0
            total -= 0.0 if clipped else weight * advantage * ratio / 360
            gradient[row, t] = 0.0 if clipped else -weight * advantage * ratio / 360
    assert found.loss.item() == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(batch.logprobs.grad, gradient, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "row"}, "correction.weights must be one of token, sequence, geometric; got 'row'"),
        ({"rejection": "row"}, "correction.rejection must be one of token, sequence, geometric; got 'row'"),
        ({"cap": 0.0}, "correction.cap must be a number above 0; got 0.0"),
        ({"high": math.nan}, "correction.high must be a number above 0; got nan"),
        ({"low": -0.1}, "correction.low must be a number of at least 0; got -0.1"),
        ({"low": 2.0}, "correction.low must be below correction.high; got 2.0 and 2.0; swap them"),
        ({"outlier_low": 3.0, "outlier_high": 2.0}, "correction.outlier_low must be below correction.outlier_high"),
        ({"cap": 0.9, "widen_with_noise": True}, "needs ranges around 1; got cap=0.9"),
        ({"rejection": "token", "low": 1.1, "widen_with_noise": True}, "needs ranges around 1; got low=1.1"),
        ({"outlier_high": 0.5, "widen_with_noise": True}, "needs ranges around 1; got outlier_high=0.5"),
    ],
)
def test_bad_settings_are_a_user_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RolloutCorrection(**arguments)


def test_a_correction_and_another_cap_contradict_each_other() -> None:
    for cap in (None, 3.0):
        with pytest.raises(UserError, match=f"a correction has its own cap; got importance_cap={cap} and a correction"):
            DAPO(importance_cap=cap, correction="icepop")
    with pytest.raises(UserError, match="correction must be one of off, token_tis, .*; got 'tis'"):
        DAPO(correction="tis")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--objective.correction=icepop"], "icepop"),
        (["--objective.correction={weights: sequence, cap: 3.0}"], RolloutCorrection("sequence", 3.0)),
        (["--objective.correction.rejection=token"], RolloutCorrection(rejection="token")),
        ([], None),
    ],
)
def test_yaml_names_a_preset_or_gives_settings(given: list[str], expected: Any) -> None:
    def configured(objective: Objective) -> Objective:
        return objective

    found = auto_cli(configured, args=["--objective=qerl_pl.algorithm.DAPO", *given], as_positional=False)
    assert found == DAPO(correction=expected)


# Widening by the noise -----------------------------------------------------------------------------------------------


class Noisy(Scripted):
    """An engine that is wrong by 0.01 nats at each token, and by 3 sigma more with noise."""

    def sync(self, weights: Any) -> SyncReport:
        noise = getattr(weights, "noise", None)
        self.error = 0.01 + (0.0 if noise is None else 3 * noise.sigma * (1 + noise.draw_number))
        self.noisy = noise is not None
        return super().sync(weights)

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        if requests[0].seeds != (0,):
            self.calls.append(("seeds", self.noisy, [request.seeds for request in requests]))
        return super().generate(requests, sampling)


class Heated(Watched):
    """A policy that may be asked at the temperature of training."""

    def token_logprobs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.temperatures = [*getattr(self, "temperatures", []), args[3]]
        return super().token_logprobs(*args[:3], 1.0, **kwargs)


def noisy_weights(sigma: float, version: int = 4, draw_number: int = 0) -> PolicyWeights:
    return PolicyWeights(version, {}, 1.0, noise=NormNoise(sigma, 7, version, draw_number))


def test_the_noise_widens_by_the_ratio_of_mean_differences() -> None:
    engine, policy = Noisy(), Heated()
    sampling = replace(SAMPLING, max_tokens=500)
    weights = noisy_weights(0.01)
    prompts = [PROMPTS[0], replace(PROMPTS[1], token_ids=tuple(range(1000)))]
    widening = measure_noise_widening(engine, policy, prompts, weights, sampling, (5, 6), SINGLE_PROCESS)
    assert widening == pytest.approx(0.04 / 0.01, rel=1e-4)
    calls = [call for call in engine.calls if call[0] == "generate"]
    assert [[len(prompt) for prompt in call[1]] for call in calls] == [[1, 512]] * 2  # the second is truncated
    generated = [call[2] for call in calls]
    assert [(one.max_tokens, one.temperature, one.stop) for one in generated] == [(64, 0.9, ("!",))] * 2
    assert policy.temperatures == [0.9, 0.9]
    assert [call for call in engine.calls if call[0] == "seeds"] == [
        ("seeds", noisy, [(5,), (6,)]) for noisy in (True, False)
    ]


def test_an_engine_without_an_error_of_its_own_is_taken_to_have_that_of_kernels() -> None:
    class Exact(Noisy):
        def sync(self, weights: Any) -> SyncReport:
            report = super().sync(weights)
            self.error -= 0.01
            return report

    for sigma, expected in ((0.001, 3.0), (1e-5, 1.0)):
        weights = noisy_weights(sigma)
        found = measure_noise_widening(Exact(), Heated(), PROMPTS[:2], weights, SAMPLING, (5, 6), SINGLE_PROCESS)
        assert found == pytest.approx(expected, rel=1e-3)


def collector_of(engine: Scripted, widen: bool, ranks: Communicator = SINGLE_PROCESS) -> Collector:
    objective = DrGRPO(correction=RolloutCorrection(widen_with_noise=widen))
    return Collector(config_of(), engine, Words(), objective, 7, ranks)  # type: ignore[arg-type]


def test_the_collector_measures_once_for_each_sigma_and_goes_on_from_a_checkpoint() -> None:
    engine = Noisy()
    collector = collector_of(engine, widen=True)
    widenings = []
    for version, sigma in enumerate((0.01, 0.01, 0.02, 0.0)):
        if version == 1:  # a resumed run
            state, collector = dict(collector.noise_widening), collector_of(engine, widen=True)
            collector.noise_widening |= state
        engine.calls.clear()
        weights = noisy_weights(sigma, version)
        experience = collector.collect(PROMPTS[:6], weights, Heated(), nobody)
        widenings.append(experience.noise_widening)
        assert experience.metrics["mismatch/noise_widening"] == experience.noise_widening
        measured = [call[2] for call in engine.calls if call[0] == "seeds" and len(call[2][0]) == 1]
        seeds = [(stream_seed(7, "widening", version, prompt.id),) for prompt in PROMPTS[:4]]
        assert measured == ([seeds, seeds] if version in (0, 2) else [])
        last_sync = [call for call in engine.calls if call[0] == "sync"][-1]
        assert last_sync == ("sync", version, True) and engine.noisy
        tokens = [token for prompt in PROMPTS[:1] for token in said(prompt.token_ids, seed_of(version, prompt.id))]
        start = len(PROMPTS[0].token_ids)
        found = experience.sampler_logprobs[0, start : start + len(tokens)].tolist()
        assert found == pytest.approx([own(True, token) + 0.01 + 3 * sigma for token in tokens], abs=1e-5)
    assert widenings == [pytest.approx(4, rel=1e-3)] * 2 + [pytest.approx(7, rel=1e-3), 1.0]
    assert widenings[0] == widenings[1]


def seed_of(version: int, prompt: str) -> int:
    return stream_seed(7, "rollout", version, prompt, 0)


def test_nothing_is_measured_without_noise_or_where_bounds_stay() -> None:
    for widen, weights in ((True, PolicyWeights(4, {}, 1.0)), (True, noisy_weights(0.0)), (False, noisy_weights(0.1))):
        engine = Noisy()
        experience = collector_of(engine, widen).collect(PROMPTS[:2], weights, Heated(), nobody)
        assert experience.noise_widening == 1.0
        assert not [call for call in engine.calls if call[0] == "seeds" and len(call[2][0]) == 1]


def test_ranks_widen_alike_each_with_its_own_noise() -> None:
    def work(ranks: Communicator) -> float:
        weights = noisy_weights(0.01, draw_number=ranks.rank)
        collector = collector_of(Noisy(), widen=True, ranks=ranks)
        return collector.collect(PROMPTS[:4], weights, Heated(), nobody).noise_widening

    # Errors of 0.04 and of 0.07, over as many tokens.
    assert on_ranks(2, work) == [pytest.approx(5.5, rel=1e-3)] * 2
