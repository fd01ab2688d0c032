"""The tables of first.md, computed again from the rows with numpy alone; the page's text is compared."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import yaml
from numpy.typing import NDArray

STUDY = Path(__file__).parents[1]
PAGE = STUDY / "first.md"
PLAN: dict[str, Any] = yaml.safe_load((STUDY / "first.yaml").read_text())
ROWS = [json.loads(line) for line in (STUDY / "first.jsonl").read_text().splitlines()]
NAMES = {
    level["label"]: (factor, name)
    for factor, about in PLAN["factors"].items()
    for name, level in about.get("levels", {}).items()
}
NEAR = ("full fine-tuning", "learning rate", "other methods")  # claims that tolerate a loss of 0.03
SHARES = {"first tenth": 0.1, "first half": 0.5}
CURVES = {"sampler entropy": "sampler_entropy", "reward growth": "reward"}
ROUNDED = 0.00051  # three digits
Array = NDArray[np.float64]


def stratum_of(text: str) -> tuple[str, dict[str, Any]]:
    """What stands before the last parentheses, and the levels in them."""
    name, inside = re.fullmatch(r"(.+) \((.+)\)", text).groups()  # type: ignore[union-attr]
    return name, dict(NAMES[label] for label in inside.rsplit(", ", 1))


def level_of(label: str) -> tuple[str, Any]:
    factor, _, level = label.partition(" ")
    return NAMES[label] if label in NAMES else (factor, level)


def metric(row: dict[str, Any], label: str) -> float:
    held_out, kind = row["held_out"], label.partition(" (")[0].partition(",")[0]
    if kind == "final held-out accuracy":
        return float(held_out["val/pass@1"][-1][1])
    if kind == "final greedy accuracy":
        return float(held_out["val/accuracy"][-1][1])
    if kind == "gain in held-out accuracy":
        return float(held_out["val/pass@1"][-1][1] - held_out["val/pass@1"][0][1])
    values = np.array(row["curves"][CURVES[kind]], dtype=float)
    values = values[: round(len(values) * next(share for when, share in SHARES.items() if when in label))]
    return float(100 * np.polyfit(np.arange(len(values)), values, 1)[0] if "growth" in kind else values.mean())


def by_seed(levels: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = {**PLAN["defaults"], **levels}
    found = [row for row in ROWS if all(row["levels"][factor] == level for factor, level in wanted.items())]
    assert [row["levels"]["seed"] for row in sorted(found, key=lambda row: row["levels"]["seed"])] == [0, 1, 2, 3, 4]
    return sorted(found, key=lambda row: row["levels"]["seed"])


def values_of(levels: dict[str, Any], label: str) -> Array:
    return np.array([metric(row, label) for row in by_seed(levels)])


def differences_of(text: str, label: str) -> Array:
    """First minus second by seed, as the difference's name says."""
    name, stratum = stratum_of(text)
    name, _, beside = name.partition(", minus the same for ")
    common, _, sides = name.rpartition(": ")
    first, second = (
        {**stratum, **dict(level_of(part) for part in (common, side) if part)} for side in sides.split(" − ")
    )
    values = values_of(first, label) - values_of(second, label)
    if beside:
        other = dict([level_of(beside)])
        values = values - values_of({**first, **other}, label) + values_of({**second, **other}, label)
    return values


def t_cdf(t: float) -> float:
    """Student's t with four degrees of freedom."""
    x = t / math.sqrt(1 + t * t / 4)
    return 0.5 + 3 / 8 * x * (1 - x * x / 12)


