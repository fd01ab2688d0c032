"""The page of the claims, written from rows alone."""

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
    """Write a study's page, evidence.md or evidence-NAME.md of another than study.yaml, and its pictures.

    Args:
        plan: The study.
        rows: What was measured of it.
        pages: Folder to write to.
        raw: Where the rows lie, which the page links to.

    Raises:
        UserError: Nothing was measured.
    """
    names = {run.name for run in plan.runs}
    rows = [row for row in rows if row["run"] in names]
    if not rows:
        raise UserError(f"a page needs runs that have ended; {raw} has none of {plan.path}; run the study first")
    found = findings(plan, rows)
    stem = "evidence" if plan.path.stem == "study" else f"evidence-{plan.path.stem}"
    title = "Every difference with its 95 % interval, green where the claim holds, red where it does not"
    differences = _image(title, pictures.forest(plan, found, pages / f"{stem}-claims.png"))
    curves = []
    for stratum in strata(plan):
        path = pages / ("-".join([stem, *map(str, stratum.values())]) + ".png")
        title = f"Curves{pictures.of(plan, stratum)}, bands are 95 % intervals over seeds"
        curves += _image(title, pictures.curves(plan, rows, stratum, path))
    sweeps = pictures.sweeps(plan, rows, pages / f"{stem}-sweeps.png")
    curves += _image("Sweeps, with 95 % intervals over seeds", sweeps)
    text = [_head(plan, rows, pages, raw), _verdicts(found), *differences, _differences(plan, found)]
    text += ["## Curves", *curves, "## Methods", _methods(plan, rows), "## What it was measured with", _where(rows)]
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
    gaps = f"\n{short} were stopped on their way and lack the points of the rollout in which that was." if short else ""
    return f"""# {plan.title}

{plan.note}

{len(rows)} of {len(plan.runs)} runs of {link(plan.path)} have ended, {diverged} of them by a loss that was not finite;
{seeds} seeds.{gaps} This page is written from {link(raw)}, one line a run, by `python -m benchmarks.study report`;
`run` in place of `report` trains what is missing.

Differences are paired by seed, which sets adapter, samples, noise and order, and everything else is the same. The
interval is Student's over the seeds, 95 %, not corrected for the number of differences. A claim **holds** where the
interval of each of its differences lies on its side, **does not hold** where that of one lies on the other, and is
**undecided** otherwise: a difference that was not measured decides nothing."""


def _stopped(plan: Plan, rows: Sequence[Row]) -> int:
    """How many runs have fewer points than the longest that they are compared with."""
    lengths: dict[tuple[Level, ...], list[int]] = {}
    for row in rows:
        if row["ended"] == "done":
            lengths.setdefault(tuple(row["levels"][factor] for factor in plan.strata), []).append(row["rollouts"])
    return sum(length < max(found) for found in lengths.values() for length in found)


def _verdicts(found: Sequence[Claim]) -> str:
    rows = [[claim.text, f"**{claim.verdict}**"] for claim in found]
    return "## Verdicts\n\n" + report.markdown(["claim", "verdict"], rows)


def _differences(plan: Plan, found: Sequence[Claim]) -> str:
    rows, unmeasured = list[list[str]](), dict[str, int]()
    for claim in found:
        for one in claim.findings:
            if one.difference is None:
                unmeasured[claim.name] = unmeasured.get(claim.name, 0) + 1
            else:
                name = pictures.sides(plan, one.part) + pictures.of(plan, one.stratum)
                difference = [one.part.statistic.label, str(one.difference), str(one.difference.count)]
                rows.append([claim.name, name, *difference, one.verdict])
    text = "## Differences"
    if rows:
        text += "\n\n" + report.markdown(["claim", "difference", "of", "mean [95 %]", "seeds", "verdict"], rows)
    if unmeasured:
        counts = ", ".join(f"{count} of {name}" for name, count in unmeasured.items())
        text += f"\n\nNot measured: {counts}."
    return text


def _methods(plan: Plan, rows: Sequence[Row]) -> str:
    """Means over seeds of each method, with half the width of their intervals."""
    measures = [plan.measure, *_largest_k(plan, rows)]
    headers = ["method", "seeds"]
    for measure in measures:
        headers += [f"{measure} before", "after", "gain"]
    headers += ["reward", "sampler's entropy", "groups without signal", "seconds", "peak GiB"]
    table = []
    for stratum in strata(plan):
        for method in pictures.methods(plan):
            found = pictures.at(plan, rows, {**stratum, "method": method})
            if found:
                name = plan.label("method", method) + pictures.of(plan, stratum)
                table.append([name, len(found), *_measured(plan, found, measures)])
    return report.markdown(headers, table)


def _measured(plan: Plan, found: Sequence[Row], measures: Sequence[str]) -> list[str]:
    cells = []
    for measure in measures:
        before = [(row["held_out"].get(measure) or [[None, None]])[0][1] for row in found]
        cells += [_mean(before), *(_mean([one.of(row, measure) for row in found]) for one in (ACCURACY, GAIN))]
    cells += [_mean([statistic.of(row, plan.measure) for row in found]) for statistic in (REWARD, ENTROPY)]
    silent = [[value for value in row["curves"].get("without_signal", []) if value is not None] for row in found]
    cells.append(_mean([statistics.fmean(values) if values else None for values in silent]))
    cells.append(_mean([row["seconds"][-1] if row["seconds"] else None for row in found], 0))
    return [*cells, _mean([row["peak_gib"] for row in found], 2)]


def _largest_k(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """The tag of pass@k for the largest k beyond 1, where the runs have it."""
    stem = plan.measure.partition("@")[0]
    tags = {tag for row in rows for tag in row["held_out"] if tag.startswith(f"{stem}@") and tag != plan.measure}
    return sorted(tags, key=lambda tag: int(tag.rpartition("@")[2]))[-1:]


def _mean(values: Sequence[float | None], digits: int = 3) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    found = interval(known)
    spread = f" ± {found.high - found.mean:.{digits}f}" if found.count > 1 else ""
    return f"{found.mean:.{digits}f}{spread}"


def _where(rows: Sequence[Row]) -> str:
    """Machines, versions and commits, and how many runs each has."""
    counts: dict[str, int] = {}
    for row in rows:
        where: Mapping[str, Level] = {name: value for name, value in row["where"].items() if name != "values"}
        line = ", ".join(f"{name} {value}" for name, value in where.items())
        counts[line] = counts.get(line, 0) + 1
    hours = sum(row["wall_s"] for row in rows) / 3600
    lines = [f"- {count} runs: {line}" for line, count in counts.items()]
    return "\n".join([*lines, f"- {hours:.1f} hours of processes, starts and validations included"])
