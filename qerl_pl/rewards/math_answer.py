"""Answers compared as mathematics, by math-verify."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.rewards.base import RewardSample
from qerl_pl.rewards.format_and_length import last_tagged

log = logging.getLogger("qerl_pl")

_PROGRAM = Path(__file__).with_name("math_worker.py")
_MEGABYTES = 4096
_SECONDS_TO_END = 60
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Exit statuses that no answer causes: its limits end the process by other signals or an exception."""


class MathAnswer:
    """1 where the answer equals the reference as mathematics (math-verify), else 0.

    The answer is LaTeX or plain text, such as \\frac{1}{2}, 0.5, 1/2 or $x = 3$. An answer that cannot be read, or not
    within the limits on time and memory, counts as wrong. Grading runs in a process of its own, started at the first
    call and kept: a time limit is certain to end it, and nothing in it writes files, starts programs or opens sockets.

    Args:
        weight: Factor of this reward in the total.
        tag: The answer is what the last block of this tag encloses; null searches the whole completion for it.
        time_limit_s: Seconds of processor time that reading and comparing one answer may take.
        name: What the values are logged as, after `reward/`.
    """

    def __init__(
        self, weight: float = 1.0, tag: str | None = "answer", time_limit_s: float = 3.0, name: str = "accuracy"
    ) -> None:
        if not (math.isfinite(time_limit_s) and time_limit_s > 0):
            raise UserError(f"MathAnswer needs a positive time_limit_s; got {time_limit_s}; a few seconds do.")
        self.weight = weight
        self.tag = tag
        self.name = name
        self._grader = _Grader(time_limit_s)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def extract_answer(self, completion: str) -> str | None:
        """What the last block of the tag encloses, as it is written; None without one, or where there is no tag."""
        return (last_tagged(completion, self.tag) or None) if self.tag is not None else None

    def _is_right(self, sample: RewardSample) -> bool:
        answer = sample.completion if self.tag is None else last_tagged(sample.completion, self.tag)
        if not answer:
            return False
        # The same text is the same value: most right answers need no more than this.
        return answer == sample.reference.strip() or self._grader.equivalent(sample.reference, answer)


class _Grader:
    """The process that runs `math_worker.py`: started when needed, replaced when it has ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def equivalent(self, reference: str, answer: str) -> bool:
        """Whether the two have one value; False where the process ended over it.

        Raises:
            RuntimeError: Somebody else kills the process, again and again.
        """
        question = json.dumps([reference, answer])
        for _ in range(2):
            if self._process is None:
                self._process = self._start()
            if reply := _ask(self._process, question):
                return bool(json.loads(reply))
            status, self._process = _ended(self._process), None
            if status not in _KILLED:
                log.warning("counted as wrong, for it cannot be graded within the limits: %.200r", answer)
                return False
        raise RuntimeError(f"something kills the grading process (exit status {status}); is memory short?")

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(self._seconds), str(_MEGABYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads' stacks would count against the memory limit
            start_new_session=True,  # Ctrl-C is the caller's affair
        )
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            _stop(process)
            raise RuntimeError(f"the grading process did not start (exit status {process.returncode})")
        return process


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """The reply line; empty where the process has ended, now or before."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _ended(process: subprocess.Popen[str]) -> int:
    """Exit status of a process that has closed its output, once it is gone."""
    process.communicate(timeout=_SECONDS_TO_END)
    return process.returncode


def _stop(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        process.kill()
        process.communicate()
