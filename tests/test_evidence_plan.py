"""Figures of docs/evidence-plan.md, computed from the pilot's rows with numpy alone."""

import json
import re
from typing import Any

import numpy as np
from pages import ROOT

from benchmarks.study.plan import read_plan

PLAN = " ".join((ROOT / "docs" / "evidence-plan.md").read_text().split())
LONG = ("lora16", "nvfp4_aqn")
ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "gsm8k_pilot.jsonl").read_text().splitlines()]


def last(metric: str, method: str, lr: float) -> list[float]:
    """Values at the end of a method's runs at a rate, by seed."""
    rows = [row for row in ROWS if (row["levels"]["method"], row["levels"]["lr"]) == (method, lr)]
    rows.sort(key=lambda row: row["levels"]["seed"])
    return [row["held_out"][f"val/held_out/{metric}"][-1][1] for row in rows]


def figures(pattern: str) -> list[float]:
    """The groups of a sentence of the plan."""
    found = re.search(pattern, PLAN)
    assert found is not None, pattern
    return [float(value) for value in found.groups()]


def test_the_number_of_roundings_follows_from_the_pilots_spread() -> None:
    differences = np.array(last("accuracy", "nvfp4_aqn", 1e-4)) - np.array(last("accuracy", "lora16", 1e-4))
    assert len(differences) == 3
    spread = differences.std(ddof=1)
    assert figures(r"a standard deviation of (\d\.\d+) between the pilot's three seeds") == [round(spread, 3)]
    # Two seeds a rounding are averaged. Quantiles of Student's t for 0.975 and 0.8, with 4 and 9 degrees of freedom.
    seen = [(t + power) * spread / np.sqrt(2 * n) for n, t, power in ((5, 2.776, 0.941), (10, 2.262, 0.883))]
    pattern = r"minimum detectable effect is (\d\.\d+) with five roundings and (\d\.\d+) with ten"
    assert figures(pattern) == [round(one, 3) for one in seen]
    assert seen[0] > 0.02 > seen[1]  # the plan's bound
    # Of chi-squared with 2 degrees of freedom, the quantiles for 0.975 and 0.025 are 7.378 and 0.0506.
    limits = [spread * np.sqrt(2 / quantile) for quantile in (7.378, 0.0506)]
    assert figures(r"\(95 % interval (\d\.\d+) to (\d\.\d+)\)") == [round(one, 3) for one in limits]


def test_accuracies_that_are_known_before_are_those_of_the_pilot() -> None:
    means = [float(np.mean(last("accuracy", method, lr))) for method in ("lora16", "nvfp4_aqn") for lr in (3e-5, 1e-4)]
    without_noise = [float(np.mean(last("accuracy", "nvfp4", lr))) for lr in (3e-5, 1e-4)]
    pattern = (
        r"(\d\.\d+) greedily after 64 rollouts at 3e-5 and (\d\.\d+) at 1e-4, NVFP4 \+ AQN (\d\.\d+) and (\d\.\d+) "
    )
    pattern += r"\(means of three seeds\), NVFP4 without noise (\d\.\d+) and (\d\.\d+)"
    assert figures(pattern) == [round(one, 3) for one in means + without_noise]
    for method in ("lora16", "nvfp4", "nvfp4_aqn"):  # 3e-4 is too high
        assert last("accuracy", method, 3e-4)[0] < last("accuracy", method, 1e-4)[0] / 2


def test_the_rates_that_won_are_those_of_the_highest_sampled_accuracy() -> None:
    rates: dict[str, Any] = {
        method: max((3e-5, 1e-4), key=lambda lr: last("pass@1", method, lr)[0])
        for method in ("lora16", "nvfp4_aqn", "mxfp4", "placebo", "nvfp4", "nf4", "lora16_aqn")
    }
    assert {method for method, rate in rates.items() if rate == 3e-5} == {"lora16", "mxfp4", "placebo"}
    sampled = last("pass@1", "nvfp4_aqn", 1e-4)
    expected = [sampled[0], last("pass@1", "nvfp4_aqn", 3e-5)[0], float(np.mean(sampled))]
    pattern = r"\((\d\.\d+) against (\d\.\d+)\), and three seeds at 1e-4 have a mean of (\d\.\d+)"
    assert figures(pattern) == [round(one, 3) for one in expected]
    assert figures(r"collapses at 1e-5 \((\d\.\d+)\)") == [round(last("accuracy", "full", 1e-5)[0], 3)]


def test_three_seeds_put_the_primary_methods_at_rates_of_their_own() -> None:
    means = [
        float(np.mean(last("pass@1", method, lr)))
        for method, lr in (("lora16", 3e-5), ("lora16", 1e-4), ("nvfp4_aqn", 1e-4), ("nvfp4_aqn", 3e-5))
    ]
    pattern = (
        r"of three seeds (\d\.\d+), and (\d\.\d+) at 1e-4\), NVFP4 \+ AQN 1e-4 \((\d\.\d+), and (\d\.\d+) at 3e-5\)"
    )
    assert figures(pattern) == [round(one, 3) for one in means]
    assert means[0] > means[1] and means[2] > means[3]


