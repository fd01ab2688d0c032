"""Jobs of SLURM, by the variables that it sets: its signal, its requeue, and the number of its tasks."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from tiny_run import VALIDATED, Tiny, trainer_of

from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.callbacks.resume import Preempted
from qerl_pl.errors import Stopped, StopSignals, UserError, install_sigusr1_handler, sigusr1_as_sigterm
from qerl_pl.runtime.checks import check_world

JOB = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
USR1 = signal.SIGUSR1


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (USR1, signal.SIGTERM)}
    signal.signal(USR1, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def job_of(patch: pytest.MonkeyPatch, folder: Path, scontrol: str | None = "exit 0", **variables: str) -> Path:
    """A job, and the file with the arguments of its `scontrol`, a script; None for none."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    if scontrol is not None:
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{scontrol}\n')
        program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    for name, value in variables.items():
        patch.setenv(name, value)
    return folder / "asked"


@pytest.mark.parametrize(
    ("at", "limits", "variables", "scontrol", "asked", "warning"),
    [
        (0, {}, {}, "exit 0", "requeue 12\n", None),
        (2, {}, {}, "kill -TERM $PPID", "requeue 12\n", None),  # as SLURM does to requeue
        (5, {}, ARRAY, "exit 0", "requeue 10_3\n", None),
        (VALIDATED, {"limit_val_batches": 2, "val_check_interval": 3}, {}, "exit 0", "requeue 12\n", None),
        (
            2,
            {},
            {},
            "echo no requeue >&2; exit 1",
            "requeue 12\n",
            "requeued (Command '['scontrol', 'requeue', '12']' returned non-zero",
        ),
        (2, {}, {}, None, None, "the job is not requeued ([Errno 2] No such file"),
    ],
)
def test_sigusr1_ends_the_step_saves_and_requeues(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: int,
    limits: dict[str, Any],
    variables: dict[str, str],
    scontrol: str | None,
    asked: str | None,
    warning: str | None,
) -> None:
    file = job_of(monkeypatch, tmp_path, scontrol, **JOB, **variables)
    module, before = Tiny({at: USR1}), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="stopped by SIGUSR1; state saved in ") as stopped:
        trainer_of(tmp_path, ResumeCheckpoint(4), **limits).fit(module)
    done = 3 if at == VALIDATED else at + 1
    assert stopped.value.checkpoint == tmp_path / "checkpoints" / f"step={done}.ckpt"
    assert not list(tmp_path.rglob("hpc_ckpt*")) and signal.getsignal(signal.SIGTERM) == before
    assert (file.read_text() if file.exists() else None) == asked
    assert [warning in text for text in caplog.messages if "requeued" in text] == [True] * (warning is not None)
    resumed = Tiny()
    path = str(stopped.value.checkpoint)
    trainer_of(tmp_path, ResumeCheckpoint(4)).fit(resumed, ckpt_path=path, weights_only=True)
    assert resumed.events == [*range(done, 6)]


def test_sigterm_requeues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = job_of(monkeypatch, tmp_path, **JOB)
    with pytest.raises(Preempted, match="stopped by SIGTERM"):
        trainer_of(tmp_path, ResumeCheckpoint()).fit(Tiny({2: signal.SIGTERM}))
    assert not file.exists()


def test_a_handler_of_ones_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = job_of(monkeypatch, tmp_path, **JOB)
    got: list[int] = []
    signal.signal(USR1, lambda number, frame: got.append(number))
    trainer_of(tmp_path, ResumeCheckpoint()).fit(module := Tiny({2: USR1}))
    assert got == [USR1] and module.events == [*range(6)] and not file.exists()


def test_outside_of_a_job_sigusr1_is_left_alone() -> None:
    install_sigusr1_handler()
    assert signal.getsignal(USR1) == signal.SIG_DFL


def test_sigusr1_is_sigterm_where_nothing_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    install_sigusr1_handler()
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    signal.raise_signal(USR1)
    signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]

    def stop(number: int, frame: Any) -> None:  # of an evaluation
        raise Stopped(number)

    signals = StopSignals(stop)
    signals.install()
    with pytest.raises(Stopped, match="stopped by SIGUSR1"):
        signal.raise_signal(USR1)
    signals.restore()
    assert signal.getsignal(USR1) is sigusr1_as_sigterm


def devices(count: int, nodes: int = 1) -> Callable[[], Trainer]:
    strategy = "auto" if count * nodes == 1 else "ddp"
    settings: dict[str, Any] = {"devices": count, "num_nodes": nodes, "strategy": strategy}
    return lambda: Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)


TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("make", "variables", "message"),
    [
        (
            devices(2),
            {"SLURM_NTASKS": "1"},
            "got 1 for .*devices 2 .*; start it by srun --nodes 1 --ntasks-per-node 2",
        ),
        (devices(1), {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, "got 4 for trainer.devices 1 and"),
        (
            devices(2),
            TORCHRUN | {"WORLD_SIZE": "4"},
            "got 4 for .* by torchrun --nnodes 1 --nproc-per-node 2",
        ),
        (devices(1), TORCHRUN | {"WORLD_SIZE": "2", "SLURM_NTASKS": "1"}, "got 2 for trainer.devices 1"),
        (devices(2), {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}, None),
        (devices(1, 2), {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}, None),
        # A step of a larger job; one where Lightning starts the processes.
        (devices(1), {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}, None),
        (devices(2), {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "interactive"}, None),
        (devices(2), {"SLURM_JOB_ID": "12"}, None),
        (devices(2), TORCHRUN | {"WORLD_SIZE": "2", "SLURM_NTASKS": "1"}, None),
        (devices(2), {}, None),
    ],
)
def test_another_number_of_processes_than_devices_is_refused_and_no_other(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Trainer], variables: dict[str, str], message: str | None
) -> None:
    for name, value in (TASK | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) if message else nullcontext() as raised:
        check_world(make())
    assert raised is None or "\n" not in str(raised.value)
