"""Tables of a study's page: differences, sweeps, methods."""

from collections.abc import Mapping, Sequence

from benchmarks import report
from studies.train_on_4_bits.claims import (
    ACCURACY,
    ENTROPY,
    GAIN,
    GROWTH,
    MISMATCH,
    REWARD,
    SILENT,
    START,
    Row,
    Statistic,
    other,
)
from studies.train_on_4_bits.findings import (
    Levels,
    Result,
    Unit,
    at,
    by_unit,
    interval_of,
    less,
    methods,
    strata,
    unit_of,
)
from studies.train_on_4_bits.pictures import of, ordered, sides
from studies.train_on_4_bits.plan import Level, Plan

NOT_ALONE = "Seconds and GiB: no row says that its run had the GPU to itself, so that they are left out."


def differences(plan: Plan, results: Sequence[Result]) -> str:
    """Every difference with its interval and the one of Holm's procedure."""
    rows, unmeasured = list[list[str]](), dict[str, int]()
    for result in results:
        for one in result.findings:
            interval = one.difference
            if interval is None:
                unmeasured[result.claim.name] = unmeasured.get(result.claim.name, 0) + 1
                continue
            name = sides(plan, one.contrast) + of(plan, one.stratum)
            adjusted = f"[{one.adjusted.low:+.3f}, {one.adjusted.high:+.3f}]" if one.adjusted else "-"
            effect = f"{interval.detectable_effect:.3f}" if interval.count > 1 else "-"
            cells = [one.contrast.statistic.label, str(interval), adjusted, str(interval.count), effect]
            rows.append([result.claim.name, name, *cells, one.verdict, one.adjusted_verdict])
    text = "## Differences"
    if rows:
        headers = ["claim", "difference", "metric", "mean [95 %]", "Holm", f"{plan.units[0]}s"]
        headers += ["minimum detectable effect", "verdict", "with Holm"]
        text += "\n\n" + report.markdown(headers, rows)
    if unmeasured:
        counts = ", ".join(f"{count} of {name}" for name, count in unmeasured.items())
        text += f"\n\nNot measured: {counts}."
    return text


