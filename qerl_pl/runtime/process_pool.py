"""A pool of worker processes that can be killed, forked by a server that has loaded what they need."""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from qerl_pl.runtime.fork_server import Header

END_TIMEOUT_S = 5.0
"""Seconds that a process has to end."""
_START_TIMEOUT_S = 120
T = TypeVar("T")


class WorkerProcess:
    """The trainer's side of a worker.

    Args:
        name: What messages call it.
        reader: Of its replies.
        writer: Of requests.
    """

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name, self.reader, self.writer = name, reader, writer
        self.pid: int | None = None
        self.made: Mapping[str, Any] = {}
        """Its first message."""
        self.busy = True
        """Whether it is gone, or has not replied to a request."""
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def note_end(self, status: int | None) -> None:
        """Note the process's exit status; None if it is unknown."""
        if not self.ended.done():
            self.ended.set_result(status)

    async def ask(self, seconds: float, *request: Any) -> Mapping[str, Any]:
        """Send a request; returns as `receive`."""
        self.busy = True
        data = pickle.dumps(request)
        self.writer.write(Header.pack(len(data)) + data)
        return await self.receive(seconds)

    async def receive(self, seconds: float) -> Mapping[str, Any]:
        """The next reply. After `seconds`, or if the process ended, an error with `gone`: it is to be released."""
        reading = asyncio.ensure_future(_read_message(self.reader))
        try:
            await asyncio.wait({reading, self.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (reply := reading.result()) is not None:
                self.busy = False
                return reply
            if not reading.done() and not self.ended.done():
                return {"error": f"ended after its time limit of {seconds:g} s", "gone": True}
        finally:
            reading.cancel()
        await asyncio.wait({self.ended}, timeout=END_TIMEOUT_S)
        status = self.ended.result() if self.ended.done() else None
        return {"error": f"{self.name} ended ({_status(status)})", "gone": True, "status": status}


class ProcessPool:
    """Runs workers in processes: each answers one request at a time, and is killed at its time limit.

    A thread with an event loop talks to them. They end when this process ends in any way.

    Args:
        owner: The processes end when it is no longer used.
        name: What messages call a worker's process.
        program: File with a function `load`, which makes of the settings what makes a worker (`fork_server.Worker`).
        settings: For `load`; what pickle needs to import for them must be installed.
        most: Workers at a time.
        memory: Limit of a worker's memory (Linux), in bytes; None sets none.
        variables: The workers' variables of the environment.

    Attributes:
        started: What the server says of `load`: empty, or an `error`, which may be `refused` as a user's.
        workers: Those that are alive.
    """

    def __init__(
        self,
        owner: object,
        name: str,
        program: Path,
        settings: Any,
        most: int,
        memory: int | None,
        variables: Mapping[str, str],
    ) -> None:
        self.name = name
        self.workers: set[WorkerProcess] = set()
        self._free = asyncio.Semaphore(most)
        self._idle: list[WorkerProcess] = []
        self._by_pid: dict[int, WorkerProcess] = {}
        commands, self._commands = socket.socketpair()
        notices, self._notices = socket.socketpair()
        with commands, notices:
            self.server = subprocess.Popen(
                [
                    *(sys.executable, "-P", str(Path(__file__).with_name("fork_server.py"))),
                    *(str(commands.fileno()), str(notices.fileno())),
                ],
                pass_fds=(commands.fileno(), notices.fileno()),
                stdin=subprocess.PIPE,
                start_new_session=True,  # the caller handles Ctrl-C
                # Sets of text are iterated in the same order in every run.
                env={
                    "PYTHONHASHSEED": "0",
                    **variables,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        setup = {
            "path": sys.path,
            "program": str(program),
            "settings": settings,
            "memory": memory,
            "seconds": _START_TIMEOUT_S,
            "debug": os.environ.get("QERL_DEBUG") == "1",
        }
        self._loop = asyncio.new_event_loop()
        self._closed = self._lost = False
        self._owner_pid = os.getpid()
        self._writer: asyncio.StreamWriter | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.started = self.submit(self._start(pickle.dumps(setup)))
        weakref.finalize(owner, self.close)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def is_alive(self) -> bool:
        """Whether the server is there to fork workers."""
        return not self._lost and self.server.poll() is None

    def close(self) -> None:
        """Kill the processes, and end the thread; what is under way is cancelled."""
        if self._closed or os.getpid() != self._owner_pid:  # in a fork of the trainer there is no thread
            return
        self._closed = True
        ending = threading.Thread(target=self._end, name=f"end of {self.name}")
        ending.start()
        if threading.current_thread() is not self._thread:  # which may collect the owner as garbage
            ending.join()

    async def worker(self) -> WorkerProcess:
        """A worker, once one is free; if its process could not be forked or did not start, its `made` is an error."""
        await self._free.acquire()
        while self._idle:
            worker = self._idle.pop()
            if not worker.ended.done():
                return worker
            self._drop(worker)
        return await self._fork()

    def release(self, worker: WorkerProcess, reusable: bool) -> None:
        """Take a worker back."""
        if reusable:
            self._idle.append(worker)
        else:
            self._kill(worker)
            self._drop(worker)
        self._free.release()

    async def end(self, worker: WorkerProcess) -> None:
        """Have a worker that is not busy prepare for its end; a subclass may do that."""

    def _drop(self, worker: WorkerProcess) -> None:
        self.workers.discard(worker)
        worker.writer.close()

    def _kill(self, worker: WorkerProcess) -> None:
        """Kill a worker and what it started."""
        if worker.pid is not None and not worker.ended.done():
            try:
                self._commands.sendall(Header.pack(worker.pid))
            except BrokenPipeError:  # the server is gone, which would have done it
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)

    async def _fork(self) -> WorkerProcess:
        theirs, ours = socket.socketpair()
        worker = WorkerProcess(self.name, *await asyncio.open_connection(sock=ours))
        self.workers.add(worker)
        with theirs:
            try:
                socket.send_fds(self._commands, [Header.pack(0)], [theirs.fileno()])
            except BrokenPipeError:  # the server is gone
                worker.note_end(None)
        worker.made = await worker.receive(_START_TIMEOUT_S)
        if "pid" in worker.made:
            worker.pid = worker.made["pid"]
            self._by_pid[worker.pid] = worker
            worker.busy = True
            worker.made = await worker.receive(_START_TIMEOUT_S)
        return worker

    async def _start(self, setup: bytes) -> Mapping[str, Any]:
        """Wait until the server has loaded the program."""
        assert self.server.stdin is not None
        with suppress(BrokenPipeError), self.server.stdin as pipe:  # it is gone, as the notices will say
            pipe.write(setup)
        reader, self._writer = await asyncio.open_connection(sock=self._notices)
        reply = await _read_message(reader)
        if reply is None:
            return {"error": f"its process ended, or took longer than {_START_TIMEOUT_S} s"}
        if "error" not in reply:
            self._watcher = asyncio.ensure_future(self._watch(reader))
        return reply

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Record the ends of workers."""
        while (notice := await _read_message(reader)) is not None:
            worker = self._by_pid.pop(notice["pid"], None)
            if worker is not None:
                worker.note_end(notice["status"])
        self._lost = True
        for worker in list(self.workers):  # the server is gone, and nobody else kills or reports
            self._kill(worker)
            worker.note_end(None)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _end(self) -> None:
        self.submit(self._cancel_all()).result()
        self._commands.close()
        try:
            self.server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # in the import of the program
            self.server.kill()
            self.server.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self.end(worker) for worker in self.workers if not worker.busy))
        for worker in self.workers:
            worker.writer.close()
        if self._writer is not None:
            self._writer.close()


async def _read_message(reader: asyncio.StreamReader) -> Any:
    """The next message; None at the end of the connection."""
    try:
        return json.loads(await reader.readexactly(*Header.unpack(await reader.readexactly(Header.size))))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _status(status: int | None) -> str:
    if status is None:
        return "no exit status"
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
