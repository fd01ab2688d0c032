"""Modules, callbacks and trainers that are used again: a fit without a checkpoint is the first one, bit for bit."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from short_run import data, module_of

from qerl_pl.algorithm import DrGRPO
from qerl_pl.callbacks import (
    AdaptiveQuantizationNoise,
    CompletionLog,
    ResumeCheckpoint,
    RolloutCallback,
    RolloutLines,
    RunSummary,
)
from qerl_pl.engines import TransformersEngine
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.runtime.checkpoint_io import AtomicCheckpointIO
from qerl_pl.types import SamplingConfig

ROLLOUTS = 4


class Failing:
    """A reward that raises at one of its calls, counted from when that was set."""

    name, weight = "vowels", 1.0

    def __init__(self) -> None:
        self.calls_left: int | None = None
        self.error: BaseException = ValueError("fails")

    def __call__(self, samples: Any) -> list[float]:
        if self.calls_left is not None:
            self.calls_left -= 1
            if not self.calls_left:
                raise self.error
        return [sum(letter in "aeiou" for letter in sample.completion) / 10 for sample in samples]


class Used:
    """A module and callbacks, and what their last fit has done."""

    def __init__(self, base: Path, run: Path, **limits: Any) -> None:
        self.limits = limits or {"max_epochs": 1}
        self.base, self.reward, self.engine = base, Failing(), TransformersEngine()
        self.callbacks: list[Callback] = [
            RolloutCallback([self.reward], self.engine, group_size=2, sampling=SamplingConfig(max_tokens=4)),
            AdaptiveQuantizationNoise(stages=ROLLOUTS),
            RunSummary(),
            RolloutLines(),
            CompletionLog(jsonl=True),
            ResumeCheckpoint(1, keep=9),
        ]
        self.run = run
        self.module, self.trainer = self.new_module(), self.new_trainer()

    def new_module(self, **settings: Any) -> QeRLModule:
        return module_of(self.base, lr_scheduler="linear", **settings)

    def new_trainer(self) -> Trainer:
        return Trainer(
            default_root_dir=self.run,
            accelerator="cpu",
            logger=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=self.callbacks,
            plugins=[AtomicCheckpointIO()],
            **self.limits,
        )

    def fit(self, **settings: Any) -> None:
        self.trainer.fit(self.module, datamodule=data(), weights_only=True, **settings)

    def fails(self, error: BaseException, calls: int) -> None:
        self.reward.calls_left, self.reward.error = calls, error
        with pytest.raises((UserError, SystemExit)):
            self.fit()
        self.reward.calls_left = None

    def result(self) -> dict[str, Any]:
        summary: Any = self.callbacks[2]
        weights = {name: tensor.clone() for name, tensor in self.module.policy.trained_state().items()}
        logged = (self.run / "completions.jsonl").read_text()
        kept = {path.name for path in (self.run / "checkpoints").glob("step=*.ckpt")}
        curves = {name: values for name, values in summary.curves.items() if not name.startswith("time/")}
        found = {"curves": curves, "completions": logged, "checkpoints": kept}
        counts = {"rollouts": self.module.policy_version, "steps": self.trainer.global_step}
        return found | counts | {"weights": {name: tensor.tolist() for name, tensor in weights.items()}}


def finished(used: Used) -> None:
    used.fit()
    used.trainer = used.new_trainer()


def finished_and_the_same_trainer(used: Used) -> None:
    used.fit()


def failed_and_the_same_trainer(used: Used) -> None:
    used.fails(ValueError("fails"), 3)


def failed_in_the_first_rollout(used: Used) -> None:
    used.fails(ValueError("fails"), 1)


def interrupted(used: Used) -> None:
    used.fails(KeyboardInterrupt(), 3)
    used.trainer = used.new_trainer()


def failed_with_another_objective(used: Used) -> None:
    used.module = used.new_module(objective=DrGRPO(), seed=9)
    used.fails(ValueError("fails"), 2)
    used.module = used.new_module()


def failed_with_callbacks_of_its_own(used: Used) -> None:
    own = Used(used.base, used.run)
    own.module = used.module
    own.fails(ValueError("fails"), 3)


def evaluated_a_checkpoint(used: Used) -> None:
    used.fit()
    path = used.run / "checkpoints" / "step=2.ckpt"
    used.trainer.validate(used.module, datamodule=data(), ckpt_path=str(path), weights_only=True, verbose=False)


@pytest.fixture(scope="module")
def first(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    used = Used(tiny_policy_dir, tmp_path_factory.mktemp("first"))
    used.fit()
    return used.result()


EARLIER = [failed_and_the_same_trainer, interrupted, failed_with_another_objective]
EARLIER += [failed_with_callbacks_of_its_own, evaluated_a_checkpoint]
NIGHTLY = [finished, finished_and_the_same_trainer, failed_in_the_first_rollout]
"""Of which each is a part of another."""


@pytest.mark.parametrize("earlier", [*EARLIER, *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHTLY)])
def test_a_fit_after_another_is_the_first_one_bit_for_bit(
    earlier: Callable[[Used], None],
    first: dict[str, Any],
    tiny_policy_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    used = Used(tiny_policy_dir, tmp_path)
    caplog.set_level(logging.INFO)
    earlier(used)
    assert used.engine._model is None  # freed, however the fit has ended
    caplog.clear()
    used.fit()
    found = used.result()
    assert {name for name, value in first.items() if found[name] != value} == set()
    sigma = found["curves"]["aqn/sigma"][""]
    assert found["rollouts"] == ROLLOUTS and [rollout for rollout, _ in sigma] == [*range(ROLLOUTS)]
    assert sigma[0] == (0, 0.0) and "rollout 1/4" in caplog.text and "rollout 5/4" not in caplog.text


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_epochs": 2, "val_check_interval": 2}, marks=pytest.mark.nightly),
        {"max_epochs": None, "max_steps": 10, "val_check_interval": 3, "check_val_every_n_epoch": None},
    ],
)
def test_a_trainer_counts_anew_whatever_ends_its_run(
    limits: dict[str, Any], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    used, results = Used(tiny_policy_dir, tmp_path, **limits), []
    for _ in range(2):
        used.fit()
        results.append(used.result())
    assert {name for name, value in results[0].items() if results[1][name] != value} == set()


def test_a_fit_from_a_checkpoint_goes_on_with_whatever_was_used_before(
    first: dict[str, Any], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    used = Used(tiny_policy_dir, tmp_path)
    used.fails(ValueError("fails"), 4)
    used.fit(ckpt_path=str(tmp_path / "checkpoints" / "step=2.ckpt"))
    found = used.result()
    assert {name for name, value in first.items() if found[name] != value} == set()
