"""A run's results as one line of JSON, small enough to commit."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.runtime.files import atomic_write
from studies.sweep.plan import Run

POINTS = 60
"""Most points of a curve; longer curves are averaged over intervals of equal length."""
CURVES = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "entropy": "policy/entropy",
    "sampler_entropy": "completions/sampler_entropy",
    "without_signal": "completions/groups_without_signal_frac",
    "dropped": "completions/groups_dropped_frac",
    "length": "completions/length_mean",
    "kl": "policy/kl",
    "grad_norm": "optim/grad_norm",
    "mismatch": "mismatch/logprob_abs_mean",
    "weight": "mismatch/is_weight_mean",
    "ess": "mismatch/ess",
    "rejected": "mismatch/rejected_frac",
    "noise": "aqn/measured_std",
}
SECONDS = ("check", "sync", "rollout", "reward", "update", "sleep", "wait")


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Read rows, by run name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row["run"]: row for row in map(json.loads, lines)}


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write all rows atomically."""
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows.values()]
    atomic_write(path, "".join(lines).encode())


def add_row(path: Path, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Add a row to the file, which other processes may have changed, and return all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):  # not the rows: some versions of filelock empty what they lock
        rows = read_rows(path) | {row["run"]: row}
        write_rows(path, rows)
    return rows


def row_of(run: Run, folder: Path, wall_seconds: float, where: dict[str, Any]) -> dict[str, Any]:
    """The row of a finished run.

    Args:
        run: The run.
        folder: Its run folder.
        wall_seconds: Wall time of its processes, including startup and validation.
        where: GPU, versions, commit, and machine-dependent values.
    """
    scalars = _scalars(folder)
    times = [scalars[f"time/{name}_s"] for name in SECONDS if f"time/{name}_s" in scalars]
    rewards = scalars.get("reward/mean", {})
    steps = range(max(rewards, default=-1) + 1)  # a step that an interruption lost is a gap
    seconds, total = [], 0.0
    for step in steps:
        total += sum(time.get(step, 0.0) for time in times)
        seconds.append(total)
    held_out = {tag: values for tag, values in sorted(scalars.items()) if tag.startswith("val/")}
    peak = scalars.get("memory/peak_gib", {})
    return {
        "run": run.name,
        "levels": run.levels,
        "digest": run.digest,
        "ended": "diverged" if (folder / "failed").is_dir() else "done",
        "rollouts": len(rewards),
        "curves": {
            name: compact([scalars[tag].get(step, math.nan) for step in steps])
            for name, tag in CURVES.items()
            if tag in scalars
        },
        "seconds": compact(seconds, last=True),
        "held_out": {
            tag: [[step + 1, _short(value)] for step, value in points.items()] for tag, points in held_out.items()
        },
        "peak_gib": _short(max(peak.values(), default=math.nan)),
        "wall_s": round(wall_seconds, 1),
        "where": where,
    }


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard scalars by tag and step; step -1 is before training."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def compact(values: Sequence[float], points: int = POINTS, last: bool = False) -> list[float | None]:
    """Reduce a curve to at most `points`: means (or last values) over intervals of equal length.

    Values that are not finite are ignored; an interval without finite values is None.
    """
    length = -(-len(values) // points) or 1
    intervals = [values[start : start + length] for start in range(0, len(values), length)]
    means: list[float | None] = []
    for interval in intervals:
        finite = [value for value in interval if math.isfinite(value)]
        means.append(_short((finite[-1] if last else sum(finite) / len(finite)) if finite else math.nan))
    return means


def _short(value: float) -> float | None:
    """Round to five digits; None if not finite, because JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
