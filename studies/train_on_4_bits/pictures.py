"""Plots of a study: learning curves of methods, their paired differences, differences of claims."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from studies.train_on_4_bits.claims import ACCURACY, Contrast, Row, Statistic, rollouts_of_point
from studies.train_on_4_bits.findings import Finding, Result, Unit, at, by_unit, interval_of, less, methods, unit_of
from studies.train_on_4_bits.plan import Level, Plan

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")  # colour-blind safe
LINES = (("-", None), ("--", "none"))
"""Line styles and the filling of markers (None: the colour's), one pair for each round of `COLOURS`."""
MOST_BANDS = 5
"""Of more methods than this, only one has the interval of its differences drawn."""
OF_VERDICT = {"holds": "#228833", "does not hold": "#ee6677", "undecided": "#777777", "at its ceiling": "#cccccc"}
UNITS = {
    **{"held out": "accuracy", "gain": "accuracy", "reward": "reward"},
    **{"sampler_entropy": "nats", "without_signal": "share of groups"},
}


def curves(plan: Plan, rows: Sequence[Row], stratum: Mapping[str, Level], path: Path) -> str | None:
    """Plot reward, entropy and held-out accuracy: means of methods, and below their paired differences.

    The differences are to the reference, `plan.compare[1]`, with the 95 % intervals, over the units that both have, of
    the methods that `with_intervals` names. Accuracies of the end alone are points with intervals. None without data.
    """
    by_method = _by_method(plan, rows, stratum)
    if not by_method:
        return None
    shaded = with_intervals(plan, by_method)
    figure = Figure(figsize=(14, 7), layout="constrained")
    axes, reference = figure.subplots(2, 3), plan.compare[1]
    styles = dict(zip(methods(plan), itertools.product(LINES, COLOURS), strict=False))
    titles = {"reward": "reward", "sampler_entropy": "sampler entropy (nats per token)", "": f"held-out {plan.measure}"}
    for (above, below), (curve, title) in zip(axes.T, titles.items(), strict=True):
        points = {method: _points(plan, measured, curve) for method, measured in by_method.items()}
        above.set(title=title)
        below.set(title=f"less {plan.label('method', reference)}")
        if not curve and all(len(one) <= 1 for runs in points.values() for one in runs.values()):
            above.set(title=f"{title}, at the end")
            final = {method: by_unit(plan, rows, {**stratum, "method": method}, ACCURACY) for method in by_method}
            _final_accuracies(plan, (above, below), final, styles)
            continue
        for method, runs in points.items():
            label = plan.label("method", method)
            _band(plan, above, runs, styles[method], label, shade=False)
            if method != reference and reference in points:
                _band(plan, below, _less(runs, points[reference]), styles[method], label, shade=method in shaded)
        below.set(xlabel="rollouts")
    for axis in axes[1]:
        axis.axhline(0, color="black", lw=0.8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return report.save_figure(figure, path)


def with_intervals(plan: Plan, shown: Collection[Level]) -> list[Level]:
    """The methods whose differences are drawn with an interval: all, or of more than `MOST_BANDS` the first."""
    return list(shown) if len(shown) <= MOST_BANDS else [plan.compare[0]]


def caption(plan: Plan, rows: Sequence[Row], stratum: Mapping[str, Level]) -> str:
    """What `curves` shows."""
    shown = _by_method(plan, rows, stratum)
    shaded = with_intervals(plan, shown)
    whose = f" (of curves: {plan.label('method', shaded[0])} alone)" if len(shaded) < len(shown) else ""
    return f"Means of methods{of(plan, stratum)} and, below, their differences, paired, with 95 % intervals{whose}"


def _by_method(plan: Plan, rows: Sequence[Row], stratum: Mapping[str, Level]) -> dict[Level, list[Row]]:
    """Rows by method, in the plan's order, of the methods that have any."""
    by_method = {method: at(plan, rows, {**stratum, "method": method}) for method in methods(plan)}
    return {method: measured for method, measured in by_method.items() if measured}


Curve = dict[float, float]
Style = tuple[tuple[str, str | None], str]
"""Line style, filling of markers, and colour."""


def _points(plan: Plan, measured: Sequence[Row], name: str) -> dict[Unit, Curve]:
    """A curve of each run, by rollout; an empty name is the held-out accuracy."""
    curves = {}
    for row in measured:
        values = row["curves"].get(name, [])
        width = rollouts_of_point(row, values) if values else 0
        points = [(width * (index + 0.5), value) for index, value in enumerate(values)]
        if not name:
            points = row["held_out"].get(plan.measure, [])
        curves[unit_of(plan, row)] = {rollout: value for rollout, value in points if value is not None}
    return curves


def _less(first: Mapping[Unit, Curve], second: Mapping[Unit, Curve]) -> dict[Unit, Curve]:
    """The first curve less the second at their common points, of the units that both have."""
    pairs = [(unit, first[unit], second[unit]) for unit in first if unit in second]
    return {
        unit: {rollout: one[rollout] - two[rollout] for rollout in one if rollout in two} for unit, one, two in pairs
    }


def _band(
    plan: Plan, axis: Axes, curves: Mapping[Unit, Curve], style: Style, label: str, *, shade: bool = True
) -> None:
    """Plot the mean of the curves, and its 95 % interval, at every point that all of them have."""
    rollouts = sorted(set.intersection(*map(set, curves.values()))) if curves else []  # fewer seeds are not comparable
    estimates = [interval_of(plan, {unit: curve[rollout] for unit, curve in curves.items()}) for rollout in rollouts]
    intervals = [interval for interval in estimates if interval is not None]
    marker = "o" if len(rollouts) < 12 else None
    (line, _), colour = style
    means = [one.mean for one in intervals]
    axis.plot(rollouts, means, ls=line, color=colour, label=label, marker=marker, markersize=3)
    if shade:
        lows, highs = [one.low for one in intervals], [one.high for one in intervals]
        axis.fill_between(rollouts, lows, highs, color=colour, alpha=0.15, lw=0)


def _final_accuracies(
    plan: Plan, axes: Sequence[Axes], final: Mapping[Level, Mapping[Unit, float]], styles: Mapping[Level, Style]
) -> None:
    """Plot accuracies that were measured once, by method, and below their differences: all values, means, intervals."""
    reference = final.get(plan.compare[1], {})
    for x, (method, values) in enumerate(final.items()):
        differences = less(values, reference) if method != plan.compare[1] else {}
        (line, filling), colour = styles[method]
        for axis, shown in zip(axes, (values, differences), strict=True):
            interval = interval_of(plan, shown)
            if interval is None:
                continue
            height = list(shown.values())
            axis.plot([x] * len(shown), height, "o", color=colour, mfc=filling, markersize=4, alpha=0.35)
            errors = [[interval.mean - interval.low], [interval.high - interval.mean]] if interval.count > 1 else None
            bars = axis.errorbar(x, interval.mean, errors, fmt="_", color=colour, markersize=16, capsize=5)[2]
            for bar in bars:
                bar.set_linestyle(line)
    for axis in axes:
        axis.set(xlim=(-1, len(final)), xticks=[])


def _unit(statistic: Statistic) -> str:
    return UNITS[statistic.curve] + (" per 100 rollouts" if statistic.growth else "")


def forest(plan: Plan, results: Sequence[Result], path: Path) -> str | None:
    """Plot every difference with its interval, grouped by unit; None without data."""
    entries = [one for result in results for one in result.findings if one.difference is not None]
    by_unit: dict[str, list[Finding]] = {}
    for unit in dict.fromkeys(_unit(one.contrast.statistic) for one in entries):
        by_unit[unit] = [one for one in entries if _unit(one.contrast.statistic) == unit]
    if not by_unit:
        return None
    heights = [len(group) + 1.2 for group in by_unit.values()]
    figure = Figure(figsize=(10, 0.32 * sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(by_unit), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (unit, group) in zip(axes, by_unit.items(), strict=True):
        for row, one in enumerate(group):
            difference, colour = one.difference, OF_VERDICT[one.verdict]
            assert difference is not None
            if difference.count > 1:
                axis.plot([difference.low, difference.high], [row, row], color=colour, lw=2)
            axis.plot(difference.mean, row, "o", color=colour, markersize=5)
            if one.contrast.margin:
                axis.plot(-one.contrast.margin, row, "|", color="black", markersize=9)
        names = [f"{sides(plan, one.contrast)}{one.contrast.statistic.when}{of(plan, one.stratum)}" for one in group]
        axis.set_yticks(range(len(group)), names, fontsize=8)
        axis.set(title=f"difference, {unit}", ylim=(len(group) - 0.4, -0.6))
        axis.axvline(0, color="black", lw=0.8)
        axis.grid(axis="x", alpha=0.3)
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
