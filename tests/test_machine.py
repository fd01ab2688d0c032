"""The processor and the versions that a report names."""

import sys
from importlib.metadata import version

import pytest
import torch

from qerl_pl.runtime.machine import machine_of

CPU = torch.device("cpu")


def test_a_report_has_the_processor_and_the_versions_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    machine = machine_of(CPU)
    assert machine["processor"] == f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    assert machine["torch"] == version("torch") and machine["qerl-pl"] == version("qerl-pl")
    assert "peft" not in machine
