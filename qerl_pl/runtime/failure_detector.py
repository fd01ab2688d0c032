"""Failure detection: a rank that fails ends all ranks, with its reason as the last line.

A rank that raised, was killed or lost its machine leaves the others in a collective that never ends. A thread of each
rank therefore writes a heartbeat to the rendezvous store once a second and reads there whether another rank has failed
(no port besides MASTER_PORT is needed); rank 0 also checks the heartbeats of all ranks, and the others that of rank 0.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from qerl_pl.errors import Preempted, Stopped, UserError, chain_of_causes
from qerl_pl.runtime.communicator import Communicator

PERIOD = 1.0
"""Seconds between heartbeats."""
PATIENCE = 180.0
"""Seconds without a heartbeat after which a rank counts as lost; a process may be frozen for a while."""
GRACE = 10.0
"""Seconds that a failing process has to close its files, and the others to end after the first; also the patience
once a rank has lost its connection to another, as a frozen process keeps its connections."""
_FAILURE, _SUSPICION = "failure", "suspicion"
_LOST = "killed, or its machine or network is lost"
_REMEDY = "run the command again, training with --resume auto"


class FailureDetector:
    """Monitors the ranks of a run from the process group's start; its construction is collective.

    Args:
        communicator: All ranks.
        local_rank: Local rank of this process; rank 0 of a machine reports to the user.
        children: Processes that this one has started, local ranks 1, 2, …
    """

    def __init__(
        self, communicator: Communicator, local_rank: int, children: Sequence["subprocess.Popen[bytes]"]
    ) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._local_rank, self._children = local_rank, children
        # Its own connection: a collective that waits blocks that of the process group.
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        # A launcher's server may outlive a run that it restarts: each run has its own keys.
        self._store = PrefixStore(f"qerl/{communicator.all_gather(uuid.uuid4().hex)[0]}", store)
        self._ending, self._suspected, self._giving_up = threading.Event(), threading.Event(), threading.Lock()
        monitored = range(1, self._size) if self._rank == 0 else [0]
        self._last_heartbeat = {rank: (0, time.monotonic()) for rank in monitored}
        self._exited: dict[int, float] = {}  # local rank -> time at which its exit was noticed
        self._heartbeats = 0
        self._thread = threading.Thread(target=self._monitor, name="failure detector", daemon=True)
        self._thread.start()
        if self._rank > 0:
            threading.Thread(target=self._monitor_store, name="store monitor", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether it monitors nothing any more."""
        return self._ending.is_set()

    def failed(self, exception: BaseException) -> None:
        """Publish why this rank fails and end the process; returns only on the rank that reports to the user."""
        if isinstance(exception, Preempted):  # all ranks stop together
            self._end()
            return
        expected = isinstance(exception, UserError | Stopped)
        status = exception.status if isinstance(exception, Stopped) else 2 if expected else 1
        if any(_lost_connection(cause) for cause in chain_of_causes(exception)):
            self._suspect()  # a consequence of another rank's end, whose reason comes first
            time.sleep(self._patience + 5 * PERIOD)  # until the thread ends this process
        elif not expected:
            time.sleep(3 * PERIOD)
        reason = str(exception) if expected else f"{type(exception).__name__}: {exception}"
        if not self._publish(self._rank, reason, status):
            time.sleep(GRACE)  # the thread ends this process
        if self._local_rank > 0:
            if not expected:
                traceback.print_exception(exception)
                sys.stderr.flush()
            os._exit(status)
        self._end()
        self._end_children()
        closing = threading.Timer(GRACE, os._exit, (status,))  # if the process group waits for dead ranks
        closing.daemon = True
        closing.start()

    def stop(self, communicator: Communicator) -> None:
        """End detection on all ranks, so that no rank takes another's normal exit for a failure."""
        if not self._ending.is_set():
            communicator.barrier()
            self._end()
            communicator.barrier()  # no rank reads the store when rank 0, which may serve it, exits

    def join(self) -> int:
        """Wait for the launched processes; the first exit status that is not 0."""
        for child in self._children:
            try:
                child.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:  # done, but hanging in a driver
                child.kill()
                child.wait()
        return next((child.returncode for child in self._children if child.returncode), 0)

    def _end(self) -> None:
        """End the thread: Python's exit would abort() a thread inside the store. Does not wait for a hanging store."""
        self._ending.set()
        self._thread.join(GRACE)

    def _monitor(self) -> None:
        while not self._ending.is_set():
            self._heartbeats += 1
            try:
                self._store.set(f"heartbeat/{self._rank}", str(self._heartbeats))
                if self._store.check([_SUSPICION]):
                    self._suspected.set()
                self._check_children()
                self._check_heartbeats()
                if self._store.check([_FAILURE]) and not self._ending.is_set():
                    self._give_up(**json.loads(self._store.get(_FAILURE)))
            except DistError:  # the store ended with rank 0
                if not self._ending.is_set():
                    self._give_up(0, f"it is gone: {_LOST}; {_REMEDY}", 1, lost=True)
            self._ending.wait(PERIOD)

    def _monitor_store(self) -> None:
        """Detect a store that does not answer: a connection to a lost machine does not break.

        It counts periods, not seconds, as this process itself may have been frozen.
        """
        heartbeats = silent = 0
        while not self._ending.wait(PERIOD):
            heartbeats, silent = self._heartbeats, silent + 1 if self._heartbeats == heartbeats else 0
            if silent * PERIOD > self._patience:
                self._give_up(0, _silence(self._patience), 1, lost=True)

    @property
    def _patience(self) -> float:
        return min(GRACE, PATIENCE) if self._suspected.is_set() else PATIENCE

    def _suspect(self) -> None:
        """Shorten the patience of all ranks."""
        self._suspected.set()
        try:
            self._store.set(_SUSPICION, "")
        except DistError:  # rank 0 is lost, as the thread detects too
            pass

    def _check_children(self) -> None:
        for local_rank, child in enumerate(self._children, start=1):
            if child.poll() is None or self._ending.is_set():
                continue
            since = self._exited.setdefault(local_rank, time.monotonic())
            if child.returncode or time.monotonic() - since > GRACE:  # a rank may finish a little before this one
                time.sleep(PERIOD)  # its own reason comes first
                reason, status = _exit_reason(child.returncode)
                self._publish(self._rank + local_rank, f"{reason}; {_REMEDY}", status, lost=True)

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        for rank, (last, since) in self._last_heartbeat.items():
            key = f"heartbeat/{rank}"
            heartbeat = int(self._store.get(key)) if self._store.check([key]) else 0
            if heartbeat != last:
                self._last_heartbeat[rank] = (heartbeat, now)
            elif now - since > self._patience:
                self._publish(rank, _silence(self._patience), 1, lost=True)

    def _publish(self, rank: int, reason: str, status: int, lost: bool = False) -> bool:
        """Publish a failure unless there is an earlier one, whose consequence it may be; whether it was published."""
        document = json.dumps({"rank": rank, "reason": " ".join(reason.split()), "status": status, "lost": lost})
        try:
            return bool(self._store.compare_set(_FAILURE, "", document).decode() == document)
        except DistError:  # rank 0 is gone, and has reported why
            return False

    def _give_up(self, rank: int, reason: str, status: int, lost: bool) -> None:
        """Report the failure and end this process, which waits in a collective.

        Local rank 0 reports; if it is the lost rank, every other process of its machine does.
        """
        if not self._giving_up.acquire(blocking=False):
            return
        if self._local_rank == 0:
            self._end_children()
        if self._local_rank == 0 or (lost and rank == self._rank - self._local_rank):
            sys.stdout.flush()
            print(f"qerl: rank {rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(status)

    def _end_children(self) -> None:
        until = time.monotonic() + 3 * PERIOD
        if self._rank == 0:  # the others read the reason in this process's store
            time.sleep(3 * PERIOD)
        for child in self._children:  # each detects the failure by itself
            try:
                child.wait(timeout=max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _lost_connection(error: BaseException) -> bool:
    """Whether a collective raised it because a rank could not be reached; gloo's errors are RuntimeErrors."""
    if isinstance(error, DistError):
        return True
    *_, (frame, _) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return type(error) is RuntimeError and module.startswith("torch.distributed.") and "gloo/transport/" in str(error)


def _silence(seconds: float) -> str:
    return f"no sign of life for {seconds:.0f} s: {_LOST}; {_REMEDY}"


def _exit_reason(status: int) -> tuple[str, int]:
    if not status:
        return "its process ended before the run did", 1
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}", 128 - status
    return f"its process ended with status {status}", status
