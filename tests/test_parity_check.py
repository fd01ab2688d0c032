"""The self-check's measure and its bounds, on an engine that errs as the test says."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from scripted import Scripted, Watched

from qerl_pl.errors import UserError
from qerl_pl.rollout import parity_check
from qerl_pl.rollout.parity_check import (
    LogprobParity,
    check_logprob_parity,
    measure_logprob_parity,
    require_logprob_parity,
)
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

PROMPTS = [Prompt("p0", (10,), "question 0", "0"), Prompt("p1", (10, 11), "question 1", "1")]


def test_parity_worked_out() -> None:
    policy = Watched()
    assert measure_logprob_parity(Scripted(error=0.125), policy, PROMPTS, 3, 3) == LogprobParity(
        pytest.approx(0.125), pytest.approx(0.125), pytest.approx(0.25)
    )
    assert measure_logprob_parity(Scripted(lost=True), policy, PROMPTS, 3, 3) == LogprobParity(
        pytest.approx(0.25), pytest.approx(0.0, abs=1e-6), pytest.approx(0.25)
    )
    engine = Scripted()
    measure_logprob_parity(engine, policy, PROMPTS, 3, 50)
    assert engine.calls[1][2].max_tokens == 16  # longer completions are not compared to their end


def test_long_prompts_are_truncated() -> None:
    """The trainer's forward pass runs while the engine's full cache is allocated."""
    engine, long = Scripted(), tuple(range(1000))
    measure_logprob_parity(engine, Watched(), [Prompt("p", long, "", "0"), PROMPTS[0]], 3, 3)
    asked = [call[1] for call in engine.calls if call[0] == "generate"]
    assert asked == 2 * [[long[:512], (10,)]]


@pytest.mark.parametrize(
    ("on", "off", "effect", "perturbed", "agrees"),
    [
        (0.25, 0.25, 0.0, False, True),  # at the bound
        (0.26, 0.0, 0.0, False, False),
        (0.0, 0.26, 0.0, False, False),
        (0.0, 0.26, 0.0, True, False),
        (0.26, 0.25, 0.0, True, True),  # a probe may make rounding larger
        (0.2, 0.02, 0.4, False, True),  # half of the effect
        (0.21, 0.02, 0.4, False, False),
        (0.21, 0.02, 0.4, True, False),
        (0.21, 0.05, 0.4, False, True),  # eight times the rounding does not stand out of it
        (5e-6, 0.0, 7e-6, True, True),  # less than 8e-6 does not either, whatever the rounding
        (6e-6, 0.0, 9e-6, True, False),
        (0.0055, 0.0008, 0.0068, False, True),  # seen: an adapter after two steps of rate 1e-6, all of it rounding
        (0.0055, 0.0008, 0.0068, True, False),
        (0.06, 0.0, 0.0625, False, True),  # a quarter of the bound
        (0.06, 0.0, 0.0626, False, False),
        (math.nan, 0.0, 0.0, True, False),
        (0.0, math.nan, 0.0, True, False),
    ],
)
def test_parity_at_its_bounds(on: float, off: float, effect: float, perturbed: bool, agrees: bool) -> None:
    if agrees:
        require_logprob_parity(LogprobParity(on, off, effect), 0.25, perturbed)
    else:
        with pytest.raises(UserError, match="must agree within 0.25 nats"):
            require_logprob_parity(LogprobParity(on, off, effect), 0.25, perturbed)


def test_a_difference_is_none_of_a_probe_unless_it_is_said() -> None:
    with pytest.raises(UserError, match="must agree within 0.25 nats"):
        require_logprob_parity(LogprobParity(0.26, 0.0, 0.0), 0.25)


class RoughOnProbes(Scripted):
    """An engine that rounds away 0.1 nats of every policy that is a probe."""

    perturbed = False

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[Any]:
        self.error = 0.1 * (self.perturbed and self.adapter)
        return super().generate(requests, sampling)


class Probing(Watched):
    """A policy that tells such an engine."""

    def __init__(self, engine: RoughOnProbes) -> None:
        super().__init__()
        self.engine = engine

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        self.engine.perturbed = True
        with super().perturbed(seed, strength):
            yield
        self.engine.perturbed = False


def test_a_probe_may_be_rounded_more_than_the_policy_itself() -> None:
    engine = RoughOnProbes()
    policy = Probing(engine)
    # 0.1 is more than the bound, which is the policy's own, and less than half of the adapter's effect, 0.25.
    check_logprob_parity(engine, policy, PROMPTS, 3, 1, 3, 0.05)
    assert policy.probes == [1] and engine.error == 0
    with pytest.raises(UserError, match="must agree within 0.05 nats"):
        check_logprob_parity(Scripted(error=0.1), Watched(), PROMPTS, 3, 1, 3, 0.05)


class Sensitive(Watched):
    """A policy that notes how strongly it is perturbed; 0 where it is not."""

    strength = 0.0

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        self.strength = strength
        with super().perturbed(seed, strength):
            yield
        self.strength = 0.0


def test_a_random_adapter_is_as_strong_as_the_policy_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    # At strength 1 rounding changes this policy by more than half of the adapter's effect, as it does a pretrained one.
    measured = {0.0: (0.004, 0.0), 1.0: (5.0, 8.8), 0.25: (0.02, 1.5), 0.0625: (0.01, 0.1)}
    seen: list[float] = []

    def parity(engine: Any, policy: Sensitive, *_: Any) -> LogprobParity:
        seen.append(policy.strength)
        on, effect = measured[policy.strength]
        return LogprobParity(on, 0.004, effect)

    monkeypatch.setattr(parity_check, "measure_logprob_parity", parity)
    check_logprob_parity(Scripted(), Sensitive(), PROMPTS, 3, 1, 3, 0.25)
    assert seen == [0.0, 1.0, 0.25]
    measured[0.25] = (1.5, 1.5)  # the engine has lost the adapter
    with pytest.raises(UserError, match="got 1.5 with the adapter, 0.004 without it, the adapter's effect being 1.5"):
        check_logprob_parity(Scripted(), Sensitive(), PROMPTS, 3, 1, 3, 0.25)


class Whole(Watched):
    """A policy that trains whole: as it is it is what `own` calls the reference, and a probe moves it."""

    full_finetuning = True

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.adapter, self.moves, self.asked = False, moves, list[int]()

    def weights(self, version: int, noise: Any = None, *, reference: bool = False) -> Any:
        self.asked.append(version)
        return super().weights(version, noise, reference=reference or not self.adapter)

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        with super().perturbed(seed, strength):
            self.adapter = self.moves
            yield
        self.adapter = False


def test_a_policy_that_trains_whole_is_compared_as_it_is_and_as_a_probe() -> None:
    engine, policy = Scripted(), Whole()
    check_logprob_parity(engine, policy, PROMPTS, 3, 7, 2, 0.05)
    assert policy.probes == [7] and policy.asked == [3, 3] and policy.evaluates
    sampled = [call for call in engine.calls if call[0] == "generate"]
    assert [(prompts, sampling.max_tokens) for _, prompts, sampling in sampled] == 2 * [([(10,), (10, 11)], 2)]
    assert engine.samples == [[1, 1], [1, 1]]
    check_logprob_parity(Scripted(error=0.05), Whole(), PROMPTS, 3, 7, 2, 0.0501)


@pytest.mark.parametrize(
    ("engine", "moves", "bound"),
    [
        (Scripted(error=0.06), False, 0.05),  # rounding above the bound
        (Scripted(error=math.nan), True, 0.05),
        (Scripted(lost=True), True, 9.0),  # the probe never comes to the engine: the difference is its whole effect
    ],
)
def test_an_engine_that_samples_from_another_whole_policy_is_found(engine: Scripted, moves: bool, bound: float) -> None:
    with pytest.raises(UserError, match=f"must agree within {bound:g} nats"):
        check_logprob_parity(engine, Whole(moves), PROMPTS, 3, 7, 2, bound)


def test_a_whole_policys_probe_may_be_rounded_more_than_the_policy_itself() -> None:
    class Rough(Scripted):
        def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[Any]:
            self.error = 0.1 * self.adapter
            return super().generate(requests, sampling)

    check_logprob_parity(Rough(), Whole(), PROMPTS, 3, 7, 2, 0.05)  # 0.1 is below half of the effect, 0.25


def test_differences_and_effects_of_both_signs_do_not_cancel() -> None:
    class Wavering(Scripted):
        def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
            return [
                [replace(one, logprobs=tuple(value + 0.5 - number % 2 for value in one.logprobs)) for one in group]
                for number, group in enumerate(super().generate(requests, sampling))
            ]

    class Mixed(Watched):
        def token_values(self, *sequences: Any, reference: bool, routing: None) -> Any:
            values, *others = super().token_values(*sequences, reference=reference, routing=routing)
            values[1] += 0.0 if reference else 0.5
            return values, *others

    alike = PROMPTS[1], replace(PROMPTS[1], id="again")  # as many tokens with each sign
    parity = measure_logprob_parity(Wavering(), Watched(), alike, 3, 50)
    assert (parity.adapter_on, parity.adapter_off) == (pytest.approx(0.5), pytest.approx(0.5))
    assert measure_logprob_parity(Scripted(), Mixed(), alike, 3, 50).adapter_effect == pytest.approx(0.25)
