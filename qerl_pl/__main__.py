"""The program `qerl`, also as `python -m qerl_pl`."""

import os
import signal
import sys


def main() -> int:
    """Import the command line and run it.

    The imports take seconds. Meanwhile Ctrl-C ends the process at once: a KeyboardInterrupt would print a traceback,
    and an import may swallow it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a job in the background ignores SIGINT
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from qerl_pl.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
