"""Answers compared as mathematics, by math-verify."""

import logging
import math
from collections.abc import Mapping, Sequence

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards.answer_text import answer_of, only_text, same_prose, same_text
from qerl_pl.rewards.base import RewardSample, refuse_empty_references
from qerl_pl.rewards.math_pool import MathPool, cores

log = logging.getLogger("qerl_pl")


class MathAnswer:
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
