"""Failure detection: a rank that fails ends all ranks, with its reason as the last line.

A rank that raised, was killed or lost its machine leaves the others in a collective that never ends. A thread of each
rank therefore sends its state to all other ranks once a second, over gloo's connections (no port is needed): those of
a process that has ended break at once, and a rank that is silent for `HEARTBEAT_TIMEOUT_S` counts as lost.
"""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from qerl_pl.errors import Preempted, Stopped, UserError
from qerl_pl.runtime.communicator import Communicator

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between messages."""
HEARTBEAT_TIMEOUT_S = 180.0
"""Seconds without a message after which a rank counts as lost; a process may be frozen for a while."""
LOST = "killed, or its machine or network is lost; run the command again, training with --resume auto"
_NOTICE_S = 5.0
"""Seconds from a failure to the process's end: a rank that stands still for less learns the reason."""
_GRACE, _MESSAGE_BYTES, _TAG = 10.0, 4096, 1


class FailureDetector:
    """Monitors the ranks of a run from the process group's start.

    Args:
        communicator: All ranks.
        local_rank: Local rank of this process; rank 0 of a machine reports to the user.
        children: Processes that this one has started, local ranks 1, 2, …
    """

    def __init__(
        self, communicator: Communicator, local_rank: int, children: Sequence["subprocess.Popen[bytes]"]
    ) -> None:
        self._communicator, self._local_rank, self._children = communicator, local_rank, children
        self._others = [rank for rank in range(communicator.size) if rank != communicator.rank]
        self._failure: Sequence[Any] | None = None
        """Rank, exit status and reason, which is empty for a lost rank."""
        self._stopping = threading.Event()
        self._sent: deque[Any] = deque(maxlen=2 * communicator.size)  # a buffer must live until it is received
        self._thread = threading.Thread(target=self._monitor, name="failure detector", daemon=True)
        self._thread.start()

    def failed(self, exception: BaseException) -> None:
        """Tell all ranks why this one fails and end the process; returns only on the rank that reports to the user."""
        if isinstance(exception, Preempted):  # all ranks stop together
            return
        expected = isinstance(exception, UserError | Stopped)
        status = exception.status if isinstance(exception, Stopped) else 2 if expected else 1
        reason = str(exception) if expected else f"{type(exception).__name__}: {exception}"
        if not expected:
            time.sleep(_NOTICE_S)  # the thread ends this process if another rank's end is the cause
            if self._failure is None and self._local_rank > 0:
                traceback.print_exception(exception)
        self._failure = self._failure or (self._communicator.rank, status, " ".join(reason.split())[:600] or "fails")
        self._thread.join()
        closing = threading.Timer(_GRACE, os._exit, (status,))  # if the process group waits for dead ranks
        closing.daemon = True
        closing.start()

    def stop(self) -> None:
        """End detection on all ranks, so that no rank takes another's normal exit for a failure."""
        if self._failure is None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._communicator.barrier()  # all have received the last message

    def _monitor(self) -> None:
        while self._failure is None:
            stopping = self._stopping.is_set()
            self._send(stopping)
            if all([self._receive(rank) for rank in self._others]) and stopping:
                return
            self._stopping.wait(HEARTBEAT_INTERVAL_S)
        self._send(False)
        self._give_up(*self._failure)

    def _send(self, stopping: bool) -> None:
        text = json.dumps([stopping, self._failure], ensure_ascii=False).encode(errors="replace")
        message = torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
        for rank in self._others:
            with suppress(RuntimeError):  # it is lost, which receiving from it shows
                self._sent.append(distributed.isend(message, rank, self._communicator.gloo_group, _TAG))

    def _receive(self, rank: int) -> bool:
        """Whether that rank is stopping; False at once after a failure."""
        if self._failure is not None:
            return False
        message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
        stopping, failure = False, [rank, 1, ""]
        with suppress(RuntimeError):
            work: Any = distributed.irecv(message, rank, self._communicator.gloo_group, _TAG)
            work.wait(timedelta(seconds=HEARTBEAT_TIMEOUT_S))
            stopping, failure = json.loads(bytes(message.tolist()))
        self._failure = self._failure or failure
        return stopping

    def _give_up(self, rank: int, status: int, reason: str) -> None:
        """Report the failure and end this process, which waits in a collective, unless it reports its own.

        Local rank 0 reports; if it is the lost rank, the next process of its machine does.
        """
        reporter = int(not reason and rank == self._communicator.rank - self._local_rank)
        time.sleep(_NOTICE_S)  # until all ranks know, and have ended
        for process in self._children:
            process.kill()
        if rank == self._communicator.rank and self._local_rank == 0:
            return
        if self._local_rank == reporter:
            sys.stdout.flush()
            print(f"qerl: rank {rank}: {reason or LOST}", file=sys.stderr, flush=True)
        os._exit(status)
