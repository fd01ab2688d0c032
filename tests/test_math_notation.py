"""Kinds of answers that math-verify alone misreads: letters, words, units, small numbers, names, choices, failures."""

import logging
from pathlib import Path

import pytest

from qerl_pl.rewards import math_answer as grading
from qerl_pl.rewards.answers import answer_of, same_prose
from qerl_pl.rewards.math_answer import MathPool

COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
OTHER_COLUMN = r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"
MATRIX = r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"

RIGHT = {
    "case": r"""
        \pi(R+r)(R-r) | \pi(R^2-r^2)
        \frac1R | \frac{1}{R}
        E = mc^2 | mc^2
        \mathrm{R} | R
        2\Delta | \Delta + \Delta
        I_2 R | R I_2
        BA | AB
        \bar{X} | \overline{X}
        (c) | \text{(C)}
    """,
    "units": r"""
        5 | 5 m
        5m | 5
        9\pi cm | 9\pi
        5\mathrm{~cm}^{2} | 5
        5\,\text{m}/\text{s} | 5
        \frac{1}{2} hour | \frac12
        90^\circ C | 90
        5th | 5
        5x | 5x \text{ dollars}
    """,
    "words": r"""
        A B C D | ABCD
        A, B, C, D | ABCD
        \text{ABCD} | ABCD
        may | May
        \textbf{June 20} | \text{June 20}
        June 20 | \text{June 20}
        Bob, Amy | Amy, Bob
        zyx | xyz
        nTR | nRT
        \text{all real numbers} | \mathbb{R}
        \mathbb{R} | \text{all reals}
        (-\infty, \infty) | \text{all real numbers}
        \text{No solution} | \emptyset
    """,
    "small": r"""
        1e-20 | 10^{-20}
        10^{-20} | \frac{1}{10^{20}}
        0.333333 | \frac13
        0.033333 | \frac{1}{30}
        3.141593 | \pi
        \sqrt{2}+\sqrt{3} | \sqrt{5+2\sqrt{6}}
        \sin^2(x)+\cos^2(x) | 1
    """,
    "numbers": r"""
        x = 58,500 | 58,500
        x=\$58,500 | 58500
        y = 1,234,567 | 1234567
        \frac{58,500}{2} | 29250
        x = 1,000, y = 2,000 | x = 1000, y = 2000
        1.2e3 | 1200
        1.5E+3 | 1,500
        2.5e-3 | 0.0025
        2e-1 | 0.2
        2e - 1 | 2e-1
        6.02e23 | 6.02 \times 10^{23}
        5 tenths | 0.5
        5.4 million | 5400000
        3 dozen | 36
    """,
    "mixed": r"""
        37.5\% | 37\frac{1}{2}\%
        37\frac12\% | 37.5\%
        33 1/3 | 33\frac{1}{3}\%
        \frac{1}{3} | 33\frac{1}{3}\%
        \frac{7}{2}\pi | 3\frac{1}{2}\pi
        \frac72\sqrt{2} | 3 \tfrac{1}{2}\sqrt{2}
        x = 3\dfrac12 x | \frac72 x
        3\frac12\pi \text{ or } 4\frac12\pi | \frac72\pi, \frac92\pi
        3\frac12 | 3.5
        \pi | 2\cdot\frac{1}{2}\pi
        \frac{x^2}{2}\pi | x^2\frac{1}{2}\pi
        4\pi | 2^3\frac12\pi
        \frac{a_2 x}{2} | a_2\frac{1}{2}x
        0.75\pi | 1.5\frac{1}{2}\pi
        \frac{\pi}{\sqrt2} | \sqrt 2\frac12\pi
        3\pi | 2\frac{3}{2}\pi
        \frac16 x | 1\frac12\frac13 x
    """,
    "percents": r"""
        12 | 12\%
        12.5 | 12.5\%
        0.125 | 12.5\%
        2.5\% | 2.5
        -5\% | -5
        5\% | 5.0
    """,
    "approximations": r"""
        \frac13 \approx 0.333 | \frac13
        3\pi \approx 9.42 | 9.42
        3\pi \approx 9.42 | 3\pi
        x = \frac{2}{3} ≈ 0.66 | \frac23
        \sqrt{35} \approx 6 | 6
        x \approx 5 | 5
    """,
    "letters": r"""
        3+4\mathrm{i} | 3+4i
        4i + 3 | 3+4\text{i}
        3+4I | 3+4i
        \operatorname{ln} 2 | \ln 2
        \mathrm{ln}\,2 | \ln 2
        \operatorname{arctan}(2) | \arctan 2
    """,
    "choices": r"""
        \textbf{(B)}\ 5 | 5
        \textbf{(B) }\frac{1}{2} | 0.5
        (B) 5 | 5
        B. 5 | 5
        Choice B: 5 | 5
        \textbf{(B)}\ 5 | \text{(B)}
        5 | \textbf{(B)}\ 5
        B | \textbf{(B)}\ 5
    """,
    "names": rf"""
        x = {COLUMN} | {COLUMN}
        \vec v = {COLUMN} | {COLUMN}
        A^{{-1}} = {MATRIX} | {MATRIX}
        {MATRIX} | A = {MATRIX}
        A = {MATRIX} = {MATRIX} | {MATRIX}
        \vec{{v}} = \langle 1, 2 \rangle | \langle 1,2 \rangle
    """,
}
WRONG = {
    "case": r"""
        r/R | R/r
        R^2 | Rr
        r_1 | R_1
        x_N | x_n
        \delta | \Delta
        \gamma | \Gamma
        \vec{r} | \vec{R}
        (a, B) | (A, b)
        y = ce^x | y = Ce^x
    """,
    "units": r"""
        a+b h | a+b
        \frac{a}{b} c | \frac{a}{b}
        \frac34 | \frac34 h
        5x | 5
        5 | 5m
        5\text{x} | 5
    """,
    "words": r"""
        DCBA | ABCD
        CBA | ABC
        A C B | A B C
        A-C-B-D | A-B-C-D
        Amy | May
        May, Bob | Amy, Bob
        \angle BCA | \angle ABC
        \text{all positive real numbers} | \mathbb{R}
    """,
    "small": r"""
        10^{-21} | 10^{-20}
        1e-21 | 1e-20
        0.0000001 | 0.0000002
        \sqrt{2} | \sqrt{2}+10^{-18}
        \frac{\pi}{10^{20}} | \frac{\pi}{10^{21}}
        6.62e-34 | 6.63e-34
        x = 10^{-20} | x = 10^{-21}
        (1, 10^{-20}) | (1, 10^{-21})
        [0, 10^{-20}] | [0, 10^{-21}]
        \{10^{-21}, 5\} | \{10^{-20}, 5\}
        x > 10^{-20} | x > 10^{-21}
        10^{-20} = 10^{-21} | 10^{-21}
        5.00000001 | 5
    """,
    "numbers": r"""
        x = 5,850 | 58,500
        5e3 | 15e
        15e | 5e3
        2e-1 | 0.2e
        5 tenths | 5
        5\text{ million} | 5
    """,
    "mixed": r"""
        66\frac{1}{3}\% | 33\frac{1}{3}\%
        \frac{1}{3}\% | 33\frac{1}{3}\%
        \frac{3}{2}\pi | 3\frac{1}{2}\pi
    """,
    "percents": r"""
        12.6 | 12.5\%
        1250 | 12.5\%
        12.5\% | 13.5\%
        0.125\% | 12.5\%
        y = 12.5\% | x = 12.5
    """,
    "approximations": r"""
        5 \approx 6 | 5
        \pi \approx 4 | \pi
        x = 5 \approx 6 | 5
        3.14 ≈ 3.2 | 3.14
    """,
    "letters": r"""
        5\mathrm{i} | 5
        5\text{e} | 5
        \operatorname{ln} 3 | \ln 2
        2 | \operatorname{ln} 2
    """,
    "more": r"""
        5\text{ or more} | 5
        5 or more | 5
        5\text{ and up} | 5
        5\text{ at least} | 5
        5\text{ or fewer} | 5
        5\text{ if } x>0 | 5
        5 \text{ R } 3 | 5
    """,
    "choices": r"""
        \textbf{(B)}\ 6 | 5
        (C) 5 | \textbf{(B)}\ 5
        \textbf{(C)}\ 5 | \text{(B)}
        A | \text{(B)}
    """,
    "names": rf"""
        x = {OTHER_COLUMN} | {COLUMN}
        {COLUMN} = {OTHER_COLUMN} | {COLUMN}
        {COLUMN}^{{2.5}} | 5
    """,
}


