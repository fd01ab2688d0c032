"""Answers graded as mathematics: what counts as right, and that an answer can neither hang nor run."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared_data import DATA, needs_data, read

from qerl_pl.errors import UserError
from qerl_pl.rewards import GSM8KAnswer, MathAnswer, RewardSample, score
from qerl_pl.rewards import math_answer as grading
from qerl_pl.rewards.answers import answer_of, last_boxed, only_text, same_text
from qerl_pl.rewards.math_answer import MathPool, Pair
from qerl_pl.runtime.process_pool import WorkerProcess


def sample(completion: str) -> RewardSample:
    return RewardSample("How many?", completion, reference="18", truncated=False, num_tokens=5)


def answered(answer: str, reference: str = "18") -> RewardSample:
    completion = f"<think>so</think><answer>{answer}</answer>"
    return RewardSample("How many?", completion, reference, truncated=False, num_tokens=5)


@pytest.fixture(scope="module")
def math_answer() -> MathAnswer:
    return MathAnswer(time_limit_s=20.0, workers=1)


RIGHT = [
    ("52_{8}", "52_8"),
    ("\\mathbf{5} \\text{ cm}", "5"),
    ("\\text{1/2}", "\\frac12"),
    ("\\sqrt\\frac{2}{3}", "\\sqrt{\\frac{2}{3}}"),
    ("2^\\frac12", "\\sqrt{2}"),
    ("37\\frac12\\%", "37.5\\%"),
    ("0.\\bar{3}", "\\frac13"),
    ("10 ^ \\circ", "10^\\circ"),
    ("10\\degree", "10^\\circ"),
    ("(C) 12", "\\text{(C)}"),
    ("(\\sqrt2, 1) \\approx (1.41, 1)", "(\\sqrt2, 1)"),
    ("x \\approx 5", "5"),
    ("$0.5$", "\\frac12"),
    ("\\boxed{18}", "18"),
    ("\\$18", "18"),
    ("1,234", "1234"),
    ("1 234", "1234"),
    ("1\\,234{,}567", "1234567"),
    ("(1, 2)", "\\left(1, 2\\right)"),
    ("√9", "3"),
    ("{no way to read this", "{no way to read this"),
    ("€18", "18"),
    ("18 miles per hour", "18"),
    ("90°", "90^\\circ"),
    ("-2 \\le x \\le 7", "[-2,7]"),
    ("x > 2", "(2,\\infty)"),
    ("\\{2, 1\\}", "\\{1, 2\\}"),
    ("1 \\text{ or } 2", "1, 2"),
    ("x = 1 \\lor x = 2", "1, 2"),
    ("\\begin{bmatrix} 1 & 0 \\\\ 0 & 2 \\end{bmatrix}", "\\begin{pmatrix} 1 & 0 \\\\ 0 & 2 \\end{pmatrix}"),
    ("evelyn", "\\text{Evelyn}"),
    ("(c)", "\\text{(C)}"),
    ("**18**", "18"),
    ("x = 36/2 = 18", "18"),
    ("(x+1)^2 = x^2+2x+1", "x^2+2x+1"),
    ("3\\pi = 9.42", "9.42"),
    ("f'(x) \\cdot 2", "2f'(x)"),
    ("f'(x) = 2x", "2x"),
    ("F_5 = 5", "5"),
    ("\\text{Pascal's}", "Pascal's"),
    ("12_{10}", "12"),
    ("A5_{16}", "A5_{16} "),
    ("\\log_2 8", "3"),
    ("17 \\boxed{17} no, \\boxed{18}", "18"),
    ("\\boxed{\\frac{1}{\\sqrt{4}}}", "\\frac12"),
    ("9 * 2 = 18\n#### 18", "18"),
    ("-$12$", "-12"),
    ("Answer: -\\(12\\)", "-12"),
    ("The answer is **$12$**.", "12"),
    ("50\\text{ percent}", "50"),
    ("$\\frac12$ or, equivalently, $0.5$", "\\frac12"),
    ("$2$/$3$", "2/3"),
    ("2$\\pi$", "2\\pi"),
    ("$50$%", "\\frac12"),
    ("5 \\text{ cm} or 6 \\text{ cm}", "5, 6"),
    ("3 \\text{ m} ; 5 \\text{ kg}", "3 ; 5"),
    ("3 \\text{ m}^2 + 5 \\text{ m}^2", "8"),
    ("5 \\text{ inches squared}", "5"),
    ("$-1./3$ or $-1./6$", "-1/6, -1/3"),
    ("$1$, $2$, $3$, $4$, $5$, $6$, and $7$", "7, 6, 5, 4, 3, 2, 1"),
    ("$a=1$; $b=2$", "a=1, b=2"),
    ("I_2+I_1", "I_1+I_2"),
    ("Since $x > 3$, or so I think, and $x < 5$, the answer is $4$", "4"),
    ("$18$ - the number of eggs", "18"),
    ("18", "The answer is $18$."),
    ("18", "$18$ dollars"),
    ("$C$ is not  invertible.", "$C$ is not invertible"),
    ("No real solutions", "\\text{no real solutions}"),
    ("The answer is 18.", "18"),
    ("Final answer: 18", "18"),
    ("1 1/2", "\\frac{3}{2}"),
    ("0.1\\overline{6}", "\\frac{1}{6}"),
    ("\\frac{1}{3}", "0.\\overline{3}"),
    ("\\varnothing", "\\emptyset"),
    ("2 ln(3) + sin x", "2\\ln 3 + \\sin x"),
    ("exp(x)", "e^x"),
    ("2*pi + 7 sqrt(2)", "2\\pi+7\\sqrt{2}"),
    ("true", "\\text{True}"),
    ("18 km/h", "18"),
    ("18 cm²", "18"),
    ("18", "18 dollars"),
    ("$x = 18.$", "18"),
    ("x < -1 or x > 1", "(-\\infty,-1)\\cup(1,\\infty)"),
]
WRONG = [
    ("52_7", "52_8"),
    ("19", "18"),
    ("17 or 18", "18"),
    ("17 \\text{ or } 18", "18"),
    ("17 \\lor 18", "18"),
    ("17 ∨ 18", "18"),
    ("x = 17 \\vee x = 18", "18"),
    ("17 || 18", "18"),
    ("17, 18", "18"),
    ("$17$ $18$", "18"),
    ("x=17 x=18", "18"),
    ("17 \\\\ 18", "18"),
    ("17 & 18", "18"),
    ("17 \\to 18", "18"),
    ("It is 17. No, 18", "18"),
    ("2 + 2 = 18", "18"),
    ("1 = 2 = 18", "18"),
    ("x = 17 = 18", "18"),
    ("17 \\equiv 18", "18"),
    ("\\neq 18", "18"),
    ("\\not= 18", "18"),
    ("x \\ne 18", "18"),
    ("≠ 18", "18"),
    ("!= 18", "18"),
    ("<> 18", "18"),
    ("not 18", "18"),
    ("18 \\text{ is wrong}", "18"),
    ("\\ge 18", "18"),
    ("< 18", "18"),
    ("18'", "18"),
    ("18^\\prime", "18"),
    ("x'", "x"),
    ("x' = 5", "x = 5"),
    ("A5_{12}", "A5_{16}"),
    ("f(x)", "f'(x)"),
    ("18_5", "18"),
    ("18 million", "18"),
    ("18 or so", "17"),
    ("x^2 + 1", "1"),
    ("(2, 1)", "(1, 2)"),
    ("1 < x < 2", "(1, 2)"),
    ("", "18"),
    ("0.33", "\\frac13"),
    *(
        (answer, "\\frac{1}{2}")
        for answer in ("\\frac{1}{2}, ..., 3", "\\frac{1}{2} 或 3", "\\frac{1}{2}. 3", "x^\\frac{1}{2}")
    ),
    ("\\sqrt\\frac{2}{3}", "\\frac{2}{3}"),
    ("\\begin{cases} \\frac{1}{2} & x>0 \\\\ 3 & x<0 \\end{cases}", "\\frac{1}{2}"),
    *((answer, "\\text{(C)}") for answer in ("(C) or (D)", "\\textbf{(C)}, \\textbf{(D)}", "C: 5 or D: 6")),
    *(("(1,2) \\approx (3,4) \\approx (5,6)", one) for one in ("(3,4)", "(5,6)")),
    ("x+1 \\approx 2x", "2x"),
    ("\\frac{1}{0}", "18"),
    ("\ud800", "18"),
    ("{no way to read this", "18"),
    ("\\boxed{18} \\boxed{17}", "18"),
    ("18 #### 17", "18"),
    ("-$12$", "12"),
    ("- $12$", "12"),
    ("12 \\text{ wrong}", "12"),
    ("-$\\$ 5000$", "5000"),
    ("2$12$", "12"),
    ("$12$/$5$", "5"),
    ("5 \\text{ cm} or 6 \\text{ cm}", "5"),
    ("$5$ cm or $6$ cm", "6"),
    ("$5$ or 6", "5"),
    ("3 \\text{ m} ; 6 \\text{ kg}", "3 \\text{ m} ; 5 \\text{ kg}"),
    ("5 \\text{ million}", "5"),
    ("$1$, $2$, $3$, $4$, $5$, $6$, $7$", "7"),
    ("$5$ or ${6$", "5"),
    ("I_1+I_3", "I_1+I_2"),
    *(("$-1./3$ or $-1./6$", one) for one in ("-1/3", "-1/6", "-1./3", "$-1./3$", "$-1/6$")),
    ("The mode is 1/6. or The mode is 1/3.", "1/3"),
    ("$b=2$", "$a=1$; $b=2$"),
    ("2", "$a=1$ for $b=2$"),
    ("$C$ is invertible", "$C$ is not invertible"),
    ("C", "$C$ is not invertible"),
    ("(1,2)", "increasing on $(0,1)$, decreasing on $(1,2)$"),
    ("$6$", "$5$ apples and $6$ pears"),
    ("The answer is 17. No, 18", "18"),
    ("The answer is not 18.", "18"),
    ("1 1/2", "1"),
    ("0.1\\overline{6}", "0.16"),
    ("x < -1 or x > 2", "(-\\infty,-1)\\cup(1,\\infty)"),
    ("x < -1 or y > 1", "(-\\infty,-1)\\cup(1,\\infty)"),
]


def test_math_answer(math_answer: MathAnswer) -> None:
    values = math_answer([answered(*pair) for pair in RIGHT + WRONG])
    expected = [1.0] * len(RIGHT) + [0.0] * len(WRONG)
    wrongly = [pair for pair, value, one in zip(RIGHT + WRONG, values, expected, strict=True) if value != one]
    assert not wrongly


REFERENCES = {
    "a": "18",
    "b": "The answer is $18$.",
    "c": "$18$ dollars",
    "d": "$x = 1$ or $x = 2$",
    "e": "x^2 \\text{ or } 3 \\text{ cm}",
    "f": "$C$ is not invertible",
    "g": "$a=1$ for $b=2$",
    "h": "\\(C\\) invertible",
    "i": "C \\text{ is even}",
    "j": "The answer is not $18$",
}


def test_which_references_can_only_be_compared_as_text() -> None:
    assert [name for name, reference in REFERENCES.items() if only_text(reference)] == ["f", "g", "h", "i", "j"]


def test_equal_texts_need_no_grading() -> None:
    reward = MathAnswer()
    assert reward([answered("\\pi", "\\pi"), answered(" 18 ", "18 ")]) == [1.0, 1.0]
    assert reward._pool.processes is None


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("So it is $\\frac{36}{2}$.", "$\\frac{36}{2}$"),
        ("It is $1$ or $2$. So $3$, or $4$.", "$3$, or $4$"),
        ("First 18, but then 19.", "19"),
        ("\\boxed{17} \\boxed{a_{\\frac{1}{2}}} then 5", "a_{\\frac{1}{2}}"),
        ("\\boxed{17} and \\boxed{18", "17"),
        ("16 - 3 = 13\n#### 1,300\nThat is it.", "1,300"),
        ("\\(x = 5\\) dollars", "\\(x = 5\\)"),
        ("The mode is 1/6. or The mode is 1/3.", "1/6. or The mode is 1/3"),
        ("Not 7. It is 5 or 6.", "5 or 6"),
        ("Of 5 or 6 take 5 and have 7.", "7"),
        ("\\[a \\\\[2pt] b\\] then \\[c", "\\[a \\\\[2pt] b\\]"),
        ("\\[a\n\\[b\n\\] c", "\\[b\n\\]"),
        ("\\(a \\(b\\) c", "\\(b\\)"),
        ("\\\\[a\\\\] so 7", "7"),
        ("She makes 9 * $2 = $18 every day.", "$18"),
        ("The profit is $150,000 - $80,000 = $70,000.", "$70,000"),
        ("It is $15*13=$<<15*13=195>>195.", "195"),
        ("He pays $5 and gets $2 back, so $ x = 3 $ is left.", "$ x = 3 $"),
        ("At $5 or $6, it is $ 5 and $ 6", "6"),
        ("Thus\n$$\nx = \\frac{1}{4}\n$$\nas said.", "$$\nx = \\frac{1}{4}\n$$"),
        ("So -$\\$ 5000$", "$\\$ 5000$"),
        ("It falls to −3.", "−3"),
        ("It takes 1 1/2 hours.", "1 1/2"),
        ("The value lies between 3-5.", "5"),
        ("The town has 1.5 million people.", "1.5 million"),
        ("They meet at 12:30.", "12:30"),
        ("nothing", None),
        ("", None),
    ],
)
def test_what_a_completion_without_tags_answers(completion: str, answer: str | None) -> None:
    assert answer_of(completion, None) == answer


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{7}" + "\\boxed{" * 5000, "7"),
        ("\\boxed{" * 5000, None),
        ("\\boxed{" * 3 + "1}", "1"),  # what leaves the two around it open does not leave it open
        ("\\boxed{a\\boxed{b}c}", "b"),
        ("\\boxed{a\\boxed{b}", "b"),
        ("\\boxed{a} \\boxed{b \\boxed{c {d}", "a"),
        ("\\boxed{a \\boxed{b\\} c}", "b\\} c"),
        ("\\boxed{a} } \\fboxed {b{", "a"),
        ("\\boxed{a\\boxed{{b}}", "{b}"),
        ("\\boxed{}\\boxed{\\{", ""),
    ],
    ids=lambda given: str(given)[:30],
)
def test_the_last_box_that_is_closed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("between", "together"),
    [
        (" " * 20_000, True),
        (" " * 20_000 + "," + " " * 20_000 + "and\n", True),
        (" " * 20_000 + "x ", False),
        (" and ", True),
        (";", True),
        ("or", True),
        ("", True),
        (", or so ", False),
        ("; or ", False),
    ],
    ids=lambda given: str(given).strip()[:10],
)
def test_formulas_that_stand_together(between: str, together: bool) -> None:
    text = f"\\(1\\){between}\\(2\\)"
    assert answer_of(f"so {text}" + " " * 20_000 + "!", None) == (text if together else "\\(2\\)")


def test_math_answer_reads_only_the_tag_unless_told(math_answer: MathAnswer) -> None:
    free = MathAnswer(tag=None)
    texts = [sample("So it is $\\frac{36}{2}$."), sample("First 18, but then 19.")]
    assert math_answer(texts) == [0.0, 0.0]
    assert free(texts) == [1.0, 0.0]


@pytest.mark.parametrize(
    "texts",
    [
        ("\\dfrac{1}{2}", "$\\frac{1}{2}$", " \\frac{1}{2}. "),
        ("1,234.50", "1234.5", "**1234.5**"),
        ("(1, 2)", "\\left( 1,2 \\right)"),
        ("x = 5", "x=5"),
    ],
)
def test_answers_that_differ_in_writing_alone_have_one_text(texts: tuple[str, ...]) -> None:
    assert len({same_text(text) for text in texts}) == 1
    assert same_text("1,2") != same_text("12") and same_text("a b") != same_text("ab")


ENDLESS = [answered(f"{base}^{{9^{{9^9}}}}") for base in (5, 6, 7, 8, 9)]
"""Powers that are computed inside one call of C, where no Python signal handler runs."""


def test_math_answer_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    reward = MathAnswer(time_limit_s=0.6)
    endless = ENDLESS[0]
    assert reward([endless, answered("36/2"), endless, answered("36/2")]) == [0.0, 1.0, 0.0, 1.0]
    assert caplog.text.count("cannot be graded within the limits: '5^{9^{9^9}}'") == 1
    first = pid(reward)
    assert reward([endless, answered("36/3")]) == [0.0, 0.0] and pid(reward) == first  # known by now
    assert caplog.text.count("cannot be graded") == 1


def test_hostile_answers_end_in_a_process_that_survives() -> None:
    reward = MathAnswer(time_limit_s=1.0, workers=1)
    hostile = ["(" * 2000, "\\sqrt{" * 300, "1" * 20000 + "!", "{" * 5000 + "}" * 5000, "1e999999999"]
    for extra in ("", " "):
        samples = [answered("36/2"), *(answered(one + extra) for one in hostile), answered("36/2")]
        assert reward(samples) == [1.0, *[0.0] * len(hostile), 1.0]
        first = pid(reward)
    assert reward([answered("36/3")]) == [0.0]  # by a worker that stays: the last hostile answer may end its own
    assert pid(reward) == first
    (worker,) = psutil.Process(first).children()
    assert worker.rlimit(psutil.RLIMIT_DATA) == (4 * 2**30, 4 * 2**30)


def test_slow_answers_share_the_time_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five, two of 1.2 s each fit into 2.6 s: those that come first, however many processes there are."""
    samples = [*ENDLESS[:3], answered("36/2"), *ENDLESS[3:], answered("54/3"), answered("36/3")]
    for workers in (1, 2):
        reward = MathAnswer(time_limit_s=1.2, batch_limit_s=2.6, workers=workers)
        asked: list[tuple[float, list[str]]] = []
        grade = reward._pool._grade

        def watched(pairs: Any, seconds: float, asked: Any = asked, grade: Any = grade) -> Any:
            asked.append((seconds, [answer[0] for _, answer in pairs]))
            return grade(pairs, seconds)

        monkeypatch.setattr(reward._pool, "_grade", watched)
        assert reward(samples) == [0, 0, 0, 1, 0, 0, 1, 0]
        assert asked == [(pytest.approx(0.2), ["5", "6", "7", "3", "8", "9", "5", "3"]), (1.2, ["5", "6"])]


