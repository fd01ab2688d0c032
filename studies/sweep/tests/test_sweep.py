"""A study's list of runs, a small one that is cut off and goes on, and its rows."""

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fit_helpers import configuration, with_keys
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.errors import UserError
from studies.sweep.__main__ import chosen, main
from studies.sweep.plan import ROOT, Plan, read_plan
from studies.sweep.rows import compact, read_rows, row_of
from studies.sweep.runner import Limits, Runner


def tiny(folder: Path, base: Path) -> Path:
    """A study of two runs of eight rollouts of a policy of two layers: with noise and without."""
    settings = with_keys(configuration(base, folder / "unused"))
    settings["trainer"] |= {"num_sanity_val_steps": -1, "val_check_interval": 4}
    settings["model"] |= {"update_epochs": 1, "minibatches": 1, "micro_batch_tokens": None}
    (folder / "base.yaml").write_text(yaml.safe_dump(settings | {"seed_everything": 0}))
    noise = "noise"
    study = {
        "config": str(folder / "base.yaml"),
        "values": {"policy": None},
        "set": {"data.tokenizer": "${policy}"},
        "factors": {
            "seed": {"keys": ["seed_everything", "data.seed"]},
            "method": {
                "levels": {
                    "nvfp4": {"set": {f"{noise}.sigma_start": 0.0, f"{noise}.sigma_end": 0.0}},
                    "nvfp4_aqn": {},
                }
            },
        },
        "blocks": [{"method": ["nvfp4", "nvfp4_aqn"], "seed": 5}],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def stop_after(pattern: str, folder: Path) -> threading.Thread:
    """SIGTERM to this process, in which a study runs, as soon as there is such a file."""

    def wait() -> None:
        for _ in range(2000):
            if list(folder.glob(pattern)):
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_study_that_is_cut_off_goes_on(
    tmp_path: Path, tiny_policy_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # where fit_helpers has its reward
    plan = tiny(tmp_path, tiny_policy_dir)
    runs, results = tmp_path / "runs", tmp_path / "results"
    options = ["--folder", str(runs), "--out", str(results), "--devices", "cpu"]
    assert main(["run", str(plan), *options]) == 0
    assert "2 left out, which need --set policy=" in capsys.readouterr().out and not runs.exists()
    options += ["--set", f"policy={tiny_policy_dir}"]
    thread = stop_after("*/checkpoints/step=3.ckpt", runs)
    assert main(["run", str(plan), *options, "--only", "method=nvfp4"]) == 75
    thread.join()
    (run,) = runs.iterdir()
    assert run.name == "seed=5,method=nvfp4" and not (run / "summary.json").exists()
    assert "1 left: the same command goes on" in capsys.readouterr().out
    assert main(["run", str(plan), *options, "--budget-s", "0"]) == 75  # no time, nothing begun
    assert "0 finished" in capsys.readouterr().out
    assert main(["run", str(plan), *options, "--at-once", "2"]) == 0
    rows = read_rows(results / "tiny.jsonl")
    assert set(rows) == {"seed=5,method=nvfp4", "seed=5,method=nvfp4_aqn"}
    for row in rows.values():
        assert row["rollouts"] == 8 and row["ended"] == "done" and len(row["curves"]["reward"]) == 8
        assert [step for step, _ in row["held_out"]["val/pass@1"]] == [0, 4, 8]
        assert row["seconds"] == sorted(row["seconds"]) and row["seconds"][-1] < row["wall_s"]
        assert all(nats > 0 for nats in row["curves"]["sampler_entropy"])
        assert row["where"]["values"] == {} and str(tmp_path) not in str(row)  # no path of this machine is kept
    clean, noisy = (rows[f"seed=5,method={method}"]["curves"] for method in ("nvfp4", "nvfp4_aqn"))
    assert max(clean["noise"]) == 0 < max(noisy["noise"])
    assert clean["sampler_entropy"][0] == noisy["sampler_entropy"][0]  # the same seed, before noise begins
    assert "resuming from" in (run / "output.txt").read_text()
    before = (run / "output.txt").stat().st_size
    (results / "tiny.jsonl").unlink()  # the runs' folders are enough
    assert main(["run", str(plan), *options]) == 0
    assert read_rows(results / "tiny.jsonl") == rows and (run / "output.txt").stat().st_size == before
    changed = yaml.safe_load(plan.read_text())
    changed["set"]["model.optimizer.lr"] = 0.5
    plan.write_text(yaml.safe_dump(changed, sort_keys=False))
    assert main(["run", str(plan), *options]) == 2
    assert "keep what they are made of; seed=5,method=nvfp4 was made otherwise" in capsys.readouterr().err


# The list of runs -----------------------------------------------------------------------------------------------------


def plan_of(folder: Path, **changes: Any) -> Plan:
    study: dict[str, Any] = {
        "config": "configs/quickstart.yaml",
        "values": {"size": 8, "where": None},
        "set": {"data.batch_size": "${size}", "model.policy.dtype": "bfloat16"},
        "factors": {
            "seed": {"keys": ["seed_everything", "data.seed"]},
            "policy": {"levels": {"toy": {}, "other": {"set": {"model.policy.path": "${where}"}}}},
            "lr": {"levels": {"small": {}, "own": {}, "large": {"set": {"model.optimizer.lr": 0.1}}}},
            "decay": {"keys": ["noise.decay"]},
            "method": {
                "levels": {
                    "lora16": {"set": {"model.policy.dtype": "float32", "model.policy.quantization": "none"}},
                    "nvfp4": {},
                    "nvfp4_aqn": {},
                    "nvfp4_aqn_own": {},
                }
            },
        },
        "defaults": {"policy": "toy", "lr": "own", "decay": "exponential"},
        "blocks": [
            {"method": ["lora16", "nvfp4", "nvfp4_aqn"], "seed": [0, 1, 2], "policy": ["toy", "other"]},
            {"method": ["lora16", "nvfp4"], "seed": [0, 1, 2], "lr": ["own", "large"]},
            {"method": "nvfp4_aqn", "seed": [0, 1, 2], "decay": "linear"},
        ],
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(study | changes, sort_keys=False))
    return read_plan(path)


def test_a_setting_may_use_the_level_of_a_factor(tmp_path: Path) -> None:
    settings = {"model.policy.path": "${where}/base-${seed}", "model.policy.dtype": "${method}", "data.batch_size": 4}
    run = plan_of(tmp_path, set=settings).runs[1]
    assert run.name == "seed=0,policy=toy,lr=own,decay=exponential,method=nvfp4"
    assert [run.overrides[key] for key in settings] == ["${where}/base-0", "nvfp4", 4]
    assert run.needs == {"where"} and "--model.policy.path=x/base-0" in run.words(tmp_path, {"where": "x"})


def test_a_plan_has_every_combination_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (
        len(plan.runs) == len({run.name for run in plan.runs}) == 18 + 6 + 3
    )  # half of the second block is in the first
    assert plan.runs[0].name == "seed=0,policy=toy,lr=own,decay=exponential,method=lora16"
    first, last = plan.runs[0], plan.runs[-1]
    assert first.words(Path("runs/x"), plan.values) == [
        *("fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "--resume=auto"),
        *("--data.batch_size=8", "--model.policy.dtype=float32", "--seed_everything=0", "--data.seed=0"),
        "--noise.decay=exponential",
        *("--model.policy.quantization=none", "--trainer.default_root_dir=runs/x"),
    ]
    assert last.levels == {"seed": 2, "policy": "toy", "lr": "own", "decay": "linear", "method": "nvfp4_aqn"}
    assert first.digest != last.digest == plan_of(tmp_path, values={"size": 16}).runs[-1].digest
    other = next(run for run in plan.runs if run.levels["policy"] == "other")
    assert other.missing(plan.values) == ["where"] and other.missing({"size": 8, "where": "x"}) == []
    some = chosen(plan, {"method": ["lora16", "nvfp4"], "lr": "large"})
    assert {run.name[7:] for run in some} == {
        f"policy=toy,lr=large,decay=exponential,method={m}" for m in ("lora16", "nvfp4")
    }


class Ended:
    """What stands for a run's process: it has ended at once."""

    returncode = 0
    seen: list[dict[str, str]] = []

    def __init__(self, words: list[str], *, env: dict[str, str], **rest: Any) -> None:
        self.seen.append(env)

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("devices", "visible", "given"),
    [(["0", "1"], None, ["0", "1"]), (["1"], "4,6,7", ["6", "6"]), (["cpu"], "0,1", ["", ""])],
)
def test_a_run_sees_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, given: list[str]
) -> None:
    plan = plan_of(tmp_path)
    runner = Runner(plan, plan.values, tmp_path / "runs", tmp_path / "rows.jsonl", Limits(devices))
    monkeypatch.setattr("subprocess.Popen", Ended)
    monkeypatch.setattr(Ended, "seen", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert len(runner.work(plan.runs[:2]).failed) == 2
    assert [seen.get("CUDA_VISIBLE_DEVICES", "none") for seen in Ended.seen] == given
    assert {seen["OMP_NUM_THREADS"] for seen in Ended.seen} == {str(12 // len(devices))}  # processors of a run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": 3}, "has runs; take it out"),
        ({"blocks": [{"method": "nvfp4", "seed": 0, "rate": 1}]}, "has rate, which is none of them"),
        ({"blocks": [{"method": "nvfp4"}]}, "has a block without seed"),
        ({"blocks": [{"method": "nvfp5", "seed": 0}]}, "has nvfp5 as method"),
    ],
)
def test_a_plan_that_says_what_it_does_not_define_is_refused(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_of(tmp_path, **changes)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_curves_are_averaged_over_stretches() -> None:
    assert compact([1.0, 3.0, math.nan, 5.0, math.nan, math.nan, 7.123456], points=4) == [2.0, 5.0, None, 7.1235]
    assert compact([1.0, 3.0, 4.0, 5.0, 6.0], points=3, last=True) == [3.0, 5.0, 6.0]
    assert compact([1.0, 2.0], points=3) == [1.0, 2.0] and compact([]) == []


def test_a_rollout_whose_numbers_were_lost_leaves_a_gap(tmp_path: Path) -> None:
    (run, *_) = plan_of(tmp_path).runs
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in (0, 1, 3):
            writer.add_scalar("reward/mean", step / 4, step)
            writer.add_scalar("time/rollout_s", 2.0, step)
    row = row_of(run, tmp_path / "run", 9.0, {})
    assert row["rollouts"] == 3 and row["curves"]["reward"] == [0.0, 0.25, None, 0.75]
    assert row["seconds"] == [2.0, 4.0, 4.0, 6.0]
