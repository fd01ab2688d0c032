"""What an environment wrote between turns is nowhere in the loss: with and without those positions it is the same."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import fit
from test_environment_runs import PATTERN, game, lines
from test_objectives import OBJECTIVES, make_batch

from qerl_pl.algorithm import DAPO, GRPO
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.algorithm.off_policy import PRESETS
from qerl_pl.callbacks import EnvironmentConfig
from qerl_pl.callbacks.evaluation import environment_settings
from qerl_pl.toy.game import GuessNumber

HOLES = torch.tensor(
    [
        [0, 1, 1, 0, 0, 1, 0, 1, 1],
        [0, 0, 1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 1],
        [0, 1, 1, 1, 0, 0, 0, 0, 0],
    ],
    dtype=torch.bool,
)
ALL = [
    *OBJECTIVES,
    *(GRPO(beta=0.04, correction=preset) for preset in PRESETS.values()),
    DAPO(beta=0.1, entropy_coefficient=0.01),
]


def compacted(batch: Any) -> tuple[Any, torch.Tensor]:
    """The batch with the masked tokens of each row moved to its left, and their positions before."""
    order = (~batch.mask).long().argsort(dim=1, stable=True)
    moved: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and value.shape == batch.mask.shape:
            moved[name] = value.detach().gather(1, order)
    return replace(batch, **moved), order


@pytest.mark.parametrize("objective", ALL, ids=lambda one: f"{type(one).__name__}")
def test_losses_gradients_and_metrics_do_not_see_what_was_not_sampled(objective: Objective) -> None:
    batch = make_batch(objective, HOLES)
    whole = objective.loss(batch)
    (gradient,) = torch.autograd.grad(whole.loss, batch.logprobs)
    dense, order = compacted(batch)
    logprobs = dense.logprobs.clone().requires_grad_()
    found = objective.loss(replace(dense, logprobs=logprobs))
    (moved,) = torch.autograd.grad(found.loss, logprobs)
    assert found.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(moved, gradient.gather(1, order), rtol=1e-12, atol=1e-15)
    assert (gradient[~HOLES] == 0).all() and (gradient[HOLES] != 0).any()
    assert found.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-12, atol=1e-12)


def test_every_part_of_a_run_takes_dialogues(game_policy_dir: Path, tmp_path: Path) -> None:
    """Dynamic sampling, noise, packing, corrections by completion, over-long penalty, micro-batches."""
    config = game(game_policy_dir, tmp_path / "run", resample_rounds=2)
    config["model"]["objective"] = {
        "class_path": "qerl_pl.algorithm.GSPO",
        "init_args": {"beta": 0.05, "correction": "geometric_mask_token_tis", "mask_truncated": True},
    }
    config["model"]["micro_batch_tokens"] = 150
    callbacks = {one["class_path"].rpartition(".")[2]: one for one in config["trainer"]["callbacks"]}
    callbacks["AdaptiveQuantizationNoise"]["init_args"] = {"stages": 2, "noiseless_first_stage": False}
    rollout = callbacks["RolloutCallback"]["init_args"]
    rollout |= {"sampling": {"max_tokens": 60}, "accuracy_reward": "environment"}
    rollout["environment"]["max_turns"] = 8
    rollout["rewards"] = [{"class_path": "qerl_pl.rewards.OverlongPenalty", "init_args": {"max_length": 30}}]
    config["trainer"] |= {"max_steps": 16, "val_check_interval": 2}
    status, output = fit(config)
    assert status == 0, output
    rows = lines(tmp_path / "run")
    assert {row["version"] for row in rows} == set(range(4)) and any(not row["trained"] for row in rows)
    assert any(row["truncated"] for row in rows)
    for row in rows:  # sampled tokens alone: with the answers, a dialogue of 60 tokens would be at the full penalty
        free = 30 - 30 // 4
        assert row["rewards"]["overlong"] == pytest.approx(-min(1.0, max(0.0, (row["tokens"] - free) / (30 // 4))))
        assert row["tokens"] < 60


def test_an_evaluations_digest_covers_the_environments_settings() -> None:
    game = "qerl_pl.toy.game.GuessNumber"
    arguments = {"class_path": game, "init_args": {"limit": 3}}
    for environment, found in (
        ("my_game.py:Game", "my_game.py:Game"),
        (arguments, arguments),
        (GuessNumber, game),
        (partial(GuessNumber, 3), game),
    ):
        settings = environment_settings(EnvironmentConfig(factory=environment))["environment"]
        assert settings["environment"] == found

    def of(**settings: Any) -> dict[str, Any]:
        return environment_settings(EnvironmentConfig(factory="qerl_pl.toy.game.GuessNumber", **settings))

    plain = of(tool_format=PATTERN)
    assert plain["environment"]["environment"] == "qerl_pl.toy.game.GuessNumber"
    assert plain != of(tool_format=PATTERN, max_turns=3) and plain != of()
    assert plain == of(tool_format=PATTERN, tool_wait=1.0, workers=2, tool_time_limit=1.0)
