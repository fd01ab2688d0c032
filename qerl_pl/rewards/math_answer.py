"""Mathematical equivalence of answers, graded in a pool of killable processes."""

import asyncio
import logging
import math
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards.answers import answer_of, only_text, same_prose, same_text
from qerl_pl.rewards.base import Reward, RewardSample, refuse_empty_references
from qerl_pl.runtime.communicator import warn_of_this_rank
from qerl_pl.runtime.process_pool import ProcessPool, cores, worker_variables

log = logging.getLogger("qerl_pl")

_GRADER = Path(__file__).with_name("math_grader.py")
_MEMORY_LIMIT = 4 * 2**30
_OVERDUE_S = 60
"""Beyond twenty times an answer's limit, seconds after which a process hangs: its own timers should have ended it."""
_FIRST_PASS_DIVISOR = 6
"""The first pass gives an answer a sixth of its limit."""
_PAIRS_PER_WORKER = 4
"""Fewer pairs are not worth another process."""
_BATCH = 128
"""Completions for which a batch's time limit holds once."""
_MAX_BATCHES = 16
_OWN = "MathAnswer grades in separate processes"
_REMEDY = "free memory, or set fewer workers, and continue with --resume auto"
_LIMITS = (signal.SIGPROF, signal.SIGALRM)
"""The timers of an answer."""
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Not caused by an answer."""

Pair = tuple[str | None, str]
"""Reference and answer; without a reference, the answer's canonical form is asked for."""

Verdict = bool | str | None
"""Whether both are equal, or the canonical form; None if it took too long, or there is no such form."""