class Slow(MathPool):
    """Knows no answer in a shorter time than the longest."""

    def _grade(self, pairs: Sequence[Pair], seconds: float) -> dict[Pair, bool | None]:
        return dict.fromkeys(pairs, True if seconds == self.seconds else None)


def test_a_larger_batch_has_more_time_for_its_slow_answers() -> None:
    pool = Slow(seconds=3.0, batch_seconds=12.0, workers=1)
    for answers, graded in ((3, 3), (128, 4), (129, 8), (1024, 32), (2048, 64), (3000, 64)):
        assert sum(pool.equivalent([("18", str(answer)) for answer in range(answers)])) == graded
    assert sum(pool.equivalent([("18", str(answer)) for answer in range(20)], batch=1024)) == 20


def test_grades_do_not_depend_on_what_was_graded_before() -> None:
    """Two places for slow answers, of which the first two time out; the third would be right in time."""

    class Scripted(MathPool):
        def _grade(self, pairs: Sequence[Pair], seconds: float) -> dict[Pair, bool | None]:
            asked.append("".join(answer for _, answer in pairs))
            return {pair: True if pair[1] == "c" and seconds == self.seconds else None for pair in pairs}

    asked: list[str] = []
    pool = Scripted(seconds=1.0, batch_seconds=2.0, workers=1)
    for _ in range(2):
        assert pool.equivalent([("18", answer) for answer in "abc"]) == [False] * 3
    assert asked == ["abc", "ab", "c", ""]  # what timed out is asked once
    assert pool.equivalent([("18", answer) for answer in "ac"]) == [False, True]


