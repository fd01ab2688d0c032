"""Plots of a study: learning curves, differences with intervals, sweeps."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.study.claims import ACCURACY, Claim, Contrast, Finding, Row, Statistic, by_seed, strata
from benchmarks.study.intervals import Interval, interval
from benchmarks.study.plan import Level, Plan
from qerl_pl.persistence.atomic_files import atomic_write

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")  # colour-blind safe
OF_VERDICT = {"holds": "#228833", "does not hold": "#ee6677", "undecided": "#777777"}
UNITS = {
    **{"held out": "accuracy", "gain": "accuracy", "reward": "reward"},
    **{"sampler_entropy": "nats", "without_signal": "share of groups"},
}


def save(figure: Figure, path: Path) -> str:
    """Write a figure as PNG and return its file name."""
    image = io.BytesIO()
    figure.savefig(image, dpi=110, metadata={"Software": None})
    atomic_write(path, image.getvalue())
    return path.name


def methods(plan: Plan) -> list[Level]:
    """The plan's methods, in its order."""
    return list(dict.fromkeys(run.levels["method"] for run in plan.runs))


def at(plan: Plan, rows: Sequence[Row], levels: Mapping[str, Level]) -> list[Row]:
    """Rows at these levels, other factors at their defaults: one per seed."""
    wanted = {**plan.defaults, **levels}
    wanted.pop("seed", None)
    return [row for row in rows if wanted.items() <= row["levels"].items()]


