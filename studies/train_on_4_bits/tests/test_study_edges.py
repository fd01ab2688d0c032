"""What a study shows of runs that diverged, lack a point, or differ in a rate that no label names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import report
from studies.train_on_4_bits import pictures
from studies.train_on_4_bits.claims import claims
from studies.train_on_4_bits.evidence import write_evidence
from studies.train_on_4_bits.findings import findings
from studies.train_on_4_bits.tests.test_study import ENDS, plan_of, rows_of


def test_the_table_of_methods_counts_a_run_that_diverged_as_the_claims_do(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["seed"] == 0]
    for row in rows:
        row |= {"ended": "diverged", "held_out": {"val/pass@1": [[0, 0.4], [2, 0.6]]}}
    page = write_evidence(plan, rows, tmp_path / "docs", tmp_path / "raw.jsonl").read_text()
    assert "| lora16 (toy) | 1 | 0.400 | 0.000 | -0.400 |" in page


def test_rates_that_are_values_alone_rise_as_numbers(tmp_path: Path) -> None:
    factors: dict[str, Any] = {
        **{"seed": {"keys": ["seed_everything"]}, "lr": {"keys": ["model.optimizer.lr"]}},
        "method": {"levels": {"lora16": {}, "nvfp4": {}}},
    }
    block = {"method": ["lora16", "nvfp4"], "seed": 0, "lr": [0.5, 0.1, 1.0]}
    plan = plan_of(tmp_path, factors=factors, defaults={"lr": 0.5}, strata=[], blocks=[block])
    found = {claim.name: claim for claim in claims(plan)}
    assert [contrast.first["lr"] for contrast in found["learning rate"].contrasts] == [1.0]


def drawn_figure(plan: Any, rows: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures = list[Figure]()
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    pictures.curves(plan, rows, {"policy": "toy"}, folder / "one.png")
    return figures[0]


def test_accuracies_of_the_end_are_rows_of_points_and_a_run_that_diverged_has_accuracy_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["lr"] == "own"]
    for row in rows:
        row["held_out"] = {"val/pass@1": row["held_out"]["val/pass@1"][-1:]}
    rows[0] |= {"ended": "diverged", "held_out": {}}
    _, below = drawn_figure(plan, rows, tmp_path, monkeypatch).axes
    assert below.get_xlabel() == "held-out val/pass@1 at the end"
    accuracies = [line.get_xdata() for line in below.lines if line.get_marker() == "o"]
    assert np.array(accuracies) == pytest.approx(np.array([[0, 0.72, 0.71], [0.75, 0.76, 0.77], [0.80, 0.83, 0.80]]))
    assert [text.get_text() for text in below.texts] == ["lora16", "nvfp4", "NVFP4 + AQN"]
    means = [line.get_xdata() for line in below.lines if line.get_marker() == "|"]
    assert np.ravel(means) == pytest.approx([(0 + 0.72 + 0.71) / 3, 0.76, 0.81])


def test_curves_are_the_rewards_of_the_two_methods_compared_each_with_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["lr"] == "own"]
    above, _ = drawn_figure(plan, rows, tmp_path, monkeypatch).axes
    lines = {line.get_label(): line for line in above.lines}
    assert list(lines) == ["lora16", "NVFP4 + AQN"] and len(above.collections) == 2
    for line in lines.values():
        assert list(line.get_xdata()) == [0.5, 1.5, 2.5, 3.5] and line.get_ydata() == pytest.approx(
            [0.1, 0.2, 0.3, 0.6]
        )
    assert pictures.caption(plan, {"policy": "toy"}).startswith(
        "Reward of NVFP4 + AQN and lora16 (toy) and, below, acc"
    )


def test_a_picture_of_differences_has_nine_rows_each_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, figures = plan_of(tmp_path), list[Figure]()
    results = findings(plan, rows_of(plan, ENDS))
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    for most in (9, 2):
        monkeypatch.setattr(pictures, "MOST_ROWS", most)
        pictures.forest(plan, results, tmp_path / "one.png")
    many, two = ([text.get_text() for text in figure.axes[0].texts] for figure in figures)
    assert len(set(many)) == len(many) <= 9 and two == many[:2] and two[0] == "NVFP4 + AQN − lora16 (toy)"
    assert all(len(line) <= 60 for name in many for line in name.split("\n"))
