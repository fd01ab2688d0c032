"""What Lightning's loggers hold after a run, read with their own libraries: TensorBoard, W&B offline, CSV."""

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml
from cli_helpers import built
from fit_helpers import configuration
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from pages import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from qerl_pl.callbacks.completions import _truncate
from qerl_pl.callbacks.loggers import MainFirstLogger, address_of, changes, flatten
from qerl_pl.cli.main import QeRLCLI

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra `loggers`")
LOGGERS = ("TensorBoardLogger", "WandbLogger", "CSVLogger")
SETTINGS = {
    "seed_everything": 3,
    "model.policy.lora.rank": 4,
    "model.objective": "GRPO",
    "model.optimizer.lr": 0.01,
    "data": "ArithmeticDataModule",
    "data.val_size": 3,
    "trainer.max_epochs": 1,
    "trainer.callbacks.AdaptiveQuantizationNoise.stages": 4,
    "trainer.callbacks.AdaptiveQuantizationNoise.sigma_start": 0.01,
    "trainer.callbacks.RolloutCallback.rewards.Vowels.weight": 0.5,
}
"""Some of the run's settings, as its configuration has them or by default."""


@pytest.fixture(scope="module")
def run(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, Path, str]]:
    """A run of two rollouts with three loggers: its trainer, its folder, and what it printed."""
    import wandb

    folder = tmp_path_factory.mktemp("loggers") / "run"
    settings = configuration(tiny_policy_dir, folder)
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2}
    own: dict[str, dict[str, Any]] = {"WandbLogger": {"offline": True}}
    settings["trainer"]["logger"] = [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": str(folder)} | own.get(name, {})}
        for name in LOGGERS
    ]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["qerl"])
        monkeypatch.setattr(sys, "stdout", printed)
        environment = {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        trainer = QeRLCLI({"subcommand": "fit", "fit": settings}).trainer
        yield trainer, folder, printed.getvalue()
        wandb.finish()
        wandb.teardown()


def logger_of(trainer: Trainer, kind: type) -> Any:
    return next(logger for logger in trainer.loggers if type(logger) is kind)


def rows_of(folder: Path, version: int) -> list[dict[str, Any]]:
    """What a table has of a rollout's completions, from RUN/completions.jsonl: one of each prompt comes first."""
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    first, second, third, fourth = (line for line in lines if line["version"] == version)  # two prompts, two of each
    rows = []
    for line in (first, third, second, fourth):
        rewards = line["rewards"]
        parts = f"accuracy {rewards['accuracy']:.3g}, vowels {rewards['vowels']:.3g}"
        same = {name: line[name] for name in ("prompt_id", "prompt", "completion", "reference")}
        row = {"rollout": version, **same, "reward": rewards["total"], "rewards": parts}
        rows.append(row | {name: line[name] for name in ("tokens", "truncated")})
    return rows


def test_tensorboard_shows_completions(run: tuple[Trainer, Path, str]) -> None:
    trainer, folder, _ = run
    events = EventAccumulator(logger_of(trainer, TensorBoardLogger).log_dir).Reload()
    panels = events.Tensors("completions/text_summary")
    assert [panel.step for panel in panels] == [0, 1]  # every tenth rollout, and the last
    for panel in panels:
        _, _, *lines = panel.tensor_proto.string_val[0].decode().split("\n")
        cells = [[unescape(cell.replace("<br>", "\n")) for cell in line[2:-2].split(" | ")] for line in lines]
        assert cells == [[str(value) for value in row.values()] for row in rows_of(folder, panel.step)]


def test_tensorboard_compares_runs_by_their_settings(run: tuple[Trainer, Path, str]) -> None:
    logger = logger_of(run[0], TensorBoardLogger)
    events = EventAccumulator(logger.log_dir).Reload()

    def plugin_data(tag: str) -> Any:
        return plugin_data_pb2.HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)

    settings = plugin_data("_hparams_/session_start_info").session_start_info.hparams
    shown = {name: settings[name].number_value or settings[name].string_value for name in SETTINGS}
    assert shown == SETTINGS
    metrics = {info.name.tag for info in plugin_data("_hparams_/experiment").experiment.metric_infos}
    assert "reward/mean" in metrics and metrics <= set(events.Tags()["scalars"])
    assert "hp_metric" not in events.Tags()["scalars"]
    assert SETTINGS.items() <= yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()).items()


def test_the_layout_begins_with_reward_and_draws_what_is_logged(run: tuple[Trainer, Path, str]) -> None:
    events = EventAccumulator(logger_of(run[0], TensorBoardLogger).log_dir).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for part in layout.category for chart in part.chart}
    held_out = ["held-out accuracy (greedy)", "held-out pass@1 (sampled)", "held-out reward (sampled)"]
    first = ["reward", *held_out, "entropy", "KL from the reference"]
    assert [*charts][:8] == [*first, "clip fraction", "completion length"]
    assert [len(charts[title]) for title in first] == [1] * 6
    for title, metric in zip(held_out, ("accuracy", "pass@1", "reward_mean"), strict=True):
        assert re.match(charts[title][0], f"val/MATH-500/{metric}")  # of a set by name
    logged = events.Tags()["scalars"]
    unseen = {tag for tags in charts.values() for tag in tags if not any(re.match(tag, one) for one in logged)}
    assert unseen == {"memory/driver_gib$"}  # of a GPU


