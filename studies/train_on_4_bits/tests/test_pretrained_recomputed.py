"""The page of the study on pretrained policies, recomputed with numpy, as it is and with a run that diverged."""

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

from studies.train_on_4_bits.evidence import write_evidence
from studies.train_on_4_bits.plan import read_plan
from studies.train_on_4_bits.tests.test_study_recomputed import ROUNDED, Array, shown

STUDY = Path(__file__).parents[1]
FILE = STUDY / "gsm8k.yaml"
PLAN: dict[str, Any] = yaml.safe_load(FILE.read_text())
LABELS = {
    level.get("label", name): name
    for factor in ("policy", "method")
    for name, level in PLAN["factors"][factor]["levels"].items()
}
MEASURED = [json.loads(line) for line in (STUDY / "gsm8k.jsonl").read_text().splitlines()]
TAGS = {"final held-out accuracy": "val/accuracy", "final sampled accuracy": "val/pass@1"}
NEAR = ("full fine-tuning", "other methods")  # claims that tolerate a loss of 0.03


@pytest.fixture(scope="module")
def changed_rows() -> list[dict[str, Any]]:
    """The measured rows but those of one second seed, and one run has diverged."""
    name, diverged = "seed=104,rounding=2,policy=qwen,method=mxfp4", {"ended": "diverged", "held_out": {}}
    assert name in {row["run"] for row in MEASURED}
    return [row | diverged if row["run"] == name else row for row in MEASURED if row["levels"]["seed"] != 119]


