"""The study: its list of runs, a small one that is cut off and goes on, and its statistics worked out by hand."""

import json
import math
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fit_helpers import configuration, with_keys
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.errors import UserError
from studies.train_on_4_bits.__main__ import chosen, main
from studies.train_on_4_bits.claims import ACCURACY, ENTROPY, FIRST_ENTROPY, GAIN
from studies.train_on_4_bits.evidence import write_evidence
from studies.train_on_4_bits.findings import findings
from studies.train_on_4_bits.intervals import Interval, interval, student_cdf, student_quantile, verdict, within_policy
from studies.train_on_4_bits.pictures import _band
from studies.train_on_4_bits.plan import ROOT, Plan, read_plan
from studies.train_on_4_bits.rows import compact, read_rows, row_of
from studies.train_on_4_bits.runner import Limits, Runner

STUDY = Path(__file__).parents[1]


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
    assert main(["report", str(plan), "--out", str(results), "--pages", str(tmp_path)]) == 0
    page = (tmp_path / "tiny.md").read_text()
    assert "2 of 2 runs of [tiny.yaml](tiny.yaml)" in page and "**undecided**" in page  # of one seed
    assert (tmp_path / "tiny.png").stat().st_size > 10_000 and "(tiny.png)" in page
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
        "strata": ["policy"],
        "factors": {
            "seed": {"keys": ["seed_everything", "data.seed"]},
            "policy": {"levels": {"toy": {}, "other": {"set": {"model.policy.path": "${where}"}}}},
            "lr": {"levels": {"small": {}, "own": {}, "large": {"set": {"model.optimizer.lr": 0.1}}}},
            "decay": {"keys": ["noise.decay"]},
            "method": {
                "levels": {
                    "lora16": {"set": {"model.policy.dtype": "float32", "model.policy.quantization": "none"}},
                    "nvfp4": {"with": {"policy": {"other": {"data.val_size": 9}}}},
                    "nvfp4_aqn": {"label": "NVFP4 + AQN"},
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
    rest = "policy=other,lr=own,decay=exponential,method=nvfp4"
    sizes = {run.name: run.overrides.get("data.val_size") for run in plan.runs}
    assert {name for name, size in sizes.items() if size} == {f"seed={n},{rest}" for n in range(3)}
    some = chosen(plan, {"method": ["lora16", "nvfp4"], "lr": "large"})
    assert {run.name[7:] for run in some} == {
        f"policy=toy,lr=large,decay=exponential,method={m}" for m in ("lora16", "nvfp4")
    }
    assert plan.label("method", "nvfp4_aqn") == "NVFP4 + AQN" and plan.label("decay", "linear") == "decay linear"


def test_runs_of_another_policy_are_not_added_to_a_study(tmp_path: Path) -> None:
    plan, results = plan_of(tmp_path), tmp_path / "rows.jsonl"
    for name, digest in (("first", "aaa"), ("second", "bbb")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "warm_up.json").write_text(json.dumps({"digest": digest}))

    def runner(policy: str | None) -> Runner:
        values = {"size": 8, "where": str(tmp_path / policy) if policy else None}
        return Runner(plan, values, tmp_path / "runs", results, Limits())

    run = next(run for run in plan.runs if run.levels["policy"] == "other")
    folder = tmp_path / "runs" / run.name
    (folder / "failed").mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({"digest": run.digest, "wall_s": 1.0}))
    assert runner("first").work([run]).finished == [run.name]
    assert read_rows(results)[run.name]["where"]["values"] == {"size": 8, "where": "aaa"}
    assert runner("first").work([run]).finished == runner(None).work([run]).finished == [run.name]
    with pytest.raises(UserError, match="began with a where of digest aaa, and that of .*second is bbb"):
        runner("second").work([run])


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
    [(["0,1", "2,3"], None, ["0,1", "2,3"]), (["1,0"], "4,6,7", ["6,4", "6,4"]), (["cpu"], "0,1", ["", ""])],
)
def test_a_run_sees_as_many_gpus_as_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, given: list[str]
) -> None:
    plan = plan_of(tmp_path, set={"trainer.devices": 2})
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
    assert {seen["OMP_NUM_THREADS"] for seen in Ended.seen} == {str(6 // len(devices))}  # processors of a rank


@pytest.mark.parametrize(("wanted", "device"), [(2, "0"), (1, "0,1")])
def test_a_run_on_another_number_of_gpus_is_refused(tmp_path: Path, wanted: int, device: str) -> None:
    plan = plan_of(tmp_path, set={"trainer.devices": wanted})
    runner = Runner(plan, plan.values, tmp_path / "runs", tmp_path / "rows.jsonl", Limits(["cpu", device]))
    with pytest.raises(UserError, match=f"trains on {wanted} and --devices names {device}; join so many numbers"):
        runner.work(plan.runs)
    assert not (tmp_path / "runs").exists()


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


def test_the_earlier_studies_are_understood() -> None:
    first, ranks = (read_plan(STUDY / f"{name}.yaml") for name in ("first", "ranks"))
    assert [len(plan.runs) for plan in (first, ranks)] == [215, 40]
    assert all(run.devices == run.levels["ranks"] for run in ranks.runs)


def test_the_pretrained_study_is_the_planned_one() -> None:
    plan = read_plan(STUDY / "gsm8k.yaml")
    units: dict[tuple[Any, Any], set[tuple[Any, Any]]] = {}
    for run in plan.runs:
        unit = (run.levels["rounding"], run.levels["seed"])
        units.setdefault((run.levels["policy"], run.levels["method"]), set()).add(unit)
    policies = [policy for policy, _ in units]
    assert len(plan.runs) == 110 and policies == ["qwen"] * 11 + ["smollm2"] * 4 + ["qwen"]
    for (policy, method), taken in units.items():
        seeds, roundings = ((0, 1), 10) if (policy == "qwen" and method in plan.compare) else ((0,), 5)
        assert taken == {(rounding, 100 + 2 * rounding + seed) for rounding in range(roundings) for seed in seeds}
    assert {run.overrides["rollout.evaluation.samples"] for run in plan.runs} == {16}
    assert [int(run.levels["seed"]) % 2 for run in plan.runs] == [0] * 90 + [1] * 20  # second seeds last
    assert {name for run in plan.runs for name in run.missing(plan.values)} == {"starts"}


# Statistics, by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (100, 1.984)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=6e-4)
    assert student_cdf(0.0, degrees) == 0.5 and student_cdf(-1.5, degrees) == pytest.approx(
        1 - student_cdf(1.5, degrees)
    )


def test_intervals_and_verdicts_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # s = sqrt(2.5), s / sqrt(5) = 0.7071, times 2.7764
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 1.0368, 4.9632), abs=1e-4)
    assert verdict(found, "above") == "holds" and verdict(interval([-1.0, -1.1, -0.9]), "above") == "does not hold"
    assert verdict(interval([1.0, -1.0, 0.5]), "above") == verdict(interval([3.0]), "above") == "undecided"
    near = Interval(-0.01, -0.025, 0.005, 5)
    assert verdict(near, "not below", 0.03) == "holds" and verdict(near, "not below", 0.02) == "undecided"
    assert verdict(near, "not below", 0.001) == "undecided"
    assert verdict(Interval(-0.05, -0.06, -0.04, 5), "not below", 0.03) == "does not hold"
    assert verdict(Interval(-0.02, -0.025, -0.015, 5), "not below", 0.02) == "undecided"
    assert verdict(None, "above") == "not measured"
    assert within_policy(["holds", "holds"]) == "holds" and within_policy(["holds", "not measured"]) == "undecided"
    assert within_policy(["holds", "undecided", "does not hold"]) == "does not hold"
    assert within_policy(["not measured"]) == within_policy([]) == "not measured"


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