def test_what_kills_the_grading_is_told_as_itself_and_not_as_a_rewards_mistake() -> None:
    reward = MathAnswer(workers=1)
    assert reward([answered("36/2")]) == [1.0]
    asked: list[str] = []

    async def killed_when_asked(worker: Any, seconds: float, *request: Any, ask: Any = WorkerProcess.ask) -> Any:
        for child in psutil.Process(pid(reward)).children():
            child.kill()
        asked.append(request[1])
        return await ask(worker, seconds, *request)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as told:
        patch.setattr(WorkerProcess, "ask", killed_when_asked)
        score([reward], [answered("36/3"), answered("36/2")])
    assert re.fullmatch(
        r"MathAnswer grades in .*; two were killed while grading '36/\d', not by its limits; free memory.*",
        str(told.value),
    )
    assert len(asked) == 2  # and not once more for each sample alone
    assert reward([answered("36/2")]) == [1.0]


def test_a_grading_that_is_broken_off_answers_no_later_question() -> None:
    class BrokenOff(Exception):
        pass

    def break_off(*_: object) -> None:
        raise BrokenOff

    reward = MathAnswer(workers=1, time_limit_s=6.0)
    assert reward([answered("36/2")]) == [1.0]
    before = signal.signal(signal.SIGALRM, break_off)
    try:
        with pytest.raises(BrokenOff):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            reward([ENDLESS[0]])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert reward([answered("36/2"), answered("36/3")]) == [1.0, 0.0]


