"""Plots of a study: the two methods that it compares, every method's accuracy at the end, differences of claims.

They are narrow, for a phone, and on a white ground, for a dark page.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from studies.train_on_4_bits.claims import ACCURACY, Contrast, Row, rollouts_of_point
from studies.train_on_4_bits.findings import Result, Unit, at, by_unit, interval_of, methods, unit_of
from studies.train_on_4_bits.plan import Level, Plan

COLOURS, GREY = ("#4477aa", "#ee6677"), "#777777"
"""Of the two methods that a study compares, and of all others; colour-blind safe."""
OF_VERDICT = {"holds": "#228833", "does not hold": "#ee6677", "undecided": GREY, "at its ceiling": "#cccccc"}
MOST_ROWS = 9
"""Differences in a picture; the page's table has all."""
WIDTH, ROW_HEIGHT = 5.5, 0.65
"""In inches: of a picture, and of a row with a name of two lines."""


def curves(plan: Plan, rows: Sequence[Row], stratum: Mapping[str, Level], path: Path) -> str | None:
    """Plot the reward of the two methods that the plan compares, and below every method's accuracy at the end.

    Curves are means with 95 % intervals. Of accuracies all values are shown, with mean and interval. None without data.
    """
    found = {method: by_unit(plan, rows, {**stratum, "method": method}, ACCURACY) for method in methods(plan)}
    final = {method: values for method, values in found.items() if values}
    if not final:
        return None
    heights = (3.0, ROW_HEIGHT * len(final) + 0.5)
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    colours = dict(zip(reversed(plan.compare), COLOURS, strict=True))
    for method, colour in colours.items():
        if measured := at(plan, rows, {**stratum, "method": method}):
            _band(plan, above, _rewards(plan, measured), colour, plan.label("method", method))
    above.set(xlabel="rollouts", ylabel="reward")
    above.legend()
    for row, (method, values) in enumerate(final.items()):
        interval, colour = interval_of(plan, values), colours.get(method, GREY)
        assert interval is not None
        below.plot(list(values.values()), [row] * len(values), "o", color=colour, markersize=4, alpha=0.35)
        if interval.count > 1:
            below.plot([interval.low, interval.high], [row, row], color=colour, lw=2)
        below.plot(interval.mean, row, "|", color=colour, markersize=14, mew=2)
    _name_rows(below, [plan.label("method", method) for method in final])
    below.set(xlabel=f"held-out {plan.measure} at the end")
    above.grid(alpha=0.3)
    return report.save_figure(figure, path)


def caption(plan: Plan, stratum: Mapping[str, Level]) -> str:
    """What `curves` shows."""
    compared = " and ".join(plan.label("method", method) for method in plan.compare)
    return (
        f"Reward of {compared}{of(plan, stratum)} and, below, accuracy of each method at the end, with 95 % intervals"
    )


Curve = dict[float, float]


def _rewards(plan: Plan, measured: Sequence[Row]) -> dict[Unit, Curve]:
    """The reward of each run, by rollout."""
    curves = {}
    for row in measured:
        values = row["curves"].get("reward", [])
        width = rollouts_of_point(row, values) if values else 0
        points = {width * (index + 0.5): value for index, value in enumerate(values)}
        curves[unit_of(plan, row)] = {rollout: value for rollout, value in points.items() if value is not None}
    return curves


def _band(plan: Plan, axis: Axes, curves: Mapping[Unit, Curve], colour: str, label: str) -> None:
    """Plot the mean of the curves, and its 95 % interval, at every point that all of them have."""
    rollouts = sorted(set.intersection(*map(set, curves.values())))  # fewer seeds are not comparable
    estimates = [interval_of(plan, {unit: curve[rollout] for unit, curve in curves.items()}) for rollout in rollouts]
    intervals = [interval for interval in estimates if interval is not None]
    axis.plot(rollouts, [one.mean for one in intervals], color=colour, label=label)
    lows, highs = [one.low for one in intervals], [one.high for one in intervals]
    axis.fill_between(rollouts, lows, highs, color=colour, alpha=0.2, lw=0)


def _name_rows(axis: Axes, names: Sequence[str]) -> None:
    """Write each row's name above its values."""
    for row, name in enumerate(names):
        text = textwrap.fill(name, 60)
        axis.text(0.01, row - 0.15, text, transform=axis.get_yaxis_transform(), va="bottom", linespacing=1.0)
    axis.set(ylim=(len(names) - 0.6, -0.9), yticks=[])
    axis.grid(axis="x", alpha=0.3)


def forest(plan: Plan, results: Sequence[Result], path: Path) -> str | None:
    """Plot the first differences in accuracy with their intervals, each under its name; None without data."""
    found = [
        (f"{sides(plan, one.contrast)}{of(plan, one.stratum)}", one)
        for result in results
        for one in result.findings
        if one.difference is not None and one.contrast.statistic == ACCURACY
    ]
    entries = dict(list(dict(found).items())[:MOST_ROWS])
    if not entries:
        return None
    figure = Figure(figsize=(WIDTH, ROW_HEIGHT * len(entries) + 0.5), layout="constrained")
    axis = figure.subplots()
    for row, one in enumerate(entries.values()):
        difference, colour = one.difference, OF_VERDICT[one.verdict]
        assert difference is not None
        if difference.count > 1:
            axis.plot([difference.low, difference.high], [row, row], color=colour, lw=2)
        axis.plot(difference.mean, row, "o", color=colour, markersize=5)
        if one.contrast.margin:
            axis.plot(-one.contrast.margin, row, "|", color="black", markersize=9)
    _name_rows(axis, list(entries))
    axis.set(xlabel="difference in accuracy")
    axis.axvline(0, color="black", lw=0.8)
    return report.save_figure(figure, path)


def sides(plan: Plan, contrast: Contrast) -> str:
    """Name of a difference, such as "NVFP4 − 16-bit LoRA"; factors that both runs share are named once."""
    first, second = contrast.first, contrast.second
    others = ", ".join(plan.label(*level) for level in contrast.beside.items())
    less = f", minus the same for {others}" if others else ""
    names = [[plan.label(factor, level) for factor, level in side.items()] for side in (first, second)]
    changed = [factor for factor in first if first[factor] != second.get(factor)]
    if len(changed) < len(first):
        common = ", ".join(plan.label(factor, first[factor]) for factor in first if factor not in changed)
        names = [[plan.label(factor, side[factor]) for factor in changed] for side in (first, second)]
        return f"{common}: {', '.join(names[0])} − {', '.join(names[1])}{less}"
    return " − ".join(", ".join(name) for name in names) + less


def of(plan: Plan, stratum: Mapping[str, Level]) -> str:
    """A stratum's labels in parentheses."""
    return f" ({', '.join(plan.label(*pair) for pair in stratum.items())})" if stratum else ""


def ordered(plan: Plan, factor: str, levels: set[Level]) -> list[Level]:
    """The levels in the order of the plan's labels, or ascending if it has none."""
    listed = list(plan.labels.get(factor, {}))
    return sorted(levels, key=lambda level: listed.index(str(level)) if listed else level)
