"""What is kept of a run: one line of JSON, small enough to be committed."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.study.plan import Run
from qerl_pl.persistence.atomic_files import atomic_write, directory_lock

POINTS = 60
"""Most points of a curve; a longer one is averaged over stretches of equal length."""
CURVES = {
    "reward": "reward/mean",
    "entropy": "policy/entropy",
    "sampler_entropy": "completions/sampler_entropy",
    "without_signal": "completions/groups_without_signal_frac",
    "dropped": "completions/groups_dropped_frac",
    "length": "completions/length_mean",
    "kl": "policy/kl",
    "grad_norm": "optim/grad_norm",
    "mismatch": "mismatch/logprob_abs_mean",
    "noise": "aqn/measured_std",
}
SECONDS = ("check", "sync", "rollout", "reward", "update", "sleep", "wait")


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by the run's name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row["run"]: row for row in map(json.loads, lines)}


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write all rows, whole or not at all."""
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows.values()]
    atomic_write(path, "".join(lines).encode())


def add_row(path: Path, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Add a row to those that are there now, which may be more than this process knew of. All come back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with directory_lock(path.parent, wait=True):
        rows = read_rows(path) | {row["run"]: row}
        write_rows(path, rows)
    return rows


def row_of(run: Run, folder: Path, wall_seconds: float, where: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run that has ended.

    Args:
        run: Which.
        folder: Where it trained.
        wall_seconds: What its processes took, starts and validations included.
        where: GPU, versions, commit, and the values that differ from machine to machine.
    """
    scalars = _scalars(folder)
    times = [scalars[f"time/{name}_s"] for name in SECONDS if f"time/{name}_s" in scalars]
    known = scalars.get("reward/mean", {})
    steps = range(max(known, default=-1) + 1)  # one that was lost where a run was stopped leaves a gap
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
        "rollouts": len(known),
        "curves": {
            name: compact([scalars[tag].get(step, math.nan) for step in steps])
            for name, tag in CURVES.items()
            if tag in scalars
        },
        "seconds": compact(seconds, last=True),
        "held_out": {
            tag: [[step + 1, _short(value)] for step, value in found.items()] for tag, found in held_out.items()
        },
        "peak_gib": _short(max(peak.values(), default=math.nan)),
        "wall_s": round(wall_seconds, 1),
        "where": where,
    }


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows, by tag and step; -1 is before training."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def compact(values: Sequence[float], points: int = POINTS, last: bool = False) -> list[float | None]:
    """A curve of at most so many points: means of stretches of equal length, but for the rest; or their last values.

    Values that are not finite do not count; a stretch of none else is null.
    """
    length = -(-len(values) // points) or 1
    stretches = [values[start : start + length] for start in range(0, len(values), length)]
    found: list[float | None] = []
    for stretch in stretches:
        known = [value for value in stretch if math.isfinite(value)]
        found.append(_short((known[-1] if last else sum(known) / len(known)) if known else math.nan))
    return found


def _short(value: float) -> float | None:
    """Five digits; null where it is none, for JSON knows no nan."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