@pytest.fixture(scope="module")
def changed_page(changed_rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    return write_evidence(read_plan(FILE), changed_rows, folder, folder / "gsm8k.jsonl")


@pytest.fixture(params=["measured", "changed"])
def rows(request: pytest.FixtureRequest, changed_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return MEASURED if request.param == "measured" else changed_rows


@pytest.fixture
def page(rows: list[dict[str, Any]], changed_page: Path) -> Path:
    return STUDY / "gsm8k.md" if rows is MEASURED else changed_page


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


def interval(values: Array) -> list[float]:
    """Mean and 95 % interval."""
    half = quantile(0.05, len(values) - 1) * error(values)
    return [float(values.mean()), float(values.mean() - half), float(values.mean() + half)]


def intervals(*samples: Array) -> list[float]:
    """Mean and 95 % interval of each, in a row."""
    return [number for values in samples for number in interval(values)]


def percentages(text: str) -> list[float]:
    """Shares that a text gives as "89 %", "89 and 77 %" or "84 to 92 %"."""
    return [float(share) / 100 for share in re.findall(r"(\d+)(?= %| and \d+ %| to \d+ %)", text)]


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
    for rank, index in enumerate(sorted(range(1, len(table)), key=lambda index: p_values[index])):
        if rejected:
            level = 0.05 / (len(table) - 1 - rank)
            rejected = p_values[index] <= level
        levels[index] = level
    assert len(table) == 36 and {len(values) for values in measured} == {5, 10}
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


def test_verdicts_of_claims_over_both_policies(page: Path) -> None:
    table = {tuple(row[:3]): row for row in pages.rows(pages.sections(page)["Differences"])[1:]}
    claims = list(dict.fromkeys(claim for claim, *_ in table))
    verdicts = pages.rows(pages.sections(page)["Verdicts"])[1:]
    assert len(claims) == len(verdicts) == 10
    for claim, (_, *cells) in zip(claims, verdicts, strict=True):
        for column, cell in zip((7, 8), cells, strict=True):
            over = []
            for policy in ("Qwen2.5-Coder-0.5B", "SmolLM2-135M"):
                own = [one for one in table if one[0] == claim and one[1].endswith(f"({policy})")]
                parts = {table[one][column] for one in own}
                worst = "does not hold" if "does not hold" in parts else "holds" if parts == {"holds"} else "undecided"
                over += [worst] if own else []
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
    assert opening[0].startswith("**Should I train a model of 0.5B on 4 bits?** ") and len(opening) == 3
    for line, policy in zip(opening[1:], ("Qwen2.5-Coder-0.5B", "SmolLM2-135M"), strict=True):
        values = differences_of(rows, f"NVFP4 + AQN − 16-bit LoRA ({policy})", "final held-out accuracy")
        assert line.startswith(f"- {policy}: ")
        assert shown(line.removeprefix(f"- {policy}"))[:3] == pytest.approx(interval(values), abs=ROUNDED)


def test_gpu_minutes_are_shared_by_the_runs_at_once(page: Path, rows: list[dict[str, Any]]) -> None:
    (minutes,) = re.findall(r"about (\d+) GPU minutes", pages.sections(page)["Hardware and versions"])
    spent = np.array([[row["wall_s"], row["where"]["at_once"]] for row in rows])
    assert int(minutes) == round((spent[:, 0] / spent[:, 1]).sum() / 60)


def test_every_run_of_the_plan_is_measured_with_its_settings() -> None:
    assert [(run.name, run.digest) for run in read_plan(FILE).runs] == [(row["run"], row["digest"]) for row in MEASURED]


def limit_with(words: str) -> str:
    (limit,) = (limit for limit in PLAN["limits"] if words in limit)
    return str(limit)


def test_what_the_limits_and_the_plan_say_of_second_seeds() -> None:
    lora16, aqn = (values_of(MEASURED, method, "qwen", "final held-out accuracy") for method in ("lora16", "nvfp4_aqn"))
    first, second = (
        np.array([[values[rounding, seed + 2 * rounding] for rounding in range(10)] for values in (lora16, aqn)])
        for seed in (100, 101)
    )
    gain = (second - first).mean(0)
    below, above = limit_with("Second seeds").partition("Second seeds")[2].split("below the first")
    assert shown(below) == pytest.approx(interval(-gain[:5]), abs=ROUNDED)
    assert shown(above) == pytest.approx(interval(gain[5:]), abs=ROUNDED)
    change = (STUDY / "plan.md").read_text().partition("after all 110 runs")[2]
    balance = change.partition("*Balance*")[2].partition("*SmolLM2-135M, made again*")[0]
    outcomes = [accuracies[1] - accuracies[0] for accuracies in (first, second, (first + second) / 2)]
    assert shown(balance) == pytest.approx(intervals(*outcomes), abs=ROUNDED)


def test_what_the_limits_say_of_the_entropy() -> None:
    method = {"policy": "qwen", "method": "nvfp4_aqn"}
    curves = [row["curves"]["sampler_entropy"] for row in MEASURED if method.items() <= row["levels"].items()]
    entropy = np.mean(curves, axis=0)  # four rollouts a point
    falls = limit_with("in its first 20 rollouts").partition("NVFP4 + AQN falls")[2].partition("The temperature")[0]
    assert shown(falls) == pytest.approx([entropy[:5].mean(), entropy[-5:].mean()], abs=10 * ROUNDED)


def test_what_the_limits_say_of_the_own_order_and_of_later_rollouts() -> None:
    differences = []
    for label in ("final held-out accuracy", "final sampled accuracy"):
        lora16, aqn = (values_of(MEASURED, method, "qwen", label) for method in ("lora16", "nvfp4_aqn"))
        rounding = [np.mean([aqn[r, seed] - lora16[r, seed] for seed in (100 + 2 * r, 101 + 2 * r)]) for r in range(10)]
        differences.append((rounding[0], np.mean(rounding[1:])))
    (greedy, others), (sampled, others_sampled) = differences
    said = limit_with("Rounding 0 has its own channel order")
    assert shown(said) == pytest.approx([greedy, sampled, others, others_sampled], abs=ROUNDED)
    rewards = []
    for method in ("lora16", "nvfp4_aqn"):
        levels = {"policy": "qwen", "method": method}
        curves = [row["curves"]["reward"] for row in MEASURED if levels.items() <= row["levels"].items()]
        rewards.append(np.mean(curves, axis=0).reshape(6, 8).mean(1))  # 48 points
    assert shown(limit_with("by sixths")) == pytest.approx(rewards[1] - rewards[0], abs=ROUNDED)


def test_the_note_s_set_up_is_that_of_the_runs() -> None:
    _, *rows = pages.rows(PLAN["note"])
    said = {row[0]: row[1:] for row in rows}
    for column, policy in enumerate(("qwen", "smollm2")):
        own = [row for row in MEASURED if row["levels"]["policy"] == policy]
        assert {str(row["rollouts"]) for row in own} == {said["rollouts, of 32 prompts x 8 completions"][column]}
        questions = int(said["test questions"][column])
        right = np.array([row["held_out"]["val/accuracy"][-1][1] for row in own]) * questions
        assert np.abs(right - right.round()).max() < 1e-5 * questions
        values, methods = own[0]["where"]["values"], {row["levels"]["method"] for row in own}
        rates = {values[name] for name in (f"rate_{policy}_{method}" for method in methods) if name in values}
        assert {float(rate) for rate in re.findall(r"\de-\d", said["rate, constant after a warm-up"][column])} == rates


def test_what_the_note_says_of_many_samples() -> None:
    results = json.loads((STUDY / "gsm8k_many_samples.json").read_text())["results"]
    lora16, aqn = (results[f"policy=qwen,method={method}"] for method in ("lora16", "nvfp4_aqn"))
    for metric_name in ("pass@1", "pass@64"):
        values = np.array([aqn[rounding][metric_name] - lora16[rounding][metric_name] for rounding in "01234"])
        mean, low, high = interval(values)
        said = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] in {metric_name}"
        assert re.search(re.escape(said) + r"\b", PLAN["note"]), said


ACCURACIES = json.loads((STUDY / "format_accuracy.json").read_text())["results"]
BEFORE, AFTER, START = ACCURACIES.values()
"""Means over the test questions by format and rounding: of the instruct model, fine-tuned alike, where runs start."""


def accuracies(formats: dict[str, Any], kind: str, name: str) -> tuple[Array, Array]:
    """A format's values and those of 16 bits, in the roundings of both."""
    shared = sorted(set(formats[kind]) & set(formats["none"]))
    own, dense = (np.array([formats[each][rounding][name] for rounding in shared]) for each in (kind, "none"))
    return own, dense


def outcomes_of_first_seeds(name: str) -> tuple[Array, Array, Array]:
    """NVFP4 less 16 bits where the first seeds of roundings 0 to 4 start, where they end, and what training makes."""
    label = {"greedy": "final held-out accuracy", "sampled": "final sampled accuracy"}[name]
    lora16, aqn = (values_of(MEASURED, method, "qwen", label) for method in ("lora16", "nvfp4_aqn"))
    end = np.array([aqn[rounding, 100 + 2 * rounding] - lora16[rounding, 100 + 2 * rounding] for rounding in range(5)])
    own, dense = accuracies(START, "nvfp4", name)
    return own - dense, end, end - (own - dense)


def test_what_the_limits_and_the_plan_say_of_the_starts() -> None:
    (greedy_start, greedy_end, greedy_gain), (start, end, gain) = map(outcomes_of_first_seeds, ("greedy", "sampled"))
    limit = limit_with("How much of the greedy difference")
    said = intervals(start, greedy_start, end, gain, greedy_end, greedy_gain)
    assert shown(limit) == pytest.approx(said, abs=ROUNDED)
    plan = (STUDY / "plan.md").read_text().partition("*Starts* were made equal in sampled")[2]
    said = intervals(start, greedy_start, greedy_end, greedy_gain, gain)
    assert shown(plan.partition("The answer therefore")[0]) == pytest.approx(said, abs=ROUNDED)
    assert "about half of its difference at the end" in PLAN["answer"]
    assert 0.4 < greedy_start.mean() / greedy_end.mean() < 0.6


def test_what_the_limits_and_the_plan_say_of_formats() -> None:
    kinds, names = ("nvfp4", "nf4", "mxfp4"), ("greedy", "sampled")
    recovery = {
        (stage, kind, name): float(own.mean() / dense.mean())
        for stage, formats in (("before", BEFORE), ("after", AFTER))
        for kind in kinds
        for name in names
        for own, dense in [accuracies(formats, kind, name)]
    }
    limit = limit_with("without an equal start").partition("quantization leaves")[2]
    assert percentages(limit) == pytest.approx(list(recovery.values()), abs=10 * ROUNDED)
    prior = (STUDY / "plan.md").read_text().partition("Added on 2026-11-28")[2].split("\n- ")
    expected = []
    for kind in kinds:
        for name in names:
            own, dense = accuracies(BEFORE, kind, name)
            expected += [recovery["before", kind, name], (own / dense).min(), (own / dense).max()]
    assert percentages(prior[1]) == pytest.approx(expected, abs=10 * ROUNDED)
    after, nats = prior[2].split("Reference solutions")
    expected = [recovery["after", kind, name] for kind in kinds for name in names]
    assert percentages(after) == pytest.approx(expected, abs=10 * ROUNDED)
    costs = intervals(*(own - dense for kind in kinds for own, dense in [accuracies(AFTER, kind, "nats")]))
    assert shown(nats.partition("Fine-tuning brings")[0]) == pytest.approx(costs, abs=ROUNDED)


def test_the_page_of_the_documentation_has_figures_of_the_studys() -> None:
    """What the tests above recompute from the rows."""
    measured = pages.sections(pages.ROOT / "docs" / "measured.md")
    short, full = pages.rows(measured["Should one train on 4 bits?"]), pages.sections(STUDY / "gsm8k.md")
    methods = {(row[0], row[1], row[2]) for row in pages.rows(full["Methods"])}
    differences = {(row[1], row[3]) for row in pages.rows(full["Differences"]) if "final held-out" in row[2]}
    first, second = short[1:7], short[8:]
    assert {(f"{name} (Qwen2.5-Coder-0.5B)", *cells) for name, *cells in first} <= methods and len(first) == 6
    shown = {(name.replace(", word problems", ""), difference) for name, difference in second}
    assert shown <= differences and len(second) == 4
