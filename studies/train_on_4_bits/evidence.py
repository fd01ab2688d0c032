"""The page of a study's results, generated from its rows."""

from collections.abc import Mapping, Sequence
from os.path import relpath
from pathlib import Path

from benchmarks import report
from qerl_pl.errors import UserError
from qerl_pl.runtime.files import atomic_write
from studies.train_on_4_bits import pictures, tables
from studies.train_on_4_bits.claims import Row
from studies.train_on_4_bits.findings import CEILING, Result, findings, strata
from studies.train_on_4_bits.opening import opening, with_effects
from studies.train_on_4_bits.plan import Level, Plan

METHODS = (
    "Means with half the width of their 95 % intervals. The mismatch is the mean absolute difference of the sampled "
    "tokens' log-probabilities, trainer against sampler. Noise adds to it."
)


def write_evidence(plan: Plan, rows: Sequence[Row], pages: Path, raw: Path) -> Path:
    """Write a study's page (NAME.md for NAME.yaml) and its plots.

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
    results = findings(plan, rows)
    stem = plan.path.stem
    title = (
        "Differences in accuracy with 95 % intervals, the first of the table; green: the claim holds, red: it does not "
        "hold, light: at its ceiling"
    )
    differences = _image(title, pictures.forest(plan, results, pages / f"{stem}-claims.png"))
    curves = []
    for stratum in strata(plan):
        path = pages / ("-".join([stem, *map(str, stratum.values())]) + ".png")
        curves += _image(pictures.caption(plan, stratum), pictures.curves(plan, rows, stratum, path))
    text = [f"# {plan.title}", *opening(plan, rows, results), "## The study", _head(plan, rows, pages, raw)]
    text += [_verdicts(results), *differences, tables.differences(plan, results), *tables.sweeps(plan, rows)]
    text += ["## Curves", *curves, "## Methods", METHODS, tables.method_table(plan, rows)]
    text += ["## Hardware and versions", _where(rows)]
    page = pages / f"{stem}.md"
    atomic_write(page, ("\n\n".join(text) + "\n").encode())
    return page


def _image(title: str, name: str | None) -> list[str]:
    return [f"![{title}]({name})"] if name else []


def _head(plan: Plan, rows: Sequence[Row], pages: Path, raw: Path) -> str:
    def link(path: Path) -> str:
        return f"[{path.name}]({relpath(path.resolve(), pages.resolve())})"

    diverged = sum(row["ended"] == "diverged" for row in rows)
    units = " and ".join(f"{len({row['levels'][factor] for row in rows})} {factor}s" for factor in plan.units)
    short = _stopped(plan, rows)
    gaps = f"\n{short} were interrupted and lack the points of the interrupted rollout." if short else ""
    planned = (
        f"\n\nThe study was [planned]({relpath((plan.path.parent / plan.preregistered).resolve(), pages.resolve())}) "
        "before its runs."
        if plan.preregistered
        else ""
    )
    averaged = f", averaged within each {plan.units[0]}" if len(plan.units) > 1 else ""
    near = f", or if it lies within ±{plan.negligible} for an accuracy" if plan.negligible else ""
    return f"""{plan.note}{planned}

{len(rows)} of {len(plan.runs)} runs of {link(plan.path)} have finished, with {units}; {diverged} diverged (a loss
that is not finite).{gaps} This page is generated from {link(raw)}, one line per run, by
`python -m studies.train_on_4_bits report`; `python -m studies.train_on_4_bits run` trains missing runs.

Held-out accuracy is `{plan.measure}`.
Differences are paired by {" and ".join(plan.units)}: the two runs of a pair share adapter initialization, sampling
seeds, noise seeds and data order. Intervals are 95 % Student's t intervals over {plan.units[0]}s{averaged}. Beside them
stand those of Holm's procedure over all differences of the page{_exempt(plan)}, each at the confidence of its step: one
excludes the claim's bound if and only if the procedure rejects.

A difference **holds** if its interval lies on the claimed side, and **does not hold** if it lies on the other{near}.
For a policy, a claim holds if all its differences hold, and does not hold if one does not. It is **mixed** if it holds
for one policy and does not for another. All else is **undecided**, as is a difference that was not measured; the
minimum detectable effect has power 0.8 in a two-sided test at 0.05, at the measured spread.
Growth of the reward is its least-squares slope over the first half of the rollouts: rewards flatten later, and a slope
uses every rollout. A policy whose reference is at its ceiling (above {CEILING} at half of the run) decides nothing."""


def _exempt(plan: Plan) -> str:
    return " but the preregistered outcome" if plan.preregistered else ""


def _stopped(plan: Plan, rows: Sequence[Row]) -> int:
    """Number of runs with fewer points than the longest run of their stratum."""
    lengths: dict[tuple[Level, ...], list[int]] = {}
    for row in rows:
        if row["ended"] == "done":
            lengths.setdefault(tuple(row["levels"][factor] for factor in plan.strata), []).append(row["rollouts"])
    return sum(length < max(counts) for counts in lengths.values() for length in counts)


def _verdicts(results: Sequence[Result]) -> str:
    rows = [[one.claim.text, with_effects(one.verdict, one), one.adjusted_verdict] for one in results]
    return "## Verdicts\n\n" + report.markdown(["claim", "verdict", "with Holm"], rows)


def _where(rows: Sequence[Row]) -> str:
    """Number of runs per combination of hardware, versions and commit."""
    counts: dict[str, int] = {}
    for row in rows:
        where: Mapping[str, Level] = {name: value for name, value in row["where"].items() if name != "values"}
        line = ", ".join(f"{name} {value}" for name, value in where.items())
        counts[line] = counts.get(line, 0) + 1
    lines = [f"- {count} runs: {line}" for line, count in counts.items()]
    hours = sum(row["wall_s"] for row in rows) / 3600
    lines.append(f"- {hours:.1f} process hours in total, including startup and validation")
    if all("at_once" in row["where"] for row in rows):
        minutes = sum(row["wall_s"] / row["where"]["at_once"] for row in rows) / 60
        lines.append(f"- about {minutes:.0f} GPU minutes: each run's time divided by the runs that shared its GPU")
    return "\n".join(lines)
