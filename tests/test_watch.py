"""A rank that fails ends all ranks, with its reason as the last line. Real processes over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import psutil
import torch
from torch import distributed
from qerl_pl.errors import Stopped, UserError
from qerl_pl.distributed.communicator import Communicator
from qerl_pl.distributed import failure_detector
from qerl_pl.distributed.failure_detector import FailureDetector

rank, fault = int(os.environ["RANK"]), sys.argv[1]
if fault.startswith("freeze"):  # else a rank that nobody tells of is waited for longer than the test does
    failure_detector.PATIENCE = 6.0

def listening():
    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}

distributed.init_process_group("gloo", rank=rank, world_size=3)
communicator = Communicator(rank, 3, distributed.new_group(backend="gloo"))
ports = listening()
detector = FailureDetector(communicator, rank, [])
assert fault != "none" or listening() == ports, "a cluster may open MASTER_PORT alone"
assert communicator.gather(rank) == [0, 1, 2] and communicator.concatenate([rank] * rank) == [1, 2, 2]
try:
    communicator.require_same({"base model": "x", "data": rank // 2})
    raise AssertionError("rank 2 has other data")
except UserError as error:
    assert str(error).startswith("every rank must have the same data; found 1 on rank 2 and 0 on rank 0;")
a, b = torch.full((2,), float(rank)), torch.full((3, 1), 10.0 * rank)
communicator.sum([a, b])
assert a.tolist() == [3.0, 3.0] and b.flatten().tolist() == [30.0] * 3
alone = torch.full((2,), float(rank))  # summed where it is, without a copy
communicator.sum([alone])
assert alone.tolist() == [3.0, 3.0]
try:
    if fault == f"raise{rank}":
        raise UserError("a rule; found something; a remedy")
    if fault == f"stop{rank}":
        raise Stopped(signal.SIGTERM)
    if fault == f"bug{rank}":
        raise ZeroDivisionError("division by zero")
    if fault == f"word{rank}":
        raise RuntimeError("a gloomy reward of gloo")
    if fault == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == f"freeze{rank}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "none":
        detector.stop(communicator)
        assert not detector._thread.is_alive()  # or Python's end may find it within the store, and abort
        time.sleep(2 * (rank == 1))  # the first rank and its store are gone then
        sys.exit(0)
    communicator.wait()  # one rank never comes
except (Exception, Stopped) as error:
    detector.failed(error)
    print(f"qerl: {error}", file=sys.stderr)
    sys.exit(2)
"""


def run(folder: Path, fault: str) -> tuple[list[int], list[str]]:
    """Exit statuses and what each rank printed on standard error."""
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), fault], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    printed = {}
    try:
        for rank in sorted(range(3), key=lambda rank: fault == f"freeze{rank}"):  # that one ends when it is killed
            if fault == f"freeze{rank}":
                processes[rank].kill()
            printed[rank] = processes[rank].communicate(timeout=60)[1]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], [printed[rank] for rank in range(3)]


def test_ranks_that_end_together_are_no_failure(tmp_path: Path) -> None:
    statuses, printed = run(tmp_path, "none")
    assert statuses == [0, 0, 0], printed


@pytest.mark.parametrize(
    ("fault", "last", "found"),
    [
        ("raise1", "qerl: rank 1: a rule; found something; a remedy", [2, 2, 2]),
        ("raise0", "qerl: a rule; found something; a remedy", [2, 2, 2]),
        ("stop1", "qerl: rank 1: stopped by SIGTERM", [143, 143, 143]),
        ("bug2", "qerl: rank 2: ZeroDivisionError: division by zero", [1, 1, 1]),
        ("word1", "qerl: rank 1: RuntimeError: a gloomy reward of gloo", [1, 1, 1]),
    ],
)
def test_a_rank_that_raises_ends_all_with_its_reason(tmp_path: Path, fault: str, last: str, found: list[int]) -> None:
    statuses, printed = run(tmp_path, fault)
    assert statuses == found, printed
    assert printed[0].splitlines()[-1].startswith(last)


REMEDY = "; give the command again, a training with --resume auto"


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
    tmp_path: Path, fault: str, lost: int, last: str
) -> None:
    statuses, printed = run(tmp_path, fault)
    assert statuses == [-9 if rank == lost else 1 for rank in range(3)], printed
    told = [[line for line in one.splitlines() if line.startswith("qerl:")] for one in printed]
    line = f"qerl: rank {lost}: {last}{REMEDY}"
    # All are on one machine, whose first process tells; where that is the lost one, the others do.
    assert told == ([[], [line], [line]] if lost == 0 else [[line], [], []])


CHILD = """
import subprocess, sys, time
from torch import distributed
from qerl_pl.distributed.communicator import Communicator
from qerl_pl.distributed import failure_detector

failure_detector.GRACE = 2.0
distributed.init_process_group("gloo", rank=0, world_size=1)
communicator = Communicator(0, 1, distributed.new_group(backend="gloo"))
child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({sys.argv[1]})"])
detector = failure_detector.FailureDetector(communicator, 0, [child])
time.sleep(float(sys.argv[2]))
detector.stop(communicator)
sys.exit(detector.join())
"""


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
    script = tmp_path / "parent.py"
    script.write_text(CHILD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [sys.executable, str(script), str(status), str(seconds)]
    ended = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=50)
    said = [line for line in ended.stderr.splitlines() if line.startswith("qerl:")]
    assert ended.returncode == found and said == ([f"{last}{REMEDY}"] if last else []), ended.stderr
