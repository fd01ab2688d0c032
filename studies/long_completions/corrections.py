"""What the corrections between sampler and trainer do while a policy learns long completions.

    python -m studies.long_completions.corrections studies/long_completions/long_answers.jsonl

Writes a table of the runs of `long_answers.yaml`, a row for each method and correction: means over the seeds, with half
the width of their 95 % interval if there are several. A quarter is one of a run's rollouts. The first rollouts of a run
have no noise; sigma is at its largest in those that follow.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from studies.four_bits.analysis import with_half_width
from studies.sweep.rows import read_rows

Row = dict[str, Any]
LABELS = {"nvfp4": "NVFP4", "nvfp4_aqn": "NVFP4 + AQN"}
NEAR = 0.99
"""Of the largest sigma: rollouts at it differ in how it was measured."""


def average(values: Iterable[float | None]) -> float:
    """Mean of a curve's points but the gaps that an interruption left."""
    return statistics.fmean(value for value in values if value is not None)


def quarter(row: Row, curve: str, number: int) -> float:
    """Mean of a curve over one of its four quarters, counted from 0."""
    values = row["curves"][curve]
    return average(values[len(values) * number // 4 : len(values) * (number + 1) // 4])


def without_noise(row: Row, curve: str) -> float:
    """Mean of a curve over the rollouts without noise."""
    values = row["curves"][curve]
    noise = row["curves"].get("noise", [0.0] * len(values))
    return average(value for value, sigma in zip(values, noise, strict=True) if not sigma)


def at_largest_sigma(row: Row, curve: str) -> float | None:
    """Mean of a curve over the rollouts with the largest sigma; None without noise."""
    noise = [sigma or 0.0 for sigma in row["curves"].get("noise", [])]
    if not any(noise):
        return None
    pairs = zip(row["curves"][curve], noise, strict=True)
    return average(value for value, sigma in pairs if sigma > NEAR * max(noise))


def at_the_end(row: Row) -> float | None:
    """Share of right solutions for held-out rows; 0 of a run that diverged, None without a measurement."""
    points = row["held_out"].get("val/reward_accuracy", [])
    return 0.0 if row["ended"] == "diverged" else points[-1][1] if points else None


def mean(values: Sequence[float | None], format_spec: str) -> str:
    """Mean with half the width of its 95 % interval over several seeds."""
    found = [value for value in values if value is not None]
    if not found:
        return "-"
    return f"{found[0]:{format_spec}}" if len(found) == 1 else with_half_width(found, format_spec)


COLUMNS: dict[str, tuple[Callable[[Row], float | None], str]] = {
    "reward, first quarter": (lambda row: quarter(row, "reward", 0), ".3f"),
    "reward, last quarter": (lambda row: quarter(row, "reward", 3), ".3f"),
    "right numbers, first quarter": (lambda row: quarter(row, "accuracy", 0), ".3f"),
    "right numbers, last quarter": (lambda row: quarter(row, "accuracy", 3), ".3f"),
    "right numbers, held-out rows": (at_the_end, ".3f"),
    "tokens, first quarter": (lambda row: quarter(row, "length", 0), ".0f"),
    "tokens, last quarter": (lambda row: quarter(row, "length", 3), ".0f"),
    "weight without noise": (lambda row: without_noise(row, "weight"), ".3f"),
    "weight at the largest sigma": (lambda row: at_largest_sigma(row, "weight"), ".3f"),
    "effective sample size without noise": (lambda row: without_noise(row, "ess"), ".3f"),
    "effective sample size at the largest sigma": (lambda row: at_largest_sigma(row, "ess"), ".3f"),
    "rejected": (lambda row: average(row["curves"]["rejected"]), ".1%"),
}
"""How each is measured, and its format. A rejected token has the weight 0; the effective sample size and the rejected
are shares of the tokens."""


def table(rows: Sequence[Row]) -> str:
    """A row of Markdown for each method and correction, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["levels"]["method"], row["levels"]["correction"]), []).append(row)
    lines = []
    for (method, correction), runs in groups.items():
        cells = [mean([measure(row) for row in runs], format_spec) for measure, format_spec in COLUMNS.values()]
        lines.append([LABELS[method], f"`{correction}`", len(runs), *cells])
    return report.markdown(["method", "correction", "seeds", *COLUMNS], lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of the runs' rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(words)
    rows = list(read_rows(args.rows).values())
    where = report.machines({key: str(value) for key, value in row["where"].items() if key != "values"} for row in rows)
    results = [row["levels"] | {name: measure(row) for name, (measure, _) in COLUMNS.items()} for row in rows]
    report.write(args.out, args.rows.stem, table(rows), results, where)


if __name__ == "__main__":
    main()
