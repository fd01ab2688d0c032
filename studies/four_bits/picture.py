"""The study's picture: curves of the two methods that it compares, and differences in accuracy with their intervals.

    python -m studies.four_bits.picture studies/four_bits/study.jsonl studies/four_bits/counts.jsonl picture.png

Bands and bars are 95 % intervals of Student's t over seeds, thick bars 90 %, which decide equivalence.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from studies.four_bits.analysis import (
    MARGIN,
    PRIMARY,
    accuracies,
    comparisons,
    curves_by_method,
    difference,
    student_quantile,
)
from studies.four_bits.earlier import METHODS, SAMPLED, paired, rows_measured
from studies.sweep.rows import read_rows

COLOURS = dict(zip(PRIMARY, ("#ee6677", "#4477aa"), strict=True))
"""Colour-blind safe."""
DIFFERENCES = {
    "nvfp4_aqn less lora16": "NVFP4 + AQN − 16-bit LoRA",
    "gain of nvfp4_aqn less gain of lora16": "the same, gain since the start",
    "nvfp4 less lora16": "NVFP4 − 16-bit LoRA",
    "nf4 less lora16": "NF4 − 16-bit LoRA",
    "nvfp4_aqn less nvfp4": "NVFP4 + AQN − NVFP4",
    "served on NVFP4: lora16 less nvfp4_aqn": "served on NVFP4: trained on 16 bits − on NVFP4 + AQN",
    "served on 16 bits: nvfp4_aqn less lora16": "served on 16 bits: trained on NVFP4 + AQN − on 16 bits",
    "served on 16 bits: nvfp4 less lora16": "served on 16 bits: trained on NVFP4 − on 16 bits",
}
"""Comparisons of `analysis.comparisons`, by the names that a row has."""
LEAST_PAIRS = 3
"""Of a difference that is drawn, as in the plan."""
WIDTH, CURVES, ROW = 5.5, 3.0, 0.5
"""Inches: width, height of the curves and of a difference."""


def bands(rows: Sequence[Mapping[str, Any]], method: str) -> numpy.ndarray:
    """Rollouts, mean reward, and the ends of its 95 % interval, of 128 rollouts in order 0: [4, points]."""
    by_seed = curves_by_method(rows)[method]
    curves = numpy.array([curve["reward"] for curve in by_seed.values()], dtype=numpy.float64)
    each = -(-128 // curves.shape[1])  # a point is a mean over so many rollouts
    mean, seeds = curves.mean(0), len(curves)
    half = numpy.zeros_like(mean)
    if seeds > 1:
        half = student_quantile(seeds - 1, 0.975) * curves.std(0, ddof=1) / seeds**0.5
    return numpy.stack([each * (numpy.arange(len(mean)) + 0.5), mean, mean - half, mean + half])


def draw_curves(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for method, colour in COLOURS.items():
        rollouts, mean, low, high = bands(rows, method)
        axis.plot(rollouts, mean, color=colour, label=METHODS[method])
        axis.fill_between(rollouts, low, high, color=colour, alpha=0.2, lw=0)
    axis.set(xlabel="rollouts", ylabel="reward")
    axis.grid(alpha=0.3)
    axis.legend()


def draw_differences(axis: Axes, counts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw a row for each comparison that has three pairs and for the earlier study, and return their names."""
    measured = comparisons(accuracies(counts, "sampled"))
    drawn = {DIFFERENCES[name]: values for name, values in measured.items() if name in DIFFERENCES}
    found = {name: difference(values) for name, values in drawn.items() if len(values) >= LEAST_PAIRS}
    for row, one in enumerate(found.values()):
        axis.plot([one.low, one.high], [row, row], color="#444444", lw=1.5)
        axis.plot([one.low90, one.high90], [row, row], color="#444444", lw=4)
        axis.plot(one.mean, row, "o", color="#444444", markersize=5)
    earlier = difference([*paired(rows_measured(), "qwen", *PRIMARY, SAMPLED).values()])
    axis.plot([earlier.low, earlier.high], [len(found)] * 2, color="#999999", lw=1.5)
    axis.plot(earlier.mean, len(found), "o", color="#999999", markersize=5)
    names = [*found, f"at 0.5B: {DIFFERENCES['nvfp4_aqn less lora16']}"]
    for row, text in enumerate(names):
        over = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.text(0.01, row - 0.15, text, transform=axis.get_yaxis_transform(), va="bottom", bbox=over)
    for value in (-MARGIN, MARGIN):
        axis.axvline(value, color="black", lw=0.8, ls=":")
    axis.axvline(0, color="black", lw=0.8)
    axis.set(ylim=(len(names) - 0.6, -0.9), yticks=[], xlabel="difference in sampled accuracy at the end")
    axis.grid(axis="x", alpha=0.3)
    return names


def draw(rows: Sequence[Mapping[str, Any]], counts: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Write the picture and return the names of its differences."""
    figure = Figure(layout="constrained")
    above, below = figure.subplots(2, 1)
    draw_curves(above, rows)
    names = draw_differences(below, counts)
    below.get_gridspec().set_height_ratios((CURVES, ROW * (len(names) + 1)))
    figure.set_size_inches(WIDTH, CURVES + ROW * (len(names) + 1))
    report.save_figure(figure, path)
    return names


def main(rows: Path, counts: Path, path: Path) -> None:
    draw([*read_rows(rows).values()], [*read_rows(counts).values()], path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
