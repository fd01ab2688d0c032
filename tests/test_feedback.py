"""Feedback control by numbers worked by hand, and the noise that it steers in runs that stop and go on."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from short_run import data, module_of, rollout_of, trainer_of

from qerl_pl.algorithm.feedback import (
    EXPLORATION_EFFECT,
    PATIENCE,
    BoundWarning,
    Feedback,
    TemperatureControl,
    logged_value,
)
from qerl_pl.callbacks import AdaptiveQuantizationNoise, ResumeCheckpoint
from qerl_pl.errors import UserError
from qerl_pl.types import SamplingConfig


def feedback_of(**changes: Any) -> Feedback:
    given = {"target": 0.5, "metric": "policy/entropy", "minimum": 1e-4, "maximum": 0.05, "gain": 0.4}
    return Feedback(**given | {"name": "noise.sigma"} | changes)


@pytest.mark.parametrize(
    ("metric", "measured", "factor"),
    [
        ("policy/entropy", 0.5, 1.0),
        ("policy/entropy", 0.25, math.exp(0.4 * 0.5)),  # half of the target is missing
        ("policy/entropy", 0.75, math.exp(-0.4 * 0.5)),
        ("completions/sampler_entropy", 0.25, math.exp(0.4 * 0.5)),
        ("mismatch/ess", 0.25, math.exp(-0.4 * 0.5)),  # noise lowers it
        ("completions/groups_without_signal_frac", 1.0, math.exp(0.4)),
        ("policy/entropy", 0.0, math.exp(0.4)),
        ("policy/entropy", 9.0, math.exp(-0.4)),  # no step is larger
        ("policy/entropy", math.nan, 1.0),
    ],
)
def test_next_value_by_hand(metric: str, measured: float, factor: float) -> None:
    assert feedback_of(metric=metric).next(0.01, measured) == pytest.approx(0.01 * factor, rel=1e-15)


def test_the_value_stays_in_its_bounds() -> None:
    feedback = feedback_of()
    assert feedback.next(0.049, 0.0) == 0.05 and feedback.next(1.1e-4, 9.0) == 1e-4
    assert [feedback.clip(value) for value in (1e-9, 0.01, 3.0)] == [1e-4, 0.01, 0.05]
    assert feedback.next(3.0, math.nan) == 0.05  # of a checkpoint with other bounds


def test_a_metric_that_follows_the_value_reaches_its_target() -> None:
    # An entropy of 0.2 + 20 sigma nats: 0.5 at sigma 0.015; and an effective sample size of exp(-60 sigma).
    rising, falling = feedback_of(), feedback_of(metric="mismatch/ess", target=0.4)
    first = second = 1e-3
    for _ in range(200):
        first = rising.next(first, 0.2 + 20 * first)
        second = falling.next(second, math.exp(-60 * second))
    assert first == pytest.approx(0.015, rel=1e-6) and second == pytest.approx(-math.log(0.4) / 60, rel=1e-6)


@pytest.mark.parametrize(
    ("value", "measured", "warns"),
    [
        (0.05, 0.3, True),
        (1e-4, 0.7, True),
        (0.05, 0.46, False),  # near enough
        (0.05, 0.7, False),  # falls
        (0.02, 0.3, False),  # rises
        (0.05, math.nan, False),
    ],
)
def test_a_value_that_stays_at_a_bound_far_from_the_target_is_warned_of(
    value: float, measured: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warning = BoundWarning(feedback_of())
    for _ in range(PATIENCE - 1):
        warning.record(value, measured)
    assert not caplog.messages
    warning.record(0.05, 0.5)  # on target: counts from the start
    for _ in range(PATIENCE + 5):
        warning.record(value, measured)
    assert len(caplog.messages) == warns
    if warns:
        assert f"noise.sigma has been at its bound of {value:g} for {PATIENCE} rollouts" in caplog.text
        assert f"policy/entropy is {measured:g}, not near its target of 0.5" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.0}, "noise.sigma under feedback needs its target above 0; got 0.0;"),
        ({"gain": math.nan}, "needs gain above 0; got nan;"),
        ({"minimum": 0.0}, "needs its minimum above 0; got 0.0;"),
        ({"minimum": 0.2}, "a minimum that is at most its maximum; got 0.2 and 0.05;"),
        ({"metric": "reward/mean"}, f"metric must be one of {', '.join(EXPLORATION_EFFECT)}; got 'reward/mean';"),
    ],
)
def test_bad_settings_are_a_user_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        feedback_of(**changes)


def test_a_metric_that_is_not_logged_is_refused() -> None:
    metrics = {"policy/entropy": torch.tensor(0.25), "lr": 1.0}
    assert logged_value(metrics, "policy/entropy") == 0.25
    with pytest.raises(UserError, match=r"mismatch/ess is not logged; choose one of policy/entropy$"):
        logged_value(metrics, "mismatch/ess")


@pytest.mark.parametrize("arguments", [{"decay": "feedback"}, {"target": 0.5}, {"decay": "linear", "target": 0.5}])
def test_a_target_belongs_to_feedback(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="noise.decay feedback, and no other, needs a target"):
        AdaptiveQuantizationNoise(**arguments)


def steered(metric: str = "completions/sampler_entropy", target: float = 1.0) -> AdaptiveQuantizationNoise:
    return AdaptiveQuantizationNoise(0.02, decay="feedback", metric=metric, target=target, gain=0.5, sigma_max=0.04)


def run(base: Path, folder: Path, noise: AdaptiveQuantizationNoise, *callbacks: Any, **options: Any) -> Any:
    """A run of four rollouts, and (sigma, metric) of each."""
    seen: list[tuple[float, float]] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        seen.append((batch.noise.sigma, float(trainer.callback_metrics["completions/sampler_entropy"])))

    module = module_of(base)
    watch = LambdaCallback(on_train_batch_end=note)
    trainer = trainer_of(folder, watch, *callbacks, noise, noise=False, limit_val_batches=0)
    trainer.fit(module, datamodule=data(), weights_only=True, **options)
    return module, seen


def test_sigma_follows_the_metric_of_a_run_and_a_resumed_run_goes_on_bit_for_bit(
    tiny_policy_dir: Path, tmp_path: Path
) -> None:
    noise = steered()
    # The checkpoint's callback comes first, but sigma is steered before it saves.
    module, seen = run(tiny_policy_dir, tmp_path, noise, ResumeCheckpoint(2, keep=9))
    sigma = 0.02
    for used, entropy in seen:
        assert used == sigma
        sigma = min(max(sigma * math.exp(0.5 * min(max(1.0 - entropy, -1.0), 1.0)), 1e-4), 0.04)
    assert noise.state_dict() == {"planned_rollouts": None, "sigma": sigma}
    assert len({used for used, _ in seen}) == 4
    resumed, second = run(tiny_policy_dir, tmp_path / "on", steered(), ckpt_path=tmp_path / "checkpoints/step=2.ckpt")
    assert second == seen[2:]
    for name, tensor in module.policy.trained_state().items():
        assert torch.equal(resumed.policy.trained_state()[name], tensor), name


def test_a_checkpoint_of_another_decay_starts_feedback_at_sigma_start() -> None:
    noise, clock = steered(), AdaptiveQuantizationNoise()
    noise.load_state_dict({"planned_rollouts": 4})
    assert noise.state_dict() == {"planned_rollouts": 4, "sigma": 0.02}
    clock.load_state_dict(noise.state_dict())
    assert clock.state_dict() == {"planned_rollouts": 4}


def control_of(temperature: float = 0.9) -> TemperatureControl:
    given = {"metric": "completions/sampler_entropy", "minimum": 0.5, "maximum": 2.0}
    return TemperatureControl(feedback_of(**given), temperature)


def test_a_repeated_rollout_has_the_temperature_that_it_had() -> None:
    control = control_of()
    assert control.of(3) == 0.9
    control.measured(3, 0.25)
    second = 0.9 * math.exp(0.4 * 0.5)
    assert control.of(3) == 0.9 and control.of(4) == pytest.approx(second, rel=1e-15)
    control.measured(3, 0.4)  # sampled again
    assert control.of(3) == 0.9 and control.of(4) == pytest.approx(0.9 * math.exp(0.4 * 0.2), rel=1e-15)
    control.measured(4, 0.5)
    loaded = control_of()
    loaded.load_state_dict(control.state_dict())
    assert loaded.of(5) == control.of(5) == control.of(4)


def heated(base: Path, folder: Path, *before: Any, **options: Any) -> Any:
    """A run of four rollouts with a steered temperature: module, callback and (temperature, entropy) of each."""
    seen: list[tuple[float, float]] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        metrics = trainer.callback_metrics
        assert float(metrics["completions/temperature"]) == pytest.approx(batch.experience.temperature)
        seen.append((batch.experience.temperature, batch.experience.metrics["completions/sampler_entropy"]))
        assert float(metrics["mismatch/logprob_abs_mean"]) < 1e-4  # the trainer divides by the same

    module, sampling = module_of(base), SamplingConfig(max_tokens=4, temperature=0.9)
    rollout = rollout_of(sampling=sampling, entropy_target=1.5, temperature_bounds=(0.6, 1.2))
    watch = LambdaCallback(on_train_batch_end=note)
    callbacks = [*before, rollout, watch]
    trainer = trainer_of(folder, *callbacks[1:], rollout=callbacks[0], noise=False, limit_val_batches=0)
    trainer.fit(module, datamodule=data(), weights_only=True, **options)
    return module, rollout, seen


def test_the_temperature_follows_the_entropy_and_a_resumed_run_goes_on_bit_for_bit(
    tiny_policy_dir: Path, tmp_path: Path
) -> None:
    # The checkpoint's callback comes before the one that samples.
    module, rollout, seen = heated(tiny_policy_dir, tmp_path, ResumeCheckpoint(2, keep=9))
    temperature = 0.9
    for used, entropy in seen:
        assert used == pytest.approx(temperature, rel=1e-12)
        temperature = min(max(used * math.exp(0.2 * min(max((1.5 - entropy) / 1.5, -1.0), 1.0)), 0.6), 1.2)
    assert len({used for used, _ in seen}) == 4
    resumed, other, second = heated(tiny_policy_dir, tmp_path / "on", ckpt_path=tmp_path / "checkpoints/step=2.ckpt")
    assert second == seen[2:] and other.state_dict() == rollout.state_dict()
    for name, tensor in module.policy.trained_state().items():
        assert torch.equal(resumed.policy.trained_state()[name], tensor), name


def test_runs_warn_where_neither_noise_nor_temperature_can_be_steered_further(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl_pl.algorithm.feedback.PATIENCE", 3)
    entropy = {"decay": "feedback", "metric": "completions/sampler_entropy", "target": 9.0}
    noise = AdaptiveQuantizationNoise(0.02, sigma_min=0.02, sigma_max=0.02, **entropy)
    sampling = SamplingConfig(max_tokens=4, temperature=0.9)
    rollout = rollout_of(sampling=sampling, entropy_target=9.0, temperature_bounds=(0.9, 0.9))
    trainer = trainer_of(tmp_path, noise, rollout=rollout, noise=False, limit_val_batches=0)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data(), weights_only=True)
    warned = [message.split(",")[0] for message in caplog.messages if "bound" in message]
    assert sorted(warned) == [
        "noise.sigma has been at its bound of 0.02 for 3 rollouts",
        "rollout.sampling.temperature has been at its bound of 0.9 for 3 rollouts",
    ]


def test_an_entropy_target_out_of_range_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"rollout.sampling.temperature under feedback needs its target above 0; got 0"):
        rollout_of(entropy_target=0.0)


def test_a_value_that_starts_outside_its_bounds_is_a_user_error() -> None:
    assert [control_of(heat).of(0) for heat in (0.5, 2.0)] == [0.5, 2.0]
    rule = r"rollout.sampling.temperature under feedback must start within its bounds, 0.6 to 0.9; got 1; change it"
    with pytest.raises(UserError, match=rule):
        rollout_of(entropy_target=1.5, temperature_bounds=(0.6, 0.9))
    with pytest.raises(UserError, match="got 0.5; change it"):
        rollout_of(entropy_target=1.5, temperature_bounds=(0.6, 0.9), sampling=SamplingConfig(4, temperature=0.5))
    with pytest.raises(UserError, match=r"noise.sigma under feedback must start .*0.0001 to 0.05; got 0.1; change it"):
        AdaptiveQuantizationNoise(0.1, decay="feedback", target=0.5)
