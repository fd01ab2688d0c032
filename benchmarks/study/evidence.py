"""The page of a study's results, generated from its rows."""

import statistics
from collections.abc import Mapping, Sequence
from os.path import relpath
from pathlib import Path

from benchmarks import report
from benchmarks.study import pictures
from benchmarks.study.claims import ACCURACY, ENTROPY, GAIN, REWARD, Claim, Row, findings, strata
from benchmarks.study.intervals import interval
from benchmarks.study.plan import Level, Plan
from qerl_pl.errors import UserError
from qerl_pl.persistence.atomic_files import atomic_write


def write_evidence(plan: Plan, rows: Sequence[Row], pages: Path, raw: Path) -> Path:
    """Write a study's page (evidence.md for study.yaml, else evidence-NAME.md) and its plots.

    Args:
        plan: The study.
        rows: Its measured runs.
        pages: Output folder.
        raw: File of the rows; the page links to it.

    Raises:
        UserError: No run of the study has finished.
    """
    names = {run.name for run in plan.runs}
    rows = [row for row in rows if row["run"] in names]
    if not rows:
        raise UserError(f"a report needs finished runs; {raw} has none of {plan.path}; run the study first")
    claims = findings(plan, rows)
    stem = "evidence" if plan.path.stem == "study" else f"evidence-{plan.path.stem}"
    title = "Differences with 95 % intervals; green: the claim holds, red: it does not hold"
    differences = _image(title, pictures.forest(plan, claims, pages / f"{stem}-claims.png"))
    curves = []
    for stratum in strata(plan):
        path = pages / ("-".join([stem, *map(str, stratum.values())]) + ".png")
        title = f"Learning curves{pictures.of(plan, stratum)} with 95 % intervals over seeds"
        curves += _image(title, pictures.curves(plan, rows, stratum, path))
    sweeps = pictures.sweeps(plan, rows, pages / f"{stem}-sweeps.png")
    curves += _image("Sweeps with 95 % intervals over seeds", sweeps)
    text = [_head(plan, rows, pages, raw), _verdicts(claims), *differences, _differences(plan, claims)]
    text += ["## Curves", *curves, "## Methods", _methods(plan, rows), "## Hardware and versions", _where(rows)]
    page = pages / f"{stem}.md"
    atomic_write(page, ("\n\n".join(text) + "\n").encode())
    return page


def _image(title: str, name: str | None) -> list[str]:
    return [f"![{title}]({name})"] if name else []


def _head(plan: Plan, rows: Sequence[Row], pages: Path, raw: Path) -> str:
    def link(path: Path) -> str:
        return f"[{path.name}]({relpath(path.resolve(), pages.resolve())})"

    diverged = sum(row["ended"] == "diverged" for row in rows)
    seeds = len({row["levels"]["seed"] for row in rows})
    short = _stopped(plan, rows)
    gaps = f"\n{short} were interrupted and lack the points of the interrupted rollout." if short else ""
    return f"""# {plan.title}

{plan.note}

{len(rows)} of {len(plan.runs)} runs of {link(plan.path)} have finished, with {seeds} seeds; {diverged} diverged (a loss
that is not finite).{gaps} This page is generated from {link(raw)}, one line per run, by
`python -m benchmarks.study report`; `python -m benchmarks.study run` trains the runs that are missing.

Differences are paired by seed: the two runs of a pair share adapter initialization, sampling seeds, noise seeds and
data order. Intervals are 95 % Student's t intervals over seeds, without correction for multiple comparisons. A claim
**holds** if the interval of each of its differences lies on the claimed side, **does not hold** if at least one lies on
the other side, and is **undecided** otherwise; a difference that was not measured counts as undecided."""


def _stopped(plan: Plan, rows: Sequence[Row]) -> int:
    """Number of runs with fewer points than the longest run of their stratum."""
    lengths: dict[tuple[Level, ...], list[int]] = {}
    for row in rows:
        if row["ended"] == "done":
            lengths.setdefault(tuple(row["levels"][factor] for factor in plan.strata), []).append(row["rollouts"])
    return sum(length < max(counts) for counts in lengths.values() for length in counts)


