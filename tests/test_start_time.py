"""The benchmark of a start: what it times exists, starts follow each other, and its table adds up."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import start_time
from pages import rows


def test_what_is_timed_is_there_and_has_a_row() -> None:
    timed = start_time.functions()
    assert all(callable(getattr(owner, name)) for owner, name, _ in timed)
    of_vllm = {"settings", "profile"}
    of_the_run = {"imports", "configured", "rollout"}
    assert {phase for *_, phase in timed} | of_vllm | of_the_run == set(start_time.PHASES)


def test_seconds_of_calls_add_up_and_errors_pass() -> None:
    class Owner:
        @staticmethod
        def work(fail: bool) -> int:
            if fail:
                raise ValueError("no")
            return 7

    seconds: dict[str, float] = {}
    after: list[float] = []
    start_time.timed(Owner, "work", "phase", seconds, lambda: after.append(seconds["phase"]))
    assert Owner.work(False) == 7 and len(after) == 1
    with pytest.raises(ValueError, match="no"):
        Owner.work(True)
    assert seconds["phase"] > after[0] and len(after) == 1


def test_starts_go_on_from_each_other_with_the_caches_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start_run").mkdir()
    (tmp_path / "start_caches" / "old").mkdir(parents=True)
    started: list[tuple[int, str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        told = json.loads(command[-1])
        assert not (tmp_path / "start_caches" / "old").exists() and not (tmp_path / "start_run").exists()
        started.append((told["steps"], env["VLLM_CACHE_ROOT"]))
        if len(started) < 3:
            found = {"imports": 4.0, "launch": 5.0 / len(started), "names": 1.0, "whole": 12.0, "process": 8.0}
            Path(told["times"]).write_text(json.dumps(found))

    monkeypatch.setattr(start_time, "subprocess", SimpleNamespace(run=run, STDOUT=None))
    args = argparse.Namespace(shape="tiny", device="cpu", starts=3, tokens=8, out=tmp_path)
    with pytest.raises(SystemExit, match=r"start 3 did not get to its first rollout: see .*start_3\.log"):
        start_time.measure(args, tmp_path / "base")
    assert [steps for steps, _ in started] == [1, 2, 3] and len({cache for _, cache in started}) == 1
    shown = {row[0]: row[1:] for row in rows((tmp_path / "start_time_tiny.md").read_text())}
    assert shown["engine"] == ["5.00", "2.50"] and shown["check of vLLM's names, imports of its workers"][0] == "1.00"
    assert shown["the rest"] == ["3.00", "5.50"]  # what is indented counts once
