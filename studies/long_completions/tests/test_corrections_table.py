"""The table of corrections in training, by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.long_completions.corrections import COLUMNS, at_largest_sigma, main, quarter, without_noise
from studies.sweep.rows import write_rows


def row(seed: int, method: str, correction: str, noise: list[float] | None, shift: float = 0.0) -> dict[str, Any]:
    """A run of eight rollouts."""
    curves = {
        "reward": [shift + 0.1 * one for one in range(8)],
        "accuracy": [0.0] * 6 + [0.5, 0.7],
        "length": [100.0, 300.0, *[0.0] * 6],
        "weight": [1.0, 0.5, 0.25, 0.125, 1.0, 1.0, 1.0, 1.0],
        "ess": [0.8, 0.6, 0.4, 0.2, 1.0, 1.0, 1.0, 1.0],
        "rejected": [0.0, 0.4, *[0.0] * 6],
    }
    levels = {"seed": seed, "method": method, "correction": correction}
    return {
        "run": f"{seed}-{method}-{correction}",
        "levels": levels,
        "curves": curves | ({"noise": [*noise]} if noise else {}),
        "ended": "done",
        "held_out": {"val/reward_accuracy": [[0, 0.1], [8, 0.3 + shift]]} if seed == 100 else {},
        "where": {"gpu": f"GPU {seed % 2}", "commit": "abc", "values": {"starts": "x"}},
    }


LABELS = {"nvfp4": "NVFP4", "nvfp4_aqn": "NVFP4 + AQN"}
NOISE = [0.0, 0.0, 0.01, 0.00999, 0.005, 0.002, 0.001, 0.001]


def test_curves_are_averaged_over_the_rollouts_of_a_quarter_and_of_a_sigma() -> None:
    noisy, quiet = row(100, "nvfp4_aqn", "off", NOISE), row(100, "nvfp4", "off", None)
    assert quarter(noisy, "reward", 0) == pytest.approx(0.05) and quarter(noisy, "reward", 3) == pytest.approx(0.65)
    assert (without_noise(noisy, "weight"), at_largest_sigma(noisy, "weight")) == (0.75, 0.1875)
    assert (without_noise(quiet, "ess"), at_largest_sigma(quiet, "ess")) == (0.75, None)
    held_out, _ = COLUMNS["right numbers, held-out rows"]
    assert held_out(noisy) == 0.3 and held_out(row(101, "nvfp4_aqn", "off", NOISE)) is None


def test_an_interrupted_rollout_is_a_gap() -> None:
    one = row(100, "nvfp4_aqn", "off", NOISE)
    for curve in one["curves"].values():
        curve[1] = curve[3] = None
    assert quarter(one, "reward", 0) == 0.0 and without_noise(one, "weight") == 1.0
    assert at_largest_sigma(one, "weight") == 0.25 and COLUMNS["rejected"][0](one) == 0.0


def test_the_table_has_means_over_seeds(tmp_path: Path) -> None:
    rows = [
        row(100, "nvfp4_aqn", "sequence_mask", NOISE),
        row(101, "nvfp4_aqn", "sequence_mask", NOISE, shift=0.02),
        row(100, "nvfp4", "token_tis", None),
    ]
    file = tmp_path / "long.jsonl"
    write_rows(file, {one["run"]: one for one in rows})
    main([str(file), "--out", str(tmp_path)])
    text = (tmp_path / "long.md").read_text()
    assert text.endswith("\n\nMeasured with gpu GPU 0 and GPU 1, commit abc.\n")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:4]]
    # Two seeds 0.02 apart: the standard error of 0.01 times the quantile 12.706.
    assert lines[0][:5] == ["NVFP4 + AQN", "`sequence_mask`", "2", "0.060 ± 0.127", "0.660 ± 0.127"]
    assert lines[0][5:8] == ["0.000 ± 0.000", "0.600 ± 0.000", "0.300"]  # one seed alone has a held-out measurement
    assert lines[0][8:10] == ["200 ± 0", "0 ± 0"]
    assert lines[1] == [
        *("NVFP4", "`token_tis`", "1", "0.050", "0.650", "0.000", "0.600", "0.300"),
        *("200", "0", "0.734", "-", "0.750", "-", "5.0%"),
    ]
    (first, *_) = json.loads((tmp_path / "long.json").read_text())["results"]
    assert first["weight at the largest sigma"] == 0.1875 and first["seed"] == 100


RESULTS = Path(__file__).parents[1]
WHEN = ("without noise", "at the largest sigma")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("long_answers*.jsonl")), ids=lambda file: file.stem)
def test_the_measured_table_is_that_of_its_rows(file: Path) -> None:
    """Recomputed with numpy."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        one = json.loads(line)
        runs.setdefault((one["levels"]["method"], one["levels"]["correction"]), []).append(one)
    _, _, *lines = file.with_suffix(".md").read_text().partition("\n\n")[0].splitlines()
    assert len(lines) == len(runs)
    for line, ((method, correction), rows) in zip(lines, runs.items(), strict=True):
        label, name, seeds, *cells = line.strip("| ").split(" | ")
        assert (label, name, int(seeds)) == (LABELS[method], f"`{correction}`", len(rows))
        curves = {curve: np.array([row["curves"][curve] for row in rows]) for curve in rows[0]["curves"]}
        quarters = [curves[curve].reshape(len(rows), 4, -1) for curve in ("reward", "accuracy", "length")]
        expected = [part[:, which].mean() for part in quarters for which in (0, 3)]
        noise = curves.get("noise", np.zeros_like(curves["reward"]))
        quiet, loud = noise == 0, (noise > 0) & (noise > 0.99 * noise.max())
        expected += [curves[curve][mask].mean() for curve in ("weight", "ess") for mask in (quiet, loud) if mask.any()]
        measured = [cell.partition(" ")[0] for cell in (*cells[:4], *cells[5:-1]) if cell != "-"]
        for shown, value in zip(measured, expected, strict=True):
            assert float(shown) == pytest.approx(value, abs=0.5 if "." not in shown else 0.0005)
        assert cells[-1].partition(" ")[0] == f"{curves['rejected'].mean():.1%}"
        last = [row["held_out"]["val/reward_accuracy"][-1][1] for row in rows if row["held_out"]]
        assert cells[4].partition(" ")[0] == (f"{np.mean(last):.3f}" if last else "-")


