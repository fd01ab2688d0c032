"""Dialogues whose prompt an observation makes too long: they end, and the run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dialogue_helpers import LocalPool
from light_helpers import WordyGame
from lightning.pytorch import Callback, LightningModule, Trainer
from short_run import module_of, trainer_of
from test_dialogue_rollouts import PROMPTS, SAMPLING, Game, Playing, sampler_of
from test_environment_runs import PATTERN

from qerl_pl.callbacks import EnvironmentConfig, RolloutCallback
from qerl_pl.datamodules import GuessingDataModule
from qerl_pl.engines import TransformersEngine
from qerl_pl.environments.sampler import DialogueJob
from qerl_pl.rollout.collector import pad_routing
from qerl_pl.toy.game import GuessingGame
from qerl_pl.types import Completion, DialogueFacts, RolloutRequest


def test_a_long_observation_ends_its_dialogue_before_the_first_turn(caplog: pytest.LogCaptureFixture) -> None:
    class Wordy(Game):
        def __init__(self, row: Mapping[str, Any]) -> None:
            self.game = WordyGame()

        def reset(self, **row: Any) -> str | None:  # type: ignore[override]
            return self.game.reset(**row)

    engine, pool = Playing(7), LocalPool(Wordy)
    jobs = [DialogueJob(prompt, 0) for prompt in PROMPTS]
    found = sampler_of(pool, workers=2).sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    said = ({"role": "assistant", "content": ""},)
    ended = Completion((), (), "length", (), (1, 2), DialogueFacts(0, 0, 0, 0.0, said, 0.0))
    assert found[1::2] == [ended] * 3 and not any("even" in request_text(engine, r) for r, _ in engine.log)
    assert [one.token_ids for one in found[::2]] == [
        one.token_ids
        for one in sampler_of(LocalPool(Game)).sample(Playing(7), jobs[::2], SAMPLING, 7)  # type: ignore[arg-type]
    ]
    assert caplog.text.count("more than data.max_prompt_tokens=200: such dialogues end before their first turn") == 1
    assert all(session.closed for session in pool.sessions)


def request_text(engine: Playing, request: RolloutRequest) -> str:
    return str(engine.tokenizer.decode(request.prompt_ids))


def test_a_run_goes_on_after_long_observations(game_policy_dir: Path, tmp_path: Path) -> None:
    class Measured(Callback):
        truncated: ClassVar[list[float]] = []

        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            assert batch.experience is not None
            self.truncated.append(batch.experience.metrics["completions/truncated_frac"])
            even = [prompt for prompt in batch.prompts if int(prompt.reference) % 2 == 0]
            tokens = batch.experience.mask.sum(1).reshape(len(batch.prompts), -1)
            assert [sum(row) == 0 for row in tokens.tolist()] == [prompt in even for prompt in batch.prompts]
            assert self.truncated[-1] >= len(even) / len(batch.prompts)

    sampling = {"group_size": 4, "sampling": SAMPLING}
    environment = EnvironmentConfig(factory=WordyGame, tool_format=PATTERN, max_turns=3)
    rollout = RolloutCallback({}, TransformersEngine(), environment=environment, **sampling)
    trainer = trainer_of(tmp_path, Measured(), rollout=rollout, noise=False, max_steps=6)
    data = GuessingDataModule(GuessingGame(highest=7, turns=3), train_size=12, batch_size=4, val_size=3)
    module = module_of(game_policy_dir)
    trainer.fit(module, datamodule=data)
    assert len(Measured.truncated) == 3 and max(Measured.truncated) > 0
    assert all(parameter.isfinite().all() for parameter in module.policy.parameters())


def test_a_dialogue_without_a_turn_has_no_routing() -> None:
    """The rows beside it keep theirs."""
    routing = torch.arange(6, dtype=torch.int16).view(3, 2, 1)
    empty, whole = Completion((), (), "length", ()), Completion((3, 4), (-0.5, -0.25), "stop", routing=routing)
    padded = pad_routing([[empty, whole]], (2, 4))
    assert padded is not None and (padded[0] == -1).all()
    assert padded[1, :, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert pad_routing([[empty]], (1, 2)) is None
