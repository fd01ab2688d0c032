"""Runs environments in worker processes, which can be killed."""

import asyncio
import json
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle

from qerl_pl.environments.client import END_TIMEOUT_S, WorkerClient, read_message, remedy_of
from qerl_pl.environments.contract import Factory, Opening, ToolAnswer, name_of
from qerl_pl.environments.worker import Frame
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.patience import Patience
from qerl_pl.runtime.processes import worker_variables

log = logging.getLogger("qerl_pl")

_PROGRAM = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 120
_GONE = "the environment is gone: an earlier call ended its process"
_RETRIES = 3
"""Least repetitions of a failed `reset`."""
T = TypeVar("T")


class EnvironmentPool:
    """Runs each dialogue's environment in a separate process, and ends calls at their time limit.

    The first use starts a process that imports the environment's module and forks workers. A worker makes one
    environment, and calls its `reset` for one dialogue after the other; of a function from a row it makes one for each
    dialogue. A worker that was killed, or in which a tool left threads, is replaced.

    Args:
        factory: The environment: a class or a function from a row, its name, or a name with arguments.
        time_limit: Limit of a call, a step, `reset` and `get_reward`, in seconds.
        workers: Dialogues at a time; more wait until one is closed. None takes half of the open files that the process
            may have.
        max_chars: Limit of an answer in characters; longer ones are cut, with a notice.
        memory_gib: Limit of a worker's memory (Linux), in GiB; None sets none.
        variables: Names of variables of this process that workers get, beside those that programs need to run.
        patience: Seconds for which a `reset` that fails is repeated in another worker, at least three times; 0 repeats
            none.
    """

    def __init__(
        self,
        factory: Factory,
        time_limit: float = 30.0,
        workers: int | None = None,
        max_chars: int = 32_768,
        memory_gib: float | None = 8.0,
        variables: Sequence[str] = (),
        patience: float = 300.0,
    ) -> None:
        require_at_least(1, {"environment workers": workers, "max_chars of an environment": max_chars})
        if not 0 < time_limit < float("inf"):
            raise UserError(f"the time limit of a tool is a positive number of seconds; got {time_limit}; 30 is usual")
        if memory_gib is not None and not 0 < memory_gib < float("inf"):
            raise UserError(f"the memory limit of a tool is a positive number of GiB; got {memory_gib}; 8 is usual")
        if not patience >= 0:
            raise UserError(f"the patience with a failing reset is seconds from 0; got {patience}; 300 is usual")
        self.factory = factory
        self.time_limit = time_limit
        self.workers = workers
        self.max_chars = max_chars
        self.memory_gib = memory_gib
        self.variables = variables
        self.patience = patience
        self._loop: _Loop | None = None

    def check(self) -> Opening | None:
        """Start, and create an environment to check that it meets the contract.

        Returns:
            Its tools, without an observation; None if environments are made from rows.

        Raises:
            UserError: It cannot be imported or made, or breaks the contract.
        """
        return self.running().submit(self.running().check()).result()

    def open(self, row: Mapping[str, Any], seed: int | None = None) -> "Session":
        """Start a dialogue: `reset(**row)` in a worker. Does not block.

        Args:
            row: Columns of the data, which `reset` takes by name.
            seed: Of the worker's `random` and `numpy.random`, so that the environment does not depend on the worker.
        """
        return Session(self, dict(row), seed)

    def close(self) -> None:
        """Kill all workers; open dialogues are lost. A later `open` starts anew."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def running(self) -> "_Loop":
        """The processes, started on first use."""
        if self._loop is None:
            self._loop = _Loop(self)
            weakref.finalize(self, self._loop.close)
        return self._loop


class Session:
    """One dialogue's environment. Calls are answered one after the other.

    Args:
        pool: Its pool.
        row: Columns of the data.
        seed: Of the worker's random numbers.

    Attributes:
        opened: What `reset` gave. A UserError if it kept raising or taking too long, or breaks the contract.
    """

    def __init__(self, pool: EnvironmentPool, row: Mapping[str, Any], seed: int | None) -> None:
        self._pool = pool  # which ends when nobody holds it
        self._loop = pool.running()
        self._worker: WorkerClient | None = None
        self._lock = asyncio.Lock()
        self.opened: Future[Opening] = self._loop.submit(self._in_turn(self._open, row, seed))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
        """Call a tool."""
        try:
            encoded = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return answered(ToolAnswer(f"Error: the arguments are no JSON: {error}", True, 0.0))
        return self._loop.submit(self._in_turn(self._answer, "call", name, encoded))

    def step(self, text: str) -> Future[ToolAnswer]:
        """Give the policy's text to an environment with `step`."""
        return self._loop.submit(self._in_turn(self._answer, "step", text))

    def reward(self, messages: Sequence[Mapping[str, Any]] = ()) -> Future[float | None]:
        """The environment's `get_reward`; None if it has none, or is gone.

        The future has a UserError if `get_reward` raised or returned no number.

        Args:
            messages: The dialogue after its prompt, for a `get_reward` that takes `messages`.
        """
        return self._loop.submit(self._in_turn(self._reward, list(messages)))

    def close(self) -> None:
        """End the dialogue, after the calls under way. Does not block."""
        self._loop.submit(self._in_turn(self._close))

    async def _in_turn(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        async with self._lock:  # a coroutine that was made before, and is cancelled here, would warn
            return await work(*arguments)

    async def _open(self, row: Mapping[str, Any], seed: int | None) -> Opening:
        loop, pickled = self._loop, cloudpickle.dumps(row)
        patience = Patience(_RETRIES, loop.patience)
        while True:
            worker = await loop.worker()
            method, reply = "__init__", worker.made
            if "error" not in reply:
                method, reply = "reset", await worker.ask(loop.limit, "open", pickled, seed)
            if "error" not in reply:
                break
            await loop.end(worker)
            loop.release(worker, reusable=False)
            if patience.is_used_up() or not loop.patience or reply.get("refused") or not loop.is_alive():
                loop.raise_error(method, reply)
            loop.warn("%s of an environment fails (%s): trying again for %g s", method, reply["error"], loop.patience)
            await patience.pause()
        if reply["done"]:
            loop.warn("dialogue_done is true after reset, so that dialogues end at their first call; set it to False")
        self._worker = worker
        return Opening(reply["observation"], reply["tools"], reply["steps"])

    async def _answer(self, kind: str, *arguments: Any) -> ToolAnswer:
        if self._worker is None:
            return ToolAnswer(f"Error: {_GONE}", True, 0.0, done=True)
        started = time.perf_counter()
        reply = await self._worker.ask(self._loop.limit, kind, *arguments)
        seconds = reply.get("seconds", time.perf_counter() - started)
        gone = self._gone(reply)
        if "error" in reply:
            return ToolAnswer(f"Error: {reply['error']}", True, seconds, gone, gone or reply.get("raised", False))
        return ToolAnswer(reply["text"], False, seconds, done=reply["done"])

    async def _reward(self, messages: list[Mapping[str, Any]]) -> float | None:
        if self._worker is None:
            return None
        reply = await self._worker.ask(self._loop.limit, "reward", messages)
        if self._gone(reply):
            log.warning("a dialogue has no reward of its environment: get_reward: %s", reply["error"])
            return None
        if "error" in reply:
            self._loop.raise_error("get_reward", reply)
        return reply["reward"]

    async def _close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            reply = await worker.ask(self._loop.limit, "close")
            if "error" in reply:
                self._loop.warn("close of an environment fails: %s", reply["error"])
            self._loop.release(worker, reusable=reply.get("reusable", False))

    def _gone(self, reply: Mapping[str, Any]) -> bool:
        """Whether the worker is gone, which this releases."""
        if not reply.get("gone"):
            return False
        if self._worker is not None:
            self._loop.release(self._worker, reusable=False)
            self._worker = None
        return True


class _Loop:
    """A thread with an event loop that talks to the workers.

    Args:
        pool: The settings.
    """

    def __init__(self, pool: EnvironmentPool) -> None:
        self.limit = pool.time_limit
        self.patience = pool.patience
        self.name = name_of(pool.factory)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._most = asyncio.Semaphore(most if pool.workers is None else pool.workers)
        self._idle: list[WorkerClient] = []
        self._workers: set[WorkerClient] = set()
        self._by_pid: dict[int, WorkerClient] = {}
        commands, self._commands = socket.socketpair()
        notices, self._notices = socket.socketpair()
        with commands, notices:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(commands.fileno()), str(notices.fileno())],
                pass_fds=(commands.fileno(), notices.fileno()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the caller handles Ctrl-C
                # Sets of text are iterated in the same order in every run.
                env={
                    "PYTHONHASHSEED": "0",
                    **worker_variables(pool.variables),
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        setup = {
            "path": sys.path,
            "factory": cloudpickle.dumps(pool.factory),
            "chars": pool.max_chars,
            "memory": None if pool.memory_gib is None else int(pool.memory_gib * 2**30),
            "seconds": _START_TIMEOUT_S,
            "debug": os.environ.get("QERL_DEBUG") == "1",
        }
        self._setup = pickle.dumps(setup)
        self.loop = asyncio.new_event_loop()
        self._closed = False
        self._warned: set[str] = set()
        self._owner = os.getpid()
        self._writer: asyncio.StreamWriter | None = None
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()
        self._started = self.submit(self._start())

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def close(self) -> None:
        """Kill the processes, and end the thread; what is under way is cancelled."""
        if self._closed or os.getpid() != self._owner:  # in a fork of the trainer there is no thread
            return
        self._closed = True
        ending = threading.Thread(target=self._end, name="end of environments")
        ending.start()
        if threading.current_thread() is not self._thread:  # which may collect the pool as garbage
            ending.join()

    def _end(self) -> None:
        self.submit(self._cancel_all()).result()
        self._commands.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # in the import of the environment's module
            self._process.kill()
            self._process.wait()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self.end(worker) for worker in self._workers if not worker.busy))
        for worker in self._workers:
            worker.disconnect()
        if self._writer is not None:
            self._writer.close()

    async def _start(self) -> None:
        """Wait until the first process has loaded the factory.

        Raises:
            UserError: It cannot be loaded.
        """
        try:
            self._commands.sendall(Frame.pack(len(self._setup)) + self._setup)
        except BrokenPipeError:
            pass  # the notices end, too
        reader, self._writer = await asyncio.open_connection(sock=self._notices)
        reply = await read_message(reader)
        if reply is None:
            reply = {"error": f"its process ended, or took longer than {_START_TIMEOUT_S} s"}
        if "error" in reply:
            self.raise_error("import", reply)
        self._watcher = asyncio.ensure_future(self._watch(reader))

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Record the exits of workers."""
        while (notice := await read_message(reader)) is not None:
            worker = self._by_pid.pop(notice["pid"], None)
            if worker is not None:
                worker.note_end(notice["status"])
        for worker in list(self._workers):  # the first process is gone, and nobody else kills or reports
            self.kill(worker)
            worker.note_end(None)

    async def check(self) -> Opening | None:
        """See `EnvironmentPool.check`."""
        worker = await self.worker()
        self.release(worker, reusable="error" not in worker.made)
        if "error" in worker.made:
            self.raise_error("__init__", worker.made)
        if "tools" not in worker.made:
            return None
        return Opening(None, worker.made["tools"], worker.made["steps"])

    async def worker(self) -> WorkerClient:
        """A worker for a dialogue: an idle one, or a new one, in which the environment may have failed to be made.

        Raises:
            UserError: The environment cannot be imported.
        """
        await asyncio.wrap_future(self._started)
        await self._most.acquire()
        while self._idle:
            worker = self._idle.pop()
            if not worker.ended.done():
                return worker
            self._workers.discard(worker)
            worker.disconnect()
        return await self._fork()

    async def _fork(self) -> WorkerClient:
        theirs, ours = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._commands, [Frame.pack(0)], [theirs.fileno()])
            except BrokenPipeError:
                pass  # its end is read below
        worker = WorkerClient(self.loop, *await asyncio.open_connection(sock=ours))
        self._workers.add(worker)
        hello = await worker.receive(_START_TIMEOUT_S)
        if "pid" in hello:
            worker.pid = hello["pid"]
            self._by_pid[worker.pid] = worker
            worker.made = await worker.receive(_START_TIMEOUT_S)
            worker.busy = "gone" in worker.made
        else:
            worker.made = hello
        return worker

    async def end(self, worker: WorkerClient) -> None:
        """Have a worker close its environment, unless it is gone."""
        if not worker.busy:
            reply = await worker.ask(min(self.limit, END_TIMEOUT_S), "end")
            if "error" in reply and not worker.ended.done():
                self.warn("close of an environment fails: %s", reply["error"])

    def is_alive(self) -> bool:
        """Whether the first process is there to fork workers."""
        return self._process.poll() is None

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning once, with its first cause."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *arguments)

    def release(self, worker: WorkerClient, reusable: bool) -> None:
        """Take a worker back from a dialogue."""
        if reusable:
            self._idle.append(worker)
        else:
            self.kill(worker)
            self._workers.discard(worker)
            worker.disconnect()
        self._most.release()

    def kill(self, worker: WorkerClient) -> None:
        """Kill a worker and what its tools started."""
        if worker.pid is not None and not worker.ended.done():
            try:
                self._commands.sendall(Frame.pack(worker.pid))
            except BrokenPipeError:  # the first process is gone, which would have done it
                try:
                    os.killpg(worker.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def raise_error(self, method: str, reply: Mapping[str, Any]) -> NoReturn:
        """Raise the error of a method that must not fail.

        Raises:
            UserError: Always.
        """
        if reply.get("refused"):
            raise UserError(reply["error"])
        error = reply["error"]
        raise UserError(f"an environment must not fail in {method}; {self.name}: {error}; {remedy_of(error)}")


def answered(answer: ToolAnswer) -> Future[ToolAnswer]:
    """A future that has its answer."""
    future: Future[ToolAnswer] = Future()
    future.set_result(answer)
    return future
