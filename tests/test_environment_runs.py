"""Runs with an environment: by the command line, with real processes, killed, and on several ranks."""

import json
import os
import random
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fit_helpers import adapter, configuration, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_ranks import same_run, train

from qerl_pl.callbacks import EnvironmentConfig, RolloutCallback
from qerl_pl.callbacks.evaluation import environment_settings
from qerl_pl.datamodules import TableDataModule
from qerl_pl.engines import TransformersEngine
from qerl_pl.modules import PolicyConfig, QeRLModule
from qerl_pl.rewards import GSM8KAnswer
from qerl_pl.toy.game import GuessNumber

ROLLOUTS = 5
PATTERN = r"(?P<name>guess) (?P<number>\d+)"
SPECIAL = r"<\|(?:pad|eos)\|>"
"""Special tokens, which a turn's message may hold and a record's completion leaves out."""


def game(base: Path, run: Path, rollouts: int = ROLLOUTS, **rollout: Any) -> dict[str, Any]:
    """The run of `fit_helpers` with the guessing game, its own reward, and a checkpoint after each rollout."""
    config = configuration(base, run, summary=False)
    config["model"]["policy"]["lora"]["dropout"] = 0.0
    config["data"] = {
        "class_path": "qerl_pl.datamodules.GuessingDataModule",
        "init_args": {
            "game": {"highest": 7, "turns": 3},
            "train_size": 2 * rollouts,
            "batch_size": 2,
            "val_size": 3,
            "max_prompt_tokens": 64,
        },
    }
    callbacks = {one["class_path"].rpartition(".")[2]: one for one in config["trainer"]["callbacks"]}
    callbacks["ResumeCheckpoint"]["init_args"] = {"every_n_rollouts": 1}
    callbacks["RolloutCallback"]["init_args"] = {
        "rewards": [],
        "environment": {
            "factory": "qerl_pl.toy.game.GuessNumber",
            "tool_format": PATTERN,
            "max_turns": 3,
            "max_turn_tokens": 12,
            "tool_wait": 60.0,
        },
        "group_size": 4,
        "sampling": {"max_tokens": 90},
    } | rollout
    config["trainer"] |= {"devices": 1, "max_epochs": 1, "val_check_interval": rollouts}
    return config


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(game_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(game(game_policy_dir, tmp_path_factory.mktemp("game") / "uninterrupted"))


def test_a_run_trains_on_dialogues_with_the_environments_reward(uninterrupted: Path) -> None:
    rows = lines(uninterrupted)
    assert len(rows) == 8 * ROLLOUTS and {row["rewards"]["environment"] for row in rows} == {0.0, 1.0}
    for row in rows:
        turns = [message for message in row["messages"] if message["role"] == "assistant"]
        answers = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        assert 1 <= len(turns) <= 3 and re.sub(SPECIAL, "", turns[-1]["content"]) == row["completion"]
        assert row["rewards"]["total"] == row["rewards"]["environment"] == float("found" in answers)
        guesses = [call["function"]["arguments"]["number"] for turn in turns for call in turn.get("tool_calls", [])]
        number = int(row["reference"])
        expected = ["found" if guess == number else "higher" if number > guess else "lower" for guess in guesses]
        assert answers == expected
    assert max(len(row["messages"]) for row in rows) == 6
    events = EventAccumulator(str(uninterrupted))
    events.Reload()
    curves = {
        tag: [event.value for event in events.Scalars(f"environment/{tag}")]
        for tag in ("turns", "calls", "failed_calls_frac", "tool_s")
    }
    for version in range(ROLLOUTS):
        dialogues = [row["messages"] for row in rows if row["version"] == version]
        said = [message["role"] for messages in dialogues for message in messages]
        assert curves["turns"][version] == pytest.approx(said.count("assistant") / 8)
        assert curves["calls"][version] == pytest.approx(said.count("tool") / 8)
    assert set(curves["failed_calls_frac"]) == {0.0} and min(curves["tool_s"]) > 0
    lengths = [sum(row["tokens"] for row in rows if row["version"] == version) for version in range(ROLLOUTS)]
    assert [event.value for event in events.Scalars("completions/sampled_tokens")] == lengths


def die_at(moment: int) -> None:
    """SIGKILL at the event number `moment`: a round of sampling, a finished turn, a gradient, a checkpoint."""
    from qerl_pl.engines.transformers import TransformersEngine
    from qerl_pl.modules.update import RunningUpdate
    from qerl_pl.rollout.dialogue_sampler import _Running
    from qerl_pl.runtime.checkpoint_io import AtomicCheckpointIO

    left = [moment]

    def counted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(owner, name, count)

    counted(TransformersEngine, "_decode")
    counted(_Running, "put")
    counted(RunningUpdate, "_accumulate")
    counted(AtomicCheckpointIO, "save_checkpoint")


@pytest.mark.nightly
def test_killed_twenty_times_at_random_moments_a_run_ends_with_the_same_bits(
    game_policy_dir: Path, tmp_path: Path
) -> None:
    rng, kills, times = random.Random(0), 0, 20
    uninterrupted = train(game(game_policy_dir, tmp_path / "uninterrupted", 22))
    config = game(game_policy_dir, tmp_path / "run", 22)
    while True:
        prepare: Callable[[], None] | None = partial(die_at, rng.randrange(15, 50)) if kills < times else None
        status, output = fit(config, "--resume", "auto", prepare=prepare)
        if status == 0:
            break
        assert status == -signal.SIGKILL, output
        kills += 1
    assert kills == times
    assert lines(tmp_path / "run") == lines(uninterrupted)
    first, second = adapter(uninterrupted), adapter(tmp_path / "run")
    assert first.keys() == second.keys() and all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.nightly
def test_two_ranks_are_one_run(game_policy_dir: Path, tmp_path: Path) -> None:
    runs = []
    for devices in (1, 2):
        config = game(game_policy_dir, tmp_path / str(devices) / "run")
        config["model"]["optimizer"]["init_args"] = {"lr": 0.002}
        config["trainer"] |= {"devices": devices, "max_steps": 4 * 3, "val_check_interval": 2}
        runs.append(train(config))
    same_run(*runs)


def test_each_data_module_has_its_own_prompts_in_dialogues(tiny_policy_dir: Path) -> None:
    rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(40)]
    module = QeRLModule(PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32"))
    environment = EnvironmentConfig(factory="qerl_pl.environments.Calculator", tool_format="hermes")
    rollout = RolloutCallback([GSM8KAnswer()], TransformersEngine(), environment=environment)
    for stage, limit in (("fit", 512), ("test", 100)):
        data = TableDataModule(rows, system_prompt=stage, max_prompt_tokens=limit)
        trainer: Any = SimpleNamespace(lightning_module=module, datamodule=data)
        rollout.check_first(trainer, stage)
        assert rollout._pool is not None and (rollout._pool._processes is None) == (stage == "fit") and not data.tools
        tools = rollout.open_environments(trainer)
        assert [tool["function"]["name"] for tool in tools] == ["calculate"] and rollout._dialogues is not None
        assert (rollout._dialogues.continuation.system_prompt, rollout._dialogues.max_prompt_tokens) == (stage, limit)
    rollout.close()


# Every part -----------------------------------------------------------------------------------------------------------


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
    rows = lines(train(config))
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
        settings = environment_settings(EnvironmentConfig(factory=environment), 64)["environment"]
        assert settings["factory"] == found

    def of(prompt: int = 64, **settings: Any) -> dict[str, Any]:
        return environment_settings(EnvironmentConfig(factory="qerl_pl.toy.game.GuessNumber", **settings), prompt)

    plain = of(tool_format=PATTERN)
    assert plain["environment"]["factory"] == "qerl_pl.toy.game.GuessNumber"
    assert plain != of(tool_format=PATTERN, max_turns=3) and plain != of()
    assert plain == of(tool_format=PATTERN, tool_wait=1.0, workers=2)
    assert plain != of(tool_format=PATTERN, tool_time_limit=1.0) and plain != of(96, tool_format=PATTERN)
