"""A rank that fails ends all ranks, with its reason as the last line. Real processes over gloo."""

import os
import signal
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
from torch import distributed

from qerl_pl.errors import Stopped, UserError
from qerl_pl.runtime import failure_detector
from qerl_pl.runtime.communicator import Communicator
from qerl_pl.runtime.failure_detector import FailureDetector


def end_with_a_fault(rank: int, fault: str, port: int, errors: Path) -> None:
    """One of three ranks: every collective of a Communicator once, then the fault."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    if fault.startswith("freeze"):  # else a rank that nobody tells of is waited for longer than the test does
        failure_detector.PATIENCE = 6.0

    def listening() -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

    distributed.init_process_group("gloo", rank=rank, world_size=3)
    communicator = Communicator(rank, 3, distributed.new_group(backend="gloo"))
    ports = listening()
    detector = FailureDetector(communicator, rank, [])
    assert fault != "none" or listening() == ports, "a cluster may open MASTER_PORT alone"
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
            detector.stop(communicator)
            assert not detector._thread.is_alive()  # or Python's end may find it within the store, and abort
            time.sleep(2 * (rank == 1))  # the first rank and its store are gone then
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
        "word": RuntimeError("a gloomy reward of gloo"),
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
    ],
)
def test_a_rank_that_raises_ends_all_with_its_reason(run: Run, fault: str, last: str, found: list[int]) -> None:
    statuses, printed = run(fault)
    assert statuses == found, printed
    assert printed[0].splitlines()[-1].startswith(last)


REMEDY = "; run the command again, training with --resume auto"


@pytest.mark.parametrize(
    ("fault", "lost", "last"),
    [
        ("kill2", 2, "no sign of life for 10 s: killed, or its machine or network is lost"),
        ("kill0", 0, "it is gone: killed, or its machine or network is lost"),  # and with it the store
        ("freeze2", 2, "no sign of life for 6 s: killed, or its machine or network is lost"),
        ("freeze0", 0, "no sign of life for 6 s: killed, or its machine or network is lost"),  # a store without answers
    ],
)
def test_a_rank_that_is_lost_ends_all_with_one_line_that_says_how_to_go_on(
    run: Run, fault: str, lost: int, last: str
) -> None:
    statuses, printed = run(fault)
    assert statuses == [-9 if rank == lost else 1 for rank in range(3)], printed
    told = [[line for line in one.splitlines() if line.startswith("qerl:")] for one in printed]
    line = f"qerl: rank {lost}: {last}{REMEDY}"
    # All are on one machine, whose first process tells; where that is the lost one, the others do.
    assert told == ([[], [line], [line]] if lost == 0 else [[line], [], []])


def watch_a_process(status: int, seconds: float, port: int, errors: Path) -> None:
    """The first rank, which has started a process that ends with `status`; the run ends after `seconds`."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    failure_detector.GRACE = 2.0
    distributed.init_process_group("gloo", rank=0, world_size=1)
    communicator = Communicator(0, 1, distributed.new_group(backend="gloo"))
    child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    detector = FailureDetector(communicator, 0, [child])
    time.sleep(seconds)
    detector.stop(communicator)
    sys.exit(detector.join())


@pytest.mark.parametrize(
    ("status", "seconds", "last", "found"),
    [
        (0, 60, "qerl: rank 1: its process ended before the run did", 1),
        (3, 60, "qerl: rank 1: its process ended with status 3", 3),
        (0, 1, None, 0),  # the run ends soon after
    ],
)
def test_a_process_that_ends_before_the_run_ends_it(
    tmp_path: Path, status: int, seconds: int, last: str | None, found: int
) -> None:
    errors = tmp_path / "parent.log"
    process = processes().Process(target=watch_a_process, args=(status, seconds, free_port(), errors))
    process.start()
    process.join(timeout=50)
    process.kill()
    printed = errors.read_text()
    lines = [line for line in printed.splitlines() if line.startswith("qerl:")]
    assert process.exitcode == found and lines == ([f"{last}{REMEDY}"] if last else []), printed