@dataclass(eq=False)
class MathPool:
    """Grades with `math_grader.py` in worker processes, started when needed and replaced when killed.

    Verdicts depend neither on the number of workers nor on earlier batches: in a first pass every answer may take a
    sixth of the limit; slower ones are graded again in the order of the batch, with the full limit, as many as the
    batch's time allows. The others count as wrong.

    Args:
        seconds: CPU time limit of an answer.
        batch_seconds: CPU time limit of the slow answers of a batch of up to 128; larger batches have it once for each
            128 begun, at most 16 times.
        workers: Number of processes; None takes one for each CPU core of this rank.
    """

    seconds: float
    batch_seconds: float
    workers: int | None
    processes: ProcessPool | None = field(default=None, init=False)
    _timed_out: set[Pair] = field(default_factory=set, init=False)

    def equivalent(self, pairs: Sequence[Pair], batch: int = 0) -> list[bool]:
        """Whether reference and answer of each pair are equal; False if that fails or takes longer than the limits.

        Args:
            pairs: Pairs to compare.
            batch: Size of the batch that the pairs belong to, if it is larger.
        """
        verdicts: dict[Pair, Verdict] = dict.fromkeys(pairs)
        first_pass = [pair for pair in verdicts if pair not in self._timed_out]
        verdicts |= self._grade(first_pass, self.seconds / _FIRST_PASS_DIVISOR)
        slow = [pair for pair in verdicts if verdicts[pair] is None]
        batches = min(_MAX_BATCHES, max(1, -(-max(batch, len(pairs)) // _BATCH)))
        # A pair known to exceed the limit still counts as one: a resumed run, which has no such memory, must give the
        # same grades.
        retry_slots = int(batches * self.batch_seconds / self.seconds)
        second_pass = [pair for pair in slow[:retry_slots] if pair not in self._timed_out]
        verdicts |= self._grade(second_pass, self.seconds)
        for pair in slow:
            if verdicts[pair] is None and pair not in self._timed_out:
                message = "an answer counts as wrong, as it cannot be graded within the limits: %.200r"
                warn_of_this_rank(log, message, pair[1])
        self._timed_out |= {pair for pair in second_pass if verdicts[pair] is None}
        return [bool(verdicts[pair]) for pair in pairs]

    def canonical(self, answers: Sequence[str]) -> list[str]:
        """A text for each answer that depends on its value alone; the answer itself if it has none within the limit."""
        forms = self._grade([(None, answer) for answer in dict.fromkeys(answers)], self.seconds / _FIRST_PASS_DIVISOR)
        return [str(forms[None, answer] or answer) for answer in answers]

    def _grade(self, pairs: Sequence[Pair], seconds: float) -> dict[Pair, Verdict]:
        """The verdict on each pair; False where grading raises an exception or crashes."""
        waiting, verdicts, killed = deque(pairs), dict[Pair, Verdict](), set[Pair]()
        failed: dict[Pair, str] = {}

        async def grade(processes: ProcessPool) -> None:
            """Grade what waits, one pair at a time."""
            while waiting and processes.is_alive():
                pair = waiting.popleft()
                worker = await processes.worker()
                reply = await worker.ask(20 * seconds + _OVERDUE_S, *pair, seconds)
                processes.release(worker, reusable="verdict" in reply)
                status = reply.get("status")
                if "gone" not in reply or (status is not None and -status not in (*_LIMITS, *_KILLED)):
                    verdicts[pair] = reply.get("verdict", False)
                    if "verdict" not in reply:
                        failed[pair] = reply.get("failed", f"status {status}")
                elif status is not None and -status in _LIMITS:
                    verdicts[pair] = None
                elif pair not in killed:  # not the answer's doing: try once more
                    killed.add(pair)
                    waiting.appendleft(pair)
                else:
                    raise UserError(
                        f"{_OWN}; two were killed while grading {pair[1]!r:.80}, not by its limits; {_REMEDY}"
                    )

        async def grade_concurrently(processes: ProcessPool) -> None:
            await asyncio.gather(*[grade(processes) for _ in range(min(most, -(-len(pairs) // _PAIRS_PER_WORKER)))])

        most = self.workers or cores()  # ranks are known once they have started, after the settings are read
        while len(verdicts) < len(pairs):
            processes = self._started(most)
            grading = processes.submit(grade_concurrently(processes))
            try:
                grading.result()
            finally:
                if not grading.done() or grading.exception():  # pending replies would be taken for the next pairs'
                    processes.close()
        if wrong := [pair for pair in failed if pair[0] is not None]:
            message = "%d answers count as wrong, as grading fails, such as %.200r (%s)"
            warn_of_this_rank(log, message, len(wrong), wrong[0][1], failed[wrong[0]])
        return verdicts

    def _started(self, most: int) -> ProcessPool:
        """The processes, started if there are none."""
        if self.processes is None or not self.processes.is_alive():
            if self.processes is not None:
                self.processes.close()
            # Threads' stacks would count towards the memory limit.
            variables = {**worker_variables(), "OPENBLAS_NUM_THREADS": "1"}
            self.processes = ProcessPool(self, "a grading process", _GRADER, None, most, _MEMORY_LIMIT, variables)
        started = self.processes.started.result()
        if "error" in started:
            raise UserError(f"{_OWN}; they did not start ({started['error']}); {_REMEDY}")
        return self.processes


class MathAnswer(Reward):
    """1 if the answer equals the reference as mathematics (math-verify), else 0.

    The answer is LaTeX or plain text, such as \\frac{1}{2}, 0.5, 1/2 or $x = 3$; of several \\boxed{} the last counts.
    An answer is wrong, too, if it cannot be graded within the limits on time and memory, or is ambiguous: two values
    where the reference has one, a negation, a chain of equations of which one is false, a prime or a number base that
    the reference does not have. Grading runs in separate processes, which can be killed, and which cannot write files,
    start programs or open sockets.

    References that are prose or several statements, such as "$C$ is not invertible", are compared as text, ignoring
    case and spaces.

    Args:
        weight: Factor of this reward in the total.
        tag: The answer is in the last block of this tag; null takes the completion's last \\boxed{}, the line after its
            last ####, or its last formula or number.
        time_limit_s: CPU time limit of one answer, in seconds.
        name: Logged as `reward/<name>`.
        batch_limit_s: CPU time limit, in seconds, of a batch's slow answers (those that take more than a sixth of their
            limit) together; answers beyond it count as wrong. A batch of more than 128 completions has it once for each
            128 begun, at most 16 times.
        workers: Grading processes of each rank; null takes one for each CPU core of the machine, divided by its
            ranks. Grades do not depend on it.
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
        self._pool = MathPool(time_limit_s, batch_limit_s, workers)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        values = [0.0] * len(samples)
        pairs: dict[int, Pair] = {}
        for index, sample in enumerate(samples):
            answer = answer_of(sample.completion, self.tag)
            if answer == sample.reference.strip():  # most right answers end here
                values[index] = 1.0
            elif answer and only_text(sample.reference):
                values[index] = float(same_prose(answer, sample.reference))
            elif answer:
                pairs[index] = sample.reference, answer
        for index, right in zip(pairs, self._pool.equivalent(list(pairs.values()), len(samples)), strict=True):
            values[index] = float(right)
        return values

    def check_references(self, references: Mapping[str, str]) -> None:
        """Refuse empty references."""
        refuse_empty_references(self, references)

    def extract_answer(self, completion: str) -> str | None:
        """The normalized answer; None if there is none."""
        answer = answer_of(completion, self.tag)
        return None if answer is None else same_text(answer)

    def normalize_answers(self, answers: Sequence[str]) -> Sequence[str]:
        """The text of each answer's value, 1/2 for 0.5 and \\frac12; without a definite value, the answer itself."""
        return self._pool.canonical(answers)
