"""What the corrections between sampler and trainer do while a policy learns long completions.

    python -m benchmarks.study.corrections benchmarks/results/long_answers.jsonl

Writes a table of the runs of `long_answers.yaml`, a row for each method and correction: means over the seeds, with half
the width of their 95 % interval if there are several. A quarter is one of a run's rollouts. The first rollouts of a run
have no noise; sigma is at its largest in those that follow.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.study.claims import Row
from benchmarks.study.intervals import interval
from benchmarks.study.many_samples import machines
from benchmarks.study.plan import read_plan
from benchmarks.study.rows import read_rows

PLAN = Path(__file__).with_name("long_answers.yaml")
NEAR = 0.99
"""Of the largest sigma: rollouts at it differ in how it was measured."""


def quarter(row: Row, curve: str, number: int) -> float:
    """Mean of a curve over one of its four quarters, counted from 0."""
    values = row["curves"][curve]
    return statistics.fmean(values[len(values) * number // 4 : len(values) * (number + 1) // 4])


def without_noise(row: Row, curve: str) -> float:
    """Mean of a curve over the rollouts without noise."""
    values = row["curves"][curve]
    noise = row["curves"].get("noise", [0.0] * len(values))
    return statistics.fmean(value for value, sigma in zip(values, noise, strict=True) if not sigma)


def at_largest_sigma(row: Row, curve: str) -> float | None:
    """Mean of a curve over the rollouts with the largest sigma; None without noise."""
    noise = row["curves"].get("noise", [])
    pairs = zip(row["curves"][curve], noise, strict=False)
    return statistics.fmean(value for value, sigma in pairs if sigma > NEAR * max(noise)) if any(noise) else None


def held_out(row: Row, tag: str) -> float | None:
    """The last measurement on held-out rows; None if there is none."""
    points = row["held_out"].get(tag, [])
    return float(points[-1][1]) if points else None


COLUMNS: dict[str, tuple[Callable[[Row], float | None], str]] = {
    "reward, first quarter": (lambda row: quarter(row, "reward", 0), ".3f"),
    "reward, last quarter": (lambda row: quarter(row, "reward", 3), ".3f"),
    "right numbers, first quarter": (lambda row: quarter(row, "accuracy", 0), ".3f"),
    "right numbers, last quarter": (lambda row: quarter(row, "accuracy", 3), ".3f"),
    "right numbers, held-out rows": (lambda row: held_out(row, "val/reward_accuracy"), ".3f"),
    "tokens, first quarter": (lambda row: quarter(row, "length", 0), ".0f"),
    "tokens, last quarter": (lambda row: quarter(row, "length", 3), ".0f"),
    "weight without noise": (lambda row: without_noise(row, "weight"), ".3f"),
    "weight at the largest sigma": (lambda row: at_largest_sigma(row, "weight"), ".3f"),
    "effective sample size without noise": (lambda row: without_noise(row, "ess"), ".3f"),
    "effective sample size at the largest sigma": (lambda row: at_largest_sigma(row, "ess"), ".3f"),
    "rejected": (lambda row: statistics.fmean(row["curves"]["rejected"]), ".1%"),
}
"""How each is measured, and its format. A rejected token has the weight 0; the effective sample size and the rejected
are shares of the tokens."""


def table(rows: Sequence[Row]) -> str:
    """A row of Markdown for each method and correction, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["levels"]["method"], row["levels"]["correction"]), []).append(row)
    plan, lines = read_plan(PLAN), []
    for (method, correction), runs in groups.items():
        cells = [_mean([measure(row) for row in runs], form) for measure, form in COLUMNS.values()]
        lines.append([plan.label("method", method), f"`{correction}`", len(runs), *cells])
    return report.markdown(["method", "correction", "seeds", *COLUMNS], lines)


def _mean(values: Sequence[float | None], form: str) -> str:
    measured = [value for value in values if value is not None]
    if not measured:
        return "-"
    mean = interval(measured)
    return f"{mean.mean:{form}}" + (f" ± {mean.high - mean.mean:{form}}" if mean.count > 1 else "")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of the runs' rows")
    parser.add_argument("--out", type=Path, default=report.ROOT / "benchmarks" / "results")
    args = parser.parse_args(words)
    rows = list(read_rows(args.rows).values())
    where = machines({key: str(value) for key, value in row["where"].items() if key != "values"} for row in rows)
    results = [row["levels"] | {name: measure(row) for name, (measure, _) in COLUMNS.items()} for row in rows]
    report.write(args.out, args.rows.stem, table(rows), results, where)


if __name__ == "__main__":
    main()
