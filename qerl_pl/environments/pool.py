"""Runs environments in worker processes, which can be killed."""

import asyncio
import json
import logging
import os
import re
import resource
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle

from qerl_pl.environments.contract import Factory, Opening, ToolAnswer, name_of
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.backoff import ExponentialBackoff
from qerl_pl.runtime.process_pool import END_TIMEOUT_S, ProcessPool, WorkerProcess, worker_variables

log = logging.getLogger("qerl_pl")

_CLOSE_FAILS = "close of an environment fails: %s"
_REPEATS = "%s of an environment fails (%s): trying again for %g s"
_DONE = "dialogue_done is true after reset, so that dialogues end at their first call; set it to False"
BACKOFF = 3, 300.0
"""A failed `reset` is repeated at least this often, and for at least these seconds."""
_PERMANENT = re.compile(r"(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError): ")
"""Errors that another try of `reset` does not mend."""
_MISSING_VARIABLE = re.compile(r"KeyError: '(\w+)'")
T = TypeVar("T")


@dataclass(eq=False)
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
    """

    factory: Factory
    time_limit: float = 30.0
    workers: int | None = None
    max_chars: int = 32_768
    memory_gib: float | None = 8.0
    variables: Sequence[str] = ()
    _processes: "_Environments | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_at_least(1, {"environment workers": self.workers, "max_chars of an environment": self.max_chars})
        limits = (("time", self.time_limit, "seconds", 30), ("memory", self.memory_gib, "GiB", 8))
        for name, limit, unit, usual in limits:
            if limit is not None and not 0 < limit < float("inf"):
                raise UserError(
                    f"the {name} limit of a tool is a positive number of {unit}; got {limit}; {usual} is usual"
                )

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
            seed: For the worker's `random` and `numpy.random`: the environment does not depend on the worker.
        """
        return Session(self, dict(row), seed)

    def close(self) -> None:
        """Kill all workers; open dialogues are lost. A later `open` starts anew."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def running(self) -> "_Environments":
        """The processes, started on first use."""
        if self._processes is None:
            self._processes = _Environments(self)
        return self._processes


class Session:
    """One dialogue's environment. Calls are answered one after the other.

    Attributes:
        opened: What `reset` gave. A UserError if it kept raising or taking too long, or breaks the contract.
    """

    def __init__(self, pool: EnvironmentPool, row: Mapping[str, Any], seed: int | None) -> None:
        self._pool = pool  # which ends when nobody holds it
        self._processes = pool.running()
        self._worker: WorkerProcess | None = None
        self._lock = asyncio.Lock()
        self.opened: Future[Opening] = self._processes.submit(self._in_turn(self._open, row, seed))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
        """Call a tool."""
        try:
            encoded = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return answered(ToolAnswer(f"Error: the arguments are no JSON: {error}", True, 0.0))
        return self._processes.submit(self._in_turn(self._answer, "call", name, encoded))

    def step(self, text: str) -> Future[ToolAnswer]:
        """Give the policy's text to an environment with `step`."""
        return self._processes.submit(self._in_turn(self._answer, "step", text))

    def reward(self, messages: Sequence[Mapping[str, Any]] = ()) -> Future[float | None]:
        """The environment's `get_reward`; None if it has none, or is gone.

        The future has a UserError if `get_reward` raised or returned no number.

        Args:
            messages: The dialogue after its prompt, for a `get_reward` that takes `messages`.
        """
        return self._processes.submit(self._in_turn(self._reward, list(messages)))

    def close(self) -> None:
        """End the dialogue, after the calls under way. Does not block."""
        self._processes.submit(self._in_turn(self._close))

    async def _in_turn(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        async with self._lock:  # a coroutine that was made before, and is cancelled here, would warn
            return await work(*arguments)

    async def _open(self, row: Mapping[str, Any], seed: int | None) -> Opening:
        environments, pickled = self._processes, cloudpickle.dumps(row)
        backoff = ExponentialBackoff(*BACKOFF)
        while True:
            worker = await environments.worker()
            method, reply = "__init__", worker.made
            if "error" not in reply:
                method, reply = "reset", await worker.ask(environments.limit, "open", pickled, seed)
            if "error" not in reply:
                break
            if not worker.busy:
                await environments.end(worker)
            environments.release(worker, reusable=False)
            is_last = backoff.is_used_up() or not environments.is_alive()
            if is_last or reply.get("refused") or _is_permanent(reply["error"]):
                environments.raise_error(method, reply)
            environments.warn(_REPEATS, method, reply["error"], BACKOFF[1])
            await backoff.pause()
        if reply["done"]:
            environments.warn(_DONE)
        self._worker = worker
        return Opening(reply["observation"], reply["tools"], reply["steps"])

    async def _ask(self, worker: WorkerProcess, kind: str, *arguments: Any) -> Mapping[str, Any]:
        """The worker's reply; one that is gone is released."""
        started = time.perf_counter()
        reply = await worker.ask(self._processes.limit, kind, *arguments)
        if "gone" in reply:
            self._release(worker, reusable=False)
        return {"seconds": time.perf_counter() - started, **reply}

    def _release(self, worker: WorkerProcess, reusable: bool) -> None:
        self._worker = None
        self._processes.release(worker, reusable)

    async def _answer(self, kind: str, *arguments: Any) -> ToolAnswer:
        if self._worker is None:
            return ToolAnswer("Error: the environment is gone: an earlier call ended its process", True, 0.0, True)
        reply = await self._ask(self._worker, kind, *arguments)
        if "error" in reply:
            gone = "gone" in reply
            return ToolAnswer(f"Error: {reply['error']}", True, reply["seconds"], gone, reply.get("raised", gone))
        return ToolAnswer(reply["text"], False, reply["seconds"], reply["done"])

    async def _reward(self, messages: list[Mapping[str, Any]]) -> float | None:
        if self._worker is None:
            return None
        reply = await self._ask(self._worker, "reward", messages)
        if "gone" in reply:
            log.warning("a dialogue has no reward of its environment: get_reward: %s", reply["error"])
            return None
        if "error" in reply:
            self._processes.raise_error("get_reward", reply)
        return reply["reward"]

    async def _close(self) -> None:
        if (worker := self._worker) is None:
            return
        reply = await self._ask(worker, "close")
        if "error" in reply:
            self._processes.warn(_CLOSE_FAILS, reply["error"])
        if "gone" not in reply:
            self._release(worker, reply.get("reusable", False))


class _Environments(ProcessPool):
    """The pool's processes; not the pool, at whose end they end."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.limit = pool.time_limit
        self._factory = name_of(pool.factory)
        self._warned: set[str] = set()
        super().__init__(
            pool,
            "the environment's process",
            Path(__file__).with_name("worker.py"),
            (cloudpickle.dumps(pool.factory), pool.max_chars),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if pool.workers is None else pool.workers,
            None if pool.memory_gib is None else int(pool.memory_gib * 2**30),
            worker_variables(pool.variables),
        )

    async def check(self) -> Opening | None:
        """See `EnvironmentPool.check`."""
        worker = await self.worker()
        self.release(worker, reusable="error" not in worker.made)
        if "error" in worker.made:
            self.raise_error("__init__", worker.made)
        if "tools" not in worker.made:
            return None
        return Opening(None, worker.made["tools"], worker.made["steps"])

    async def worker(self) -> WorkerProcess:
        """A worker for a dialogue, in which the environment may have failed to be made."""
        started = await asyncio.wrap_future(self.started)
        if "error" in started:
            self.raise_error("import", started)
        return await super().worker()

    async def end(self, worker: WorkerProcess) -> None:
        """Have a worker close its environment."""
        reply = await worker.ask(min(self.limit, END_TIMEOUT_S), "end")
        if "error" in reply and not worker.ended.done():
            self.warn(_CLOSE_FAILS, reply["error"])

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning once, with its first cause."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *arguments)

    def raise_error(self, method: str, reply: Mapping[str, Any]) -> NoReturn:
        """Raise the error of a method that must not fail."""
        error = reply["error"]
        if reply.get("refused"):
            raise UserError(error)
        raise UserError(f"an environment must not fail in {method}; {self._factory}: {error}; {remedy_of(error)}")


def _missing_variable(error: str) -> str | None:
    """The environment variable of this process that a worker looked for in vain; None for another error."""
    missing = _MISSING_VARIABLE.search(error)
    return missing[1] if missing is not None and missing[1] in os.environ else None


def _is_permanent(error: str) -> bool:
    """Whether another try gives the same error."""
    return _PERMANENT.match(error) is not None or _missing_variable(error) is not None


def remedy_of(error: str) -> str:
    """What to do about an environment's error."""
    if missing := _missing_variable(error):
        return f"workers get few variables: name {missing} in rollout.environment.variables"
    return "correct it"


def answered(answer: ToolAnswer) -> Future[ToolAnswer]:
    """A future that has its answer."""
    future: Future[ToolAnswer] = Future()
    future.set_result(answer)
    return future