def test_a_grading_process_that_does_not_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(grading, "_GRADER", tmp_path / "worker.py")
    monkeypatch.setattr("qerl_pl.runtime.process_pool._START_TIMEOUT_S", 1)
    with pytest.raises(UserError, match=r"did not start \(its process ended, or took longer than 1 s\); free memory"):
        MathPool(1.0, 1.0, workers=1).equivalent([("18", "36/2")])


EQUAL = [
    ("1/2", "0.5", ".50", "\\frac12", "\\dfrac{1}{2}", "$x = 0.50$", "50\\%", "\\frac{2}{4}"),
    ("-3/2", "-1.5", "-\\frac{3}{2}"),
    ("1/3", "0.\\overline{3}"),
    ("1000", "1,000", "1000.0", "1000 miles per hour", "The answer is $1000$."),
    ("2\\sqrt{2}", "\\sqrt{8}", "√8"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("1, 2", "\\{2, 1\\}", "2 and 1"),
    ("\\pi/2", "0.5\\pi"),
]
"""Answers that are equal, and differ from those of the other rows."""
APART = ["0.333", "(1, 2)", "5", "act", "52_8", "52", "x<3", "x>3"]
"""Answers that differ from all others."""
UNREADABLE = ["cat", "not 5", "{no way to read this", "5^{9^{9^9}}", "(x+1)^{300}"]
"""Answers without a definite value, or without one within the limits on time and length."""


def test_equal_answers_have_one_normal_form_and_no_other_answer_has_it() -> None:
    alone = APART + UNREADABLE
    answers = [answer for row in EQUAL for answer in row] + alone
    forms = dict(zip(answers, MathAnswer(time_limit_s=6.0, workers=1).normalize_answers(answers), strict=True))
    rows = [{forms[answer] for answer in row} for row in [*EQUAL, *([answer] for answer in alone)]]
    assert all(len(row) == 1 for row in rows) and len(set.union(*rows)) == len(rows), rows
    assert forms["0.5"] == "1/2" and all(forms[answer] == answer for answer in UNREADABLE)
    assert MathAnswer().normalize_answers([]) == []


def test_grades_do_not_depend_on_the_number_of_workers(math_answer: MathAnswer) -> None:
    samples = [answered(*pair) for pair in (RIGHT + WRONG)[::2]]
    many = MathAnswer(time_limit_s=20.0, workers=3)
    assert list(many(samples)) == list(math_answer(samples))
    assert many._pool.processes is not None and len(many._pool.processes.workers) == 3


def pid(reward: MathAnswer) -> int:
    assert reward._pool.processes is not None
    return reward._pool.processes.server.pid


@pytest.mark.parametrize(("while_idle", "alone"), [(True, False), (False, False), (False, True)])
def test_a_killed_grading_process_is_replaced_and_asked_again(while_idle: bool, alone: bool) -> None:
    reward = MathAnswer()
    assert reward([answered("36/2")]) == [1.0]
    first = pid(reward)
    copy = int(Path(f"/proc/{first}/task/{first}/children").read_text())

    def kill(number: signal.Signals) -> None:
        for killed in [copy] if alone else [copy, first]:  # the copy that grades, or both
            os.kill(killed, number)

    kill(signal.SIGSTOP)  # it takes the question and never answers
    killing = threading.Timer(0.0 if while_idle else 0.3, kill, (signal.SIGKILL,))
    killing.start()
    if while_idle:
        killing.join()
    assert reward([answered("36/2"), answered("36/3")]) == [1.0, 0.0] and (pid(reward) == first) == alone


WORKER = Path(__file__).parent.parent / "qerl_pl" / "rewards" / "math_grader.py"


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {file}')",
        "1 + open('{file}', 'w').write('1')",
        "\\text{{__import__('pathlib').Path('{file}').touch()}}",
        "(lambda: open('{file}', 'w'))()",
    ],
)
def test_answers_are_not_run(math_answer: MathAnswer, tmp_path: Path, attack: str) -> None:
    file = tmp_path / "written"
    assert math_answer([answered(attack.format(file=file))]) == [0.0]
    assert not file.exists()


