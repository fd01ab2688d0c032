"""The processor and the versions in a checkpoint, the warning of a run that goes on with others."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from tiny_run import Tiny, trainer_of

from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.callbacks.resume import MACHINE_KEY, _warn_of_another_machine
from qerl_pl.runtime.machine import machine_of

CPU = torch.device("cpu")


def resume(folder: Path, changed: dict[str, str], steps: int = 4) -> None:
    """Go on from the second step of a run whose checkpoint says something else of its machine."""
    path = folder / "checkpoints" / "step=2.ckpt"
    trainer_of(folder, ResumeCheckpoint(2, 9), max_steps=2).fit(Tiny())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[MACHINE_KEY] |= changed
    trainer = trainer_of(folder, ResumeCheckpoint(2, 9), max_steps=steps)
    trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, path)
    trainer.fit(Tiny(), ckpt_path=str(path), weights_only=True)
    assert trainer.global_step == steps


def test_a_checkpoint_has_the_processor_and_the_versions_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    machine = machine_of(CPU)
    assert machine["processor"] == f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    assert machine["torch"] == version("torch") and machine["qerl-pl"] == version("qerl-pl")
    assert "peft" not in machine


def test_a_run_that_goes_on_elsewhere_says_what_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resume(tmp_path, {"processor": "NVIDIA H100 80GB HBM3", "torch": "2.11.0"})
    now = machine_of(CPU)
    assert [message for message in caplog.messages if "goes on" in message] == [
        "this run goes on elsewhere, so that its results may be rounded otherwise: processor was NVIDIA H100 80GB HBM3 "
        f"and is {now['processor']}; torch was 2.11.0 and is {now['torch']}"
    ]


def test_a_package_that_is_gone_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("qerl_pl.runtime.machine.version", absent)
    _warn_of_another_machine({"vllm": "0.30.0"}, CPU)
    assert caplog.messages[0].endswith(": vllm was 0.30.0 and is missing")


def test_a_run_on_the_same_machine_and_one_of_an_older_checkpoint_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resume(tmp_path, {})
    _warn_of_another_machine({}, CPU)
    assert not [message for message in caplog.messages if "goes on" in message]
