"""The grading process of `MathAnswer`: reads lines [reference, answer, seconds], writes a verdict for each.

Where the reference is null, it writes the answer's canonical form instead.

A program, `python -P math_grader.py MEGABYTES`, that imports nothing of this package: it starts fast and holds no data
of the run. It grades in a fork of itself: an answer over its time limit, even inside a C function, ends the fork by the
default action of the timer's signal, and a new fork takes milliseconds.
"""

import json
import logging
import mmap
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from latex2sympy2_extended.sets import FiniteSet
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import And, Basic, Eq, Expr, Symbol, Union, expand, nsimplify
from sympy.core.relational import Relational

# math-verify parses LaTeX by a grammar, and passes plain text to sympy's parser (which evaluates) only if it consists
# of digits, spaces and + - * / ^ ( ). Should that change, these audit events stay forbidden.
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "mmap.", "signal.", "ftplib.")
_READ_ONLY = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # needed by imports
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Not caused by an answer: its limits raise other signals or an exception."""
_WALL_SECONDS_PER_CPU_SECOND = 10
_BASE = re.compile(r"(?<![A-Za-z\\])(?=[\dA-F]*\d)[\dA-F]+\s*_\s*\{?(\w+)\}?")
"""A number with its base; F_5 is a name."""
_PRIME = re.compile(r"(\\[A-Za-z]+|[^\s^{])\}?\s*(?:\^\s*\{?\s*)?((?:\\prime|['′’](?!s\b|t\b))+)")
_NAMED = re.compile(r"^[\s$]*[A-Za-z]{1,2}(?:_\{?\w+\}?)?['′’]+\s*(?:\(\w+\))?\s*=")
"""The left-hand side of an answer, such as f'(x) =."""
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mbox|mathrm|operatorname)\s*\{[^{}]*\}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|[ \u00a0\u202f])\d{3})+(?![\d.,]*\d)")
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\b\s*:?|\s*[:=])\s*",
    re.IGNORECASE,
)
_FUNCTION = re.compile(r"(?<![A-Za-z\\{])(?:sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*(?:[\d(\\_^]|\s[a-z]\b))")
"""A function's name without its backslash, which would be a product of letters."""
_MIXED = re.compile(r"(?<![\w.,/^)}])(\d+)\s+(\d+)/(\d+)(?![\d/])")
"""A mixed number in plain text, such as 1 1/2, of which math-verify reads the integer alone."""
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\overline\s*\{\s*(\d{1,20})\s*\}")
_WORD = re.compile(r"(?<![A-Za-z\\])(?!and\b)[A-Za-z]{3,}")
"""A word, which math-verify would read as a product of its letters."""
_LONGEST_FORM = 1000
"""Characters of a canonical form."""
_OR = re.compile(r"\\(?:lor|vee)(?![A-Za-z])|∨")
_DOUBTS = (
    re.compile(  # negations
        r"\\(?:neq?|not|notin|neg|lnot|ncong|nequiv)(?![A-Za-z])|\\not(?=\\)|[≠¬∉]|!=|<>"
        r"|(?<!\\)\b(?:not|never|neither|nor|isn't|wrong|incorrect)\b",
        re.IGNORECASE,
    ),
    re.compile(  # conclusions
        r"\\(?:to|gets|mapsto|implies|iff|land|wedge|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight|[Ll]eftright)arrow)(?![A-Za-z])"
        r"|[→⇒⇔∧]|\|\||&&"
    ),
    re.compile(r"^\s*(?:\\(?:leq?|geq?|lt|gt)(?![A-Za-z])|[<>≤≥])"),  # comparisons without a left-hand side
)
"""Signs that math-verify skips, so that "not 5", and "7, hence 5", would be 5."""
_LINES = re.compile(r"\\\\|(?<!\\)&")
"""Separators of lines and cells, outside of a matrix."""
_SIGNS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ",
    "²": "^2", "³": "^3", "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∈": "\\in ", "€": "", "£": "", "¥": "",
}  # fmt: skip
_INDEXED = {"I": r"\\iota", r"\\gamma": r"\\kappa"}
"""Replacements of names whose index math-verify skips."""
_NO_UNITS = set(
    "and are base choose cos cot cubed dozen exp factorial fifth fifths fourth fourths gcd half halves hundred lcm "
    "less log max min minus mod modulo more over percent plus sec sin sqrt squared tan than third thirds thousand "
    "times million billion trillion with without xyz abc".split()
)
"""Words after a number that may change it."""
_UNIT_TEXT = re.compile(
    rf"(?<=[\w)}}])\s*\\(?:text|textrm|mbox|mathrm)\s*\{{\s*(?!(?:{'|'.join(_NO_UNITS)}|or|is|if|for)\b)[A-Za-z][^{{}}]*\}}"
    r"(?:\s*\^\s*\{?\d\}?)?(?=\s*(?:$|[-+,;.$]|\\[\])]|(?:\\text\s*\{)?\s*(?:and|or)\b))"
)
_FORMULA = re.compile(
    r"(?<!\\)(\$\$?)((?:\\.|[^$\\])+)\1|(?<!\\)\\\(()((?:[^\\]|\\[^()])+)\\\)|(?<!\\)\\\[()((?:[^\\]|\\[^\[\]])+)\\\]",
    re.DOTALL,
)
_LATEX = LatexExtractionConfig()
_LATEX_WITH_UNITS = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))
_CUT = re.compile(
    r"[\d{/^]\0|[A-Za-z][-+*/^]\0|[\d)}\0] *[-+*/^] *\0|\0 *(?:\\?%|[-+*/^] *[\d(\\])|\0\d"
    r"|^[^\0]*\bor\s*\0|\0[^\0]*\bor\b[^\0]*\d[^\0]*$"
)
"""Signs and numbers outside of a formula (\\0) that belong to it, so that the formula alone is not the answer."""
_MINUS = re.compile(r"(?<![A-Za-z] )-\s*$|-$")
"""A minus sign before a formula, not a dash."""
_TOGETHER = re.compile(
    r"\s*(?:,?\s*(?:and\b|\\text\s*\{\s*and\s*\})|[,;]|)\s*|[\s.,;]*(?:[A-Za-z\\{]+[\s.,;]+){0,2}or\b(?! so\b).*",
    re.DOTALL,
)
"""Text between formulas that are the answer together."""
_UNIT = r"(?:[kcdm]?m|[km]?g|[km]?[lL]|ft|yd|mi|in|lbs?|oz|hr?s?|min|s)(?:\s*\^\s*\{?[23]\}?)?"
_UNITS = re.compile(
    r"((?:\\?\$)?\s*[-+]?[\d,.]+(?:/\d+)?)\s+"
    rf"((?:[A-Za-z]{{3,}}|of|per|{_UNIT})(?:(?: |/)(?:{_UNIT}|[A-Za-z]{{2,}})){{0,4}})"
)


