"""The program that `MathAnswer` grades in: reads [reference, answer] lines, writes true or false lines.

It runs on its own, `python -P math_worker.py SECONDS MEGABYTES`, and imports nothing of this package, so that it starts
fast and holds nothing worth taking. An answer that takes too long, be it inside a C function that no Python signal
handler could stop, ends the process: the kernel's default action on the timer's signal. The caller starts another.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

# math-verify reads LaTeX by a grammar, and gives plain text to sympy's parser (which evaluates) only where it consists
# of digits, spaces and the signs + - * / ^ ( ) alone. Should that ever change, these stay shut.
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "mmap.", "signal.", "ftplib.")
_READ_ONLY = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # what an import does
_BASE = re.compile(r"\w+_\{?(\d+)\}?")
"""A number and its base."""
_MARKUP = ("\\boxed", "\\(", "\\[")
_WALL_SECONDS_PER_CPU_SECOND = 10


def _deny(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: no processes, no network, no foreign code, no writing to files."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _READ_ONLY):
        raise PermissionError(f"grading may not do this: {event}")


def as_latex(text: str) -> str:
    """`text` as math-verify reads it: whole, as one expression, unless the text itself says what its answer is."""
    text = text.strip().rstrip(".")
    if any(mark in text for mark in _MARKUP) or text.count("$") - text.count("\\$") >= 2:
        return text
    return f"\\boxed{{{text}}}"


def equivalent(reference: str, answer: str) -> bool:
    """Whether `answer` has the reference's value; False where it cannot be read."""
    bases = [_BASE.fullmatch(text.strip().strip("$")) for text in (reference, answer)]
    if all(bases) and len({found and found[1] for found in bases}) > 1:  # math-verify reads 52_8 and 52_7 alike
        return False
    expected = parse(as_latex(reference), parsing_timeout=None)
    return bool(verify(expected, parse(as_latex(answer), parsing_timeout=None), timeout_seconds=None))


def main(seconds: float, megabytes: int) -> None:
    """Answer lines of standard input until it ends; each may take `seconds` of processor time."""
    for asked in (signal.SIGINT, signal.SIGTERM):  # the caller's affair, which finishes its step and closes the pipe
        signal.signal(asked, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # math-verify warns that we set the time limit ourselves
    sys.dont_write_bytecode = True
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    equivalent("\\frac{1}{2}", "0.5")  # what is imported on first use
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    sys.addaudithook(_deny)
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        reference, answer = json.loads(line)
        # Processor time, for a busy machine must not change a reward; the wall clock guards against a sleep.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_SECONDS_PER_CPU_SECOND)
        result = equivalent(reference, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(result) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
