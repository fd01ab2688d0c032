"""Trains the runs of a study, several at once; interrupted runs are resumed, finished ones skipped."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import report
from qerl_pl.errors import StopSignals, UserError
from qerl_pl.runtime.files import atomic_write
from studies.sweep.plan import ROOT, Plan, Run
from studies.sweep.rows import add_row, read_rows, row_of

POLL_SECONDS = 0.2
NOTES = "study.json"
"""In a run's folder: the run's digest, hardware and values, and the wall time of its processes so far."""


@dataclass(frozen=True)
class Limits:
    """Concurrency and time limits."""

    devices: Sequence[str] = ("cpu",)
    """GPU numbers, or "cpu"."""
    at_once: int = 1
    """Concurrent runs per device."""
    budget_s: float | None = None
    """Seconds until runs get SIGTERM; each then finishes its step and writes a checkpoint."""
    grace_s: float = 60.0
    """Seconds between SIGTERM and SIGKILL."""


@dataclass
class Outcome:
    """Results of `Runner.work`."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Last line of output, by run name."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Missing values, by run name."""
    left: list[str] = field(default_factory=list)
    """Not started, or interrupted."""

    @property
    def status(self) -> int:
        """Exit status: 1 if a run failed, 75 (try again) if some are left, else 0."""
        return 1 if self.failed else 75 if self.left else 0


@dataclass(frozen=True)
class _Process:
    run: Run
    folder: Path
    slot: tuple[str, int]
    process: "subprocess.Popen[bytes]"
    began: float


class Runner:
    """Trains the unfinished runs of a study.

    Args:
        plan: The study.
        values: Values of the placeholders `${name}`.
        folder: Parent of the run folders.
        results: File of rows; a run with a row is finished.
        limits: Concurrency and time limits.
    """

    def __init__(self, plan: Plan, values: Mapping[str, Any], folder: Path, results: Path, limits: Limits) -> None:
        self.plan = plan
        self.values = values
        self.folder = folder
        self.results = results
        self.limits = limits
        self.outcome = Outcome()
        self._where: dict[str, Any] = report.environment()
        self._rows = read_rows(results)
        self._running: list[_Process] = []
        self._asked = False
        self._stopping: float | None = None
        self._walls: list[float] = []

    def work(self, runs: Sequence[Run]) -> Outcome:
        """Train all unfinished runs.

        Args:
            runs: Runs of the plan, in order.

        Raises:
            UserError: A folder or row belongs to a run with other settings.
        """
        waiting = [run for run in runs if not self._is_done(run)]
        slots = [(device, slot) for slot in range(self.limits.at_once) for device in self.limits.devices]
        began, signals = time.monotonic(), StopSignals(self._on_signal)
        signals.install()
        try:
            while waiting or self._running:
                spent = time.monotonic() - began
                left = None if self.limits.budget_s is None else self.limits.budget_s - spent
                if self._stopping is None and (self._asked or (left is not None and left <= 0)):
                    self._stop()
                if self._stopping is not None or (left is not None and left < self._expected_seconds()):
                    self.outcome.left += [run.name for run in waiting]
                    waiting = []
                for slot in slots:
                    if waiting and not self._asked and slot not in {one.slot for one in self._running}:
                        self._running.append(self._start(waiting.pop(0), slot))
                self._collect()
                if self._stopping is not None and time.monotonic() > self._stopping + self.limits.grace_s:
                    for one in self._running:
                        one.process.kill()
                time.sleep(POLL_SECONDS)
        finally:
            for one in self._running:  # after an exception: leave no process behind
                one.process.terminate()
            signals.restore()
        return self.outcome

    def _expected_seconds(self) -> float:
        """Median wall time of the runs so far: a run that cannot finish in the budget is not started."""
        return statistics.median(self._walls) if self._walls else 0.0

    def _is_done(self, run: Run) -> bool:
        """Whether a run is finished or lacks values; adds a missing row."""
        self._check(run)
        if run.name not in self._rows:
            if missing := run.missing(self.values):
                self.outcome.skipped[run.name] = missing
                return True
            if not _has_ended(self.folder / run.name):
                return False
            self._keep(run)
        self.outcome.finished.append(run.name)
        return True

    def _check(self, run: Run) -> None:
        """Reject a run whose settings differ from those of its row or folder."""
        notes = self._rows.get(run.name) or _notes(self.folder / run.name)
        if notes and notes["digest"] != run.digest:
            raise UserError(
                f"a study's runs keep what they are made of; {run.name} was made otherwise, as {notes['digest']} and "
                f"not {run.digest}; name other files by --out and --folder, or remove that run from them"
            )

    def _where_of(self) -> dict[str, Any]:
        """GPU, versions, commit, and the values that the study's file sets; those of the command line are folders."""
        values = {name: value for name, value in self.values.items() if self.plan.values.get(name) is not None}
        return self._where | {"values": values}

    def _start(self, run: Run, slot: tuple[str, int]) -> _Process:
        folder = self.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        device, slots = slot[0], len(self.limits.devices) * self.limits.at_once
        where = self._where_of() | ({"gpu": "none"} if device == "cpu" else {})
        before = _notes(folder).get("where", {}).get("at_once", 1)  # a run that goes on keeps its busiest time
        where["at_once"] = max(self.limits.at_once, before)
        _note(folder, {"digest": run.digest, "where": where}, 0.0)
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // slots)),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # or accelerator "auto" would use a GPU
        else:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(device)
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "qerl_pl", *run.words(folder, self.values)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach this process only, which stops them
            )
        print(f"{run.name} on {device}", flush=True)
        return _Process(run, folder, slot, process, time.monotonic())

    def _collect(self) -> None:
        """Record the processes that have ended."""
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            wall, status, name = time.monotonic() - one.began, one.process.returncode, one.run.name
            _note(one.folder, {}, wall)
            if _has_ended(one.folder):
                self._walls.append(wall)
                self._keep(one.run)
                self.outcome.finished.append(name)
            elif self._stopping is not None or status in (128 + signal.SIGTERM, -signal.SIGTERM):
                self.outcome.left.append(name)
            else:
                lines = (one.folder / "output.txt").read_text(errors="replace").split("\n")
                self.outcome.failed[name] = next((line for line in reversed(lines) if line.strip()), "")[:300]
            print(f"{name} ended after {wall:.0f} s with status {status}", flush=True)

    def _keep(self, run: Run) -> None:
        folder = self.folder / run.name
        notes = _notes(folder)
        where = notes.get("where") or self._where_of()
        self._rows = add_row(self.results, row_of(run, folder, notes["wall_s"], where))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True  # `work` stops the processes: one may be starting at this moment

    def _stop(self) -> None:
        self._stopping = time.monotonic()
        for one in self._running:
            one.process.terminate()


def visible_devices(device: str) -> str:
    """CUDA_VISIBLE_DEVICES for a process on this GPU, a number among those visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[int(device)] if visible else device


def _read_json(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty if it does not exist."""
    contents: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return contents


def _has_ended(folder: Path) -> bool:
    """Whether a run finished or diverged."""
    learned = any((folder / name).is_dir() for name in ("adapter", "model"))  # written last
    return (folder / "failed").is_dir() or (learned and (folder / "summary.json").is_file())


def _notes(folder: Path) -> dict[str, Any]:
    return _read_json(folder / NOTES)


def _note(folder: Path, changes: Mapping[str, Any], seconds: float) -> None:
    """Update a run's notes and add the wall time of a process."""
    notes = _notes(folder)
    spent = notes.get("wall_s", 0.0) + seconds
    atomic_write(folder / NOTES, json.dumps({**notes, **changes, "wall_s": spent}).encode())
