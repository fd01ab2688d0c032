"""Training end to end, in this process, on a tiny policy."""

import copy
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import KEYS, adapter, configuration, with_keys
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from short_run import data, module_of, rollout_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from qerl_pl.cli.export import base_of
from qerl_pl.cli.main import QeRLCLI, main
from qerl_pl.cli.model_card import gguf_line
from qerl_pl.formats.base import format_of
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY, newest_checkpoint

CALLBACKS = "qerl_pl.callbacks."


def settings_of(base: Path, run: Path, rollouts: int = 2, summary: bool = False) -> dict[str, Any]:
    settings = configuration(base, run, summary)
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": rollouts}
    return settings


def callback_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The configuration of one callback, by class name."""
    return next(item for item in settings["trainer"]["callbacks"] if item["class_path"] == CALLBACKS + name)


def fit(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> QeRLCLI:
    monkeypatch.setattr("sys.argv", ["qerl"])
    return QeRLCLI({"subcommand": "fit", "fit": copy.deepcopy(settings)})


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def cli(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> QeRLCLI:
    settings = settings_of(tiny_policy_dir, tmp_path_factory.mktemp("fit") / "run", summary=True)
    settings["trainer"]["num_sanity_val_steps"] = -1
    with pytest.MonkeyPatch.context() as monkeypatch:
        return fit(settings, monkeypatch)


@pytest.fixture(scope="module")
def finished(cli: QeRLCLI) -> Path:
    return Path(cli.trainer.default_root_dir)


def test_the_logged_learning_rate_is_the_mean_of_those_used(finished: Path) -> None:
    # Two rollouts of four steps: one of warm-up at rate 0, then a cosine over seven from 0.01.
    rates = [0.0] + [0.01 * (1 + math.cos(math.pi * step / 7)) / 2 for step in range(7)]
    logged = [event.value for event in EventAccumulator(str(finished)).Reload().Scalars("optim/lr")]
    assert logged == pytest.approx([sum(rates[:4]) / 4, sum(rates[4:]) / 4])


def test_summary_and_completions_are_written(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["quantization"] == "nvfp4" and (finished / "run.png").stat().st_size > 0
    entropies = [event.value for event in EventAccumulator(str(finished)).Reload().Scalars("policy/entropy")]
    assert None not in (summary["accuracy_before"], summary["accuracy_after"])
    assert [summary["entropy_first"], summary["entropy_last"]] == pytest.approx(entropies)  # none is in both means
    records = [json.loads(line) for line in (finished / "completions.jsonl").read_text().splitlines()]
    assert [record["version"] for record in records] == [0] * 4 + [1] * 4
    for record in records:
        assert record["rewards"]["total"] == pytest.approx(
            record["rewards"]["accuracy"] + 0.5 * record["rewards"]["vowels"], abs=1e-6
        )


OPTIONAL = ("AdaptiveQuantizationNoise", "ResumeCheckpoint", "Monitor", "CompletionLog", "RunSummary")


@pytest.mark.parametrize(
    "names", [OPTIONAL[:1], OPTIONAL[1:], *(pytest.param((name,), marks=pytest.mark.nightly) for name in OPTIONAL[1:])]
)
def test_trains_without_optional_callbacks(
    finished: Path, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    settings = with_keys(settings_of(tiny_policy_dir, tmp_path / "run")) | dict.fromkeys(KEYS[name] for name in names)
    fit(settings, monkeypatch)
    same = equal(adapter(tmp_path / "run"), adapter(finished))
    assert same == (names != OPTIONAL[:1])  # only noise is part of what is learned


@pytest.mark.usefixtures("process_state")
def test_validate_from_a_checkpoint_and_export(
    finished: Path, tiny_policy_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    words = ["--ckpt_path", str(run / "checkpoints/step=2.ckpt"), "--trainer.default_root_dir", str(run)]
    assert main(["validate", "-c", str(run / "config.yaml"), *words]) == 0
    assert "val/accuracy" in capfd.readouterr().out
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    assert equal(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), adapter(run))
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "true"]) == 0
    written = capfd.readouterr().out
    assert f"wrote the adapter of {tiny_policy_dir} to {tmp_path / 'adapter'}; " in written
    assert f"wrote the complete model to {tmp_path / 'merged'}; " in written
    assert f"as GGUF: {gguf_line(str(tmp_path / 'merged'))}\nrounded to NVFP4 again, they keep " in written
    assert written.count("as GGUF") == written.count("rounded to") == 1
    kept, advice = re.findall("they keep (.*) of the adapter's change: (.*)", written)[0]
    assert advice.startswith("quantizing them is fine" if float(kept) >= 0.9 else "serve them in 16 bits, or ")
    assert "; after 2 rollouts, from " in written and "step=2.ckpt" in written
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tiny_policy_dir) and format_of(base_of(tmp_path / "adapter")).name == "nvfp4"
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template
    mode = (run / "config.yaml").stat().st_mode  # as the umask has it
    for folder in (tmp_path / "adapter", run / "adapter", tmp_path / "merged"):
        assert {path.stat().st_mode for path in folder.iterdir()} == {mode}
    assert json.loads((tmp_path / "merged" / "qerl_model.json").read_text()) == {"quantization": "none"}
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in merged and not any("packed" in name for name in merged)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_evaluation_takes_the_newest_checkpoint_and_logs_where_the_runs_curve_has_it(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    where = ("-c", str(run / "config.yaml"), "--trainer.default_root_dir", str(run), "--data.test_size", "4")
    assert main(["test", *where, "--resume", "auto"]) == 0
    assert "test/pass@1" in capsys.readouterr().out
    events = EventAccumulator(str(run)).Reload()
    assert [event.step for event in events.Scalars("test/pass@1")] == [
        max(event.step for event in events.Scalars("reward/mean"))
    ]
    before = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert main(["validate", *where, "--resume", "auto"]) == 0
    capsys.readouterr()
    events.Reload()
    assert before == {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}  # its curve has that point already
    assert validated(run, 0) == [(1, events.Scalars("val/pass@1")[-1].value)]
    newest = str(newest_checkpoint(run))
    assert main(["validate", *where, "--resume", "auto", "--ckpt_path", newest]) == 2
    assert "leave one out" in capsys.readouterr().err
    assert main(["validate", *where[:2], "--resume", "auto"]) == 2  # its configuration names the folder that was copied
    assert (
        f"got {finished} in {run}/config.yaml, beside the checkpoints of a run that was moved"
        in capsys.readouterr().err
    )
    shutil.rmtree(run / "checkpoints")
    assert main(["validate", *where, "--resume", "auto"]) == 2
    assert "--resume auto needs a checkpoint" in capsys.readouterr().err
    assert main(["validate", *where]) == 0  # the policy before training, which is before the first rollout
    assert [step for step, _ in validated(run, 1)] == [-1]


def validated(run: Path, number: int) -> list[tuple[int, float]]:
    """Steps and values of pass@1 of the evaluation `number` by `qerl validate`."""
    events = EventAccumulator(str(run / "validate" / f"version_{number}")).Reload()
    return [(event.step, event.value) for event in events.Scalars("val/pass@1")]


GOING_ON = ("fit --resume auto", "fit", "validate --resume auto", "test --resume auto", "export")


@pytest.mark.parametrize("command", GOING_ON)
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for path in (run / "checkpoints").glob("*.ckpt"):
        path.write_bytes(b"half a checkpoint")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    name, *resume = command.split()
    where = ["-c", str(run / "config.yaml"), "--trainer.default_root_dir", str(run)]
    args = [str(run), str(tmp_path / "adapter")] if name == "export" else [*where, *resume]
    assert main([name, *args]) == 2
    error = capsys.readouterr().err
    line = error.splitlines()[-1]
    assert line.startswith("qerl: ") and "are damaged" in line and "move that folder away to start over" in line
    assert "Traceback" not in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_another_logger_moves_neither_configuration_nor_checkpoints(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    settings = settings_of(tiny_policy_dir, run)
    settings["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(tmp_path / "logs")},
    }
    best = {"monitor": "val/accuracy", "filename": "best-{rollouts:.0f}"}
    settings["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": best}
    )
    fit(settings, monkeypatch)
    assert (run / "checkpoints" / "best-rollouts=2.ckpt").is_file()
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0


def test_a_development_run_leaves_nothing_to_go_on_from(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tiny_policy_dir, tmp_path / "run")
    settings["trainer"]["fast_dev_run"] = True
    assert fit(settings, monkeypatch).model.policy_version == 1
    assert not (tmp_path / "run").exists()


def test_a_development_run_leaves_a_finished_runs_folder_as_it_is(
    finished: Path, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    settings = settings_of(tiny_policy_dir, run)
    settings["trainer"]["fast_dev_run"] = True
    assert fit(settings, monkeypatch).model.policy_version == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_export_refuses_a_checkpoint_of_another_base(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = newest_checkpoint(run)
    assert path is not None
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[CHECKPOINT_KEY]["policy"]["quantization"] = "none"
    torch.save(checkpoint, path)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "true"]) == 2
    assert "a run keeps its base model; the checkpoint's is " in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("logger", [False, True])
def test_what_lightnings_own_trainer_has_saved_is_exported(
    tiny_policy_dir: Path, tmp_path: Path, logger: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Python there is no config.yaml, no digest, and Lightning's names."""
    module = module_of(tiny_policy_dir)
    given = {"accelerator": "cpu", "enable_progress_bar": False, "num_sanity_val_steps": 0, "max_epochs": 1}
    trainer = Trainer(default_root_dir=tmp_path / "run", logger=logger, callbacks=rollout_of(), **given)
    trainer.fit(module, datamodule=data())
    newest = next((tmp_path / "run").rglob("*.ckpt"))
    older = torch.load(newest, weights_only=True)
    older[CHECKPOINT_KEY]["policy_version"] = 3
    for name in ("a.ckpt", "z.ckpt"):  # neither the first nor the last name is taken
        torch.save(older, newest.with_name(name))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"after 4 rollouts, from .*run/(lightning_logs/version_0/)?checkpoints/epoch=0-step=8.ckpt", out)
    trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert equal(trained, {name: tensor.cpu() for name, tensor in module.policy.trained_state().items()})
    assert main(["export", str(tiny_policy_dir), str(tmp_path / "none")]) == 2
    assert re.search(f"needs a checkpoint; {tiny_policy_dir} has none; .* --checkpoint", capsys.readouterr().err)
    shutil.copytree(tmp_path / "run", tmp_path / "another")  # a folder of several runs is none of them
    assert main(["export", str(tmp_path), str(tmp_path / "none")]) == 2
    assert re.search(r"takes one run; .* has checkpoints in 2 folders, .*; name the run", capsys.readouterr().err)
    (other := tmp_path / "alone" / "old.ckpt").parent.mkdir()
    torch.save({"qerl": {"trained": {}}}, other)  # not of today's keys
    for named in ([], ["--checkpoint", str(other)]):
        assert main(["export", str(other.parent), str(tmp_path / "none"), *named]) == 2
        expected = "by this trainer; .*old.ckpt was written by another program or version; name another"
        assert re.search(expected, capsys.readouterr().err)