def _verdicts(claims: Sequence[Claim]) -> str:
    rows = [[claim.text, f"**{claim.verdict}**"] for claim in claims]
    return "## Verdicts\n\n" + report.markdown(["claim", "verdict"], rows)


def _differences(plan: Plan, claims: Sequence[Claim]) -> str:
    rows, unmeasured = list[list[str]](), dict[str, int]()
    for claim in claims:
        for one in claim.findings:
            if one.difference is None:
                unmeasured[claim.name] = unmeasured.get(claim.name, 0) + 1
            else:
                name = pictures.sides(plan, one.contrast) + pictures.of(plan, one.stratum)
                difference = [one.contrast.statistic.label, str(one.difference), str(one.difference.count)]
                rows.append([claim.name, name, *difference, one.verdict])
    text = "## Differences"
    if rows:
        text += "\n\n" + report.markdown(["claim", "difference", "metric", "mean [95 %]", "seeds", "verdict"], rows)
    if unmeasured:
        counts = ", ".join(f"{count} of {name}" for name, count in unmeasured.items())
        text += f"\n\nNot measured: {counts}."
    return text


def _methods(plan: Plan, rows: Sequence[Row]) -> str:
    """Mean over seeds of each metric of each method, with the half-width of its interval."""
    measures = [plan.measure, *_largest_k(plan, rows)]
    headers = ["method", "seeds"]
    for measure in measures:
        headers += [f"{measure} before", "after", "gain"]
    headers += ["reward", "sampler entropy", "groups without signal", "seconds", "peak GiB"]
    table = []
    for stratum in strata(plan):
        for method in pictures.methods(plan):
            measured = pictures.at(plan, rows, {**stratum, "method": method})
            if measured:
                name = plan.label("method", method) + pictures.of(plan, stratum)
                table.append([name, len(measured), *_measured(plan, measured, measures)])
    return report.markdown(headers, table)


def _measured(plan: Plan, measured: Sequence[Row], measures: Sequence[str]) -> list[str]:
    cells = []
    for measure in measures:
        before = [(row["held_out"].get(measure) or [[None, None]])[0][1] for row in measured]
        cells += [_mean(before), *(_mean([one.of(row, measure) for row in measured]) for one in (ACCURACY, GAIN))]
    cells += [_mean([statistic.of(row, plan.measure) for row in measured]) for statistic in (REWARD, ENTROPY)]
    silent = [[value for value in row["curves"].get("without_signal", []) if value is not None] for row in measured]
    cells.append(_mean([statistics.fmean(values) if values else None for values in silent]))
    cells.append(_mean([row["seconds"][-1] if row["seconds"] else None for row in measured], 0))
    return [*cells, _mean([row["peak_gib"] for row in measured], 2)]


def _largest_k(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """The tag of pass@k for the largest k > 1 that the runs measured, in a list; empty if none did."""
    stem = plan.measure.partition("@")[0]
    tags = {tag for row in rows for tag in row["held_out"] if tag.startswith(f"{stem}@") and tag != plan.measure}
    return sorted(tags, key=lambda tag: int(tag.rpartition("@")[2]))[-1:]


def _mean(values: Sequence[float | None], digits: int = 3) -> str:
    finite = [value for value in values if value is not None]
    if not finite:
        return "-"
    mean = interval(finite)
    spread = f" ± {mean.high - mean.mean:.{digits}f}" if mean.count > 1 else ""
    return f"{mean.mean:.{digits}f}{spread}"


def _where(rows: Sequence[Row]) -> str:
    """Number of runs per combination of hardware, versions and commit."""
    counts: dict[str, int] = {}
    for row in rows:
        where: Mapping[str, Level] = {name: value for name, value in row["where"].items() if name != "values"}
        line = ", ".join(f"{name} {value}" for name, value in where.items())
        counts[line] = counts.get(line, 0) + 1
    hours = sum(row["wall_s"] for row in rows) / 3600
    lines = [f"- {count} runs: {line}" for line, count in counts.items()]
    return "\n".join([*lines, f"- {hours:.1f} process hours in total, including startup and validation"])
