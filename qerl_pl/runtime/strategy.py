"""DDP without DistributedDataParallel: one process per device; a rank that fails ends all, with its reason last.

Each rank holds all trained weights and accumulates gradients over its own number of micro-batches; the update
all-reduces them once an optimizer step (`Communicator.all_reduce`). DistributedDataParallel would broadcast every
parameter at the start, shared 4-bit weights included, and synchronise the ranks in every backward pass.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed, nn
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from qerl_pl.errors import Preempted, Stopped, UserError
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator

TIMEOUT = timedelta(days=1)
"""Timeout of collectives: ranks wait for the slowest rollout. `FailureDetector` notices lost ranks long before."""
_FOREVER = timedelta(days=3650)
"""Timeout of the group of Python objects, where the failure detector waits as long as the run takes."""
PAUSE = 3.0
"""Seconds that a process waits for what others do at once: tell a failure, or exit."""
GRACE = 10.0
"""Seconds that a failing process has to close its files."""
_BYTES = 2**15
"""Size of a message: fixed, as a second one would wait for a frozen rank."""
_LAUNCHER = "QERL_LAUNCHER"
"""Variable that tells launched processes the number of their launcher."""


class UnwrappedDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy without its wrapper, with a failure detector."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)
        self.communicator = SINGLE_PROCESS
        """All ranks, once the process group is initialized."""
        self.failure_detector: FailureDetector | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = FailureDetectingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Initialize the process group and start the failure detector."""
        with _port_errors():
            super().setup_environment()
        if self.communicator is SINGLE_PROCESS:
            # Read by each rank's engine and workers; Lightning's launcher sets the other variables only.
            os.environ |= {"RANK": str(self.global_rank), "LOCAL_WORLD_SIZE": str(self.num_processes)}
            self.communicator = Communicator(
                self.global_rank, self.world_size, distributed.new_group(backend="gloo", timeout=_FOREVER)
            )
        if self.failure_detector is None or self.failure_detector.ended:  # by an earlier stage
            assert isinstance(self._launcher, FailureDetectingLauncher)
            self.failure_detector = FailureDetector(self.communicator, self.local_rank, self._launcher.procs)
            self._launcher.met.set()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Set up as on a single device: DDP's setup would broadcast the module's tensors."""
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure to the other ranks, which may wait in a collective."""
        if self.failure_detector is not None:
            self.failure_detector.failed(exception)

    def teardown(self) -> None:
        """End failure detection on all ranks together."""
        super().teardown()
        if self.failure_detector is not None:
            self.failure_detector.stop()

    def finish(self) -> int:
        """Destroy the process group and wait for the launched processes; their exit status."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return 0 if self.failure_detector is None else self.failure_detector.join()


class FailureDetectingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of a process per device, with another observer, until `FailureDetector` observes them.

    Lightning's observer kills the first process, too, with SIGKILL, when another ends: no reason is reported and no
    file is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.met = threading.Event()
        """Set when the ranks have met."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Start the other processes of this machine unless a cluster has started them, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if self.cluster_environment.node_rank() == 0:
                # The process group's store shares this server. Lightning looks up a free port, closes it, and listens
                # there later: another run may take it meanwhile.
                with _port_errors():
                    self._rendezvous = TCPStore(
                        self.cluster_environment.main_address,
                        int(os.environ.get("MASTER_PORT", 0)),  # 0: the system chooses
                        is_master=True,
                        wait_for_workers=False,
                        multi_tenant=True,
                    )
                os.environ["MASTER_PORT"] = str(self._rendezvous.port)
            os.environ[_LAUNCHER] = str(os.getpid())
            self._call_children_scripts()
            for rank, child in enumerate(self.procs, start=self._first_rank + 1):
                threading.Thread(target=self._observe, args=(rank, child), daemon=True).start()
        elif _LAUNCHER in os.environ and self.cluster_environment.local_rank() > 0:
            threading.Thread(target=self._end_with, args=(int(os.environ[_LAUNCHER]),), daemon=True).start()
        return function(*args, **kwargs)

    def _observe(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        """End this process, which waits for the others, if one of them ends before the ranks have met."""
        child.wait()
        if not self.met.wait(PAUSE):
            reason, status = _reason(child)
            _report(rank, reason)
            for other in self.procs:
                other.kill()
            os._exit(status)

    def _end_with(self, launcher: int) -> None:
        """End this process soon after its launcher, as the ranks may not have met, or this one may hang."""
        while os.getppid() == launcher:
            time.sleep(1.0)
        if self.met.is_set():
            time.sleep(PAUSE)  # the failure detector reports
        elif self.cluster_environment.local_rank() == 1:
            _report(self._first_rank, _reason(None)[0])
        os._exit(1)

    @property
    def _first_rank(self) -> int:
        """The rank of the launcher."""
        return self.cluster_environment.node_rank() * self.num_processes


class FailureDetector:
    """Ends all ranks if one fails, until all stop.

    A rank that raised or was killed leaves the others in a collective that never ends. A thread of each rank therefore
    waits for a message of rank 0, and threads of rank 0 for one of each other: a failure, or null at the end of the
    run. When a process ends, however it does, the system closes its connections, and the wait for its message fails.

    Args:
        communicator: All ranks.
        local_rank: Local rank of this process; rank 0 of a machine reports to the user.
        children: Processes that this one has started, local ranks 1, 2, …
    """

    def __init__(
        self, communicator: Communicator, local_rank: int, children: Sequence["subprocess.Popen[bytes]"]
    ) -> None:
        self._rank, self._local_rank, self._group = communicator.rank, local_rank, communicator.objects
        self._children = dict(enumerate(children, start=self._rank + 1))
        self._peers = range(1, communicator.size) if self._rank == 0 else range(1)
        self.ended = False
        """Whether it detects nothing any more."""
        _limit_silence()
        self._failing = threading.Lock()
        self._sent: list[Any] = []
        self._threads = [threading.Thread(target=self._wait_for, args=(peer,), daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    def failed(self, exception: BaseException) -> None:
        """Tell the others why this rank fails and end the process; returns only on the rank that reports."""
        if self.ended or isinstance(exception, Preempted):  # all ranks stop together
            return
        expected = isinstance(exception, UserError | Stopped)
        status = exception.status if isinstance(exception, Stopped) else 2 if expected else 1
        if not expected:  # it may follow from another rank's end, which ends this process meanwhile
            time.sleep(PAUSE)
        self._failing.acquire()  # never, if another failure ends this process
        reason = str(exception) if expected else f"{type(exception).__name__}: {exception}"
        self._end_others(self._rank, " ".join(reason.split())[:2000], status, False)
        if self._local_rank > 0:
            if not expected:
                traceback.print_exception(exception)
                sys.stderr.flush()
            os._exit(status)
        self.ended = True

    def stop(self) -> None:
        """Wait until all ranks are here, so that none takes another's normal exit for a failure."""
        if not self.ended:
            self._send(None)
            with suppress(RuntimeError):  # a rank is lost, whose thread ends this process
                for sent in self._sent:
                    sent.wait()
            for thread in self._threads:
                thread.join()
            self.ended = True

    def join(self) -> int:
        """Wait for the launched processes; the first exit status that is not 0."""
        self._wait_for_children(180.0)
        return next((child.returncode for child in self._children.values() if child.returncode), 0)

    def _wait_for(self, peer: int) -> None:
        message = torch.empty(_BYTES, dtype=torch.uint8)
        try:
            distributed.recv(message, peer, group=self._group)
            failure = json.loads(bytes(message.tolist()))
        except RuntimeError:
            failure = []
        if failure is None or not self._failing.acquire(blocking=False):
            return
        rank, reason, status, lost = failure or [peer, *_reason(self._children.get(peer)), True]
        self._end_others(rank, reason, status, lost)
        # The first process of a machine reports, or the second if the first is lost.
        if self._local_rank == int(lost and rank == self._rank - self._local_rank):
            _report(rank, reason)
        os._exit(status)

    def _end_others(self, *failure: Any) -> None:
        """Tell the other ranks, which then end; this process ends after `GRACE` seconds, if it waits for them."""
        closing = threading.Timer(GRACE, os._exit, (failure[2],))
        closing.daemon = True
        closing.start()
        self._send(failure)
        until = time.monotonic() + PAUSE
        for thread in self._threads:  # until the connection breaks
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
        self._wait_for_children(max(until - time.monotonic(), 0.0))

    def _send(self, failure: tuple[Any, ...] | None) -> None:
        message = torch.frombuffer(bytearray(json.dumps(failure).encode().ljust(_BYTES)), dtype=torch.uint8)
        for peer in self._peers:
            with suppress(RuntimeError):  # it is lost
                self._sent.append(distributed.isend(message, peer, group=self._group))

    def _wait_for_children(self, seconds: float) -> None:
        """Wait for the launched processes; kill those that hang, as in a driver."""
        until = time.monotonic() + seconds
        for child in self._children.values():
            try:
                child.wait(timeout=max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _limit_silence() -> None:
    """Have the system end a connection whose machine has been lost for three minutes; a frozen process keeps it."""
    for connection in psutil.Process().net_connections("tcp") if sys.platform == "linux" else ():
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as one:  # closed meanwhile
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, 60),
                (socket.TCP_KEEPINTVL, 30),
                (socket.TCP_USER_TIMEOUT, 180_000),
            ):
                one.setsockopt(socket.IPPROTO_TCP, option, value)


def _report(rank: int, reason: str) -> None:
    """Print why the run ends."""
    sys.stdout.flush()
    print(f"qerl: rank {rank}: {reason}", file=sys.stderr, flush=True)


def _reason(child: "subprocess.Popen[bytes] | None") -> tuple[str, int]:
    """Why a rank is lost, by its process if this one has launched it; and the exit status of the run."""
    try:
        status = None if child is None else child.wait(timeout=PAUSE)
    except subprocess.TimeoutExpired:
        status = None
    if status is None:
        reason = "it is gone: killed, or its machine or network is lost"
    elif status < 0:
        reason, status = f"its process was ended by {signal.Signals(-status).name}", 128 - status
    else:
        reason = f"its process ended with status {status}" if status else "its process ended before the run did"
    return f"{reason}; run the command again, training with --resume auto", status or 1


@contextmanager
def _port_errors() -> Iterator[None]:
    """Turn PyTorch's error of a taken rendezvous port into a UserError."""
    try:
        yield
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = f"port {os.environ['MASTER_PORT']} is" if "MASTER_PORT" in os.environ else "all are"
        raise UserError(
            f"rank 0 needs a free port on its machine, where the ranks meet; {port} taken: set MASTER_PORT to a free "
            "port, the same for all ranks"
        ) from error


def communicator_of(trainer: "pl.Trainer") -> Communicator:
    """The communicator of a trainer's process group; `SINGLE_PROCESS` without or before one."""
    strategy = trainer.strategy
    return strategy.communicator if isinstance(strategy, UnwrappedDDPStrategy) else SINGLE_PROCESS