def test_a_run_of_truncated_completions_that_is_validated_in_part_claims_no_means(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tiny_policy_dir, tmp_path / "run", summary=True)
    settings["model"]["objective"] = {"class_path": "qerl_pl.algorithm.DAPO"}  # leaves truncated completions out
    callback_of(settings, "RolloutCallback")["init_args"]["sampling"] = {"max_tokens": 1}
    settings["trainer"] |= {"num_sanity_val_steps": 1, "check_val_every_n_epoch": 5}
    fit(settings, monkeypatch)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.value for event in events.Scalars("completions/truncated_frac")] == [1.0, 1.0]
    for tag in ("policy/entropy", "policy/ratio_mean", "mismatch/logprob_abs_mean"):
        assert all(math.isnan(event.value) for event in events.Scalars(tag))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert all(summary[key] is None for key in ("entropy_first", "accuracy_before", "accuracy_after"))
    assert summary["reward_first"] is not None


def test_the_self_check_asks_for_no_more_than_the_engine_was_launched_for(
    cli: QeRLCLI, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [len(prompt.token_ids) for prompt in cli.datamodule.replacement_prompts(("all",), 9, ())]
    settings = settings_of(tiny_policy_dir, tmp_path / "tight")
    settings["data"]["init_args"]["max_prompt_tokens"] = max(lengths)  # no room beyond the six tokens of a completion
    assert fit(settings, monkeypatch).model.policy_version == 2
