"""The program `qerl`, also as `python -m qerl_pl`."""

import gc
import os
import select
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the program; its exit status is 141 where nobody reads what it prints, as in `qerl configs | head -1`."""
    try:
        status = _run()
    except (BrokenPipeError, SystemExit):
        if _has_reader():
            raise
        return 128 + signal.SIGPIPE
    return status if _has_reader() else 128 + signal.SIGPIPE


def _run() -> int:
    """Answer, or import the command line and run it.

    The imports take seconds. Meanwhile Ctrl-C ends the process at once: a KeyboardInterrupt would print a traceback,
    and an import may swallow it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a job in the background ignores SIGINT
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from qerl_pl.cli.commands import answered

    if (status := answered(sys.argv[1:])) is not None:
        return status
    gc.disable()  # imports make a million objects that stay; searching them for garbage takes a fifth of the time
    from qerl_pl.cli.main import interrupt
    from qerl_pl.cli.main import main as run

    gc.freeze()  # nor are they searched later
    gc.enable()
    signal.signal(signal.SIGINT, interrupt if handler is signal.default_int_handler else handler)
    return run()


def _has_reader() -> bool:
    """Whether standard output is no pipe whose reader has gone; if it is, what is left to write is dropped."""
    if sys.stdout is None:  # closed
        return True
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return False


if __name__ == "__main__":
    sys.exit(main())
