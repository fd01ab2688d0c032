"""The page of the study on pretrained policies, recomputed with numpy, as it is and with all runs of the plan.

Runs that are not measured yet are made up.
"""

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import yaml
from pages import ROOT
from test_study_recomputed import ROUNDED, Array, shown

from benchmarks.study.evidence import write_evidence
from benchmarks.study.plan import read_plan

FILE = ROOT / "benchmarks" / "study" / "gsm8k.yaml"
PLAN: dict[str, Any] = yaml.safe_load(FILE.read_text())
LABELS = {
    level.get("label", name): name
    for factor in ("policy", "method")
    for name, level in PLAN["factors"][factor]["levels"].items()
}
MEASURED = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "gsm8k.jsonl").read_text().splitlines()]
TAGS = {"final held-out accuracy": "val/accuracy", "final sampled accuracy": "val/pass@1"}
NEAR = ("full fine-tuning", "other methods")  # claims that tolerate a loss of 0.03


def made_up(levels: dict[str, Any], name: str, generator: np.random.Generator) -> dict[str, Any]:
    """A run that ends where its method, its rounding and chance put it."""
    last, effect = (64, 0.0) if levels["policy"] == "smollm2" else (192, -0.02 * ("nvfp4" in levels["method"]))
    accuracy = 0.34 + effect + 0.01 * math.sin(levels["rounding"]) + 0.01 * generator.normal()
    row: dict[str, Any] = copy.deepcopy(MEASURED[0]) | {"run": name, "levels": levels, "rollouts": last}
    row["held_out"] = {"val/accuracy": [[last, accuracy]], "val/pass@1": [[last, 0.8 * accuracy]]}
    for curve in row["curves"]:
        row["curves"][curve] = list(np.linspace(0.2, 0.5, 48) + 0.05 * generator.normal(size=48))
    return row


@pytest.fixture(scope="module")
def all_rows() -> list[dict[str, Any]]:
    """All runs of the plan but one second seed; a measured one keeps its results, and one run has diverged."""
    measured, generator = {row["run"]: row for row in MEASURED}, np.random.default_rng(0)
    runs = [run for run in read_plan(FILE).runs if run.levels["seed"] != 119]
    complete = [measured.get(run.name) or made_up(dict(run.levels), run.name, generator) for run in runs]
    name, diverged = "seed=104,rounding=2,policy=qwen,method=mxfp4", {"ended": "diverged", "held_out": {}}
    assert name in {row["run"] for row in complete}
    return [row | diverged if row["run"] == name else row for row in complete]