def t_quantile(level: float) -> float:
    """|t| is above it with the probability `level`."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 2 * t_cdf(-middle) > level else (low, middle)
    return low


def error(values: Array) -> float:
    assert len(values) == 5
    return float(values.std(ddof=1) / math.sqrt(5))


def shown(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", cell)]


def verdict(low: float, high: float, bound: float) -> str:
    return "holds" if low > bound else "does not hold" if high < bound else "undecided"


DIFFERENCES = pages.rows(pages.sections(PAGE)["Differences"])[1:]


def test_differences_intervals_and_verdicts() -> None:
    measured = [differences_of(name, label) for _, name, label, *_ in DIFFERENCES]
    bounds = [-0.03 if claim in NEAR else 0.0 for claim, *_ in DIFFERENCES]
    errors = [error(values) for values in measured]
    p_values = np.array(
        [
            2 * t_cdf(-abs(values.mean() - bound) / se)
            for values, bound, se in zip(measured, bounds, errors, strict=True)
        ]
    )
    levels, rejected = np.empty(len(p_values)), True
    for rank, index in enumerate(np.argsort(p_values)):
        if rejected:
            level = 0.05 / (len(p_values) - rank)
            rejected = bool(p_values[index] <= level)
        levels[index] = level
    assert len(measured) > 70 and t_quantile(0.05) == pytest.approx(2.7764, abs=1e-4)
    for row, values, bound, se, level in zip(DIFFERENCES, measured, bounds, errors, levels, strict=True):
        mean, plain, holm = values.mean(), t_quantile(0.05) * se, t_quantile(level) * se
        assert shown(row[3]) == pytest.approx([mean, mean - plain, mean + plain], abs=ROUNDED), row
        assert shown(row[4]) == pytest.approx([mean - holm, mean + holm], abs=ROUNDED), row
        assert float(row[6]) == pytest.approx(3.7611 * se, abs=ROUNDED), row
        # the toy policy has reached its ceiling, which the next test sees
        expected = [verdict(mean - half, mean + half, bound) for half in (plain, holm)]
        assert row[7:] == (["at its ceiling"] * 2 if "toy policy" in row[1] else expected), row


def test_the_detectable_effect_has_a_power_of_four_fifths() -> None:
    x = np.linspace(0, 100, 400_001)[1:]  # chi-squared of four degrees: its density is x / 4 exp(-x / 2)
    normal = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(3.7611 - t_quantile(0.05) * np.sqrt(x / 4))
    assert float((x / 4 * np.exp(-x / 2) * normal).sum() * (x[1] - x[0])) == pytest.approx(0.8, abs=1e-4)


def test_ceilings_are_the_toy_policys() -> None:
    for policy, reached in (("toy", True), ("smollm2", False)):
        for objective in ("grpo", "dapo"):
            rows = by_seed({"policy": policy, "objective": objective, "method": "lora16"})
            half = np.mean([dict(row["held_out"]["val/pass@1"])[30] for row in rows])
            assert (half > 0.9) == reached


def test_verdicts_of_claims() -> None:
    verdicts = pages.rows(pages.sections(PAGE)["Verdicts"])[1:]
    claims = list(dict.fromkeys(claim for claim, *_ in DIFFERENCES))
    assert len(claims) == len(verdicts)
    for claim, (_, plain, holm) in zip(claims, verdicts, strict=True):
        for column, found in ((7, plain), (8, holm)):  # one policy decides, so that nothing is mixed
            parts = {row[column] for row in DIFFERENCES if row[0] == claim} - {"at its ceiling"}
            expected = "does not hold" if "does not hold" in parts else "holds" if parts == {"holds"} else "undecided"
            assert found.replace("*", "").partition(" (")[0] == expected, claim


def test_methods() -> None:
    table = pages.rows(pages.sections(PAGE)["Methods"])[1:]
    assert len(table) == 28 and "SmolLM2" in table[0][0]
    for name, seeds, *cells in table:
        label, stratum = stratum_of(name)
        rows = by_seed({**stratum, **dict([NAMES[label]])})
        expected: list[Array] = []
        for tag in ("val/pass@1", "val/accuracy", "val/pass@4"):
            first, last = (np.array([row["held_out"][tag][point][1] for row in rows]) for point in (0, -1))
            expected += [first, last, last - first]
        expected.append(np.array([np.mean(row["curves"]["reward"]) for row in rows]))
        expected += [
            np.array([metric(row, text) for row in rows])
            for text in ("reward growth, first half", "sampler entropy, first half")
        ]
        expected += [
            np.array([np.nanmean(np.array(row["curves"][curve], dtype=float)) for row in rows])
            for curve in ("without_signal", "mismatch")  # a rollout without signal has no mismatch
        ]
        assert seeds == "5" and len(cells) == len(expected)
        for cell, values in zip(cells, expected, strict=True):
            rounded = ROUNDED / 10 if values is expected[-1] else ROUNDED  # the mismatch has a digit more
            assert shown(cell) == pytest.approx([values.mean(), t_quantile(0.05) * error(values)], abs=rounded), name


def test_sweeps() -> None:
    accuracy = "final held-out accuracy"
    parts = re.split(r"^### (\w+)\n", pages.sections(PAGE)["Sweeps"], flags=re.MULTILINE)
    assert parts[1::2] == ["lr", "decay", "sigma"]
    for factor, text in zip(parts[1::2], parts[2::2], strict=True):
        quiet = 0
        for name, label, _, cell, less in pages.rows(text)[1:]:
            method, stratum = stratum_of(name)
            base = {**stratum, **dict([NAMES[method]])}
            if label == "without noise (NVFP4)":
                levels, quiet = {**base, "method": "nvfp4"}, quiet + 1
            else:
                level = float(label) if factor == "sigma" else NAMES.get(label, (factor, label))[1]
                levels = {**base, factor: level}
            values, change = values_of(levels, accuracy), values_of(levels, accuracy) - values_of(base, accuracy)
            half = t_quantile(0.05) * error(values)
            assert shown(cell) == pytest.approx(
                [values.mean(), values.mean() - half, values.mean() + half], abs=ROUNDED
            )
            half = t_quantile(0.05) * error(change)
            expected = [change.mean(), change.mean() - half, change.mean() + half]
            assert shown(less) == (pytest.approx(expected, abs=ROUNDED) if np.any(change) else [])
        assert quiet == (factor != "lr")


def test_what_you_may_want_to_know_has_the_figures_of_the_differences() -> None:
    cells = [found for _, found in pages.rows(pages.sections(PAGE)["What you may want to know"])[1:]]
    entries = [entry for cell in cells for entry in cell.split("<br>")[1:]]
    known = {f"{name}: {mean}" for _, name, _, mean, *_ in DIFFERENCES}
    known |= {f"{name}, {label}: {mean}" for _, name, label, mean, *_ in DIFFERENCES}
    assert len(entries) == sum("toy policy" not in row[1] for row in DIFFERENCES) and set(entries) <= known


def test_the_answer_has_the_differences_of_starts_and_ends() -> None:
    question, _, table = PAGE.read_text().partition("## ")
    lines = [line for line in question.splitlines()[1:] if line]
    assert lines[0].startswith("**Should I train on 4 bits?** This study cannot say") and len(lines) <= 5
    assert table.startswith("What you may want to know")
    for line, objective in zip(lines[1:], ("grpo", "dapo"), strict=True):
        ends = []
        for point in (-1, 0):
            first, second = (
                np.array(
                    [
                        row["held_out"]["val/pass@1"][point][1]
                        for row in by_seed({"policy": "smollm2", "objective": objective, "method": method})
                    ]
                )
                for method in ("nvfp4_aqn", "lora16")
            )
            half = t_quantile(0.05) * error(first - second)
            mean = (first - second).mean()
            ends += [mean, mean - half, mean + half]
        assert shown(line) == pytest.approx(ends, abs=ROUNDED)
