"""What a study keeps and refuses: rows of several processes, runs of another policy, a signal at any moment."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from studies.sweep import rows
from studies.sweep.__main__ import main
from studies.sweep.plan import Plan, Run
from studies.sweep.rows import add_row, read_rows
from studies.sweep.runner import Limits, Runner
from studies.sweep.tests.test_sweep import plan_of


def runner(plan: Plan, folder: Path, limits: Limits = Limits(), **values: Any) -> Runner:  # noqa: B008
    return Runner(plan, plan.values | values, folder / "runs", folder / "rows.jsonl", limits)


def end(folder: Path, run: Run) -> None:
    """A run's folder as one leaves it whose loss was not finite."""
    (folder / "runs" / run.name / "failed").mkdir(parents=True)
    notes = folder / "runs" / run.name / "study.json"
    if not notes.exists():
        notes.write_text(json.dumps({"digest": run.digest, "wall_s": 1.0}))


class Process:
    """What stands for a run's process."""

    made: list["Process"] = []
    returncode: int | None = 128 + signal.SIGTERM

    def __init__(self, words: list[str], **rest: Any) -> None:
        self.asked = False
        self.made.append(self)

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.asked, self.returncode = True, 128 + signal.SIGTERM

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    monkeypatch.setenv("QERL_COMMIT", "abc")
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(subprocess, "Popen", Process)
    return Process.made


def test_a_lock_that_truncates_its_file_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TruncatingLock(FileLock):
        """As some versions of filelock."""

        def __init__(self, path: Path) -> None:
            path.write_bytes(b"")
            super().__init__(path)

    monkeypatch.setattr(rows, "FileLock", TruncatingLock)
    for name in ("first", "second"):
        add_row(tmp_path / "rows.jsonl", {"run": name})
    assert list(read_rows(tmp_path / "rows.jsonl")) == ["first", "second"]


def test_two_processes_of_a_study_keep_each_others_rows(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for run in plan.runs[:2]:
        end(tmp_path, run)
    first, second = runner(plan, tmp_path), runner(plan, tmp_path)  # both have read the rows: none
    first.work(plan.runs[:1])
    second.work(plan.runs[1:2])
    assert list(read_rows(tmp_path / "rows.jsonl")) == [run.name for run in plan.runs[:2]]


def test_a_row_says_where_its_run_began(
    tmp_path: Path, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    run = plan.runs[0]
    assert runner(plan, tmp_path, Limits(at_once=3)).work([run]).left == [run.name]
    assert runner(plan, tmp_path).work([run]).left == [run.name] and len(processes) == 2
    end(tmp_path, run)
    monkeypatch.setenv("QERL_COMMIT", "def")  # where it ended is not where its row is taken
    assert runner(plan, tmp_path).work([run]).finished == [run.name]
    where = read_rows(tmp_path / "rows.jsonl")[run.name]["where"]
    assert where["values"] == {"size": 8} and where["commit"] == "abc"
    assert where["at_once"] == 3  # the run had company once


def test_every_run_is_asked_to_stop_when_the_signal_comes_between_two_starts(
    tmp_path: Path, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(Process):
        returncode = None

        def __init__(self, words: list[str], **rest: Any) -> None:
            super().__init__(words)
            if len(self.made) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    plan = plan_of(tmp_path)
    runs = [run for run in plan.runs if run.levels["policy"] == "toy"][:5]
    outcome = runner(plan, tmp_path, Limits(at_once=4, grace_s=1.0)).work(runs)
    assert [process.asked for process in processes] == [True, True]  # and no others are begun
    assert sorted(outcome.left) == sorted(run.name for run in runs)


def test_values_may_be_long_or_missing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, set={"data.batch_size": "${nowhere}"})
    run = plan.runs[0]
    assert runner(plan, tmp_path, size={"x": "y" * 300}).work([run]).skipped == {run.name: ["nowhere"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "methd=nvfp4"], "has methd nowhere and not 'nvfp4'"),
        (["--only", "lr=[own, 1e-5]"], "has lr own, large and not '1e-5'"),
        (["--set", "sise=3"], "has size, where and not sise; name one"),
    ],
)
def test_names_that_a_study_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    plan = plan_of(tmp_path)
    folders = ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["run", str(plan.path), *folders, "--devices", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["list", str(plan.path), "--out", str(tmp_path), "--set", "where=x", "--only", "policy=other"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_levels_may_be_named_as_in_the_names_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML reads 3e-05 as a text, 3.0e-05 as a number."""
    factors = {"seed": {"keys": ["seed_everything"]}, "lr": {"keys": ["model.optimizer.lr"]}}
    plan = plan_of(tmp_path, factors=factors, defaults={}, blocks=[{"seed": [0, 1], "lr": [1.0e-5, 3.0e-5, 3.0e-4]}])
    for rates in ("[3e-05, 0.0003]", "[3.0e-5, 3.0e-4]"):
        assert main(["list", str(plan.path), "--out", str(tmp_path), "--only", f"lr={rates}", "seed=[1]"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["seed=1,lr=3e-05", "seed=1,lr=0.0003"]