def _deny(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: no processes, network, foreign code or writing to files."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _READ_ONLY):
        raise PermissionError(f"grading may not do this: {event}")


def plain(text: str) -> str:
    """Text in notation that math-verify parses."""
    text = _LEAD.sub("", text.strip().strip("*`").strip())
    if text.lower() in ("true", "false"):
        return rf"\text{{{text.capitalize()}}}"
    text = text.replace("\\varnothing", "\\emptyset")
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\{])pi(?![A-Za-z])", r"\\pi ", text)
    text = _FUNCTION.sub(lambda name: f"\\{name[0]}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _OR.sub(" \\\\text{ or } ", text)
    text = re.sub(r"(?<=\d)\.(?=[-+*/^)}])", "", text)  # 1./3
    for name, indexed in _INDEXED.items():
        text = re.sub(rf"(?<![A-Za-z\\]){name}(?=\s*_)", indexed, text)
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = re.sub(r"(?<!\\)\$\s+\$(?=\s*\S)", "$, $", text)  # two formulas side by side are two answers
    if len(re.findall(r"(?<![\w\\])[A-Za-z]\s*=", text)) > 1:
        text = re.sub(r"(?<=[\d)])\s+(?=[A-Za-z]\s*=)", ", ", text)
    return text


def _fraction(repeating: re.Match[str]) -> str:
    """The fraction of a repeating decimal: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, fixed, period = repeating.groups()
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(fixed)}}}"


def without_units(text: str) -> str:
    """A number without the words that follow it, unless one of them may change it."""
    match = _UNITS.fullmatch(text.rstrip(". "))
    return match[1] if match and not _NO_UNITS.intersection(match[2].lower().replace("/", " ").split()) else text


def formulas(text: str) -> list[str]:
    """The last adjacent formulas of a text, together the answer; without complete formulas, all of the text."""
    if "\\boxed" in text:
        return [text]
    inside = [match[match.lastindex or 0].strip().rstrip(".") for match in _FORMULA.finditer(text)]
    outside = _FORMULA.sub("\0", text)
    if not inside or _CUT.search(outside):
        joined = _FORMULA.sub(lambda match: f" {match[match.lastindex or 0]} ", text).strip().rstrip(".")
        return [f"\\boxed{{{joined}}}"]
    *before, _ = outside.split("\0")
    first = len(inside) - 1
    while first and _TOGETHER.fullmatch(before[first]):
        first -= 1
    last = zip(before[first:], inside[first:], strict=True)
    return [f"${'-' if _MINUS.search(words) else ''}{formula}$" for words, formula in last]


def _read_one(latex: str) -> list[Any]:
    """A formula parsed by math-verify; if that fails, its number, if it has only one."""
    texts = [match[0] for match in _TEXT.finditer(latex)]
    # math-verify takes everything from the first of several texts on for a unit.
    units = len(texts) < 2 and not any(
        (_NO_UNITS - {"percent"}).intersection(re.findall(r"\w+", text)[1:2]) for text in texts
    )
    as_latex = _LATEX if units else _LATEX_WITH_UNITS
    values = parse(latex, [as_latex], parsing_timeout=None)
    if any(not isinstance(value, str) for value in values) or len(re.findall(r"[\d.,/]*\d", latex)) > 1:
        return values
    return parse(latex, [as_latex, ExprExtractionConfig()], parsing_timeout=None)


def read(text: str) -> list[Any]:
    """Text after `plain`, parsed by math-verify; several formulas become a set, or the text if one cannot be parsed."""
    each = [_read_one(latex) for latex in formulas(_UNIT_TEXT.sub("", text))]
    if len(each) == 1:
        return each[0]
    values = [next((value for value in parsed if not isinstance(value, str)), None) for parsed in each]
    if None in values:
        return [text]
    return [
        FiniteSet(*(item for value in values for item in (value.args if isinstance(value, FiniteSet) else (value,))))
    ]


def _primes(text: str) -> set[tuple[str, int]]:
    primes = _PRIME.findall(_TEXT.sub("", text))
    return {(sign, len(re.findall(r"\\prime|['′’]", marks))) for sign, marks in primes}


def doubtful(reference: str, answer: str) -> bool:
    """Whether the answer has a sign that the reference lacks and that math-verify would ignore."""
    if any(sign.search(answer) and not sign.search(reference) for sign in _DOUBTS):
        return True
    if "\\begin" not in answer and _LINES.search(answer):
        return True
    if _primes(answer if "=" in reference else _NAMED.sub("", answer)) != _primes(reference):
        return True
    bases, expected = (set(_BASE.findall(text)) - {"10"} for text in (answer, reference))
    return bool(bases) and bases != expected  # an answer without a base is in the question's


def untrue(value: Any, text: str) -> bool:
    """Whether an equation in the answer is false, also in a chain of equations."""
    links = value.args if isinstance(value, And) else (value,)
    return any(isinstance(link, Eq) and _differ(link.lhs, link.rhs, "." in text) for link in links)


def _differ(left: Basic, right: Basic, rounded: bool) -> bool:
    """Whether two sides differ by a number other than 0; rounded decimals may differ by 0.5 %."""
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    difference = expand((left - right).doit())
    if difference.free_symbols or not difference.is_number:
        return False
    error = abs(complex(difference.evalf()))
    size = abs(complex(right.doit().evalf())) if right.is_number else 1.0
    return error > (5e-3 * size if rounded else 1e-9 * max(size, 1.0))


def equivalent(reference: str, answer: str) -> bool:
    """Whether `answer` has the reference's value; False if it is unreadable or not definite."""
    reference, answer = plain(reference), plain(answer)
    if doubtful(reference, answer):
        return False
    reference = without_units(reference)
    if _NUMBER.fullmatch(reference.strip("$\\ ")):
        answer = without_units(answer)
    expected, values = read(reference), read(answer)
    if any(untrue(value, answer) for value in values):
        return False
    # An inequality is a set where the reference is written as one; (1, 2) may be a point.
    sets = any(mark in reference for mark in ("[", "]", "\\infty", "\\cup", "\\in"))
    same = partial(verify, expected, timeout_seconds=None, allow_set_relation_comp=sets)
    if same(values):
        return True
    # "1/2 or 0.5" is one value in two forms.
    forms = values[0].args if values and isinstance(values[0], FiniteSet) and re.search(r"\bor\b", answer) else ()
    if sets and forms and all(isinstance(form, Relational) for form in forms) and len(values[0].free_symbols) == 1:
        return bool(same([Union(*(form.as_set() for form in forms))]))  # x < 1 or x > 2
    return bool(forms) and all(same([form]) for form in forms)


def canonical(answer: str) -> str | None:
    """Text of the answer's value, the same for 1/2, 0.5, \\frac12 and $x = 0.50$; None without a definite value.

    Products are expanded and decimals become fractions. Values that only a simplification would show to be equal have
    different texts.
    """
    answer = without_units(plain(answer))
    if doubtful("", answer) or _WORD.search(_TEXT.sub("", answer)):
        return None
    value = next((value for value in read(answer) if not isinstance(value, str)), None)
    if value is None or untrue(value, answer):
        return None
    text = str(_normal(value.rhs if isinstance(value, Eq) and isinstance(value.lhs, Symbol) else value))
    return text if len(text) <= _LONGEST_FORM else None


def _normal(value: Any) -> Any:
    if isinstance(value, FiniteSet):
        return FiniteSet(*map(_normal, value.args))
    return expand(nsimplify(value, rational=True).doit()) if isinstance(value, Expr) else value


def next_line(busy: mmap.mmap) -> bytes:
    """One line of standard input, unbuffered: more would be lost to the next fork. Empty at the end."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        busy[0] = 1
        line += byte
    return line


def grade_lines(busy: mmap.mmap, replies: int) -> None:
    """Grade the lines of standard input, each within its seconds of CPU time."""
    sys.addaudithook(_deny)
    while line := next_line(busy):
        reference, answer, seconds = json.loads(line)
        # CPU time, or a busy machine would change rewards; wall time guards against a sleep.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_SECONDS_PER_CPU_SECOND)
        result = canonical(answer) if reference is None else equivalent(reference, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[0] = 0
        os.write(replies, (json.dumps(result) + "\n").encode())


def main(megabytes: int) -> None:
    """Grade in forks, one after the other; replies are "true", "false", "null", a string, "limit" or "killed"."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the caller finishes its step and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # math-verify warns that we set the time limit ourselves
    sys.dont_write_bytecode = True
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    for warm in ("0.5", "x+1=2", "(1,2]", "it is 5"):  # import everything that grading needs
        equivalent("\\frac{1}{2}", warm)
    replies = os.dup(sys.stdout.fileno())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    busy = mmap.mmap(-1, 1)
    os.write(replies, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            try:
                grade_lines(busy, replies)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if busy[0]:
            busy[0] = 0
            os.write(replies, b"killed\n" if -status in _KILLED else b"limit\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
