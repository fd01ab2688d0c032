"""Processes that grade answers side by side, and what bounds the time of a batch."""

import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from qerl_pl.distributed.communicator import warn_of_this_rank
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards.answers import answer_of, only_text, same_prose, same_text
from qerl_pl.rewards.base import Reward, RewardSample, refuse_empty_references

log = logging.getLogger("qerl_pl")

_PROGRAM = Path(__file__).with_name("math_worker.py")

_MEGABYTES = 4096

_SECONDS_TO_START = 120

_SECONDS_TO_END = 60

_QUICK = 6

"""At first an answer may take one so-many-th of its limit."""

_PAIRS_A_WORKER = 4

"""Fewer are not worth another process."""

_REMEMBERED = 4096

_BATCH = 128

"""Answers for which the slow ones have a batch's time once; more have it once for each so many."""

_MOST_TIMES = 16

_OWN = "MathAnswer grades in processes of its own"

_REMEDY = "see that memory is to be had, or set fewer workers, and go on with --resume auto"

_VERDICTS = {"true": True, "false": False, "limit": None}

Pair = tuple[str, str]

"""Reference and answer."""


class MathPool:
    """Worker processes that run `math_worker.py`: started when needed, replaced when they are killed.

    Verdicts do not depend on the number of workers, nor on earlier batches: each answer is graded by itself. First
    every answer may take a sixth of the limit. Those that take longer are graded again, with all of it, in the order of
    the batch, as many as the batch's time allows; the rest counts as wrong.

    Args:
        seconds: Of processor time that one answer may take.
        batch_seconds: Of processor time that the slow answers of a batch of up to 128 may take together; larger ones
            have it once for each 128 begun, at most 16 times.
        workers: Number of processes.
    """

    def __init__(self, seconds: float, batch_seconds: float, workers: int) -> None:
        self.seconds = seconds
        self.batch_seconds = batch_seconds
        self.workers = workers
        self.processes: list[_Worker] = []
        self._hopeless: dict[Pair, None] = {}

    def equivalent(self, pairs: Sequence[Pair], batch: int = 0) -> list[bool]:
        """Whether the two of each pair have one value; False where that cannot be told within the limits.

        Args:
            pairs: What is to be compared.
            batch: Size of the batch that they are the rest of, where it is larger.
        """
        verdicts: dict[Pair, bool | None] = dict.fromkeys(pairs)
        asked = [pair for pair in verdicts if pair not in self._hopeless]
        verdicts |= self._grade(asked, self.seconds / _QUICK)
        slow = [pair for pair in verdicts if verdicts[pair] is None]
        # A hopeless one keeps its place: a resumed run, which knows none, must come to the same grades.
        times = min(_MOST_TIMES, max(1, -(-max(batch, len(pairs)) // _BATCH)))
        places = int(times * self.batch_seconds / self.seconds)
        again = [pair for pair in slow[:places] if pair not in self._hopeless]
        verdicts |= self._grade(again, self.seconds)
        for _, answer in (pair for pair in slow if verdicts[pair] is None and pair not in self._hopeless):
            warn_of_this_rank(log, "counted as wrong, for it cannot be graded within the limits: %.200r", answer)
        for pair in again:
            if verdicts[pair] is None:
                self._hopeless[pair] = None
        while len(self._hopeless) > _REMEMBERED:
            del self._hopeless[next(iter(self._hopeless))]
        return [bool(verdicts[pair]) for pair in pairs]

    def _grade(self, pairs: Sequence[Pair], seconds: float) -> dict[Pair, bool | None]:
        """The verdict of each pair; None where it took too long.

        Raises:
            UserError: Somebody else kills the processes, again and again.
        """
        if not pairs:
            return {}
        self._have(min(self.workers, -(-len(pairs) // _PAIRS_A_WORKER)))
        waiting, verdicts, killed = deque(pairs), dict[Pair, bool | None](), set[Pair]()
        try:
            with selectors.DefaultSelector() as selector:
                idle = list(self.processes)
                while len(verdicts) < len(pairs):
                    while idle and waiting:
                        worker = idle.pop()
                        worker.ask(waiting.popleft(), seconds)
                        selector.register(worker, selectors.EVENT_READ)
                    ready = {key.fileobj for key, _ in selector.select(timeout=1.0)}
                    for worker in [one for one in self.processes if one in ready or one.overdue()]:
                        selector.unregister(worker)
                        pair, reply = worker.taken(in_time=worker in ready)
                        if reply in _VERDICTS:
                            verdicts[pair] = _VERDICTS[reply]
                        elif pair in killed:
                            raise UserError(f"{_OWN}; two were killed at {pair[1]!r:.80}, by no limit of it; {_REMEDY}")
                        else:  # nothing that an answer does: it is asked again
                            killed.add(pair)
                            waiting.appendleft(pair)
                        idle.append(worker if reply else self._replace(worker))
        finally:
            if len(verdicts) < len(pairs):  # broken off: what they still say would answer the next questions
                for worker in self.processes:
                    worker.stop()
        return verdicts

    def _have(self, count: int) -> None:
        """Have so many processes, all started at once, none of which has ended while idle."""
        self.processes = [worker for worker in self.processes if worker.process.poll() is None]
        new = [_Worker() for _ in range(count - len(self.processes))]
        for worker in new:
            worker.wait_for_start()
        self.processes += new

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.stop()
        place = self.processes.index(worker)
        self.processes[place] = _Worker()
        self.processes[place].wait_for_start()
        return self.processes[place]


class _Worker:
    """One process, and what it was asked."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(_MEGABYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads' stacks would count against the memory limit
            start_new_session=True,  # Ctrl-C is the caller's affair
        )
        self._asked: Pair | None = None
        self._deadline = 0.0
        self._finalizer = weakref.finalize(self, _end, self.process)

    def fileno(self) -> int:
        """Where its replies come."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def wait_for_start(self) -> None:
        """Return when it takes questions.

        Raises:
            UserError: It does not start, or not in time.
        """
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            in_time = selector.select(timeout=_SECONDS_TO_START)
        if not in_time or self.process.stdout.readline() != b"ready\n":
            self.stop()
            raise UserError(f"{_OWN}; one did not start (exit status {self.process.returncode}); {_REMEDY}")

    def ask(self, pair: Pair, seconds: float) -> None:
        """Have it grade a pair; a process that is gone shows at its reply."""
        assert self.process.stdin is not None
        self._asked = pair
        self._deadline = time.monotonic() + 20 * seconds + _SECONDS_TO_END
        try:
            self.process.stdin.write((json.dumps([*pair, seconds]) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def taken(self, in_time: bool) -> tuple[Pair, str]:
        """What it was asked, and the line that it has written: "" where it is gone, or not in time."""
        assert self._asked is not None and self.process.stdout is not None
        pair, self._asked = self._asked, None
        return pair, self.process.stdout.readline().decode().strip() if in_time else ""

    def overdue(self) -> bool:
        """Whether it is stuck, for its own clocks would have ended any grading by now."""
        return self._asked is not None and time.monotonic() > self._deadline

    def stop(self) -> None:
        """End it, with the copy that grades."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with its copy; alone that ends with its input
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
    process.wait()


def cores() -> int:
    """Processor cores for this process's workers: those it may use, shared with the other ranks of its machine."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        available = os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class MathAnswer(Reward):
    """1 where the answer equals the reference as mathematics (math-verify), else 0.

    The answer is LaTeX or plain text, such as \\frac{1}{2}, 0.5, 1/2 or $x = 3$; of several in \\boxed{} the last
    counts. An answer that cannot be read, or not within the limits on time and memory, counts as wrong, and so does one
    that is not definite: two values for one, a negation, a chain of equations of which one is false, a prime or a base
    that the reference does not have. Grading runs in processes of its own, started at the first call and kept: a time
    limit is certain to end it, and nothing in it writes files, starts programs or opens sockets.

    A reference of prose or of several statements, such as "$C$ is not invertible", is compared as text alone, but for
    case and spaces; a run warns of such at its start.

    Args:
        weight: Factor of this reward in the total.
        tag: The answer is what the last block of this tag encloses; null takes the last \\boxed{} of the whole
            completion, or what follows its last ####, or its last formula or number.
        time_limit_s: Seconds of processor time that reading and comparing one answer may take.
        name: What the values are logged as, after `reward/`.
        batch_limit_s: Seconds of processor time that the slow answers of a batch, each of which takes more than a sixth
            of its limit, may take together; the first ones are graded, the rest counts as wrong. A batch of more than
            128 completions has it once for each 128 begun, at most 16 times.
        workers: Processes that grade; null takes one a processor core. Grades do not depend on it.
    """

    def __init__(
        self,
        weight: float = 1.0,
        tag: str | None = "answer",
        time_limit_s: float = 3.0,
        name: str = "accuracy",
        batch_limit_s: float = 12.0,
        workers: int | None = None,
    ) -> None:
        for key, seconds in (("time_limit_s", time_limit_s), ("batch_limit_s", batch_limit_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise UserError(f"MathAnswer needs a positive {key}; got {seconds}; a few seconds do.")
        require_at_least(1, {"MathAnswer's workers": workers})
        self.weight = weight
        self.tag = tag
        self.name = name
        self.time_limit_s = time_limit_s
        self.batch_limit_s = batch_limit_s
        self._pool = MathPool(time_limit_s, batch_limit_s, cores() if workers is None else workers)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        answers = [answer_of(sample.completion, self.tag) for sample in samples]
        # The same text is the same value: most right answers need no more than this.
        values = [float(answer == sample.reference.strip()) for sample, answer in zip(samples, answers, strict=True)]
        open_places = []
        for place, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
            if answer and not values[place]:
                if only_text(sample.reference):
                    values[place] = float(same_prose(answer, sample.reference))
                else:
                    open_places.append(place)
        pairs = [(samples[place].reference, str(answers[place])) for place in open_places]
        for place, right in zip(open_places, self._pool.equivalent(pairs, len(samples)), strict=True):
            values[place] = float(right)
        return values

    def check_references(self, references: Mapping[str, str]) -> None:
        """Refuse empty references, and warn of those that can only be compared as text."""
        refuse_empty_references(self, references)
        found = [name for name, reference in references.items() if only_text(reference)]
        if found:
            log.warning(
                "MathAnswer compares a reference of prose or of several statements as text alone, for any part of it "
                "would satisfy it as mathematics: %d of %d references, such as %.200r of %s; rewrite or drop them",
                len(found),
                len(references),
                references[found[0]],
                found[0],
            )

    def extract_answer(self, completion: str) -> str | None:
        """The answer, written one way in spaces and the like; None without one."""
        answer = answer_of(completion, self.tag)
        return None if answer is None else same_text(answer)