@pytest.fixture(scope="module")
def pool() -> MathPool:
    return MathPool(seconds=6.0, batch_seconds=60.0, workers=1)


@pytest.mark.parametrize(
    ("kind", "right"), [(kind, True) for kind in RIGHT] + [(kind, False) for kind in WRONG], ids=str
)
def test_kinds_of_answers(pool: MathPool, kind: str, right: bool, caplog: pytest.LogCaptureFixture) -> None:
    lines = (RIGHT if right else WRONG)[kind].strip().splitlines()
    pairs = [(reference.strip(), answer.strip()) for answer, reference in (line.split(" | ") for line in lines)]
    grades = pool.equivalent(pairs)
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade is not right] == []
    assert not caplog.messages  # of failures and limits


FAILS = """
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("math_grader", {path!r})
grader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grader)

def equivalent(reference, answer):
    started = time.process_time()
    if answer == "raises":
        raise TypeError("of two lines\\n")
    if answer == "crashes":
        signal.raise_signal(signal.SIGSEGV)
    while answer == "late" and time.process_time() - started < 0.3 or answer == "endless":
        pass
    return True

load = grader.load
grader.equivalent = equivalent
"""


def test_failures_are_no_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They take no turn of the slow answers, of which there is one, and are told by their reason."""
    (tmp_path / "worker.py").write_text(FAILS.format(path=str(grading._GRADER)))
    monkeypatch.setattr(grading, "_GRADER", tmp_path / "worker.py")
    pool = MathPool(seconds=1.2, batch_seconds=1.3, workers=1)
    answers = ["raises", "crashes", "late", "endless", "fine", "raises"]
    caplog.set_level(logging.WARNING)
    assert pool.equivalent([("18", answer) for answer in answers]) == [False, False, True, False, True, False]
    assert caplog.messages == [
        "2 answers count as wrong, as grading fails, such as 'raises' (TypeError)",
        "an answer counts as wrong, as it cannot be graded within the limits: 'endless'",
    ]
    pool.seconds = 30.0  # the first answer of a new process takes a slow machine long
    assert pool.canonical(["x+1"]) == ["x + 1"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("It is 1.5e3.", "1.5e3"),
        ("so 1.2e-3", "1.2e-3"),
        ("It is 1.5 × 10^3.", "1.5 × 10^3"),
        ("so $10 is 10^{-20}", "10^{-20}"),
        ("3 or 4e2", "3 or 4e2"),
        ("a 3e item", "3"),
        ("2 * 10^3 = 2000", "2000"),
    ],
)
def test_powers_belong_to_the_number_of_a_completion(completion: str, answer: str) -> None:
    assert answer_of(completion, None) == answer


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("$R$ is Larger than $r$", True),
        ("$r$ is larger than $R$", False),
        ("$R$ is larger than $R$", False),
        ("$R$  IS larger than \\(r\\)", False),
        ("\\text{R is larger than r}", True),
    ],
)
def test_prose_keeps_the_case_of_letters(answer: str, same: bool) -> None:
    assert same_prose(answer, "$R$ is larger than $r$") is same