def test_at_the_higher_rate_a_long_run_stops_rising() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "gsm8k_length_cut_off.json").read_text())["results"]
    lora16, aqn = (next(run for name, run in runs.items() if name.endswith(f"method={end}")) for end in LONG)
    quarters = [np.mean(run["train_accuracy"][begin : begin + 64]) for run in (lora16, aqn) for begin in (64, 128)]
    pattern = r"from (\d\.\d+) in the second quarter to (\d\.\d+) in the third\. That of NVFP4 \+ AQN did not, "
    pattern += (
        r"(\d\.\d+) and (\d\.\d+), and on held-out rows it answered (\d\.\d+) greedily after 64 rollouts and (\d\.\d+)"
    )
    held_out = [accuracy for _, accuracy in aqn["held_out_accuracy"]]
    assert figures(pattern) == [round(float(one), 3) for one in quarters + held_out]
    assert figures(r"cut off after (\d+) and (\d+)\.") == [lora16["rollouts"], aqn["rollouts"]]
    entropies = [np.mean(run["sampler_entropy"][64:128]) for run in (aqn, lora16)]
    assert entropies[0] / entropies[1] < 0.6  # "at half of the entropy"


def test_length_and_entropy_are_those_of_the_long_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "gsm8k_length_256.json").read_text())["results"]
    lora16, aqn = (next(run for name, run in runs.items() if f"method={method}," in name) for method in LONG)
    quarters = [np.array(run["reward"]).reshape(4, 64).mean(1) for run in (lora16, aqn)]
    assert all(third - second > 0.02 for _, second, third, _ in quarters)  # so the runs are as long as time allows
    pattern = r"rose from (\d\.\d+) to (\d\.\d+) in 16-bit LoRA and from (\d\.\d+) to (\d\.\d+) in NVFP4 \+ AQN, by"
    assert figures(pattern) == [round(float(one), 3) for run in quarters for one in run[1:3]]
    assert figures(r"In the fourth it was (\d\.\d+) and (\d\.\d+)") == [round(float(run[3]), 3) for run in quarters]
    entropies = [round(float(np.mean(run["sampler_entropy"][:192])), 3) for run in (aqn, lora16)]
    assert figures(r"target is (\d\.\d+) nats, .*? That of 16-bit LoRA was (\d\.\d+)") == entropies
    study = read_plan(ROOT / "benchmarks" / "study" / "gsm8k.yaml")
    assert study.values["entropy_qwen"] == entropies[0]
    lengths = {run.overrides["trainer.max_steps"] for run in study.runs if run.levels["policy"] == "qwen"}
    assert lengths == {2 * 192}


def test_the_other_rates_are_those_of_the_higher_accuracy_on_training_prompts() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "gsm8k_length_rates.json").read_text())["results"]
    assert len(runs) == 8

    def trained(method: str, lr: str) -> float:
        (run,) = (run for name, run in runs.items() if f"method={method},lr={lr}," in name)
        return float(np.mean(run["train_accuracy"][96:117]))

    values = read_plan(ROOT / "benchmarks" / "study" / "gsm8k.yaml").values
    means = {method: [trained(method, lr) for lr in ("3e-05", "0.0001")] for method in ("nvfp4", "nf4", "lora16_aqn")}
    for method, (low, high) in means.items():
        assert low > high and values[f"rate_qwen_{method}"] == 3e-5
    pattern = r"(\d\.\d+) and (\d\.\d+) at 1e-4 for NVFP4, (\d\.\d+) and (\d\.\d+) for NF4, "
    pattern += r"(\d\.\d+) and (\d\.\d+) for 16-bit LoRA \+ AQN"
    assert figures(pattern) == [round(mean, 3) for pair in means.values() for mean in pair]
    held_out = {run["lr"]: dict(run["held_out_pass@1"]) for name, run in runs.items() if "nvfp4_aqn" in name}
    measured = [held_out[3e-5][128], held_out[1e-4][128]]
    assert figures(r"pass@1 of (\d\.\d+) on held-out rows after 128 rollouts, and (\d\.\d+)") == [
        round(one, 3) for one in measured
    ]
    assert measured[0] > measured[1] and trained("nvfp4_aqn", "3e-05") > trained("nvfp4_aqn", "0.0001")


def test_the_curve_of_the_rate_that_won_still_rises() -> None:
    first = {"method": "lora16", "lr": 3e-5, "seed": 0}
    (run,) = (row for row in ROWS if first.items() <= row["levels"].items())
    quarters = np.array(run["curves"]["reward"]).reshape(4, -1).mean(1)
    assert figures(r"from (\d\.\d+) to (\d\.\d+) between the third and the last") == list(quarters[2:].round(3))
