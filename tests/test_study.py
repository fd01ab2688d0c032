"""The study: its list of runs, a small one that is cut off and goes on, and its statistics worked out by hand."""

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import built
from fit_helpers import configuration

from benchmarks.study.__main__ import main
from benchmarks.study.claims import ACCURACY, ENTROPY, FIRST_ENTROPY, findings
from benchmarks.study.evidence import write_evidence
from benchmarks.study.intervals import Interval, interval, student_cdf, student_quantile, together, verdict
from benchmarks.study.plan import ROOT, Plan, read_plan
from benchmarks.study.rows import compact, read_rows
from qerl_pl.algorithm import DAPO
from qerl_pl.errors import UserError

STUDY = ROOT / "benchmarks" / "study"


def tiny(folder: Path, base: Path) -> Path:
    """A study of two runs of eight rollouts of a policy of two layers: with noise and without."""
    settings = configuration(base, folder / "unused")
    settings["trainer"] |= {"num_sanity_val_steps": -1, "val_check_interval": 4}
    settings["model"] |= {"update_epochs": 1, "minibatches": 1, "micro_batch_tokens": None}
    (folder / "base.yaml").write_text(yaml.safe_dump(settings | {"seed_everything": 0}))
    noise = "trainer.callbacks.AdaptiveQuantizationNoise"
    study = {
        "config": str(folder / "base.yaml"),
        "values": {"policy": None},
        "set": {"data.tokenizer": "${policy}"},
        "factors": {
            "seed": {"keys": ["seed_everything", "data.seed"]},
            "method": {
                "levels": {
                    "nvfp4": {"label": "NVFP4", "set": {f"{noise}.sigma_start": 0.0, f"{noise}.sigma_end": 0.0}},
                    "nvfp4_aqn": {"label": "NVFP4 + AQN"},
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
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where fit_helpers has its reward
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
    assert main(["report", str(plan), "--out", str(results), "--pages", str(tmp_path)]) == 0
    page = (tmp_path / "evidence.md").read_text()
    assert "2 of 2 runs of [tiny.yaml](tiny.yaml)" in page and "**undecided**" in page  # of one seed
    assert (tmp_path / "evidence.png").stat().st_size > 10_000 and "(evidence.png)" in page
    changed = yaml.safe_load(plan.read_text())
    changed["set"]["model.optimizer.lr"] = 0.5
    plan.write_text(yaml.safe_dump(changed, sort_keys=False))
    assert main(["run", str(plan), *options]) == 2
    assert "keep what they are made of; seed=5,method=nvfp4 was made otherwise" in capsys.readouterr().err
