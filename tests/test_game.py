"""The guessing game: its environment, its demonstrations, and its toy policy's settings."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
from dialogue_helpers import LocalPool, Talking
from test_dialogue_rollouts import PATTERN, Game

from qerl_pl.datamodules import GuessingDataModule
from qerl_pl.environments.sampler import DialogueConfig, DialogueJob, DialogueSampler
from qerl_pl.errors import UserError
from qerl_pl.toy.game import GuessingGame, GuessNumber
from qerl_pl.toy.policy import FORMAT, ToyConfig, game_demonstrator
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.toy.tokenizer import TOOLS_TEMPLATE, build_tokenizer
from qerl_pl.types import Prompt, RolloutRequest, SamplingConfig


@pytest.mark.parametrize("module", ["toy.game", "environments.calculator", "environments.search"])
def test_a_worker_imports_an_environment_without_pytorch(module: str) -> None:
    script = f"import sys, qerl_pl.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_game_by_hand() -> None:
    game = GuessNumber()
    game.reset("5", id="row")
    assert [game.guess(4), game.guess(6), game.get_reward()] == ["higher", "lower", 0.0] and not game.dialogue_done
    assert game.guess(5) == "found" and game.get_reward() == 1.0 and game.dialogue_done
    game.reset("5")
    assert game.get_reward() == 0.0 and not game.dialogue_done


def test_careful_play_halves_and_careless_play_counts() -> None:
    game = GuessingGame(highest=31, turns=5)
    assert game.play(9, careless=False) == [
        ("guess 16", "lower"),
        ("guess 8", "higher"),
        ("guess 12", "lower"),
        ("guess 10", "lower"),
        ("guess 9", "found"),
    ]
    assert game.play(2, careless=True) == [("guess 1", "higher"), ("guess 2", "found")]
    for number in range(1, 32):
        assert game.play(number, careless=False)[-1] == (f"guess {number}", "found")
        assert (game.play(number, careless=True)[-1][1] == "found") == (number <= 5)


def test_splits_differ_by_names_and_numbers_cover_the_range() -> None:
    game = GuessingGame(highest=7)
    train, held_out = ([game.problem(index, split) for index in range(200)] for split in ("train", "validation"))
    assert not {question for question, _ in train} & {question for question, _ in held_out}
    assert {number for _, number in train} == {number for _, number in held_out} == set(range(1, 8))
    rows = GuessingDataModule(game, train_size=3, batch_size=1).train_rows()
    assert [(row.question, row.reference) for row in rows] == [(text, str(number)) for text, number in train[:3]]


@pytest.mark.parametrize("careless", [False, True])
def test_demonstrations_are_the_tokens_of_a_dialogue(careless: bool) -> None:
    tokenizer, game = build_tokenizer(TOOLS_TEMPLATE), GuessingGame(highest=15, turns=4)
    end, demonstrate = int(tokenizer.eos_token_id), game_demonstrator(game, tokenizer)
    for index in range(20):
        question, number = game.problem(index, "train")
        plays = iter(game.play(number, careless))

        def says(request: RolloutRequest, plays: Any = plays) -> tuple[list[int], bool]:
            return [*tokenizer(next(plays)[0])["input_ids"], end], True

        config = DialogueConfig(PATTERN, max_turns=4)
        sampler = DialogueSampler(config, LocalPool(Game), tokenizer, [end], 200)
        job = DialogueJob(Prompt("p", (), question, str(number)), 0)
        (found,) = sampler.sample(Talking(says), [job], SamplingConfig(max_tokens=200), 0)  # type: ignore[arg-type]
        ids, labels = demonstrate(index, careless)
        assert found.prompt_ids is not None and found.sampled is not None
        assert ids == [*found.prompt_ids, *found.token_ids]
        sampled = [False] * len(found.prompt_ids) + [*found.sampled]
        assert labels == [token if own else -100 for token, own in zip(ids, sampled, strict=True)]


def test_a_policy_without_a_game_has_the_name_that_it_had() -> None:
    fields = {name: value for name, value in asdict(ToyConfig()).items() if name != "game"}
    described = json.dumps({"format": FORMAT, **fields}, sort_keys=True)
    assert ToyConfig().settings == fields
    assert ToyConfig().digest == hashlib.sha256(described.encode()).hexdigest()[:16]
    taught = ToyConfig(game=GuessingGame())
    assert taught.settings["game"] == {"highest": 31, "turns": 5, "seed": 0} and taught.digest != ToyConfig().digest
    assert ToyConfig(task=ArithmeticTask(digits=3)).digest != ToyConfig().digest


@pytest.mark.parametrize("wrong", [{"highest": 1}, {"turns": 0}])
def test_a_game_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} must be at least"):
        GuessingGame(**wrong)
