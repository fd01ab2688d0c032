"""A rank that fails ends all ranks, with its reason as the last line. Real processes over gloo."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
from fit_helpers import free_port, processes
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import distributed

from qerl_pl.errors import Stopped, UserError
from qerl_pl.runtime import strategy
from qerl_pl.runtime.communicator import Communicator
from qerl_pl.runtime.strategy import FailureDetectingLauncher, FailureDetector


def end_with_a_fault(rank: int, fault: str, port: int, errors: Path) -> None:
    """One of three ranks: every collective of a Communicator once, then its fault."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}

    def listening() -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

    distributed.init_process_group("gloo", rank=rank, world_size=3)
    communicator = Communicator(rank, 3, distributed.new_group(backend="gloo"))
    ports = listening()
    detector = FailureDetector(communicator, rank, [])
    assert fault != "none" or listening() == ports, "a cluster may open MASTER_PORT alone"
    for connection in psutil.Process().net_connections("tcp"):  # or a machine that is lost is never noticed
        with socket.socket(fileno=os.dup(connection.fd)) as one:
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 180_000
    assert communicator.all_gather(rank) == [0, 1, 2] and communicator.concatenate([rank] * rank) == [1, 2, 2]
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
            assert not any(thread.is_alive() for thread in detector._threads)  # or Python's end aborts
            time.sleep(2 * (rank == 1))  # the first rank and its store are gone then
            return
        if rank in FAULTS[fault]:
            act(FAULTS[fault][rank])
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
        "word": RuntimeError("a gloomy reward of gloo"),
    }[fault]


Run = Callable[[str], tuple[list[int | None], list[str]]]

FAULTS: dict[str, dict[int, str]] = {
    "none": {},
    **{name: {int(name[-1]): name[:-1]} for name in ("raise1", "raise0", "stop1", "bug2", "word1")},
    **{f"kill{rank}": {rank: "kill"} for rank in range(3)},
    "kill all": dict.fromkeys(range(3), "kill"),
    "kill1 past a frozen one": {1: "kill", 2: "freeze"},
    "raise1 past a frozen one": {1: "raise", 2: "freeze"},
}
"""What ranks do, by name."""


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
        for rank in range(3):
            if FAULTS[fault].get(rank) == "freeze":  # the others, of lower ranks, have ended
                ranks[fault][rank].kill()
            ranks[fault][rank].join(timeout=60)
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
        ("raise1 past a frozen one", "qerl: rank 1: a rule; got something; a remedy", [2, 2, -9]),
    ],
)
def test_a_rank_that_raises_ends_all_with_its_reason(run: Run, fault: str, last: str, found: list[int]) -> None:
    statuses, printed = run(fault)
    assert statuses == found, printed
    assert printed[0].splitlines()[-1].startswith(last)


LOST = "it is gone: killed, or its machine or network is lost"
REMEDY = "; run the command again, training with --resume auto"


@pytest.mark.parametrize(
    ("fault", "told", "found"),
    [
        ("kill2", [2, None, None], [1, 1, -9]),
        ("kill1", [1, None, None], [1, -9, 1]),
        ("kill0", [None, 0, None], [-9, 1, 1]),  # and with it the store; the second process of a machine tells
        ("kill all", [None, None, None], [-9, -9, -9]),
        ("kill1 past a frozen one", [1, None, None], [1, -9, -9]),
    ],
)
def test_a_rank_that_is_lost_ends_all_with_one_line_that_says_how_to_go_on(
    run: Run, fault: str, told: list[int | None], found: list[int]
) -> None:
    statuses, printed = run(fault)
    assert statuses == found, printed
    lines = [[line for line in one.splitlines() if line.startswith("qerl:")] for one in printed]
    assert lines == [[] if rank is None else [f"qerl: rank {rank}: {LOST}{REMEDY}"] for rank in told]


class Launcher(FailureDetectingLauncher):
    """Starts a process that soon ends.

    Args:
        end: Its last statement.
    """

    def __init__(self, end: str) -> None:
        super().__init__(LightningEnvironment(), num_processes=2, num_nodes=1)
        self._end = end

    def _call_children_scripts(self) -> None:
        self.procs = [subprocess.Popen([sys.executable, "-S", "-c", f"import os; {self._end}"])]


def launch(end: str, seconds: float, errors: Path) -> None:
    """The first process of a machine, which waits for the other, or for `seconds`."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    strategy.PAUSE = 0.2
    Launcher(end).launch(time.sleep, seconds)


@pytest.mark.parametrize(
    ("end", "seconds", "last", "found"),
    [
        ("os._exit(0)", 60, "its process ended before the run did", 1),
        ("os._exit(3)", 60, "its process ended with status 3", 3),
        ("os.kill(os.getpid(), 9)", 60, "its process was ended by SIGKILL", 137),
        ("os.abort()", 60, "its process was ended by SIGABRT", 134),
        ("os._exit(0)", 0, None, 0),  # the run ends soon after
    ],
)
def test_a_process_that_ends_before_the_ranks_have_met_ends_the_run(
    tmp_path: Path, end: str, seconds: int, last: str | None, found: int
) -> None:
    errors = tmp_path / "parent.log"
    process = processes().Process(target=launch, args=(end, seconds, errors))
    process.start()
    process.join(timeout=50)
    process.kill()
    printed = errors.read_text()
    lines = [line for line in printed.splitlines() if line.startswith("qerl:")]
    assert process.exitcode == found and lines == ([f"qerl: rank 1: {last}{REMEDY}"] if last else []), printed


def be_killed(file: Path, errors: Path) -> None:
    """The first process of a machine, killed before the ranks have met; the file has the other's number."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    os.environ["QERL_LAUNCHER"] = str(os.getpid())
    child = os.fork()
    if child == 0:
        os.environ["LOCAL_RANK"] = "1"
        FailureDetectingLauncher(LightningEnvironment(), num_processes=2, num_nodes=1).launch(time.sleep, 600)
    file.write_text(str(child))
    act("kill")


def test_a_launched_process_ends_with_its_launcher_before_the_ranks_have_met(tmp_path: Path) -> None:
    process = processes().Process(target=be_killed, args=(tmp_path / "pid", tmp_path / "child.log"))
    process.start()
    process.join(timeout=50)
    child = int((tmp_path / "pid").read_text())
    for _ in range(200):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            assert (tmp_path / "child.log").read_text() == f"qerl: rank 0: {LOST}{REMEDY}\n"
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("an orphan is left")