@pytest.mark.parametrize(
    ("action", "denied"),
    [
        ("open({file!r}, 'w')", True),
        ("os.open({file!r}, os.O_RDWR | os.O_CREAT)", True),
        ("os.system('true')", True),
        ("os.fork()", True),
        ("__import__('socket').socket()", True),
        ("open(os.devnull).close()", False),
        ("__import__('sympy.physics.units')", False),
    ],
)
def test_what_the_grading_process_may_do(tmp_path: Path, action: str, denied: bool) -> None:
    """Were some parser to run an answer, this is all it could do."""
    code = (
        f"import os, sys, runpy; worker = runpy.run_path({str(WORKER)!r}); sys.addaudithook(worker['_deny'])\n"
        f"try:\n    {action.format(file=str(tmp_path / 'written'))}\n"
        "except PermissionError as error:\n    sys.exit(7 if 'grading may not do this' in str(error) else 1)\n"
    )
    result = subprocess.run([sys.executable, "-B", "-c", code], check=False)
    assert result.returncode == (7 if denied else 0)


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("limit", ["time_limit_s", "batch_limit_s"])
def test_math_answer_needs_limits(limit: str, seconds: float) -> None:
    with pytest.raises(UserError, match=f"positive {limit}"):
        MathAnswer(**{limit: seconds})