def sweeps(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """A table of the final accuracy for each swept factor, with a row of the same method without noise."""
    tables = []
    for factor in plan.defaults:
        if factor in ("method", *plan.units, *plan.strata):
            continue
        levels = ordered(plan, factor, {run.levels[factor] for run in plan.runs})
        table = [
            row
            for stratum in strata(plan)
            for method in methods(plan)
            for row in _sweep(plan, rows, {**stratum, "method": method}, factor, levels)
        ]
        if table:
            headers = ["method", factor, f"{plan.units[0]}s", ACCURACY.label, "less the default"]
            tables += [f"### {factor}", report.markdown(headers, table)]
    return ["## Sweeps", *tables] if tables else []


def _sweep(plan: Plan, rows: Sequence[Row], levels: Levels, factor: str, swept: Sequence[Level]) -> list[list[str]]:
    """Rows of one method and stratum; empty if it has a single level."""
    stratum = {name: level for name, level in levels.items() if name != "method"}
    name, method = plan.label("method", levels["method"]) + of(plan, stratum), str(levels["method"])
    values = {level: by_unit(plan, rows, {**levels, factor: level}, ACCURACY) for level in swept}
    points = {_level(plan, factor, level): measured for level, measured in values.items() if measured}
    if len(points) < 2:
        return []
    quiet = method.removesuffix("_aqn")
    if quiet != method and (without := by_unit(plan, rows, {**levels, "method": quiet}, ACCURACY)):
        points = {f"without noise ({plan.label('method', quiet)})": without, **points}
    base, table = values.get(plan.defaults[factor], {}), list[list[str]]()
    for label, measured in points.items():
        mean, change = interval_of(plan, measured), interval_of(plan, less(measured, base))
        assert mean is not None
        span = f"{mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}]" if mean.count > 1 else f"{mean.mean:.3f}"
        table.append([name, label, str(mean.count), span, "-" if change is None or measured is base else str(change)])
    return table


def _level(plan: Plan, factor: str, level: Level) -> str:
    return plan.labels.get(factor, {}).get(str(level), str(level))


def method_table(plan: Plan, rows: Sequence[Row]) -> str:
    """Mean of each metric of each method, with the half-width of its interval.

    Accuracies have columns of their start and gain where a run was validated before training.
    """
    tags = [other(plan.measure, metric) for metric in ("accuracy", "pass@1")]
    measured = {tag for row in rows for tag in row["held_out"]}
    measures = [plan.measure, *(tag for tag in tags if tag != plan.measure and tag in measured)]
    measures += _largest_k(plan, measured) + _other_samplings(plan, measured)
    headers, accuracies = ["method", f"{plan.units[0]}s"], list[tuple[str, Statistic]]()
    for measure in measures:
        if any(START.of(row, measure) is not None for row in rows):
            headers += [f"{measure} before", "after", "gain"]
            accuracies += [(measure, one) for one in (START, ACCURACY, GAIN)]
        else:
            headers.append(measure)
            accuracies.append((measure, ACCURACY))
    headers += ["reward", "growth", "sampler entropy", "groups without signal", "mismatch (nats)"]
    timed = any(map(alone, rows))
    headers += ["seconds", "peak GiB"] if timed else []
    table = []
    for stratum in strata(plan):
        for method in methods(plan):
            levels = {**stratum, "method": method}
            runs = {unit_of(plan, row): row for row in at(plan, rows, levels)}
            if runs:
                count = len({unit[:1] for unit in runs})
                curves = [(plan.measure, statistic) for statistic in (REWARD, GROWTH, ENTROPY, SILENT, MISMATCH)]
                cells = [
                    mean(plan, {unit: statistic.of(row, measure) for unit, row in runs.items()}, statistic.format_spec)
                    for measure, statistic in (*accuracies, *curves)
                ]
                cells += cost(plan, rows, levels) if timed else []
                table.append([plan.label("method", method) + of(plan, stratum), count, *cells])
    return report.markdown(headers, table)


def _largest_k(plan: Plan, tags: set[str]) -> list[str]:
    """The tag of pass@k for the largest k > 1 that the runs measured, in a list; empty if none did."""
    stem = other(plan.measure, "pass@")
    ks = {int(tag.removeprefix(stem)) for tag in tags if tag.startswith(stem)} - {1}
    return [f"{stem}{max(ks)}"] if ks else []


def _other_samplings(plan: Plan, tags: set[str]) -> list[str]:
    """The tags of pass@1 by other samplings in the same evaluation, such as val/cool_pass@1."""
    where = plan.measure.rpartition("/")[0]
    return sorted(tag for tag in tags if tag.rpartition("/")[0] == where and tag.endswith("_pass@1"))


def mean(plan: Plan, values: Mapping[Unit, float | None], format_spec: str) -> str:
    """Mean of one value per unit with the half-width of its interval."""
    interval = interval_of(plan, {unit: value for unit, value in values.items() if value is not None})
    if interval is None:
        return "-"
    half_width = f" ± {interval.high - interval.mean:{format_spec}}" if interval.count > 1 else ""
    return f"{interval.mean:{format_spec}}{half_width}"


def alone(row: Row) -> bool:
    """Whether a run's row says that it had the GPU to itself."""
    return row["where"].get("gpu") != "none" and row["where"].get("at_once") == 1


def cost(plan: Plan, rows: Sequence[Row], levels: Levels) -> tuple[str, str]:
    """Seconds of rollouts and updates and peak GiB at these levels, of runs that had the GPU to themselves."""
    runs = {unit_of(plan, row): row for row in at(plan, rows, levels) if alone(row)}
    seconds = {unit: row["seconds"][-1] if row["seconds"] else None for unit, row in runs.items()}
    return mean(plan, seconds, ".0f"), mean(plan, {unit: row["peak_gib"] for unit, row in runs.items()}, ".2f")
