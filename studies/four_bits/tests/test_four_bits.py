"""The analysis against values worked by hand or from tables of Student's t; the runs against the plan."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Barrier

import pytest

from studies.four_bits import analysis, picture, prepare
from studies.four_bits.evaluate import counts, levels_of, main, words
from studies.sweep.plan import read_plan

STUDY = Path(__file__).parents[1]


@pytest.mark.parametrize("degrees, probability, t", [(1, 0.975, 12.7062), (7, 0.975, 2.36462), (7, 0.95, 1.89458)])
def test_quantiles_are_those_of_the_tables(degrees: int, probability: float, t: float) -> None:
    assert analysis.student_quantile(degrees, probability) == pytest.approx(t, rel=1e-4)


def test_a_difference_by_hand() -> None:
    found = analysis.difference([0.01, 0.03])  # deviation 0.02 / sqrt(2), error 0.01, one degree of freedom
    assert found[:6] == pytest.approx((0.02, -0.107062, 0.147062, -0.043138, 0.083138, 0.0141421), abs=1e-5)
    assert found.p_value == pytest.approx(0.295167, abs=1e-5)  # 1 - 2 atan(2) / pi


def test_the_effect_that_eight_pairs_detect() -> None:
    # One-sample t test, n = 8, power 0.8, two-sided 0.05: 1.156 deviations (Cohen's d of tables of power).
    assert analysis.detectable_effect(1.0, 8) == pytest.approx(1.156, abs=0.003)


def test_holms_p_values() -> None:
    assert analysis.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize(
    "values, verdict",
    [
        ([0.001, -0.001, 0.002, -0.002], "equivalent"),
        ([-0.011, -0.010, -0.009, -0.010], "different, by less than the margin"),
        ([-0.04, -0.05, -0.045, -0.045], "worse"),
        ([0.04, 0.05, 0.045, 0.045], "better"),
        ([0.05, -0.05, 0.04, -0.04], "undecided"),
    ],
)
def test_verdicts_of_the_plan(values: list[float], verdict: str) -> None:
    assert analysis.verdict(analysis.difference(values)).startswith(verdict)


def row(method: str, served: str, right: list[int], **levels: str) -> dict[str, object]:
    """Two questions, of four samples each."""
    return {
        "levels": {"order": "0", "method": method, "served": served, **levels},
        "samples": 4,
        "sampled": right,
        "greedy": [int(one > 2) for one in right],
    }


ROWS = [
    row("start", "none", [3, 1]),
    row("start", "nvfp4", [1, 2]),
    row("lora16", "none", [4, 3], seed="200", rollouts="128"),
    row("lora16", "none", [4, 2], seed="201", rollouts="128"),
    row("lora16", "nvfp4", [3, 3], seed="200", rollouts="128"),
    row("lora16", "nvfp4", [2, 3], seed="201", rollouts="128"),
    row("nvfp4_aqn", "nvfp4", [3, 2], seed="201", rollouts="128"),  # another order of rows
    row("nvfp4_aqn", "nvfp4", [3, 3], seed="200", rollouts="128"),
    row("nvfp4_aqn", "nvfp4", [4, 4], seed="208", rollouts="400"),
    row("nvfp4_aqn", "nvfp4", [0, 0], seed="200", rollouts="128", order="1"),
]


def test_pairs_are_of_one_seed_and_gains_of_one_format() -> None:
    found = analysis.accuracies(ROWS, "sampled")
    assert found["nvfp4_aqn", "nvfp4"] == {"201": 5 / 8, "200": 6 / 8}  # neither 400 rollouts nor another order
    assert analysis.comparisons(found) == {
        "nvfp4_aqn less lora16": [-1 / 8, -1 / 8],
        "gain of nvfp4_aqn less gain of lora16": [0.0, 0.0],
        "served on NVFP4: lora16 less nvfp4_aqn": [0.0, 0.0],
    }
    greedy = analysis.accuracies(ROWS, "greedy")
    assert greedy["lora16", "none"] == {"200": 1.0, "201": 0.5}


def test_before_training_an_order_is_compared_with_its_own_16_bits() -> None:
    other = [row("start", "none", [4, 4], order="1"), row("start", "mxfp4", [1, 2], order="1")]
    assert analysis.before_training([*other, *ROWS], "sampled").splitlines()[2:] == [
        "| 0 | 0.500 | 0.375 (75 %) |  |  |",
        "| 1 | 1.000 |  |  | 0.375 (38 %) |",
    ]


def run(method: str, seed: int, rewards: list[float], entropies: list[float], **levels: int) -> dict[str, object]:
    levels = {"order": 0, "rollouts": 128, "seed": seed, **levels}
    return {"levels": {"method": method, **levels}, "curves": {"reward": rewards, "sampler_entropy": entropies}}


RUNS = [
    run("nvfp4_aqn", 200, [0.1, 0.3, 0.0, 0.0, 0.0, 0.0], [0.4, 0.6, 9.0, 9.0, 0.2, 0.4]),
    run("nvfp4_aqn", 201, [0.0, 0.1, 0.0, 0.0, 0.0, 0.0], [0.2, 0.2, 9.0, 9.0, 0.1, 0.1]),
    run("nvfp4", 201, [0.0, 0.3, 0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 9.0, 9.0, 0.1, 0.1]),
    run("nvfp4_aqn", 208, [9.0] * 6, [9.0] * 6, rollouts=400),
    run("lora16", 201, [9.0] * 6, [9.0] * 6),
]


def test_pairs_of_other_orders_and_lengths_stand_alone() -> None:
    graded = [
        row("lora16", "none", [1, 1], seed="200", rollouts="128", order="1"),
        row("nvfp4_aqn", "nvfp4", [2, 0], seed="201", rollouts="128", order="1"),
    ]
    pairs = [
        run("lora16", 200, [0.1, 0.3], [], order=1),
        run("nvfp4_aqn", 200, [0.0, 0.2], [], order=1),
        run("nvfp4_aqn", 201, [0.2, 0.2], [], order=1),
        run("lora16", 201, [0.2, 0.3], [], order=1),
        run("lora16", 200, [0.2, 0.3], [], order=2),  # without a partner, as the 400 rollouts
    ]
    assert analysis.single_pairs([*ROWS, *graded], [*RUNS, *pairs], "sampled").splitlines()[2:] == [
        "| 1 | 128 | 200 | -0.100 | 0.250 | 0.000 | -0.250 |",
        "| 1 | 128 | 201 | -0.050 |  | 0.250 |  |",
    ]


def test_noise_is_compared_over_seeds_that_every_sigma_has() -> None:
    assert analysis.by_sigma(ROWS, RUNS).splitlines()[2:] == [
        "| 0 | 1.406 | 0.100 | 0.100 | 1 |  | 0 |",  # 0.3 in a point, a point in 21.3 rollouts; not graded yet
        "| 0.5 % | 0.469 | 0.200 | 0.100 | 1 |  | 0 |",
    ]
    graded = row("nvfp4", "nvfp4", [1, 1], seed="201", rollouts="128")
    assert [line.split("|")[6:8] for line in analysis.by_sigma([*ROWS, graded], RUNS).splitlines()[2:]] == [
        [" 0.250 ", " 1 "],
        [" 0.625 ", " 1 "],
    ]
    assert analysis.by_sigma(ROWS, RUNS[:2]).splitlines()[2:] == ["| 0.5 % | 0.703 | 0.350 | 0.200 | 2 | 0.688 | 2 |"]


def test_reward_in_training_is_compared_in_thirds() -> None:
    runs = [
        run("nvfp4_aqn", 200, [0.1, 0.3, 0.5, 0.5, 0.6, 0.8], []),
        run("nvfp4_aqn", 201, [0.2, 0.4, 0.5, 0.5, 0.7, 0.9], []),
        run("lora16", 200, [0.2, 0.4, 0.4, 0.6, 0.6, 0.8], []),
        run("lora16", 201, [0.3, 0.5, 0.5, 0.5, 0.9, 0.9], []),
        run("nvfp4", 201, [0.0] * 6, []),  # one pair has no interval
    ]
    assert analysis.by_third(runs).splitlines()[2:] == [
        # Of 0 and -0.1: the deviation over the root of two is 0.05, times Student's t of one degree of freedom, 12.706.
        "| nvfp4_aqn less lora16 | -0.100 ± 0.000 | +0.000 ± 0.000 | -0.050 ± 0.635 | 2 |"
    ]


ANALYSIS = str(STUDY / "analysis.py")
NOT_NUMPY = ["torch", "scipy", "qerl_pl", "studies"]
"""Packages whose import fails in the test."""


def test_the_analysis_needs_numpy_alone(tmp_path: Path) -> None:
    rows = tmp_path / "counts.jsonl"
    rows.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    hidden = f"import runpy, sys; sys.modules |= dict.fromkeys({NOT_NUMPY}); "
    program = f"{hidden}runpy.run_path({ANALYSIS!r}, None, '__main__')"
    (runs := tmp_path / "study.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RUNS))
    run = subprocess.run(
        [sys.executable, "-c", program, str(rows), str(runs)], capture_output=True, text=True, check=True
    )
    assert "| nvfp4_aqn less lora16 | -0.125 [-0.125, -0.125] |" in run.stdout


def test_counts_of_each_question() -> None:
    lines = [
        {"prompt_id": "b", "sample": None, "correct": True},
        *({"prompt_id": "a", "sample": k, "correct": k < 2} for k in range(3)),
        {"prompt_id": "a", "sample": None, "correct": False},
        {"prompt_id": "b", "sample": 0, "correct": False},
    ]
    assert counts(lines) == {"greedy": [0, 1], "sampled": [2, 0]}
    with pytest.raises(ValueError, match="2 questions have a greedy answer and 1 have samples"):
        counts([line for line in lines if line["prompt_id"] != "b" or line["sample"] is None])


def test_every_run_is_evaluated_once_on_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    devices: list[str] = []
    together = Barrier(2)

    def evaluated(command: list[str], *, env: dict[str, str], **_: object) -> None:
        options = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
        words = ("model.policy.quantization", "model.policy.adapter", "rollout.evaluation.samples")
        asked.append(tuple(options.get(word, "") for word in words))
        devices.append(env["CUDA_VISIBLE_DEVICES"])
        together.wait(60)  # for another GPU's
        folder = Path(options["trainer.default_root_dir"])
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text(json.dumps({"samples": "samples.jsonl"}))
        lines = [{"prompt_id": "a", "sample": sample, "correct": True} for sample in (None, 0)]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(subprocess, "run", evaluated)
    monkeypatch.setenv("QERL_COMMIT", "abc")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    methods = {200: "nvfp4_aqn_2", 201: "lora16"}
    runs = [str(tmp_path / f"seed={seed},order=1,rollouts=128,method={method}") for seed, method in methods.items()]
    given = [str(tmp_path / "prepared"), str(tmp_path / "counts.jsonl"), "--folder", str(tmp_path / "evaluations")]
    for _ in range(2):
        main([*given, "--runs", *runs, "--formats", "nvfp4", "none", "--devices", "0", "1"])
    assert sorted(asked) == sorted(
        [
            ("nvfp4", f"{runs[0]}/adapter", "16"),
            ("none", f"{runs[0]}/adapter", "4"),
            ("nvfp4", f"{runs[1]}/adapter", "4"),
            ("none", f"{runs[1]}/adapter", "16"),
        ]
    )
    assert sorted(devices) == ["0", "0", "1", "1"]
    rows = [json.loads(line) for line in (tmp_path / "counts.jsonl").read_text().splitlines()]
    evaluated_as = sorted((row["levels"]["seed"], row["levels"]["served"]) for row in rows)
    assert evaluated_as == [("200", "none"), ("200", "nvfp4"), ("201", "none"), ("201", "nvfp4")]
    assert {(*row["greedy"], *row["sampled"], row["where"]["commit"]) for row in rows} == {(1, 1, "abc")}
    main([*given, "--orders", "0", "2", "--formats", "nf4", "--at-once", "2"])
    assert asked[4:] == [("nf4", "", "16")] * 2 and devices[4:] == ["0", "0"]
    starts = [json.loads(line)["levels"] for line in (tmp_path / "counts.jsonl").read_text().splitlines()[4:]]
    assert sorted(one.pop("order") for one in starts) == ["0", "2"]
    assert starts == [{"method": "start", "served": "nf4"}] * 2


def test_an_early_end_leaves_fewer_seeds_and_no_fewer_methods() -> None:
    runs = [run for run in read_plan(STUDY / "study.yaml").runs if run.levels["rollouts"] == 128]
    own_order = [run.levels for run in runs if run.levels["order"] == 0]
    primary = [levels for levels in own_order if levels["method"] in analysis.OWN_FORMAT]
    seeds = [levels["seed"] for levels in primary]
    assert seeds == [seed for seed in range(200, 208) for _ in range(3)] + [*range(200, 208)]
    for seed in range(200, 208):
        assert {levels["method"] for levels in primary if levels["seed"] == seed} == {
            "lora16",
            "nvfp4_aqn",
            "nvfp4",
            "nf4",
        }


def test_rates_are_tried_on_training_rows_alone() -> None:
    runs = [run for run in read_plan(STUDY / "study.yaml").runs if run.levels["rollouts"] == 64]
    assert {run.overrides["data.val_split"] for run in runs} == {"held_out"}
    assert [str(run.overrides["model.optimizer.lr"]) for run in runs].count("0.0001") == 2  # two formats, tried once
    rates = {(*run.levels.values(),): str(run.overrides["model.optimizer.lr"]) for run in runs}
    assert len(rates) == 14 and set(rates.values()) == {"1e-05", "3e-05", "6e-05", "0.0001"}


def test_runs_begin_with_rows_in_three_parts_and_the_policy_in_three_orders(
    tmp_path: Path, tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "HELD_OUT", 2)
    rows = [json.dumps({"question": f"{one}?", "answer": f"#### {one}"}) + "\n" for one in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(rows[:5]))
    (tmp_path / "test.jsonl").write_text(rows[5])
    for _ in range(2):  # again where it was cut off
        prepare.main(tiny_policy_dir, tmp_path, tmp_path / "out")
    parts = {file.stem: file.read_text().splitlines(keepends=True) for file in (tmp_path / "out/data").iterdir()}
    assert parts == {"train": rows[:3], "held_out": rows[3:5], "test": rows[5:]}
    weights = [(tmp_path / f"out/base-{order}/model.safetensors").read_bytes() for order in range(3)]
    assert weights[0] == (tiny_policy_dir / "model.safetensors").read_bytes() and len(set(weights)) == 3


def test_an_adapter_is_served_on_another_format() -> None:
    run = Path("runs/seed=200,order=1,rollouts=128,method=lora16,rate=chosen")
    assert levels_of(run)["method"] == "lora16"
    given = words(Path("prepared"), 1, "nvfp4", run / "adapter", Path("out"), 16)
    assert f"--model.policy.adapter={run}/adapter" in given and "--model.policy.path=prepared/base-1" in given
    assert "--model.policy.quantization=nvfp4" in given


def test_bands_are_of_seeds_in_the_models_own_order() -> None:
    def run(seed: int, rewards: list[float], **levels: object) -> dict[str, object]:
        levels = {"seed": seed, "order": 0, "rollouts": 128, "method": "lora16", "rate": "chosen", **levels}
        return {"levels": levels, "curves": {"reward": rewards}}

    rows = [
        run(200, [0.1, 0.3]),
        run(201, [0.3, 0.3]),
        run(200, [1.0, 1.0], order=1),
        run(208, [1.0] * 60, rollouts=400),
    ]
    rollouts, mean, low, high = picture.bands(rows, "lora16")
    assert rollouts.tolist() == [32, 96] and mean == pytest.approx([0.2, 0.3])  # a point is a mean over 64 rollouts
    assert low == pytest.approx([0.2 - 1.27062, 0.3], abs=1e-4) and high == pytest.approx([1.47062, 0.3], abs=1e-4)


def test_the_picture_has_the_comparisons_that_were_measured(tmp_path: Path) -> None:
    rows = [
        {"levels": {"seed": seed, "order": 0, "rollouts": 128, "method": method}, "curves": {"reward": [0.5, 0.6]}}
        for seed in (200, 201)
        for method in ("lora16", "nvfp4_aqn")
    ]
    third = [
        row("lora16", "none", [4, 1], seed="202", rollouts="128"),
        row("nvfp4_aqn", "nvfp4", [2, 2], seed="202", rollouts="128"),  # 16 bits served on NVFP4 has two seeds only
    ]
    names = picture.draw(rows, [*ROWS, *third], tmp_path / "picture.png")
    assert names == [
        "NVFP4 + AQN − 16-bit LoRA",
        "the same, gain since the start",
        "at 0.5B: NVFP4 + AQN − 16-bit LoRA",
    ]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_page_has_the_tables_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    analysis.main(STUDY / "counts.jsonl", STUDY / "study.jsonl")
    shown = capsys.readouterr().out
    page = (STUDY / "README.md").read_text()
    results = page.split("## Before training")[1]  # the table above is of settings
    tables = [line for line in results.splitlines() if line.startswith("|")]
    assert len(tables) > 10 and set(tables) <= set(shown.splitlines())
    assert sum(any(letter.isalnum() for letter in word) for word in page.split()) < 900