TITLES = {
    "reward/mean": "Main/1 reward",
    "val/accuracy": "Main/2 greedy accuracy",
    "val/MATH-500/accuracy": "Main/2 greedy accuracy MATH-500",
    "val/a/b/pass@1": "Main/3 sampled accuracy a/b",
    "policy/entropy": "Main/4 entropy",
    "completions/length_mean": "Main/5 length",
    **dict.fromkeys(["epoch", "reward/accuracy", "val/pass@8", "test/accuracy", "reward/x/y"]),
}


def test_tensorboard_begins_with_the_main_curves(tmp_path: Path) -> None:
    logger = MainFirstLogger(tmp_path, name="", version="")
    logger.log_metrics({tag: float(i) for i, tag in enumerate(TITLES)}, step=3)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    titles = [title for title in TITLES.values() if title is not None]
    assert sorted(events.Tags()["scalars"]) == [*titles, *sorted(TITLES)]
    for i, (tag, title) in enumerate(TITLES.items()):
        for name in (tag, title) if title else (tag,):
            assert [(event.step, event.value) for event in events.Scalars(name)] == [(3, i)]


def test_wandb_shows_completions_and_settings(run: tuple[Trainer, Path, str]) -> None:
    trainer, folder, _ = run
    experiment = logger_of(trainer, WandbLogger).experiment
    assert {name: experiment.config[name] for name in SETTINGS} == SETTINGS
    media = Path(experiment.dir) / "media"
    tables = [json.loads(path.read_text()) for path in media.glob("table/completions_*.table.json")]
    rows = [[dict(zip(table["columns"], row, strict=True)) for row in table["data"]] for table in tables]
    assert sorted(rows, key=lambda table: table[0]["rollout"]) == [rows_of(folder, 0), rows_of(folder, 1)]


def test_csv_has_curves_and_settings(run: tuple[Trainer, Path, str]) -> None:
    logger = logger_of(run[0], CSVLogger)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rewards = [row["reward/mean"] for row in csv.DictReader(file) if row["reward/mean"]]
    assert len(rewards) == 2
    assert SETTINGS.items() <= yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()).items()


def test_the_closing_hint_names_each_logger(run: tuple[Trainer, Path, str]) -> None:
    trainer, folder, printed = run
    hints = [line.removeprefix("watch it: ") for line in printed.splitlines() if line.startswith("watch it: ")]
    tensorboard, wandb, csv_file = hints
    assert (
        tensorboard
        == f"tensorboard --logdir {folder}/lightning_logs, then http://localhost:6006/#custom_scalars&_smoothingWeight=0"
    )
    offline = Path(wandb.removeprefix("wandb sync "))
    assert offline.parent == folder / "wandb" and list(offline.glob("*.wandb"))
    assert Path(csv_file).is_file() and csv_file.endswith("/metrics.csv")
    assert address_of(DummyLogger()) is None
    spaced = address_of(TensorBoardLogger("my runs/first", name="", version=""))
    assert spaced is not None and spaced.startswith("tensorboard --logdir 'my runs', then ")


def test_the_loggers_of_the_page_are_accepted(tmp_path: Path) -> None:
    (block,) = pages.fences(ROOT / "docs" / "logged-metrics.md", "yaml")
    (tmp_path / "loggers.yaml").write_text(block)
    settings = built("fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(tmp_path / "loggers.yaml"))
    assert [type(logger) for logger in settings.trainer.logger] == [WandbLogger, CSVLogger]


def test_settings_are_named_as_on_the_command_line() -> None:
    rewards = {"exact": {"class_path": "a.Exact", "init_args": {"weight": 2}}, "mine": "my.py:score"}
    rewards["file"] = {"class_path": "my.py:Exact", "init_args": None}
    callbacks = [{"class_path": "b.Watch", "init_args": {"every": 3, "at": None}}, {"class_path": "b.Other"}]
    settings = {
        "noise": None,
        "rollout": {"rewards": rewards, "betas": [0.9, 0.99]},
        "trainer": {"callbacks": callbacks},
    }
    assert flatten(settings) == {
        "rollout.rewards.exact": "Exact",
        "rollout.rewards.exact.weight": 2,
        "rollout.rewards.mine": "my.py:score",
        "rollout.rewards.file": "my.py:Exact",
        "rollout.betas": [0.9, 0.99],
        "trainer.callbacks.Watch": "Watch",
        "trainer.callbacks.Watch.every": 3,
        "trainer.callbacks.Other": "Other",
    }
    judges = [{"class_path": "a.Judge", "init_args": {"model": model}} for model in ("x", "y")]
    assert flatten(["my.py:score", *judges], "rewards") == {  # of one class, by their places
        "rewards.0": "my.py:score",
        "rewards.Judge.1": "Judge",
        "rewards.Judge.1.model": "x",
        "rewards.Judge.2": "Judge",
        "rewards.Judge.2.model": "y",
    }


def test_settings_that_differ_from_those_before_are_told() -> None:
    before = "{noise: {sigma_start: 0.01}, data: {class_path: a.B, init_args: {seed: 1}}, trainer: {max_steps: 4}}"
    after = "{noise: {sigma_start: 0.2}, data: {class_path: a.B, init_args: {size: 3}}, trainer: {max_steps: 8}}"
    assert changes(before, after) == [
        "data.seed was 1 and is None",
        "data.size was None and is 3",
        "noise.sigma_start was 0.01 and is 0.2",
    ]
    assert not changes(before, before) and not changes("", "{trainer: {max_steps: 8}}")


def test_completions_that_a_power_cut_has_damaged_do_not_stop_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = tmp_path / "completions.jsonl", b'{"version": 0}\n'
    path.write_bytes(whole + bytes(40) + b'\n{"version": 1}\n')
    _truncate(path, 2)
    assert path.read_bytes() == whole and "is damaged after 15 bytes" in caplog.text
