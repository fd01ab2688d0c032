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


def test_accuracies_are_averaged_at_the_rollout_that_they_were_measured_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, drawn = plan_of(tmp_path), list[Any]()
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["method"] == "nvfp4_aqn"][:2]
    for row, points in zip(rows, ([[0, 0.4], [4, 0.8]], [[0, 0.4], [2, 0.5], [4, 0.8]]), strict=True):
        row["held_out"]["val/pass@1"] = points
        row["levels"] = {**row["levels"], "decay": "exponential"}
    monkeypatch.setattr(pictures, "_band", lambda plan, axis, curves, *_, **rest: drawn.append(curves))
    pictures.curves(plan, rows, {"policy": "toy"}, tmp_path / "one.png")
    assert drawn[2] == {(0,): {0: 0.4, 4: 0.8}, (1,): {0: 0.4, 2: 0.5, 4: 0.8}}


def test_accuracies_of_the_end_alone_are_points_and_a_run_that_diverged_has_accuracy_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["lr"] == "own"]
    for row in rows:
        row["held_out"] = {"val/pass@1": row["held_out"]["val/pass@1"][-1:]}
    rows[0] |= {"ended": "diverged", "held_out": {}}
    figures = list[Figure]()
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    pictures.curves(plan, rows, {"policy": "toy"}, tmp_path / "one.png")
    above, below = figures[0].axes[2], figures[0].axes[5]
    assert above.get_title() == "held-out val/pass@1, at the end"
    accuracies, differences = (
        [line.get_ydata() for line in axis.lines if line.get_marker() == "o"] for axis in (above, below)
    )
    assert np.array(accuracies) == pytest.approx(np.array([[0, 0.72, 0.71], [0.75, 0.76, 0.77], [0.80, 0.83, 0.80]]))
    assert np.array(differences) == pytest.approx(np.array([[0.75, 0.04, 0.06], [0.80, 0.11, 0.09]]))
    assert len(above.containers) == 3 and len(below.containers) == 2  # means with their intervals


def test_bands_are_of_differences_paired_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, drawn = plan_of(tmp_path), dict[str, Any]()
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["seed"] < 2 and row["levels"]["lr"] == "own"]
    rows = [row for row in rows if row["levels"]["decay"] == "exponential"]
    shaded = []

    def band(plan: Any, axis: Any, curves: Any, colour: str, label: str, shade: bool = True) -> None:
        shaded.append(shade)
        if shade:
            drawn.setdefault(label, []).append(curves)

    monkeypatch.setattr(pictures, "_band", band)
    pictures.curves(plan, rows, {"policy": "toy"}, tmp_path / "one.png")
    assert shaded.count(False) == 9 and set(drawn) == {"nvfp4", "NVFP4 + AQN"}  # less lora16, the reference
    reward, entropy, accuracy = drawn["NVFP4 + AQN"]
    assert reward == {(seed,): dict.fromkeys([0.5, 1.5, 2.5, 3.5], 0.0) for seed in (0, 1)}
    assert entropy[(1,)] == pytest.approx({0.5: 0.15, 1.5: 0.15, 2.5: 0.0})
    assert accuracy[(0,)] == pytest.approx({0: 0.0, 4: 0.1}) and accuracy[(1,)] == pytest.approx({0: 0.0, 4: 0.11})


def test_of_many_methods_the_first_compared_has_a_band_and_colours_return_with_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, figures = plan_of(tmp_path), list[Figure]()
    rows = [row for row in rows_of(plan, ENDS) if row["levels"]["lr"] == "own"]
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    monkeypatch.setattr(pictures, "COLOURS", pictures.COLOURS[:2])
    for most, bands in ((3, 2), (2, 1)):
        monkeypatch.setattr(pictures, "MOST_BANDS", most)
        pictures.curves(plan, rows, {"policy": "toy"}, tmp_path / "one.png")
        assert len(figures[-1].axes[3].collections) == bands  # less lora16, the reference
        assert ("alone" in pictures.caption(plan, rows, {"policy": "toy"})) is (bands == 1)
    lines = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in figures[-1].axes[0].lines}
    first, second = pictures.COLOURS
    assert [lines[name] for name in ("lora16", "nvfp4", "NVFP4 + AQN")] == [(first, "-"), (second, "-"), (first, "--")]