def test_the_page_has_the_figures_of_the_table() -> None:
    """Means over seeds, and of each seed the share of right solutions at the end."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "long_answers.json").read_text())["results"]:
        kind = "no noise" if row["method"] == "nvfp4" else "AQN"
        groups.setdefault(f"{kind}, `{row['correction']}`", []).append(row)
    text = (RESULTS / "README.md").read_text().partition("## In training")[2]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line]
    start = json.loads((RESULTS / "long_answers_start.json").read_text())["sampled"]["solutions"]
    error = np.std(start, ddof=1) / len(start) ** 0.5
    assert f"at {np.mean(start):.3f} with a standard error of {error:.3f}." in text
    assert [line[0] for line in lines] == list(groups)
    for (_, *cells), rows in zip(lines, groups.values(), strict=True):
        names = ["reward, first quarter", "reward, last quarter"]
        names += [f"{name} {when}" for name in ("weight", "effective sample size") for when in WHEN]
        means = [f"{np.mean([row[name] for row in rows]):.3f}" if rows[0][name] is not None else "-" for name in names]
        ends = ", ".join(f"{row['right numbers, held-out rows']:.3f}" for row in rows)
        rejected = f"{np.mean([row['rejected'] for row in rows]):.1%}".replace("%", " %")
        assert cells == [f"{means[0]}, {means[1]}", ends, *means[2:], rejected]
