"""The program of a process pool: loads what workers need, forks them by command, kills them, and reports their ends.

`python -P fork_server.py COMMANDS NOTICES`, two inherited sockets, with the settings on standard input. The server runs
no request, so that it answers whatever its forks do; at the end of COMMANDS, when the trainer ends in any way, it kills
them and ends.
"""

import ctypes
import gc
import json
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil

Header = struct.Struct("!i")
"""The length of a message in bytes, as `Connection` sends it; also a command: the worker to kill, or 0 to fork one."""
ERROR_CHARS = 400
_PR_SET_CHILD_SUBREAPER = 36
_JOB_SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}
"""Signals that all processes of a job get, at which the trainer finishes its step, and Python's handlers of them."""


class Worker(Protocol):
    """Answers requests in a forked process, one after the other."""

    def start(self) -> dict[str, Any]:
        """Prepare; returns the first message."""

    def answer(self, *request: Any) -> dict[str, Any]:
        """The reply to a request."""


def clean(text: str) -> str:
    """`text` as a plain string that UTF-8 can encode."""
    return str.__str__(text).encode("utf-8", "replace").decode()


def one_line(error: BaseException) -> str:
    """The exception's class and message in one line."""
    lines = "".join(traceback.format_exception_only(type(error), error))
    return clean(" ".join(lines.split()))[:ERROR_CHARS]


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that these did."""
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}


def _send(connection: Connection, reply: Mapping[str, Any]) -> None:
    """Send a message in JSON: the trainer unpickles nothing that a worker made."""
    connection.send_bytes(json.dumps(reply).encode())


def _serve(connection: Connection, worker: Worker) -> None:
    """Answer requests until the trainer closes the connection."""
    process = os.getpid()
    _send(connection, {"pid": process})
    _send(connection, worker.start())
    while True:
        reply = worker.answer(*pickle.loads(connection.recv_bytes()))
        if os.getpid() != process:  # a fork that a tool made and that came back
            os._exit(0)
        _send(connection, reply)


def _adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end, so that they can be found and killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ForkServer:
    """Forks workers by command, kills and reaps them.

    Args:
        commands: Socket with the trainer's commands.
        notices: For the ends of workers.
        memory: Limit of a worker's memory in bytes; None sets none.
        make_worker: Called in each fork.
    """

    def __init__(
        self, commands: socket.socket, notices: Connection, memory: int | None, make_worker: Callable[[], Worker]
    ) -> None:
        self.commands = commands
        self.notices = notices
        self.memory = memory
        self.make_worker = make_worker
        self.alive: set[int] = set()
        self.own = descendants(os.getpid())  # of the loaded module

    def run(self) -> None:
        """Obey until the trainer is gone."""
        woken, wakes = os.pipe()  # at the end of a process
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        poll.register(woken, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if woken in ready:
                    os.read(woken, 4096)
                    self.reap()
                if self.commands.fileno() in ready:
                    message, sockets, *_ = socket.recv_fds(self.commands, Header.size, 1)
                    if not message:
                        return
                    if not sockets:
                        self.kill(Header.unpack(message)[0])
                    elif (pid := os.fork()) == 0:
                        self.become_worker(Connection(sockets[0]))
                    else:
                        os.close(sockets[0])
                        self.alive.add(pid)
        finally:
            _kill_with_descendants(os.getpid(), itself=False)

    def become_worker(self, connection: Connection) -> None:
        """Answer requests in this process, and end it."""
        try:
            os.setsid()  # a group of its own, killed together with what its tools start
            _adopt_orphans()
            signal.set_wakeup_fd(-1)
            self.commands.close()
            self.notices.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in _JOB_SIGNALS:
                signal.signal(number, _ignore)  # a handler, not SIG_IGN: programs that tools start have the default
            os.register_at_fork(
                before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_signals
            )
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if self.memory is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (self.memory, self.memory))
            if sys.platform == "linux":  # short of memory, the kernel ends a worker before the trainer
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
            _serve(connection, self.make_worker())
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the trainer is gone, or closed the connection
            pass
        finally:
            os._exit(0)

    def kill(self, pid: int) -> None:
        """Kill a worker, unless it has ended, and the processes that its tools started."""
        if pid in self.alive:
            _kill_with_descendants(pid)

    def reap(self) -> None:
        """Collect the workers that ended, with what is left of their tools' processes, and report them."""
        while (ended := _ended_child()) is not None:
            _kill_group(ended)  # before its number is free for others
            status = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
            if ended in self.alive:
                self.alive.remove(ended)
                try:
                    _send(self.notices, {"pid": ended, "status": status})
                except (BrokenPipeError, ConnectionResetError):
                    return  # the trainer is gone, as COMMANDS will say
        for orphan in psutil.Process().children():
            if orphan.pid not in self.alive | self.own:
                _kill_with_descendants(orphan.pid)


def _ended_child() -> int | None:
    """A child that ended and is not yet collected."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _kill_with_descendants(pid: int, itself: bool = True) -> None:
    """Kill the processes that a process started, also those in sessions of their own, and then the process."""
    for descendant in descendants(pid):
        _kill_group(descendant)
    if itself:
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(pid, signal.SIGKILL)  # not yet in a group of its own
        except ProcessLookupError:
            pass


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


def main(commands: socket.socket, notices: Connection) -> None:
    """Load the program, report whether that worked, and serve."""
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    setup = pickle.load(sys.stdin.buffer)
    signal.alarm(setup["seconds"])
    sys.path[:] = setup["path"]
    if not setup["debug"]:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.close(null)
    from qerl_pl.errors import UserError

    try:
        make_worker = runpy.run_path(setup["program"])["load"](setup["settings"])
    except UserError as error:
        _send(notices, {"error": str(error), "refused": True})
        return
    except BaseException as error:  # of the module that is imported
        _send(notices, {"error": one_line(error)})
        return
    signal.alarm(0)
    _adopt_orphans()
    gc.freeze()  # collections in forks would copy its pages
    _send(notices, {})
    ForkServer(commands, notices, setup["memory"], make_worker).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2])))
