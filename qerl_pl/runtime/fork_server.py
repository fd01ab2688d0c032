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
import traceback
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil

Header = struct.Struct("!i")
"""The length of a message in bytes, as `Connection` sends it; also a command, which is a worker's number: with a socket
it forks that worker, without one it kills it."""
ERROR_CHARS = 400
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
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


def _send(connection: Connection, reply: Mapping[str, Any]) -> None:
    """Send a message in JSON: the trainer unpickles nothing that a worker made."""
    connection.send_bytes(json.dumps(reply).encode())


def _serve(connection: Connection, worker: Worker) -> None:
    """Answer requests until the trainer closes the connection."""
    process, reply = os.getpid(), worker.start()
    while True:
        _send(connection, reply)
        reply = worker.answer(*pickle.loads(connection.recv_bytes()))
        if os.getpid() != process:  # a fork that a tool made and that came back
            os._exit(0)


def _set_process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends in any way; 0 for none."""
    _set_process_control(_PR_SET_PDEATHSIG, number)


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
        self.alive: dict[int, int] = {}
        """Process ids of the workers by their numbers."""
        self.own = psutil.Process().children()  # of the loaded module

    def run(self) -> None:
        """Obey until the trainer is gone."""
        woken, wakes = os.pipe()  # at the end of a process
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if woken in ready:
                os.read(woken, 4096)
                self.reap()
            if self.commands.fileno() in ready:
                message, sockets, *_ = socket.recv_fds(self.commands, Header.size, 1)
                if not message:
                    break
                (number,) = Header.unpack(message)
                if not sockets:
                    if number in self.alive:
                        os.kill(self.alive[number], signal.SIGKILL)
                elif (pid := os.fork()) == 0:
                    self.become_worker(Connection(sockets[0]))
                else:
                    os.close(sockets[0])
                    self.alive[number] = pid
        while left := psutil.Process().children():  # of whose ends this becomes the parent of theirs
            for process in left:
                process.kill()
            psutil.wait_procs(left)

    def become_worker(self, connection: Connection) -> None:
        """Answer requests in this process, and end it."""
        try:
            signal_at_end_of_parent(signal.SIGKILL)
            _set_process_control(_PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()  # what a tool sends to its group does not reach others
            signal.set_wakeup_fd(-1)
            self.commands.close()
            self.notices.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in _JOB_SIGNALS:
                signal.signal(number, _ignore)  # a handler, not SIG_IGN: programs that tools start have the default
            os.register_at_fork(after_in_child=_restore_signals)
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

    def reap(self) -> None:
        """Collect and report the workers that ended, and kill what is left of their tools' processes.

        Those became children of this process by their parents' ends; killing one brings its own children here.
        """
        with suppress(ChildProcessError, BrokenPipeError, ConnectionResetError):  # no child is left, or no trainer
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for number in [number for number, pid in self.alive.items() if pid == ended[0]]:
                    del self.alive[number]
                    _send(self.notices, {"number": number, "status": os.waitstatus_to_exitcode(ended[1])})
        for process in psutil.Process().children():
            if process.pid not in self.alive.values() and process not in self.own:
                process.kill()


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def _restore_signals() -> None:
    """Let a process that a tool forked end by a signal, as `multiprocessing.Pool` ends its own."""
    for number, handler in _JOB_SIGNALS.items():
        if signal.getsignal(number) is _ignore:  # else the tool set a handler of its own
            signal.signal(number, handler)


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
    _set_process_control(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # collections in forks would copy its pages
    _send(notices, {})
    ForkServer(commands, notices, setup["memory"], make_worker).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2])))
