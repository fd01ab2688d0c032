"""The program of the grading processes of `MathAnswer`: whether answers are equal to references as mathematics.

It imports nothing of this package but `math_notation.py`: it starts fast and holds no data of the run.
"""

import logging
import os
import re
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import (
    And,
    Eq,
    Expr,
    Float,
    Interval,
    MatrixBase,
    MatrixExpr,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    Union,
    expand,
    preorder_traversal,
)
from sympy.core.relational import Relational

if TYPE_CHECKING:
    from qerl_pl.rewards import math_notation as notation
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `runpy` leaves out
    import math_notation as notation

# math-verify parses LaTeX by a grammar, and passes plain text to sympy's parser (which evaluates) only if it consists
# of digits, spaces and + - * / ^ ( ). Should that change, these audit events stay forbidden.
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "mmap.", "signal.", "ftplib.")
_READ_ONLY = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # needed by imports
_WALL_SECONDS_PER_CPU_SECOND = 10
_LONGEST_FORM = 1000
"""Characters of a canonical form."""
_LATEX = LatexExtractionConfig()
_LATEX = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))  # it drops variables
_APPROX = re.compile(r"\\(?:approx|simeq|doteq)(?![A-Za-z])")
_WORD = re.compile(r"(?<![A-Za-z\\])(?!and\b)[A-Za-z]{3,}")
"""A word, which math-verify would read as a product of its letters."""
_PERCENTAGE = re.compile(rf"\s*-?\s*{notation.FRACTION}\s*\\?%\s*")
"""A fraction in percent, which math-verify does not parse as a formula."""
_ROUNDED = 5e-7
"""Most by which a decimal differs from the number that it rounds."""
_DIGITS = 30
"""Digits with which numbers other than fractions are compared."""


