"""A rank that fails ends all ranks, with its reason as the last line. Real processes over gloo."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from fit_helpers import free_port, processes
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import distributed

from qerl_pl.errors import Stopped, UserError
from qerl_pl.runtime import failure_detector
from qerl_pl.runtime.communicator import Communicator
from qerl_pl.runtime.failure_detector import LOST, FailureDetector
from qerl_pl.runtime.strategy import UnobservedLauncher, signal_at_end_of_launcher


def end_with_a_fault(rank: int, fault: str, port: int, errors: Path) -> None:
    """One of three ranks: every collective of a Communicator once, then the fault."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    if fault.startswith("freeze"):  # else a rank that nobody tells of is waited for longer than the test does
        failure_detector.HEARTBEAT_TIMEOUT_S = 15.0

    def listening() -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

    distributed.init_process_group("gloo", rank=rank, world_size=3)
    communicator = Communicator(rank, 3, distributed.new_group(backend="gloo"))
    ports = listening()
    detector = FailureDetector(communicator, rank, [])
    assert fault != "none" or listening() == ports, "a cluster may open MASTER_PORT alone"
    assert communicator.all_gather(rank) == [0, 1, 2]
    with pytest.raises(UserError) as caught:
        communicator.require_same({"base model": "x", "data": rank // 2})
    assert str(caught.value).startswith("every rank must have the same data; got 1 on rank 2 and 0 on rank 0;")
    a, b = torch.full((2,), float(rank)), torch.full((3, 1), 10.0 * rank)
    communicator.all_reduce([a, b])
    assert a.tolist() == [3.0, 3.0] and b.flatten().tolist() == [30.0] * 3
    alone = torch.full((2,), float(rank))  # summed where it is, without a copy
    communicator.all_reduce([alone])
    assert alone.tolist() == [3.0, 3.0]
    try:
        if fault == "none":
            detector.stop()
            assert not detector._thread.is_alive()  # or Python's end may find its thread within gloo
            time.sleep(2 * (rank == 1))  # the first rank is gone then
            return
        if fault.endswith(str(rank)):
            act(fault[:-1])
        communicator.barrier()  # one rank never comes
    except (Exception, Stopped) as error:
        detector.failed(error)
        print(f"qerl: {error}", file=sys.stderr)
        sys.exit(2)


def act(fault: str) -> None:
    """The fault of one rank."""
    if fault in ("kill", "freeze"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault])
        return
    raise {
        "raise": UserError("a rule; got something; a remedy"),
        "stop": Stopped(signal.SIGTERM),
        "bug": ZeroDivisionError("division by zero"),
        "word": RuntimeError("a gloomy reward of gloo \ud800" + 900 * "\U0001f600"),  # longer than a message
    }[fault]


Run = Callable[[str], tuple[list[int | None], list[str]]]

FAULTS = ("none", "raise1", "raise0", "stop1", "bug2", "word1", "kill2", "kill0", "freeze2", "freeze0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Exit statuses of three ranks by their fault, and what each printed on standard error.

    All run at once, as they wait most of the time.
    """
    ranks, errors = {}, {}
    for fault in FAULTS:
        folder, port = tmp_path_factory.mktemp(fault), free_port()
        errors[fault] = [folder / f"rank{rank}.log" for rank in range(3)]
        arguments = [(rank, fault, port, errors[fault][rank]) for rank in range(3)]
        ranks[fault] = [processes().Process(target=end_with_a_fault, args=one) for one in arguments]
        for process in ranks[fault]:
            process.start()

    def of(fault: str) -> tuple[list[int | None], list[str]]:
        for rank in sorted(range(3), key=lambda rank: fault == f"freeze{rank}"):  # that one ends when it is killed
            if fault == f"freeze{rank}":
                ranks[fault][rank].kill()
            ranks[fault][rank].join(timeout=800)
        return [process.exitcode for process in ranks[fault]], [path.read_text() for path in errors[fault]]

    yield of
    for process in chain(*ranks.values()):
        process.kill()


def test_ranks_that_end_together_are_no_failure(run: Run) -> None:
    statuses, printed = run("none")
    assert statuses == [0, 0, 0], printed


@pytest.mark.parametrize(
    ("fault", "last", "found"),
    [
        ("raise1", "qerl: rank 1: a rule; got something; a remedy", [2, 2, 2]),
        ("raise0", "qerl: a rule; got something; a remedy", [2, 2, 2]),
        ("stop1", "qerl: rank 1: stopped by SIGTERM", [143, 143, 143]),
        ("bug2", "qerl: rank 2: ZeroDivisionError: division by zero", [1, 1, 1]),
        ("word1", "qerl: rank 1: RuntimeError: a gloomy reward of gloo", [1, 1, 1]),
    ],
)
def test_a_rank_that_raises_ends_all_with_its_reason(run: Run, fault: str, last: str, found: list[int]) -> None:
    statuses, printed = run(fault)
    assert statuses == found, printed
    assert printed[0].splitlines()[-1].startswith(last)


@pytest.mark.parametrize(("fault", "lost"), [("kill2", 2), ("kill0", 0), ("freeze2", 2), ("freeze0", 0)])
def test_a_rank_that_is_lost_ends_all_with_one_line_that_says_how_to_go_on(run: Run, fault: str, lost: int) -> None:
    statuses, printed = run(fault)
    assert statuses == [-9 if rank == lost else 1 for rank in range(3)], printed
    told = [[line for line in one.splitlines() if line.startswith("qerl:")] for one in printed]
    # All are on one machine, whose first process tells; where that is the lost one, the next does.
    line = f"qerl: rank {lost}: {LOST}"
    assert told == ([[], [line], []] if lost == 0 else [[line], [], []])


def start_one(program: str, errors: Path) -> None:
    """A launcher whose process runs the program; the ranks meet after a while if it sleeps."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stderr.fileno())
    launcher = UnobservedLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen([sys.executable, "-c", program])]
    if "sleep" in program:
        threading.Timer(2.5, launcher.have_met.set).start()
    launcher._observe_start()
    launcher.procs[0].kill()


@pytest.mark.parametrize(
    ("program", "reason", "status"),
    [
        ("", "status 0", 1),
        ("raise SystemExit(2)", "status 2", 2),
        ("import os; os.kill(os.getpid(), 9)", "status -9", 1),
        ("import time; time.sleep(60)", None, 0),
    ],
)
def test_a_process_that_ends_before_the_ranks_have_met_ends_the_run(
    tmp_path: Path, program: str, reason: str | None, status: int
) -> None:
    errors = tmp_path / "errors.log"
    launcher = processes().Process(target=start_one, args=(program, errors))
    launcher.start()
    launcher.join(timeout=800)
    launcher.kill()
    printed = errors.read_text()
    expected = [f"qerl: rank 1: its process ended with {reason} at the start; run the command again"] if reason else []
    assert launcher.exitcode == status and printed.splitlines()[-1:] == expected, printed


def start_a_rank(end: str, alive: Connection) -> None:
    """A launcher that ends, and its process, which lives as long as the connection is open, unless it ends before."""
    process, ready = os.getpid(), multiprocessing.Pipe()
    if os.fork():
        ready[0].recv()
        os.kill(process, getattr(signal, end))
    os.environ |= {"QERL_LAUNCHER_PID": str(process)}
    signal_at_end_of_launcher(signal.SIGKILL)
    ready[1].send("")
    time.sleep(60.0)
    alive.send("left behind")
    os._exit(0)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_process_ends_with_its_launcher_before_the_ranks_have_met(end: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    launcher = processes().Process(target=start_a_rank, args=(end, theirs))
    launcher.start()
    theirs.close()
    with pytest.raises(EOFError):  # nobody has the other end any more
        ours.recv()
    launcher.join()


@pytest.mark.parametrize(("told", "ends"), [("", False), ("its own", False), ("a launcher that is gone", True)])
def test_a_process_whose_launcher_has_gone_ends_at_once(told: str, ends: bool) -> None:
    process = os.fork()
    if not process:
        os.environ["QERL_LAUNCHER_PID"] = {"": str(os.getppid()), "its own": str(os.getpid())}.get(told, "1")
        signal_at_end_of_launcher(signal.SIGKILL)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == ends
