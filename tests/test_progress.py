"""What a terminal, and a file in its place, shows of a run while it trains."""

import csv
import itertools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from short_run import data, module_of, rollout_of

from qerl_pl.callbacks import RolloutLines
from qerl_pl.callbacks import summary as progress_module
from qerl_pl.callbacks.summary import held_out_metrics
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.modules import PolicyConfig, SFTModule
from qerl_pl.toy.policy import ToyConfig, build_toy_policy


def fit(base: Path, run: Path, bar: ProgressBar) -> dict[str, list[float]]:
    """Four rollouts and a validation before and after them: the logged values of each tag."""
    logger = CSVLogger(str(run), name="", version="")
    settings = {"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, "num_sanity_val_steps": -1}
    settings |= {"default_root_dir": run, "log_every_n_steps": 1, "enable_checkpointing": False}
    Trainer(callbacks=[rollout_of(), bar], logger=logger, **settings).fit(module_of(base), datamodule=data())
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {tag: [float(row[tag]) for row in rows if row[tag]] for tag in rows[0]}


def test_a_file_has_a_line_for_each_rollout_and_validation(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count(50.0)  # the clock ticks when it is looked at: a second a rollout
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=seconds.__next__))
    with caplog.at_level(logging.INFO, "qerl_pl"):
        logged = fit(tiny_policy_dir, tmp_path, RolloutLines())
    lines = [record.getMessage() for record in caplog.records if record.name == progress_module.__name__]
    tags = ("reward/mean", "policy/entropy", "completions/length_mean", "completions/truncated_frac")
    columns = (logged[tag] for tag in tags)
    assert lines[1:5] == [
        f"rollout {number}/4: reward {reward:.3f}, entropy {entropy:.3f}, length {length:.0f} tokens, "
        f"{truncated:.0%} cut off, 0:00:0{4 - number} left"
        for number, (reward, entropy, length, truncated) in enumerate(zip(*columns, strict=True), start=1)
    ]
    labels = {"val/accuracy": "greedy accuracy", "val/pass@1": "sampled pass@1", "val/reward_mean": "mean reward"}
    after = ", ".join(f"{label} {logged[tag][-1]:.3f}" for tag, label in labels.items())
    assert lines[5:] == [f"validation after 4 rollouts: {after}"]
    before = ", ".join(rf"{label} \d\.\d{{3}}" for label in labels.values())
    assert re.fullmatch(f"validation after 0 rollouts: {before}", lines[0])


def test_supervised_fine_tuning_has_a_line_for_each_logged_step_and_validation_and_says_where_its_adapter_is(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count(50.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=seconds.__next__))
    rows = [{"prompt": f"{n} and 1 is", "completion": f" {n + 1}"} for n in range(8)]
    data = ConversationDataModule(rows, batch_size=2, val_size=2)
    policy = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32")
    settings = {"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, "num_sanity_val_steps": -1}
    settings |= {"default_root_dir": tmp_path, "enable_checkpointing": False, "logger": False, "log_every_n_steps": 2}
    with caplog.at_level(logging.INFO, "qerl_pl"):
        Trainer(callbacks=[RolloutLines()], **settings).fit(SFTModule(policy), datamodule=data)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("qerl_pl")]
    lines = lines[next(number for number, line in enumerate(lines) if line.startswith("step")) :]
    assert [re.sub(r"\d\.\d{3}", "#", line) for line in lines] == [
        "step 2/3: loss #, 0:00:00 left",
        "step 3/3: loss #, 0:00:00 left",
        "validation after 3 steps: loss #, token accuracy #",
        f"adapter {tmp_path / 'adapter'}",
    ]


def test_the_time_left_of_a_resumed_run_is_of_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=itertools.count(50.0).__next__))
    trainer: Any = SimpleNamespace(callback_metrics={"optim/loss": 1.0}, log_every_n_steps=1)
    lines, module = RolloutLines(), SFTModule()
    monkeypatch.setattr(module, "planned_batches", lambda: 9)
    module.policy_version = 6
    lines.on_train_start(trainer, module)
    module.policy_version = 7
    with caplog.at_level(logging.INFO, "qerl_pl"):
        lines.on_train_batch_end(trainer, module)
    assert caplog.messages == ["step 7/9: loss 1.000, 0:00:02 left"]


def test_held_out_numbers_say_how_they_were_sampled() -> None:
    metrics = {"val/MATH/accuracy": 0.5, "val/MATH/pass@1": 0.25, "val/pass@8": 1.0, "val/length_mean": 9.0}
    assert held_out_metrics(metrics) == {"greedy accuracy on MATH": 0.5, "sampled pass@1 on MATH": 0.25}
    rewards = {"val/MATH/reward_mean": 0.75, "val/reward_brief": 1.0, "val/reward_accuracy": 1.0}
    assert held_out_metrics(rewards) == {"mean reward on MATH": 0.75}


def test_teaching_the_toy_policy_draws_no_bar_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_toy_policy(ToyConfig(layers=1, intermediate=128, steps=2, batch_size=1), tmp_path)
    assert capsys.readouterr().err == ""