def test_a_band_ends_where_not_all_curves_have_a_value() -> None:
    axis = Figure().subplots()
    curves: dict[tuple[str | int | float | bool, ...], dict[float, float]]
    curves = {(0,): {1: 0.1, 3: 0.3, 4: 0.4}, (1,): {1: 0.3, 2: 0.4, 3: 0.5}}
    _band(read_plan(STUDY / "first.yaml"), axis, curves, "#000000", "both")
    assert list(axis.lines[0].get_xdata()) == [1, 3] and list(axis.lines[0].get_ydata()) == pytest.approx([0.2, 0.4])


def rows_of(plan: Plan, end: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each run of the toy policy; `end` has the accuracy at the end by seed, of the levels in its key."""
    rows = []
    for run in plan.runs:
        levels = run.levels
        if levels["policy"] == "toy":
            key = " ".join(str(level) for level in (levels["method"], levels["lr"], levels["decay"]))
            nats = {"lora16": 0.2, "nvfp4": 0.3, "nvfp4_aqn": 0.35, "nvfp4_aqn_own": 0.35}[str(levels["method"])]
            shift = 0.01 * int(levels["seed"])
            rows.append(
                {
                    **{"run": run.name, "levels": levels, "digest": run.digest, "ended": "done", "rollouts": 4},
                    "curves": {"reward": [0.1, 0.2, 0.3, 0.6], "sampler_entropy": [nats + shift, nats, 9.0, None]},
                    "seconds": [1.0, 2.0, 3.0, 4.0],
                    "held_out": {"val/pass@1": [[0, 0.4], [4, end[key][int(levels["seed"])]]]},
                    **{"peak_gib": 1.5, "wall_s": 9.0, "where": {"gpu": "none", "values": {}}},
                }
            )
    return rows


ENDS = {
    "lora16 own exponential": [0.70, 0.72, 0.71],
    "nvfp4 own exponential": [0.75, 0.76, 0.77],
    "nvfp4_aqn own exponential": [0.80, 0.83, 0.80],
    "lora16 large exponential": [0.1, 0.1, 0.1],
    "nvfp4 large exponential": [0.74, 0.755, 0.765],
    "nvfp4_aqn own linear": [0.80, 0.82, 0.82],
}


def test_claims_of_a_study_worked_out_by_hand(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = rows_of(plan, ENDS)
    found = {result.claim.name: result for result in findings(plan, rows)}
    start, half = found["entropy"].findings[0], found["entropy"].findings[2]
    assert (start.contrast.statistic, half.contrast.statistic) == (FIRST_ENTROPY, ENTROPY)
    assert start.stratum == half.stratum == {"policy": "toy"} and start.difference is not None
    assert (start.difference.mean, start.difference.count) == (pytest.approx(0.1), 3)  # shifts by seed cancel
    assert ENTROPY.of(rows[0], plan.measure) == pytest.approx((rows[0]["curves"]["sampler_entropy"][0] + 0.2) / 2)
    assert start.verdict == half.verdict == "holds"
    assert found["entropy"].findings[1].verdict == "not measured"  # of the other policy
    assert found["entropy"].verdict == "undecided"
    ahead, *others = found["accuracy"].findings
    assert ahead.difference is not None and ahead.difference.mean == pytest.approx(0.1)  # of 0.10, 0.11 and 0.09
    assert ahead.difference.high - 0.1 == pytest.approx(4.3027 * 0.01 / math.sqrt(3), abs=1e-5)
    assert [one.verdict for one in others] == ["not measured"] * 2  # the other policy; NF4, which the plan has not
    (decay,) = found["decay"].findings
    assert decay.difference is not None and decay.difference.mean == pytest.approx(-0.01 / 3)
    assert found["decay"].verdict == "undecided"
    gain, *others = found["gain"].findings  # all begin at 0.4, so it is the difference of the ends
    assert gain.difference is not None and gain.difference.mean == pytest.approx(0.1)
    assert GAIN.of(rows[0], plan.measure) == pytest.approx(0.3) and len(others) == 2
    (beside,) = found["learning rate, vs 16-bit"].findings  # what 16 bits lose, 0.60, 0.62 and 0.61, less that
    assert beside.difference is not None and beside.difference.mean == pytest.approx((0.59 + 0.615 + 0.605) / 3)
    assert beside.difference.count == 3 and beside.verdict == "holds"
    (rate,) = found["learning rate"].findings  # it loses 0.01, 0.005 and 0.005
    assert rate.contrast.first == {"method": "nvfp4", "lr": "large"} and found["learning rate"].verdict == "holds"
    assert "full fine-tuning" not in found and "noise by rank" not in found  # the plan has no runs of them
    rows[0]["ended"] = "diverged"
    assert ACCURACY.of(rows[0], plan.measure) == 0.0 and GAIN.of(rows[0], plan.measure) == -0.4


def test_noise_by_rank_worked_out_by_hand(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, blocks=[{"method": ["nvfp4_aqn", "nvfp4_aqn_own"], "seed": [0, 1]}])
    rows = rows_of(plan, {"nvfp4_aqn own exponential": [0.5, 0.6], "nvfp4_aqn_own own exponential": [0.52, 0.64]})
    for row in rows:
        own = row["levels"]["method"] == "nvfp4_aqn_own"
        row["curves"]["without_signal"] = [0.4, 0.1 if own else 0.3]
    (result, *others) = findings(plan, rows)
    means = [one.difference.mean for one in result.findings if one.difference is not None]
    assert (
        result.claim.name == "noise by rank" and not others and means == pytest.approx([0.1, 0.0, 0.03])
    )  # signal, reward, accuracy


def test_the_page_is_written_from_rows_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, title="A study", note="Small.")
    raw = tmp_path / "raw.jsonl"
    with pytest.raises(UserError, match="has none of"):
        write_evidence(plan, [], tmp_path, raw)
    page = write_evidence(plan, rows_of(plan, ENDS), tmp_path / "docs", raw).read_text()
    assert page.startswith("# A study\n\n## What you may want to know\n") and "\n\nSmall.\n" in page
    assert "18 of 27 runs of [plan.yaml](../plan.yaml) have finished, with 3 seeds; 0 diverged" in page
    assert "| NVFP4 is stable at larger learning rates: at most 0.03 below" in page
    difference = "| accuracy | NVFP4 + AQN − lora16 (toy) | final held-out accuracy | +0.100 [+0.075, +0.125] |"
    (line,) = [line for line in page.splitlines() if line.startswith(difference)]
    assert line.endswith("| 3 | 0.033 | holds | holds |")  # 5.6535 standard errors of 0.01 / sqrt(3)
    rates = (
        "| learning rate, vs 16-bit | nvfp4: large − own, minus the same for lora16 (toy) | final held-out accuracy |"
    )
    assert f"{rates} +0.603 [+0.572, +0.635] | " in page
    cells = "0.400 ± 0.000 | 0.810 ± 0.043 | 0.410 ± 0.043 | 0.300 ± 0.000 | 10.000 ± 0.000 | 0.355 ± 0.012 | - |"
    assert f"| NVFP4 + AQN (toy) | 3 | {cells}" in page
    assert "\nNot measured: 2 of accuracy, " in page and "were interrupted" not in page
    assert "- 18 runs: gpu none" in page
    pictures = {path.name for path in (tmp_path / "docs").glob("*.png")}
    assert pictures == {"plan-claims.png", "plan-toy.png"}
    assert "| lora16 (toy) | large | 3 | 0.100 [0.100, 0.100] | -0.610 [-0.635, -0.585] |" in page
    assert "| NVFP4 + AQN (toy) | without noise (nvfp4) | 3 | 0.760 [0.735, 0.785] | -0.050 [-0.100, -0.000] |" in page
    assert "GPU to itself" in page and "seconds |" not in page
    assert all(f"({name})" in page for name in pictures)
    rows = rows_of(plan, ENDS)
    rows[2]["rollouts"] = 3
    page = write_evidence(plan, rows, tmp_path / "docs", raw).read_text()
    assert "is not finite).\n1 were interrupted and lack the points of the interrupted rollout." in page


@pytest.mark.parametrize("name", ["first", "ranks", "gsm8k"])
def test_the_pages_are_what_their_rows_say(tmp_path: Path, name: str) -> None:
    page, raw = (STUDY / f"{name}{end}" for end in (".md", ".jsonl"))
    written = write_evidence(
        read_plan(STUDY / f"{name}.yaml"), list(read_rows(raw).values()), tmp_path, raw
    ).read_text()
    first, second = (re.sub(r"\]\([^)]*/", "](", text) for text in (page.read_text(), written))
    assert first == second and all(row["digest"] for row in read_rows(raw).values())
