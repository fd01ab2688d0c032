"""One rank that fails ends the whole run, with its reason as the last line.

A rank that raised, was killed or lost its machine leaves the others in a collective that never ends. A thread of each
rank therefore looks, once a second, whether another has failed, in a store of its own beside the process group's; rank
0 also looks whether all are still alive.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from qerl_pl.errors import Preempted, Stopped, UserError
from qerl_pl.run.ranks import Ranks

PERIOD = 1.0
"""Seconds between two looks."""
PATIENCE = 180.0
"""Seconds without a sign of life after which a rank counts as gone; one that is only frozen for a while is not."""
GRACE = 10.0
"""Seconds that a failing process has to close its files, and the others to end once the first has."""
_FAILURE = "failure"


class Watch:
    """Watches the ranks of a run, from the moment that they have found each other.

    Args:
        ranks: Of the run; making a watch is collective.
        local_rank: Of this process on its machine; the first one there tells the user.
        children: Processes that this one has started, local ranks 1, 2, …
    """

    def __init__(self, ranks: Ranks, local_rank: int, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._local_rank, self._children = local_rank, children
        host, patience = os.environ["MASTER_ADDR"], timedelta(seconds=PATIENCE)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience) if self._rank == 0 else None
        port = ranks.gather(store.port if store else 0)[0]
        self._store = store or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
        self._ending = threading.Event()
        self._seen = {rank: (0, time.monotonic()) for rank in range(1, self._size)}
        self._left: dict[int, float] = {}  # when a local rank was first seen to have ended
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def failed(self, exception: BaseException) -> None:
        """Tell the others why this rank ends; returns only on the rank that tells the user, which closes its files."""
        if isinstance(exception, Preempted):  # all ranks stop together
            self._end()
            return
        expected = isinstance(exception, UserError | Stopped)
        status = exception.status if isinstance(exception, Stopped) else 2 if expected else 1
        if not expected:  # a lost connection is how the end of another rank shows, whose reason comes first
            lost = isinstance(exception, DistError) or "gloo" in str(exception)
            time.sleep(PATIENCE + GRACE if lost else 3 * PERIOD)  # until the thread ends this process
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

    def stop(self, ranks: Ranks) -> None:
        """The run has ended, on all ranks: whichever process goes first, the others do not take it for dead."""
        if not self._ending.is_set():
            ranks.wait()
            self._end()

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
        beats = 0
        while not self._ending.is_set():
            beats += 1
            try:
                self._store.set(f"alive/{self._rank}", str(beats))
                self._look_for_the_dead()
                if self._store.check([_FAILURE]) and not self._ending.is_set():
                    self._give_up(**json.loads(self._store.get(_FAILURE)))
            except DistError:  # the store went with rank 0
                if not self._ending.is_set():
                    self._give_up(0, "it is gone: killed, or its machine or network is lost", 1)
            self._ending.wait(PERIOD)

    def _look_for_the_dead(self) -> None:
        now = time.monotonic()
        for local_rank, child in enumerate(self._children, start=1):
            if child.poll() is None or self._ending.is_set():
                continue
            since = self._left.setdefault(local_rank, now)
            if child.returncode or now - since > GRACE:  # one that is done may be a little ahead of this process
                time.sleep(PERIOD)  # what it had to say comes first
                self._publish(self._rank + local_rank, *_ended(child.returncode))
        for rank in self._seen if self._rank == 0 else ():
            key = f"alive/{rank}"
            beats = int(self._store.get(key)) if self._store.check([key]) else 0
            if beats != self._seen[rank][0]:
                self._seen[rank] = (beats, now)
            elif now - self._seen[rank][1] > PATIENCE:
                self._publish(
                    rank, f"no sign of life for {PATIENCE:.0f} s: killed, or its machine or network is lost", 1
                )

    def _publish(self, rank: int, reason: str, status: int) -> bool:
        """The first failure counts, for the others follow from it; whether this is the one."""
        document = json.dumps({"rank": rank, "reason": " ".join(reason.split()), "status": status})
        try:
            return bool(self._store.compare_set(_FAILURE, "", document).decode() == document)
        except DistError:  # rank 0 is gone, and has said why
            return False

    def _give_up(self, rank: int, reason: str, status: int) -> None:
        """End this process, which waits in a collective, and say why where a user reads it."""
        if self._local_rank == 0:
            self._end_children()
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


def _ended(status: int) -> tuple[str, int]:
    if not status:
        return "its process ended before the run did", 1
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}", 128 - status
    return f"its process ended with status {status}", status
