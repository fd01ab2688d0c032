"""Worker processes of environments: a parent that loads the factory, and its forks, which serve dialogues.

A program, `python -P worker.py COMMANDS NOTICES`, two inherited sockets. The first process runs no environment, so that
it answers whatever its forks do; at the end of COMMANDS, when the trainer ends in any way, it kills them and ends.
"""

import asyncio
import ctypes
import gc
import inspect
import json
import os
import pickle
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

Frame = struct.Struct("!I")
"""The length of a message in bytes."""
_ERROR_CHARS = 400
_PR_SET_CHILD_SUBREAPER = 36
_JOB_SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}
"""Signals that all processes of a job get, at which the trainer finishes its step, and Python's handlers of them."""


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """`size` bytes; fewer at the end of the connection."""
    data = bytearray()
    while len(data) < size and (part := connection.recv(min(size - len(data), 1 << 20))):
        data += part
    return bytes(data)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None at the end of the connection."""
    header = read_exactly(connection, Frame.size)
    if len(header) < Frame.size:
        return None
    data = read_exactly(connection, size := Frame.unpack(header)[0])
    return data if len(data) == size else None


def send(connection: socket.socket, reply: Mapping[str, Any]) -> None:
    """Send a message in JSON: the trainer unpickles nothing that an environment made."""
    data = json.dumps(reply).encode()
    connection.sendall(Frame.pack(len(data)) + data)


def one_line(error: BaseException) -> str:
    """The exception's class and message in one line."""
    lines = "".join(traceback.format_exception_only(type(error), error))
    return clean(" ".join(lines.split()))[:_ERROR_CHARS]


def clean(text: str) -> str:
    """`text` as a plain string that UTF-8 can encode."""
    return str.__str__(text).encode("utf-8", "replace").decode()


class _Refused(Exception):
    """A call that the environment did not get."""


class _NoText(_Refused):
    """An answer that is no text."""


