"""One rank that fails ends the whole run, with its reason as the last line.

A rank that raised, was killed or lost its machine leaves the others in a collective that never ends. A thread of each
rank therefore looks, once a second, whether another has failed, in the store where the ranks have met (MASTER_PORT is
all that it needs); rank 0 also looks whether all are still alive, and the others whether rank 0 is.
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
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from qerl_pl.distributed.communicator import Communicator
from qerl_pl.errors import Preempted, Stopped, UserError

PERIOD = 1.0

"""Seconds between two looks."""

PATIENCE = 180.0

"""Seconds without a sign of life after which a rank counts as gone; one that is only frozen for a while is not."""

GRACE = 10.0

"""Seconds that a failing process has to close its files, and the others to end once the first has; also the patience
once a rank has lost its connection to another, for then one is not only frozen."""

_FAILURE, _SUSPICION = "failure", "suspicion"

_LOST = "killed, or its machine or network is lost"

_REMEDY = "give the command again, a training with --resume auto"


class FailureDetector:
    """Watches the ranks of a run, from the moment that they have found each other.

    Args:
        ranks: Of the run; making a watch is collective.
        local_rank: Of this process on its machine; the first one there tells the user.
        children: Processes that this one has started, local ranks 1, 2, …
    """

    def __init__(self, ranks: Communicator, local_rank: int, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._local_rank, self._children = local_rank, children
        # A connection of its own: on the process group's a collective may wait, and none else gets a word in meanwhile.
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        # The server may be a launcher's, which outlives a run that it starts again.
        self._store = PrefixStore(f"qerl/{ranks.gather(uuid.uuid4().hex)[0]}", store)
        self._ending, self._suspected, self._giving_up = threading.Event(), threading.Event(), threading.Lock()
        watched = range(1, self._size) if self._rank == 0 else [0]
        self._seen = {rank: (0, time.monotonic()) for rank in watched}
        self._left: dict[int, float] = {}  # when a local rank was first seen to have ended
        self._looks = 0
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        if self._rank > 0:
            threading.Thread(target=self._look_at_the_watch, name="watch of the store", daemon=True).start()

    def failed(self, exception: BaseException) -> None:
        """Tell the others why this rank ends; returns only on the rank that tells the user, which closes its files."""
        if isinstance(exception, Preempted):  # all ranks stop together
            self._end()
            return
        expected = isinstance(exception, UserError | Stopped)
        status = exception.status if isinstance(exception, Stopped) else 2 if expected else 1
        if any(_lost_connection(cause) for cause in _causes(exception)):
            self._suspect()  # the end of another rank shows so, whose reason comes first
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
        closing = threading.Timer(GRACE, os._exit, (status,))  # a group that waits for dead ranks
        closing.daemon = True
        closing.start()

    def stop(self, ranks: Communicator) -> None:
        """The run has ended, on all ranks: whichever process goes first, the others do not take it for dead."""
        if not self._ending.is_set():
            ranks.wait()
            self._end()
            ranks.wait()  # none looks into the store when rank 0 goes, and maybe the store with it

    def join(self) -> int:
        """Wait for the processes that this one has started; the first status that is not 0."""
        for child in self._children:
            try:
                child.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:  # its work is done, and its exit hangs in a driver
                child.kill()
                child.wait()
        return next((child.returncode for child in self._children if child.returncode), 0)

    def _end(self) -> None:
        """Let the thread go before Python ends, which would end a thread within the store, and the process, by abort().

        A store that hangs is not waited for.
        """
        self._ending.set()
        self._thread.join(GRACE)

    # The thread ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._ending.is_set():
            self._looks += 1
            try:
                self._store.set(f"alive/{self._rank}", str(self._looks))
                if self._store.check([_SUSPICION]):
                    self._suspected.set()
                self._look_for_the_dead()
                if self._store.check([_FAILURE]) and not self._ending.is_set():
                    self._give_up(**json.loads(self._store.get(_FAILURE)))
            except DistError:  # the store went with rank 0
                if not self._ending.is_set():
                    self._give_up(0, f"it is gone: {_LOST}; {_REMEDY}", 1, lost=True)
            self._ending.wait(PERIOD)

    def _look_at_the_watch(self) -> None:
        """Notice that the store does not answer: where rank 0's machine is lost no connection to it breaks off.

        Counted in periods, for a process that was frozen itself has heard nothing either.
        """
        looks = silent = 0
        while not self._ending.wait(PERIOD):
            looks, silent = self._looks, silent + 1 if self._looks == looks else 0
            if silent * PERIOD > self._patience:
                self._give_up(0, _silence(self._patience), 1, lost=True)

    @property
    def _patience(self) -> float:
        return min(GRACE, PATIENCE) if self._suspected.is_set() else PATIENCE

    def _suspect(self) -> None:
        """Have all watch for a lost rank with less patience."""
        self._suspected.set()
        try:
            self._store.set(_SUSPICION, "")
        except DistError:  # rank 0 is the lost one, as the thread sees too
            pass

    def _look_for_the_dead(self) -> None:
        now = time.monotonic()
        for local_rank, child in enumerate(self._children, start=1):
            if child.poll() is None or self._ending.is_set():
                continue
            since = self._left.setdefault(local_rank, now)
            if child.returncode or now - since > GRACE:  # one that is done may be a little ahead of this process
                time.sleep(PERIOD)  # what it had to say comes first
                reason, status = _ended(child.returncode)
                self._publish(self._rank + local_rank, f"{reason}; {_REMEDY}", status, lost=True)
        for rank in self._seen:
            key = f"alive/{rank}"
            beats = int(self._store.get(key)) if self._store.check([key]) else 0
            if beats != self._seen[rank][0]:
                self._seen[rank] = (beats, now)
            elif now - self._seen[rank][1] > self._patience:
                self._publish(rank, _silence(self._patience), 1, lost=True)

    def _publish(self, rank: int, reason: str, status: int, lost: bool = False) -> bool:
        """The first failure counts, for the others follow from it; whether this is the one."""
        document = json.dumps({"rank": rank, "reason": " ".join(reason.split()), "status": status, "lost": lost})
        try:
            return bool(self._store.compare_set(_FAILURE, "", document).decode() == document)
        except DistError:  # rank 0 is gone, and has said why
            return False

    def _give_up(self, rank: int, reason: str, status: int, lost: bool) -> None:
        """End this process, which waits in a collective, and say why where a user reads it.

        The first process of a machine says it; where that one is lost, each of the others does.
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
        if self._rank == 0:  # with this process goes the store, in which the others read the reason
            time.sleep(3 * PERIOD)
        for child in self._children:  # each sees the failure by itself
            try:
                child.wait(timeout=max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _lost_connection(error: BaseException) -> bool:
    """Whether a collective has raised it because a rank could not be reached: gloo's have no class of their own."""
    if isinstance(error, DistError):
        return True
    *_, (frame, _) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return type(error) is RuntimeError and module.startswith("torch.distributed.") and "gloo/transport/" in str(error)


def _silence(seconds: float) -> str:
    return f"no sign of life for {seconds:.0f} s: {_LOST}; {_REMEDY}"


def _ended(status: int) -> tuple[str, int]:
    if not status:
        return "its process ended before the run did", 1
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}", 128 - status
    return f"its process ended with status {status}", status