def _deny(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: no processes, network, foreign code or writing to files."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _READ_ONLY):
        raise PermissionError(f"grading may not do this: {event}")


def _read_one(latex: str) -> list[Any]:
    """A formula parsed by math-verify; if that fails, its number, if it has only one.

    Of "x is about y" both are read, if they are numbers and y may be a rounding of x, or else x.
    """
    wrapped = re.fullmatch(r"(\\boxed\{|\$)(.*)([}$])", latex, re.DOTALL)
    sides = [side for side in _APPROX.split(wrapped[2]) if side.strip()] if wrapped else []
    if wrapped and sides != [wrapped[2]]:
        each = [_read_one(f"{wrapped[1]}{side}{wrapped[3]}") for side in sides]
        values = [_first_value(parsed) for parsed in each]
        rounds = all(_may_round(*pair) for pair in zip(values, values[1:], sides[1:], strict=False))
        if None in values or not rounds:
            return [latex]
        if isinstance(values[0], Symbol):  # x \approx 5
            return [values[-1], latex]
        numbers = all(_error(_side(values[0]), _side(other))[0] is not None for other in values[1:])
        return [*(values if numbers else values[:1]), latex]
    # By default math-verify returns a fraction inside a formula that it cannot parse.
    mode = "any_match" if wrapped and _PERCENTAGE.fullmatch(wrapped[2]) else "first_match"
    values = parse(latex, [_LATEX], extraction_mode=mode, parsing_timeout=None)
    values = [_named(value) for value in values]
    if any(not isinstance(value, str) for value in values) or len(re.findall(r"[\d.,/]*\d", latex)) > 1:
        return values
    return parse(latex, [_LATEX, ExprExtractionConfig()], parsing_timeout=None)


def _first_value(parsed: list[Any]) -> Any:
    """The first reading that is no text; None without one."""
    return next((value for value in parsed if not isinstance(value, str)), None)


def _named(value: Any) -> Any:
    """An equation with its name first: x = 5 for 5 = x."""
    backwards = isinstance(value, Eq) and isinstance(value.rhs, Symbol) and not isinstance(value.lhs, Symbol)
    return Eq(value.rhs, value.lhs, evaluate=False) if backwards else value


def _may_round(value: Any, rounded: Any, text: str) -> bool:
    """Whether a number may be rounded to the next; True for what is no number."""
    value, rounded = (_side(side) for side in (value, rounded))
    error, size = _error(value, rounded)
    if error is None:
        return True
    decimal = re.fullmatch(r"\s*-?\d*(?:\.(\d+))?\s*", text)
    if decimal is None:
        return bool(error <= 5e-3 * size)
    last = 10.0 ** -len(decimal[1] or "")
    return bool(error <= 0.5 * last or (decimal[1] and error < last and abs(rounded) < abs(value)))  # or cut off


def read(text: str) -> list[Any]:
    """Text after `notation.plain`, parsed by math-verify; several formulas become a set, or the text if one fails."""
    each = [_read_one(latex) for latex in notation.formulas(text)]
    if len(each) == 1:
        return each[0]
    values = [_first_value(parsed) for parsed in each]
    if None in values:
        return [text]
    return [
        FiniteSet(*(item for value in values for item in (value.args if isinstance(value, FiniteSet) else (value,))))
    ]


def untrue(value: Any, text: str) -> bool:
    """Whether an equation in the answer is false, also in a chain; rounded decimals may differ by 0.5 %."""
    links = value.args if isinstance(value, And) else (value,)
    return any(isinstance(link, Eq) and _differ(link.lhs, link.rhs, "." in text) for link in links)


def _differ(left: Any, right: Any, rounded: bool) -> bool:
    """Whether two sides, or an entry of two matrices, differ by a number other than 0."""
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        return left.shape != right.shape or any(map(_differ, left.flat(), right.flat(), [rounded] * len(left)))
    error, size = _error(left, right)
    return error is not None and bool(error > (5e-3 if rounded else 1e-9) * size)


def _side(value: Any) -> Any:
    """The value of an assignment such as x = 5, the last of a chain; other values as they are."""
    if isinstance(value, And) and all(isinstance(link, Eq) for link in value.args):
        value = value._unsorted_args[-1]
    return value.rhs if isinstance(value, Eq) else value


def _are_scalars(*values: Any) -> bool:
    """Whether values are expressions without matrices."""
    matrices = MatrixBase | MatrixExpr
    return all(
        isinstance(value, Expr) and not any(isinstance(part, matrices) for part in preorder_traversal(value))
        for value in values
    )


def _fractions(value: Any) -> Any:
    """An expression with fractions for its decimals."""
    return value.xreplace({decimal: Rational(str(decimal)) for decimal in value.atoms(Float)})


def _error(left: Any, right: Any) -> tuple[Any, Any]:
    """Difference of two numbers, and the size of the larger one; None, None unless the difference is a number."""
    if not _are_scalars(left, right):
        return None, None
    left, right = _fractions(left).doit(), _fractions(right).doit()
    difference = left - right
    if not difference.is_number:
        difference = expand(difference)
    if difference.free_symbols or not difference.is_number or not difference.is_finite:
        return None, None
    if difference.is_Rational:
        error = abs(difference)
    else:
        error = abs(difference.evalf(_DIGITS))
        if not error.is_Number:
            return None, None
        if error.is_Float and error._prec < 10:  # zero within the precision
            error = Rational(0)
    sizes = [abs(side if side.is_Rational else side.evalf(_DIGITS)) for side in (left, right) if side.is_number]
    return error, max(sizes, default=Rational(1))


def _equal_numbers(left: Any, right: Any) -> bool | None:
    """Whether two numbers are equal, fractions exactly and others relatively; None for what is no number."""
    error, size = _error(left, right)
    if error is None:
        return None
    if error == 0:
        return True
    decimals = [side.has(Float) for side in (left, right)]
    if not any(decimals) or error > _ROUNDED:
        return False
    exact = [side.doit() for side, decimal in zip((left, right), decimals, strict=True) if not decimal]
    if exact and exact[0].is_Rational and pow(10, exact[0].q.bit_length(), exact[0].q) == 0:
        return False  # itself a decimal
    return bool(error <= 1e-6 * size or (exact and size > 1e-3))  # 0.033333 rounds 1/30


_PERCENT = UnevaluatedExpr(Rational(1, 100))


def _equal_percent(left: Any, right: Any) -> bool:
    """Whether two numbers, of which one alone has a percent sign, are equal without it: 12.5 % is 12.5, too."""
    if not _are_scalars(left, right) or left.has(_PERCENT) == right.has(_PERCENT):
        return False
    return bool(_equal_numbers(*(side.xreplace({_PERCENT: Rational(1)}) for side in (left, right))))


def _contradict(left: Any, right: Any) -> bool:
    """Whether numbers in two values that math-verify takes for equal differ: it compares them absolutely."""
    if not (isinstance(left, Eq | And) and isinstance(right, Eq | And)):
        left, right = _side(left), _side(right)
    if isinstance(left, FiniteSet) and isinstance(right, FiniteSet):
        return any(all(_contradict(one, other) for other in right.args) for one in left.args)
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        return any(map(_contradict, left.flat(), right.flat()))
    if isinstance(left, Tuple | Interval) and isinstance(right, Tuple | Interval):
        return any(map(_contradict, left.args[: len(right.args)], right.args[: len(left.args)]))
    if isinstance(left, Relational) and type(left) is type(right):
        return left.lhs == right.lhs and _contradict(left.rhs, right.rhs)
    if not _are_scalars(left, right):
        return False
    free = sorted(left.free_symbols | right.free_symbols, key=str)
    values = {symbol: Rational(2 * index + 7, index + 5) for index, symbol in enumerate(free)}
    pairs = [(left.subs(values), right.subs(values))]
    if any(side.has(_PERCENT) for side in (left, right)):  # 50 % is 50, too
        hundredfold = {_PERCENT: Rational(1)}
        pairs.append((left.xreplace(hundredfold), right.xreplace(hundredfold)))
    return all(_equal_numbers(*pair) is False for pair in pairs)


def _same(expected: list[Any], values: list[Any], sets: bool) -> bool:
    """Whether one of the values is one of the expected ones; `sets`: an inequality is a set."""
    for one in expected:
        for other in values:
            named = isinstance(one, Relational | And)
            if not named and (_equal_numbers(one, _side(other)) or _equal_percent(one, _side(other))):
                return True
            if verify([one], [other], timeout_seconds=None, allow_set_relation_comp=sets) and not _contradict(
                one, other
            ):
                return True
    return False


def equivalent(reference: str, answer: str) -> bool:
    """Whether `answer` has the reference's value; False if it is unreadable or not definite."""
    reference = notation.plain(reference)
    answer = notation.plain(answer, reference)
    if notation.doubtful(reference, answer):
        return False
    (expected, value), (chosen, given) = notation.split_label(reference), notation.split_label(answer)
    if chosen and notation.CHOICE.search(given) and not notation.CHOICE.search(value):
        return False  # two choices
    if expected and chosen:
        return expected == chosen and (not value or not given or _equivalent(value, given))
    if expected:
        return notation.spelled(answer) == expected.lower() or _equivalent(value or reference, answer)
    if chosen == reference.strip("$ "):
        return True
    return _equivalent(reference, answer) or bool(chosen and given and _equivalent(reference, given))


def _equivalent(reference: str, answer: str) -> bool:
    """Whether texts without a choice's label are equal as mathematics."""
    if words := notation.words_of(reference):
        if words == notation.spelled(answer):
            return True
        reference = rf"\text{{{words}}}"
    reference, answer = notation.without_unit_texts(reference), notation.without_unit_texts(answer)
    reference = notation.without_units(reference)
    if notation.is_number(reference):
        answer = notation.without_units(answer, spaced=False)
    expected, values = read(notation.letters(reference)), read(notation.letters(answer, reference))
    if any(untrue(value, answer) for value in values):
        return False
    # An inequality is a set where the reference is written as one; (1, 2) may be a point.
    sets = any(mark in reference for mark in ("[", "]", "\\infty", "\\cup", "\\in"))
    if _same(expected, values, sets):
        return True
    # "1/2 or 0.5" is one value in two forms.
    forms = values[0].args if values and isinstance(values[0], FiniteSet) and re.search(r"\bor\b", answer) else ()
    if sets and forms and all(isinstance(form, Relational) for form in forms) and len(values[0].free_symbols) == 1:
        return _same(expected, [Union(*(form.as_set() for form in forms))], sets)  # x < 1 or x > 2
    return bool(forms) and all(_same(expected, [form], sets) for form in forms)


def canonical(answer: str) -> str | None:
    """Text of the answer's value, the same for 1/2, 0.5, \\frac12 and $x = 0.50$; None without a definite value.

    Products are expanded and decimals become fractions. Values that only a simplification would show to be equal have
    different texts.
    """
    answer = notation.without_units(notation.without_unit_texts(notation.plain(answer)))
    if notation.doubtful("", answer) or _WORD.search(notation.TEXT.sub("", answer)):
        return None
    value = _first_value(read(notation.letters(answer)))
    if value is None or untrue(value, answer):
        return None
    value = _normal(value.rhs if isinstance(value, Eq) and isinstance(value.lhs, Symbol) else value)
    text = notation.with_capitals(str(value))
    return text if len(text) <= _LONGEST_FORM else None


def _normal(value: Any) -> Any:
    if isinstance(value, FiniteSet):
        return FiniteSet(*map(_normal, value.args))
    return expand(_fractions(value).doit()) if isinstance(value, Expr) else value


class Grader:
    """Grades answers in a process that can be killed."""

    def start(self) -> dict[str, Any]:
        """Give up what grading does not need."""
        sys.addaudithook(_deny)
        return {}

    def answer(self, reference: str | None, answer: str, seconds: float) -> dict[str, Any]:
        """The verdict; of no reference, the canonical form of the answer.

        The timers end the process by the default action of their signals, even inside a C function.
        """
        # CPU time, or a busy machine would change rewards; wall time guards against a sleep.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_SECONDS_PER_CPU_SECOND)
        try:
            return {"verdict": canonical(answer) if reference is None else equivalent(reference, answer)}
        except Exception as error:  # of math-verify or SymPy, on whatever a policy writes
            return {"failed": type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)


def load(settings: None) -> type[Grader]:
    """What makes a worker, once everything is imported that grading needs."""
    logging.disable(logging.CRITICAL)  # math-verify warns that we set the time limit ourselves
    sys.dont_write_bytecode = True
    for warm in ("0.5", "x+1=2", "(1,2]", "it is 5"):
        equivalent("\\frac{1}{2}", warm)
    return Grader