class Worker:
    """Serves dialogues with one environment, sequentially.

    Args:
        connection: Socket to the trainer.
        factory: Makes the environment.
        chars: Limit of an answer in characters.
    """

    def __init__(self, connection: socket.socket, factory: Callable[..., Any], chars: int) -> None:
        from qerl_pl.environments.contract import takes_row

        self.connection = connection
        self.factory = factory
        self.chars = chars
        self.from_row = takes_row(factory)
        self.runner = asyncio.Runner()
        self.process = os.getpid()
        self.folder = os.getcwd()
        self.close: Callable[..., Any] | None = None

    def serve(self) -> None:
        """Make the environment, and answer requests until the trainer closes the connection."""
        send(self.connection, {"pid": self.process})
        reply: dict[str, Any] = {} if self.from_row else self._guarded(self._make)
        self.left = _left()
        send(self.connection, reply)
        while (message := receive(self.connection)) is not None:
            kind, *arguments = pickle.loads(message)
            started = time.perf_counter()
            reply = self._guarded(getattr(self, f"answer_{kind}"), *arguments)
            if os.getpid() != self.process:  # a fork that a tool made and that came back
                os._exit(0)
            send(self.connection, {**reply, "seconds": time.perf_counter() - started})

    def _guarded(self, answer: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The answer, or the error in one line: whatever an environment raises ends neither worker nor run."""
        try:
            return answer(*arguments)
        except _Refused as refused:
            return {"error": clean(str(refused))[:_ERROR_CHARS], "raised": isinstance(refused, _NoText)}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which a tool may raise
            try:
                return {"error": one_line(error), "raised": True}
            except BaseException as second:  # of the exception's own methods
                return {"error": f"{type(error).__name__}: its message raises {type(second).__name__}", "raised": True}

    def _make(self, *row: Mapping[str, Any]) -> dict[str, Any]:
        from qerl_pl.environments.contract import methods_of
        from qerl_pl.errors import UserError

        self.environment = self._result(self.factory(*row))
        flag = inspect.getattr_static(self.environment, "dialogue_done", False)
        self.always_done = flag is True
        self.clears_done = not (self.always_done or isinstance(flag, property))
        try:
            self.methods = methods_of(self.environment)
        except UserError as error:
            return {"error": str(error), "refused": True}
        self.close = self.methods.close
        return {"tools": list(self.methods.schemas), "steps": self.methods.step is not None}

    def _result(self, value: Any) -> Any:
        """The value; of a coroutine its result."""
        return self.runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def answer_open(self, pickled: bytes, seed: int | None) -> dict[str, Any]:
        """Begin a dialogue: reset the environment for a row."""
        from qerl_pl.environments.contract import row_arguments
        from qerl_pl.errors import UserError

        os.chdir(self.folder)
        signal.setitimer(signal.ITIMER_REAL, 0)
        row = pickle.loads(pickled)
        if seed is not None:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
        if self.from_row and "error" in (made := self._make(row)):
            return made
        try:
            arguments = row_arguments(self.methods.reset, row)
        except UserError as error:
            return {"error": str(error), "refused": True}
        if self.clears_done and self._done():  # left by the dialogue before
            self.environment.dialogue_done = False
        observation = self._result(self.methods.reset(**arguments))
        if observation is not None and not isinstance(observation, str):
            got = f"it returned a value of type {type(observation).__name__}"
            return {"error": f"reset returns text or None; {got}; return one of them", "refused": True}
        return {
            "observation": None if observation is None else clean(observation),
            "tools": list(self.methods.schemas),
            "steps": self.methods.step is not None,
            "done": self._done() and not self.always_done,
        }

    def answer_call(self, name: str, encoded: str) -> dict[str, Any]:
        """Call a tool."""
        tool = self.methods.tools.get(name)
        if tool is None:
            offered = ", ".join(self.methods.tools) or "none"
            raise _Refused(f"there is no tool {name:.80}; the tools are {offered}")
        arguments = json.loads(encoded)
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise _Refused(f"wrong arguments: {error}; call {name}{inspect.signature(tool)}") from error
        return self._text(self._result(tool(**arguments)))

    def answer_step(self, text: str) -> dict[str, Any]:
        """Give the policy's text to the environment."""
        if self.methods.step is None:
            raise _Refused("the environment answers tool calls, and has no step")
        value = self._result(self.methods.step(text))
        if isinstance(value, tuple) and len(value) == 2:
            return {**self._text(value[0]), "done": bool(value[1])}
        return self._text(value)

    def answer_reward(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The environment's reward."""
        from qerl_pl.environments.contract import takes_messages

        get_reward = self.methods.get_reward
        if get_reward is None:
            return {"reward": None}
        reward = self._result(get_reward(messages=messages) if takes_messages(get_reward) else get_reward())
        return {"reward": None if reward is None else float(reward)}

    def answer_close(self) -> dict[str, Any]:
        """End the dialogue; a worker in which a tool left threads or processes serves no other."""
        if self.from_row:
            self.answer_end()
        (threads, processes), (threads_made, processes_made) = _left(), self.left
        reusable = threads <= threads_made and processes <= processes_made
        return {"reusable": reusable} if reusable else self.answer_end()

    def answer_end(self) -> dict[str, Any]:
        """Close the environment, once."""
        close, self.close = self.close, None
        if close is not None:
            self._result(close())
        return {}

    def _done(self) -> bool:
        return getattr(self.environment, "dialogue_done", False) is True

    def _text(self, value: Any) -> dict[str, Any]:
        """An answer as text: JSON unless it is a string, cut at the limit."""
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except TypeError as error:
                raise _NoText(f"a tool returns text or JSON; it returned a {type(value).__name__}: {error}") from error
        text = clean(value)
        if len(text) > self.chars:
            text = f"{text[: self.chars]}\n[cut after {self.chars} of {len(text)} characters]"
        return {"text": text, "done": self._done()}


def _left() -> tuple[int, set[int]]:
    """Number of threads, and the processes that this one started, also those whose own parents have ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return threading.active_count(), set()
    return threading.active_count(), _descendants(os.getpid())


def _descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that these did."""
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}


def _adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end, so that they can be found and killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def _awaited(value: Any) -> Any:
    return await value


class Forks:
    """The first process: forks workers by command, kills and reaps them, and reports their ends.

    Args:
        commands: Socket with the trainer's commands.
        notices: Socket for the ends of workers.
        setup: What the trainer set: the factory and the limits.
    """

    def __init__(self, commands: socket.socket, notices: socket.socket, setup: Mapping[str, Any]) -> None:
        self.commands = commands
        self.notices = notices
        self.setup = setup
        self.alive: set[int] = set()
        self.own = _descendants(os.getpid())  # of the environment's module

    def run(self, factory: Callable[..., Any]) -> None:
        """Serve commands until the trainer is gone."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.commands, selectors.EVENT_READ)
                selector.register(woken, selectors.EVENT_READ)
                while True:
                    ready = {key.fd for key, _ in selector.select()}
                    if woken in ready:
                        os.read(woken, 4096)
                        self.reap()
                    if self.commands.fileno() in ready:
                        message, sockets, *_ = socket.recv_fds(self.commands, Frame.size, 1)
                        if not message:
                            return
                        if not sockets:
                            self.kill(Frame.unpack(message)[0])
                        elif self.fork(sockets[0]):
                            signal.set_wakeup_fd(-1)
                            selector.close()
                            os.close(woken)
                            os.close(wakes)
                            self.become_worker(sockets[0], factory)
        finally:
            self.kill_descendants(os.getpid())

    def fork(self, descriptor: int) -> bool:
        """Whether this is the new process."""
        pid = os.fork()
        if pid == 0:
            return True
        os.close(descriptor)
        self.alive.add(pid)
        return False

    def become_worker(self, descriptor: int, factory: Callable[..., Any]) -> None:
        """Serve dialogues in this process, and end it."""
        self.alive.clear()
        os.setsid()  # a group of its own, killed together with what its tools start
        _adopt_orphans()
        self.commands.close()
        self.notices.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in _JOB_SIGNALS:
            signal.signal(number, _ignore)  # a handler, not SIG_IGN: programs that tools start have the default again
        os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_signals)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.setup["memory"] is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.setup["memory"],) * 2)
        if sys.platform == "linux":  # short of memory, the kernel ends a worker before the trainer
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        connection = socket.socket(fileno=descriptor)
        try:
            Worker(connection, factory, self.setup["chars"]).serve()
        except (BrokenPipeError, ConnectionResetError):  # the trainer is gone
            pass
        finally:
            os._exit(0)

    def kill(self, pid: int) -> None:
        """Kill a worker and the processes that its tools started."""
        if pid in self.alive:
            self.kill_descendants(pid)
            _kill_group(pid)

    def kill_descendants(self, pid: int) -> None:
        """Kill the processes that a process started, also those in sessions of their own."""
        for descendant in _descendants(pid):
            _kill_group(descendant)

    def reap(self) -> None:
        """Collect the workers that ended, with what is left of their tools' processes, and report them."""
        while (ended := _ended_child()) is not None:
            _kill_group(ended)  # before its number is free for others
            status = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
            if ended in self.alive:
                self.alive.remove(ended)
                try:
                    send(self.notices, {"pid": ended, "status": status})
                except (BrokenPipeError, ConnectionResetError):
                    return  # the trainer is gone, as COMMANDS will say
        known = self.alive | self.own
        for orphan in psutil.Process().children():
            if orphan.pid not in known:
                self.kill_descendants(orphan.pid)
                _kill_group(orphan.pid)


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal by doing nothing."""


_before_fork = threading.local()


def _block_signals() -> None:
    """Keep signals for the fork until its handlers are set."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _restore_signals() -> None:
    """Let a process that a tool forked end by `terminate`, for which `multiprocessing.Pool` waits."""
    for number, handler in _JOB_SIGNALS.items():
        if signal.getsignal(number) is _ignore:  # else the tool set a handler of its own
            signal.signal(number, handler)
    _unblock_signals()


def _ended_child() -> int | None:
    """A child that ended and is not yet collected."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(pid, signal.SIGKILL)  # not yet in a group of its own
        except ProcessLookupError:
            pass


def main(commands: socket.socket, notices: socket.socket) -> None:
    """Load the factory, report whether that worked, and serve."""
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    message = receive(commands)
    if message is None:
        return
    setup = pickle.loads(message)
    signal.alarm(setup["seconds"])
    sys.path[:] = setup["path"]
    if not setup["debug"]:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.close(null)
    from qerl_pl.environments.contract import load_factory
    from qerl_pl.errors import UserError

    try:
        factory = load_factory(pickle.loads(setup["factory"]))
        import torch  # noqa: F401 - what schemas of tools need, imported once and not in each fork
        import transformers.utils.chat_template_utils  # noqa: F401
    except UserError as error:
        send(notices, {"error": str(error), "refused": True})
        return
    except BaseException as error:  # of the module that is imported
        send(notices, {"error": one_line(error)})
        return
    signal.alarm(0)
    _adopt_orphans()
    gc.freeze()  # collections in forks would copy its pages
    send(notices, {})
    Forks(commands, notices, setup).run(factory)


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
