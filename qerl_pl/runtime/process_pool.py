"""A pool of worker processes that can be killed, forked by a server that has loaded what they need."""

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from qerl_pl.runtime.fork_server import Header

END_TIMEOUT_S = 5.0
"""Seconds that a process has to end."""
_START_TIMEOUT_S = 120
_PASSED = frozenset(
    """
    PATH HOME USER LOGNAME SHELL TZ TMPDIR TEMP TMP LD_LIBRARY_PATH LD_PRELOAD LANG LANGUAGE LC_ALL LC_CTYPE LC_COLLATE
    LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME PYTHONHASHSEED PYTHONHOME PYTHONPATH PYTHONUSERBASE PYTHONNOUSERSITE
    PYTHONUTF8 PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONWARNINGS PYTHONIOENCODING VIRTUAL_ENV CONDA_PREFIX
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR OMP_NUM_THREADS OMP_WAIT_POLICY MKL_NUM_THREADS
    OPENBLAS_NUM_THREADS NUMBA_NUM_THREADS CUDA_VISIBLE_DEVICES CUDA_HOME TRITON_INTERPRET TOKENIZERS_PARALLELISM
    QERL_CACHE QERL_DEBUG HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE NLTK_DATA
    TRANSFORMERS_OFFLINE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy SSL_CERT_FILE SSL_CERT_DIR
    REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    """.split()
)
"""Variables that programs need to run, and that hold no secrets."""
_PASSWORD = re.compile(r"://[^/\s]*@")
"""A URL with a password, as of a proxy."""
T = TypeVar("T")


def worker_variables(names: Iterable[str] = ()) -> dict[str, str]:
    """Variables of the environment for worker processes: those that programs need to run, and no tokens."""
    named = set(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (name in _PASSED and not _PASSWORD.search(value))
    }


def cores() -> int:
    """CPU cores that this process may use, divided by the ranks on its machine, unless SLURM has divided them."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        available = os.cpu_count() or 1
    if available < int(os.environ.get("SLURM_CPUS_ON_NODE", 0)):
        return available
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class WorkerProcess:
    """The trainer's side of a worker."""

    def __init__(self, name: str, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name, self.number, self.reader, self.writer = name, number, reader, writer
        self.made: Mapping[str, Any] = {}
        """First message of the process."""
        self.busy = True
        """Whether it is gone, or has not replied to a request."""
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """Exit status of the process; None if it is unknown."""

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
        how = "no exit status" if status is None else f"exit status {status}"
        if status is not None and status < 0:
            how = f"signal {signal.Signals(-status).name}"
        return {"error": f"{self.name} ended ({how})", "gone": True, "status": status}


class ProcessPool:
    """Runs workers in processes: each answers one request at a time, and is killed at its time limit.

    A thread with an event loop talks to them. They end when this process ends in any way.

    Args:
        owner: The processes end when it is no longer used.
        name: What messages call a worker's process.
        program: File with a function `load`, which makes of the settings what makes a worker (`fork_server.Worker`).
        settings: For `load`; of built-in types.
        most: Workers at a time.
        memory: Limit of a worker's memory (Linux), in bytes; None sets none.
        variables: The workers' variables of the environment.

    Attributes:
        started: What the server says of `load`: empty, or an `error`, which may be `refused` as a user's.
        workers: Workers that are alive, by their numbers.
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
        self.workers: dict[int, WorkerProcess] = {}
        self._forked = 0
        self._free = asyncio.Semaphore(most)
        self._idle: list[WorkerProcess] = []
        commands, self._commands = socket.socketpair()
        notices, self._notices = socket.socketpair()
        with commands, notices:
            theirs = commands.fileno(), notices.fileno()
            self.server = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("fork_server.py")), *map(str, theirs)],
                pass_fds=theirs,
                stdin=subprocess.PIPE,
                start_new_session=True,  # the caller handles Ctrl-C
                # Sets of text are iterated in the same order in every run.
                env={"PYTHONHASHSEED": "0", **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        setup = {"path": sys.path, "program": str(program), "settings": settings, "memory": memory}
        setup |= {"seconds": _START_TIMEOUT_S, "debug": os.environ.get("QERL_DEBUG") == "1"}
        self._loop = asyncio.new_event_loop()
        self._closed = self._lost = False
        self._process = os.getpid()
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
        if self._closed or os.getpid() != self._process:  # in a fork of the trainer there is no thread
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
        """Take a worker back; unless it is reusable, kill it and what it started."""
        if reusable:
            self._idle.append(worker)
        else:
            with suppress(BrokenPipeError):  # the server is gone
                self._commands.sendall(Header.pack(worker.number))
            self._drop(worker)
        self._free.release()

    async def end(self, worker: WorkerProcess) -> None:
        """Have a worker that is not busy prepare for its end; a subclass may do that."""

    def _drop(self, worker: WorkerProcess) -> None:
        del self.workers[worker.number]
        worker.writer.close()

    async def _fork(self) -> WorkerProcess:
        theirs, ours = socket.socketpair()
        self._forked += 1
        worker = WorkerProcess(self.name, self._forked, *await asyncio.open_connection(sock=ours))
        self.workers[worker.number] = worker
        with theirs:
            try:
                socket.send_fds(self._commands, [Header.pack(worker.number)], [theirs.fileno()])
            except BrokenPipeError:  # the server is gone
                worker.ended.set_result(None)
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
            if notice["number"] in self.workers:
                self.workers[notice["number"]].ended.set_result(notice["status"])
        self._lost = True
        for worker in self.workers.values():  # they end with the server, which is gone, and nobody else reports
            if not worker.ended.done():
                worker.ended.set_result(None)

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
        await asyncio.gather(*(self.end(worker) for worker in self.workers.values() if not worker.busy))
        for worker in self.workers.values():
            worker.writer.close()
        if self._writer is not None:
            self._writer.close()


async def _read_message(reader: asyncio.StreamReader) -> Any:
    """The next message; None at the end of the connection."""
    try:
        return json.loads(await reader.readexactly(*Header.unpack(await reader.readexactly(Header.size))))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