# Real answers -------------------------------------------------------------------------------------------------------


@needs_data
def test_real_answers_are_right_and_those_of_other_rows_wrong() -> None:
    reward = MathAnswer()
    problems = [row["answer"] for row in read(DATA / "math500.jsonl")]
    numbers = [row["answer"].rpartition("####")[2].strip() for row in read(DATA / "gsm8k" / "test.jsonl")]
    assert (len(problems), len(numbers)) == (500, 1319)
    assert GSM8KAnswer()([answered(number, number) for number in numbers]) == [1.0] * 1319
    shifted = [answered(*pair) for pair in zip(numbers[1:] + numbers[:1], numbers, strict=True)]
    same = [float(one.completion.endswith(f">{one.reference}</answer>")) for one in shifted]
    assert GSM8KAnswer()(shifted) == same and sum(same) < 50
    written = [answered(f"That is $\\boxed{{ {number}.0}}$ dollars.", number) for number in numbers]
    assert reward(written) == [1.0] * 1319
    assert reward._pool.equivalent([(one, one) for one in problems]) == [True] * 500
    for answers, also in ((problems, {("x=5", "5")}), (numbers[:300], set())):
        shifted = list(zip(answers[1:] + answers[:1], answers, strict=True))
        found = {pair for pair, right in zip(shifted, reward._pool.equivalent(shifted), strict=True) if right}
        assert found - {pair for pair in shifted if pair[0] == pair[1]} == also


def test_the_time_for_slow_answers_is_that_of_the_whole_batch() -> None:
    reward = MathAnswer()
    reward._pool = Slow(seconds=3.0, batch_seconds=12.0, workers=1)
    samples = [answered("18")] * 236 + [answered(f"17+{n}") for n in range(20)]  # most are right by their text
    assert sum(reward(samples)) == 236 + 8
