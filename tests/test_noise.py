"""The noise schedule against numbers worked by hand, and the draw's dependence on its names."""

import math
import re
from collections import Counter

import pytest
import torch

from qerl_pl.algorithm.noise import NoiseSchedule, NormNoise, noise_sigma
from qerl_pl.errors import UserError
from qerl_pl.models.families import family_of, noisy_norm_names
from qerl_pl.seeds import stream_seed

BY_HAND = {
    # sigma_start 0.01, sigma_end 0.0001, K = 3: k = 2 is half way.
    "exponential": 0.001,  # 0.01 * 0.01^(1/2)
    "linear": 0.00505,  # 0.01 - 0.0099 / 2
    "cosine": 0.00505,  # cos(pi / 2) = 0
    "logarithmic": 0.01 - 0.0099 * 0.6309297535714574,  # ln 2 / ln 3
}


@pytest.mark.parametrize("decay", BY_HAND)
def test_sigma_by_hand(decay) -> None:
    sigmas = [noise_sigma(k, 3, 1e-2, 1e-4, decay) for k in (1, 2, 3)]
    assert sigmas == pytest.approx([1e-2, BY_HAND[decay], 1e-4], rel=1e-12)


def test_sigma_away_from_the_middle() -> None:
    # K = 4, k = 2: one third of the way, where cosine (cos(pi / 3) = 1/2) has gone a quarter and ln 2 / ln 4 is a half.
    assert noise_sigma(2, 4, 8.0, 1.0, "exponential") == pytest.approx(4.0)
    assert noise_sigma(2, 4, 4.0, 1.0, "linear") == pytest.approx(3.0)
    assert noise_sigma(2, 4, 5.0, 1.0, "cosine") == pytest.approx(4.0)
    assert noise_sigma(2, 4, 5.0, 1.0, "logarithmic") == pytest.approx(3.0)


def test_a_decay_by_name_is_the_share_of_the_way(tmp_path) -> None:
    (tmp_path / "my_noise.py").write_text("def steps(t):\n    return 0.25 if t < 0.6 else t\n")
    for name in ("math.sqrt", f"{tmp_path}/my_noise.py:steps"):
        schedule = NoiseSchedule(0.5, 0.1, 5, name, noiseless_first_stage=False)
        shares = [0, 0.5, 0.5**0.5, 0.75**0.5, 1] if name == "math.sqrt" else [0, 0.25, 0.25, 0.75, 1]
        assert [schedule.sigma(k, 5) for k in range(5)] == pytest.approx([0.5 - 0.4 * share for share in shares])


def test_stages_spread_evenly() -> None:
    schedule = NoiseSchedule(stages=10)
    stages = [schedule.stage(rollout, 200) for rollout in range(200)]
    assert stages == sorted(stages) and Counter(stages) == {k: 20 for k in range(1, 11)}
    assert [NoiseSchedule(stages=3).stage(rollout, 8) for rollout in range(8)] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_fewer_rollouts_than_stages_go_from_the_first_to_the_last() -> None:
    schedule = NoiseSchedule(stages=10)
    assert [schedule.stage(rollout, 3) for rollout in range(4)] == [1, 5, 10, 10]
    assert [schedule.stage(rollout, 2) for rollout in range(2)] == [1, 10]
    assert schedule.stage(0, 1) == 1


def test_noiseless_first_stage_leaves_the_others_the_whole_decay() -> None:
    # K = 4: no noise, then three stages over 1e-2 ... 1e-4.
    schedule = NoiseSchedule(stages=4)
    assert [schedule.sigma(rollout, 4) for rollout in range(4)] == pytest.approx([0.0, 1e-2, 1e-3, 1e-4])
    noisy = NoiseSchedule(stages=3, noiseless_first_stage=False)
    assert [noisy.sigma(rollout, 3) for rollout in range(3)] == pytest.approx([1e-2, 1e-3, 1e-4])


def test_fewest_stages() -> None:
    one = NoiseSchedule(stages=1, noiseless_first_stage=False)
    assert [one.sigma(rollout, 5) for rollout in range(6)] == [1e-2] * 6
    two = NoiseSchedule(stages=2)
    assert [two.sigma(rollout, 4) for rollout in range(4)] == [0.0, 0.0, 1e-2, 1e-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma_start": 0.0}, "sigma_start must be a number above 0; got 0.0;"),
        ({"sigma_start": 0.0, "sigma_end": 1e-4}, "sigma_start must be a number above 0; got 0.0; set both to 0"),
        ({"sigma_end": -1e-4}, "sigma_end must be a number above 0; got -0.0001;"),
        ({"sigma_start": float("nan")}, "sigma_start must be a number above 0; got nan;"),
        ({"sigma_start": 1e-4, "sigma_end": 1e-2}, "got sigma_start=0.0001 and sigma_end=0.01;"),
        ({"stages": 0, "noiseless_first_stage": False}, "stages must be at least 1"),
        ({"stages": 1}, "stages must be at least 2 with noiseless_first_stage=True; got 1;"),
        ({"decay": "quadratic"}, "got 'quadratic'"),
        ({"decay": "math.no_such"}, "'math.no_such' cannot be imported"),
    ],
)
def test_bad_schedules_are_a_user_error(arguments, message) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        NoiseSchedule(**arguments)


def test_no_planned_rollout_is_a_user_error() -> None:
    with pytest.raises(UserError, match="got 0 of them"):
        NoiseSchedule().stage(0, 0)


def test_draw_is_of_its_own_stream_and_exactly_as_large_as_asked_for() -> None:
    name = "model.layers.0.input_layernorm"
    generator = torch.Generator().manual_seed(stream_seed(1, "aqn", 3, name))
    plain = torch.randn(128, generator=generator, dtype=torch.float32)
    torch.set_default_dtype(torch.bfloat16)  # as an engine does while it loads
    try:
        noise = NormNoise(0.5, seed=1, version=3).draw(name, 128)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(noise, plain * (0.5 / math.sqrt(sum(x * x for x in plain.tolist()) / 128)))


def test_noisy_norms_are_those_before_quantized_linears() -> None:
    noisy = ["model.layers.0.input_layernorm", "model.layers.11.post_attention_layernorm"]
    quiet = ["model.norm", "model.layers.0.self_attn.q_norm", "model.layers.0.input_layernorm.weight"]
    assert noisy_norm_names([quiet[0], noisy[0], *quiet[1:], noisy[1]], family_of("qwen2")) == noisy


def test_both_ends_at_zero_are_no_noise() -> None:
    schedule = NoiseSchedule(sigma_start=0, sigma_end=0, stages=3)
    assert [schedule.sigma(rollout, 6) for rollout in range(7)] == [0.0] * 7
    many = NoiseSchedule(sigma_start=0, sigma_end=0, stages=6)
    assert [many.sigma(rollout, 6) for rollout in range(7)] == [0.0] * 7


def test_relative_noise_is_in_units_of_the_scale() -> None:
    name, scale = "model.layers.3.input_layernorm", torch.tensor([3.0, 4.0] * 32, dtype=torch.bfloat16)
    plain = NormNoise(0.02, seed=1, version=3)
    relative = NormNoise(0.02, seed=1, version=3, relative=True)
    absolute, noise = plain.of_norm(name, scale), relative.of_norm(name, scale)
    assert noise.dtype == torch.float32
    assert torch.equal(absolute, plain.draw(name, 64))
    torch.testing.assert_close(noise, absolute * math.sqrt(12.5), rtol=1e-6, atol=0)  # (9 + 16) / 2
    assert noise.square().mean().sqrt().item() == pytest.approx(0.02 * math.sqrt(12.5), rel=1e-6)