@pytest.fixture(scope="module")
def page_of_all(all_rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    return write_evidence(read_plan(FILE), all_rows, folder, folder / "gsm8k.jsonl")


@pytest.fixture(params=["measured", "complete"])
def rows(request: pytest.FixtureRequest, all_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return MEASURED if request.param == "measured" else all_rows


@pytest.fixture
def page(rows: list[dict[str, Any]], page_of_all: Path) -> Path:
    return ROOT / "docs" / "evidence-gsm8k.md" if rows is MEASURED else page_of_all


def metric(row: dict[str, Any], label: str) -> float:
    if label in TAGS:
        return 0.0 if row["ended"] == "diverged" else float(row["held_out"][TAGS[label]][-1][1])
    if label == "mismatch":
        return float(np.mean(row["curves"]["mismatch"]))
    curve = np.array(row["curves"]["reward" if "growth" in label else "sampler_entropy"])
    curve = curve[: round(len(curve) * (0.1 if "first tenth" in label else 0.5))]
    per_point = -(-row["rollouts"] // len(row["curves"]["reward"]))
    return float(
        100 * np.polyfit(np.arange(len(curve)), curve, 1)[0] / per_point if "growth" in label else curve.mean()
    )


def values_of(rows: list[dict[str, Any]], method: str, policy: str, label: str) -> dict[tuple[int, int], float]:
    """The metric of a method's runs, by rounding and seed."""
    chosen = [row for row in rows if (row["levels"]["method"], row["levels"]["policy"]) == (method, policy)]
    return {(row["levels"]["rounding"], row["levels"]["seed"]): metric(row, label) for row in chosen}


def by_rounding(values: dict[tuple[int, int], float]) -> Array:
    roundings = sorted({rounding for rounding, _ in values})
    return np.array([np.mean([value for (one, _), value in values.items() if one == each]) for each in roundings])


def differences_of(rows: list[dict[str, Any]], text: str, label: str) -> Array:
    """First minus second, as the difference's name says, averaged within each rounding."""
    sides, policy = re.fullmatch(r"(.+) \((.+)\)", text).groups()  # type: ignore[union-attr]
    first, second = (values_of(rows, LABELS[side], LABELS[policy], label) for side in sides.split(" − ", 1))
    return by_rounding({unit: first[unit] - second[unit] for unit in first if unit in second})


def tail(t: float, degrees: int) -> float:
    """P(|T| > t) of Student's t, by its density in the angle arctan(t / sqrt(degrees))."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees - 1)
    inside = angles <= math.atan(t / math.sqrt(degrees))
    return float(1 - density[inside].sum() / density.sum())


@functools.cache
def quantile(level: float, degrees: int) -> float:
    """|t| is above it with the probability `level`."""
    low, high = 0.0, math.pi / 2
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(math.sqrt(degrees) * math.tan(middle), degrees) > level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def error(values: Array) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def power(effect: float, degrees: int) -> float:
    """P(T > quantile) for a mean of `effect` standard errors."""
    s = np.linspace(0, 8, 40_001)[1:]  # S² is chi-squared over its degrees
    density = np.exp((degrees - 1) * np.log(s) - degrees * s**2 / 2)
    above = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(effect - quantile(0.05, degrees) * s)
    return float((density * above).sum() / density.sum())


@functools.cache
def detectable(degrees: int) -> float:
    """The effect, in standard errors, that a test at 0.05 detects with a power of 0.8."""
    low, high = 0.0, 20.0
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, degrees) < 0.8 else (low, middle)
    return low


def verdict(low: float, high: float, claim: str, label: str) -> str:
    bound = -0.03 if claim in NEAR else 0.0
    negligible = label in TAGS and claim not in NEAR and low > -0.01 and high < 0.01
    return "holds" if low > bound else "does not hold" if high < bound or negligible else "undecided"


def test_differences_intervals_and_verdicts(page: Path, rows: list[dict[str, Any]]) -> None:
    table = pages.rows(pages.sections(page)["Differences"])[1:]
    measured = [differences_of(rows, name, label) for _, name, label, *_ in table]
    p_values = [
        tail(abs(values.mean() + (0.03 if row[0] in NEAR else 0.0)) / error(values), len(values) - 1)
        for row, values in zip(table, measured, strict=True)
    ]
    assert table[0][:2] == ["accuracy", "NVFP4 + AQN − 16-bit LoRA (Qwen2.5-Coder-0.5B)"]  # outside of the correction
    levels, rejected = {0: 0.05}, True
    for place, index in enumerate(sorted(range(1, len(table)), key=lambda index: p_values[index])):
        if rejected:
            level = 0.05 / (len(table) - 1 - place)
            rejected = p_values[index] <= level
        levels[index] = level
    assert rows is MEASURED or (len(table) == 36 and {len(values) for values in measured} == {5, 10})
    for index, (row, values) in enumerate(zip(table, measured, strict=True)):
        claim, _, label = row[:3]
        mean, se, degrees = float(values.mean()), error(values), len(values) - 1
        plain, holm = quantile(0.05, degrees) * se, quantile(levels[index], degrees) * se
        assert shown(row[3]) == pytest.approx([mean, mean - plain, mean + plain], abs=ROUNDED), row
        assert shown(row[4]) == pytest.approx([mean - holm, mean + holm] if index else [], abs=2 * ROUNDED), row
        assert int(row[5]) == len(values)
        assert float(row[6]) == pytest.approx(detectable(degrees) * se, abs=2 * ROUNDED), row
        assert row[7:] == [verdict(mean - half, mean + half, claim, label) for half in (plain, holm)], row


@pytest.mark.parametrize(("effect", "degrees"), [(3.7611, 4), (3.1503, 9)])
def test_the_detectable_effect_has_a_power_of_four_fifths(effect: float, degrees: int) -> None:
    assert power(effect, degrees) == pytest.approx(0.8, abs=2e-4)
    assert detectable(degrees) == pytest.approx(effect, abs=2e-3)


def test_verdicts_of_claims_over_both_policies(page: Path, page_of_all: Path, rows: list[dict[str, Any]]) -> None:
    planned = [tuple(row[:3]) for row in pages.rows(pages.sections(page_of_all)["Differences"])[1:]]
    table = {tuple(row[:3]): row for row in pages.rows(pages.sections(page)["Differences"])[1:]}
    claims = list(dict.fromkeys(claim for claim, *_ in table))
    verdicts = pages.rows(pages.sections(page)["Verdicts"])[1:]
    assert len(verdicts) == 10  # no run is measured before training, so that none says what it gains
    verdicts = [cells for cells in verdicts if cells[1] != "**not measured**"]
    assert len(claims) == len(verdicts) and (len(claims) == 10 or rows is MEASURED)
    for claim, (_, *cells) in zip(claims, verdicts, strict=True):
        for column, cell in zip((7, 8), cells, strict=True):
            over = []
            for policy in ("Qwen2.5-Coder-0.5B", "SmolLM2-135M"):
                own = [one for one in planned if one[0] == claim and one[1].endswith(f"({policy})")]
                parts = {table[one][column] if one in table else "undecided" for one in own}
                worst = "does not hold" if "does not hold" in parts else "holds" if parts == {"holds"} else "undecided"
                over += [worst] if set(own) & set(table) else []
            one = next((kind for kind in ("does not hold", "undecided") if kind in over), "holds")
            expected = "mixed" if {"holds", "does not hold"} <= set(over) else one
            assert cell.replace("*", "").partition(" (")[0] == expected, claim


def test_methods(page: Path, rows: list[dict[str, Any]]) -> None:
    table = pages.rows(pages.sections(page)["Methods"])[1:]
    assert len(table) == len({(row["levels"]["policy"], row["levels"]["method"]) for row in rows})
    for name, count, greedy, sampled, _, _, growth, entropy, _, mismatch in table:
        method, policy = re.fullmatch(r"(.+) \((.+)\)", name).groups()  # type: ignore[union-attr]
        labels = [*TAGS, "reward growth, first half", "sampler entropy, first half", "mismatch"]
        for cell, label in zip((greedy, sampled, growth, entropy, mismatch), labels, strict=True):
            values = by_rounding(values_of(rows, LABELS[method], LABELS[policy], label))
            half = quantile(0.05, len(values) - 1) * error(values)
            assert int(count) == len(values)
            digits = ROUNDED / 10 if label == "mismatch" else ROUNDED
            assert shown(cell) == pytest.approx([values.mean(), half], abs=digits), (name, label)


def test_the_page_opens_with_the_preregistered_difference(page: Path, rows: list[dict[str, Any]]) -> None:
    opening = [line for line in page.read_text().partition("## ")[0].splitlines() if line][1:]
    assert opening[0].startswith("**Should I train on 4 bits?** ") and len(opening) == 3
    for line, policy in zip(opening[1:], ("Qwen2.5-Coder-0.5B", "SmolLM2-135M"), strict=True):
        values = differences_of(rows, f"NVFP4 + AQN − 16-bit LoRA ({policy})", "final held-out accuracy")
        half = quantile(0.05, len(values) - 1) * error(values)
        assert line.startswith(f"- {policy}: ")
        assert shown(line.removeprefix(f"- {policy}"))[:3] == pytest.approx(
            [values.mean(), values.mean() - half, values.mean() + half], abs=ROUNDED
        )


def test_gpu_minutes_are_shared_by_the_runs_at_once(page: Path, rows: list[dict[str, Any]]) -> None:
    (minutes,) = re.findall(r"about (\d+) GPU minutes", pages.sections(page)["Hardware and versions"])
    spent = np.array([[row["wall_s"], row["where"]["at_once"]] for row in rows])
    assert int(minutes) == round((spent[:, 0] / spent[:, 1]).sum() / 60)