def curves(plan: Plan, rows: Sequence[Row], stratum: Mapping[str, Level], path: Path) -> str | None:
    """Plot reward, entropy and held-out accuracy of every method; None without data."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    drawn = False
    for colour, method in zip(itertools.cycle(COLOURS), methods(plan), strict=False):
        measured = at(plan, rows, {**stratum, "method": method})
        if not measured:
            continue
        drawn, label = True, plan.label("method", method)
        longest = max(row["rollouts"] for row in measured)
        for axis, name in ((axes[0], "reward"), (axes[1], "sampler_entropy")):
            values = [row["curves"].get(name, []) for row in measured]
            count = max(map(len, values))
            positions = [longest * (point + 0.5) / count for point in range(count)]
            _band(axis, positions, values, colour, label)
        points = [dict(row["held_out"].get(plan.measure, [])) for row in measured]
        steps = sorted(set().union(*points))
        _band(axes[2], steps, [[one.get(step) for step in steps] for one in points], colour, label)
        seconds = [row["seconds"] for row in measured]
        count = max(map(len, seconds))
        positions = [_mean([one[point] for one in seconds if point < len(one)]) for point in range(count)]
        _band(axes[3], positions, [row["curves"].get("reward", []) for row in measured], colour, label)
    titles = ("reward", "sampler entropy (nats per token)", f"held-out {plan.measure}", "reward over time")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="seconds of rollouts and updates" if title == "reward over time" else "rollouts")
        axis.grid(alpha=0.3)
    if not drawn:
        return None
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return save(figure, path)


def _mean(values: Sequence[float | None]) -> float:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else float("nan")


def _band(axis: Axes, positions: Sequence[float], curves: Sequence[Sequence[Any]], colour: str, label: str) -> None:
    """Plot the mean of the curves and its 95 % interval at every point that all of them have."""
    intervals: list[tuple[float, Interval]] = []
    for index, position in enumerate(positions):
        values = [curve[index] for curve in curves if index < len(curve) and curve[index] is not None]
        if len(values) == len(curves):  # a mean over fewer seeds is not comparable
            intervals.append((position, interval(values)))
    xs = [position for position, _ in intervals]
    marker = "o" if len(xs) < 12 else None
    axis.plot(xs, [one.mean for _, one in intervals], color=colour, label=label, marker=marker, markersize=3)
    lows, highs = [one.low for _, one in intervals], [one.high for _, one in intervals]
    axis.fill_between(xs, lows, highs, color=colour, alpha=0.15, lw=0)


def forest(plan: Plan, claims: Sequence[Claim], path: Path) -> str | None:
    """Plot every difference with its interval, grouped by unit; None without data."""
    entries = [(claim, one) for claim in claims for one in claim.findings if one.difference is not None]
    by_unit: dict[str, list[tuple[Claim, Finding]]] = {}
    for unit in dict.fromkeys(UNITS.values()):
        if group := [entry for entry in entries if UNITS[entry[1].contrast.statistic.curve] == unit]:
            by_unit[unit] = group
    if not by_unit:
        return None
    heights = [len(group) + 1.2 for group in by_unit.values()]
    figure = Figure(figsize=(10, 0.32 * sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(by_unit), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (unit, group) in zip(axes, by_unit.items(), strict=True):
        for row, (_, one) in enumerate(group):
            difference, colour = one.difference, OF_VERDICT[one.verdict]
            assert difference is not None
            if difference.count > 1:
                axis.plot([difference.low, difference.high], [row, row], color=colour, lw=2)
            axis.plot(difference.mean, row, "o", color=colour, markersize=5)
            if one.contrast.margin:
                axis.plot(-one.contrast.margin, row, "|", color="black", markersize=9)
        names = [f"{sides(plan, one.contrast)}{one.contrast.statistic.when}{of(plan, one.stratum)}" for _, one in group]
        axis.set_yticks(range(len(group)), names, fontsize=8)
        axis.set(title=f"difference, {unit}", ylim=(len(group) - 0.4, -0.6))
        axis.axvline(0, color="black", lw=0.8)
        axis.grid(axis="x", alpha=0.3)
    return save(figure, path)


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


def sweeps(plan: Plan, rows: Sequence[Row], path: Path, statistic: Statistic = ACCURACY) -> str | None:
    """Plot the final accuracy by level of each swept factor and method; None without sweeps."""
    swept = [factor for factor in plan.defaults if factor not in ("seed", "method", *plan.strata)]
    panels = {factor: _sweep(plan, rows, factor, statistic) for factor in swept}
    panels = {factor: lines for factor, lines in panels.items() if lines}
    if not panels:
        return None
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axis, (factor, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        levels = _ordered(plan, factor, {level for points in lines.values() for level in points})
        for number, (label, points) in enumerate(lines.items()):
            xs = [levels.index(level) + 0.06 * number for level in points]
            means = [one.mean for one in points.values()]
            spread = [[one.mean - one.low for one in points.values()], [one.high - one.mean for one in points.values()]]
            axis.errorbar(xs, means, spread, fmt="o-", color=COLOURS[number % len(COLOURS)], label=label, capsize=3)
        names = plan.labels.get(factor, {})
        axis.set_xticks(range(len(levels)), [names.get(str(level), str(level)) for level in levels])
        axis.set(title=factor, ylabel=statistic.label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return save(figure, path)


def _sweep(plan: Plan, rows: Sequence[Row], factor: str, statistic: Statistic) -> dict[str, dict[Level, Interval]]:
    """Intervals by level of each method and stratum with more than one level of the factor."""
    levels = _ordered(plan, factor, {run.levels[factor] for run in plan.runs})
    lines = {}
    for stratum in strata(plan):
        for method in methods(plan):
            values = {
                level: list(by_seed(plan, rows, {**stratum, "method": method, factor: level}, statistic).values())
                for level in levels
            }
            points = {level: interval(measured) for level, measured in values.items() if measured}
            if len(points) > 1:
                lines[plan.label("method", method) + of(plan, stratum)] = points
    return lines


def _ordered(plan: Plan, factor: str, levels: set[Level]) -> list[Level]:
    """The levels in the order of the plan's labels, or ascending if it has none."""
    listed = list(plan.labels.get(factor, {}))
    return sorted(levels, key=lambda level: listed.index(str(level)) if listed else level)
