"""The program that `MathAnswer` grades in: reads [reference, answer, seconds] lines, writes a verdict a line.

It runs on its own, `python -P math_grader.py MEGABYTES`, and imports nothing of this package, so that it starts fast
and holds nothing worth taking. It grades in a copy of itself: an answer that takes too long, be it inside a C function
that no Python signal handler could stop, ends that copy by the kernel's default action on the timer's signal, and the
next one is made within a moment.
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
from sympy import And, Basic, Eq, Expr, expand

# math-verify reads LaTeX by a grammar, and gives plain text to sympy's parser (which evaluates) only where it consists
# of digits, spaces and the signs + - * / ^ ( ) alone. Should that ever change, these stay shut.
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "mmap.", "signal.", "ftplib.")

_READ_ONLY = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # what an import does

_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)

"""What no answer causes: its limits end the copy by other signals or an exception."""

_WALL_SECONDS_PER_CPU_SECOND = 10

_BASE = re.compile(r"(?<![A-Za-z\\])(?=[\dA-F]*\d)[\dA-F]+\s*_\s*\{?(\w+)\}?")

"""A number with its base; F_5 is a name."""

_PRIME = re.compile(r"(\\[A-Za-z]+|[^\s^{])\}?\s*(?:\^\s*\{?\s*)?((?:\\prime|['′’](?!s\b|t\b))+)")

_NAMED = re.compile(r"^[\s$]*[A-Za-z]{1,2}(?:_\{?\w+\}?)?['′’]+\s*(?:\(\w+\))?\s*=")

"""What an answer calls its value, such as f'(x)."""

_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mbox|mathrm|operatorname)\s*\{[^{}]*\}")

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")

_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|[ \u00a0\u202f])\d{3})+(?![\d.,]*\d)")

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
    re.compile(r"^\s*(?:\\(?:leq?|geq?|lt|gt)(?![A-Za-z])|[<>≤≥])"),  # half a comparison
)

"""What math-verify reads over, so that "not 5" is 5, and "7, hence 5" too."""

_LINES = re.compile(r"\\\\|(?<!\\)&")

"""What stands between lines and cells, outside of a matrix."""

_SIGNS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ",
    "²": "^2", "³": "^3", "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∈": "\\in ", "€": "", "£": "", "¥": "",
}  # fmt: skip

_INDEXED = {"I": r"\\iota", r"\\gamma": r"\\kappa"}

"""Names whose index math-verify reads over, and others in their place."""

_NO_UNITS = set(
    "and are base choose cos cot cubed dozen exp factorial fifth fifths fourth fourths gcd half halves hundred lcm "
    "less log max min minus mod modulo more over percent plus sec sin sqrt squared tan than third thirds thousand "
    "times million billion trillion with without xyz abc".split()
)

"""Words after a number that change it, or may."""

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

# Below, \0 stands for a formula.
_CUT = re.compile(
    r"[\d{/^]\0|[A-Za-z][-+*/^]\0|[\d)}\0] *[-+*/^] *\0|\0 *(?:\\?%|[-+*/^] *[\d(\\])|\0\d"
    r"|^[^\0]*\bor\s*\0|\0[^\0]*\bor\b[^\0]*\d[^\0]*$"
)

"""Signs and numbers outside of formulas that belong to them, so that a formula by itself is not the answer."""

_MINUS = re.compile(r"(?<![A-Za-z] )-\s*$|-$")

"""A sign before a formula, and no dash of prose."""

_TOGETHER = re.compile(
    r"\s*(?:,?\s*(?:and\b|\\text\s*\{\s*and\s*\})|[,;]|)\s*|[\s.,;]*(?:[A-Za-z\\{]+[\s.,;]+){0,2}or\b(?! so\b).*",
    re.DOTALL,
)

"""What stands between formulas all of which are the answer."""

_UNITS = re.compile(r"((?:\\?\$)?\s*[-+]?[\d,.]+(?:/\d+)?)\s+((?:[A-Za-z]{3,}|of|per|in)(?:(?: |/)[A-Za-z]{2,}){0,4})")


def _deny(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: no processes, no network, no foreign code, no writing to files."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _READ_ONLY):
        raise PermissionError(f"grading may not do this: {event}")


def plain(text: str) -> str:
    """`text` in the signs that math-verify knows."""
    text = text.strip().strip("*`").strip()
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = _OR.sub(" \\\\text{ or } ", text)
    text = re.sub(r"(?<=\d)\.(?=[-+*/^)}])", "", text)  # 1./3
    for name, indexed in _INDEXED.items():
        text = re.sub(rf"(?<![A-Za-z\\]){name}(?=\s*_)", indexed, text)
    text = _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = re.sub(r"(?<!\\)\$\s+\$(?=\s*\S)", "$, $", text)  # two formulas side by side are two answers
    if len(re.findall(r"(?<![\w\\])[A-Za-z]\s*=", text)) > 1:
        text = re.sub(r"(?<=[\d)])\s+(?=[A-Za-z]\s*=)", ", ", text)
    return text


def without_units(text: str) -> str:
    """A number that words follow, without these, as long as they are none that change it."""
    found = _UNITS.fullmatch(text.rstrip(". "))
    return found[1] if found and not _NO_UNITS.intersection(found[2].lower().replace("/", " ").split()) else text


def formulas(text: str) -> list[str]:
    """The last formulas of a text that stand together; the text as one where it has none, or they are cut out of it."""
    if "\\boxed" in text:
        return [text]
    inside = [found[found.lastindex or 0].strip() for found in _FORMULA.finditer(text)]
    outside = _FORMULA.sub("\0", text)
    if not inside or _CUT.search(outside):
        whole = _FORMULA.sub(lambda found: f" {found[found.lastindex or 0]} ", text).strip().rstrip(".")
        return [f"\\boxed{{{whole}}}"]
    *before, _ = outside.split("\0")
    first = len(inside) - 1
    while first and _TOGETHER.fullmatch(before[first]):
        first -= 1
    together = zip(before[first:], inside[first:], strict=True)
    return [f"${'-' if _MINUS.search(words) else ''}{formula}$" for words, formula in together]


def _read_one(latex: str) -> list[Any]:
    """What math-verify makes of a formula; of one that it cannot read the number in it, if it is the only one."""
    texts = [found[0] for found in _TEXT.finditer(latex)]
    # Of several texts math-verify would take all from the first one on for a unit.
    units = len(texts) < 2 and not any(
        (_NO_UNITS - {"percent"}).intersection(re.findall(r"\w+", text)[1:2]) for text in texts
    )
    as_latex = _LATEX if units else _LATEX_WITH_UNITS
    found = parse(latex, [as_latex], parsing_timeout=None)
    if any(not isinstance(one, str) for one in found) or len(re.findall(r"[\d.,/]*\d", latex)) > 1:
        return found
    return parse(latex, [as_latex, ExprExtractionConfig()], parsing_timeout=None)


def read(text: str) -> list[Any]:
    """What math-verify makes of `plain` text; of several formulas the set; nothing but the text if one is unread."""
    each = [_read_one(latex) for latex in formulas(_UNIT_TEXT.sub("", text))]
    if len(each) == 1:
        return each[0]
    values = [next((one for one in found if not isinstance(one, str)), None) for found in each]
    if None in values:
        return [text]
    return [FiniteSet(*(part for one in values for part in (one.args if isinstance(one, FiniteSet) else (one,))))]


def _primes(text: str) -> set[tuple[str, int]]:
    found = _PRIME.findall(_TEXT.sub("", text))
    return {(sign, len(re.findall(r"\\prime|['′’]", marks))) for sign, marks in found}


def doubtful(reference: str, answer: str) -> bool:
    """Whether `answer` says something that the reference does not, and that reading it as mathematics would lose."""
    if any(sign.search(answer) and not sign.search(reference) for sign in _DOUBTS):
        return True
    if "\\begin" not in answer and _LINES.search(answer):
        return True
    if _primes(answer if "=" in reference else _NAMED.sub("", answer)) != _primes(reference):
        return True
    given, asked = (set(_BASE.findall(text)) - {"10"} for text in (answer, reference))
    return bool(given) and given != asked  # without a base, the one that the question names


def untrue(value: Any, text: str) -> bool:
    """Whether an equation in the answer is false: a chain proves nothing by its last link."""
    links = value.args if isinstance(value, And) else (value,)
    return any(isinstance(link, Eq) and _differ(link.lhs, link.rhs, "." in text) for link in links)


def _differ(left: Basic, right: Basic, rounded: bool) -> bool:
    """Whether two sides differ by a number that is not 0; decimals may be rounded to a part in 200."""
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    difference = expand((left - right).doit())
    if difference.free_symbols or not difference.is_number:
        return False
    error = abs(complex(difference.evalf()))
    size = abs(complex(right.doit().evalf())) if right.is_number else 1.0
    return error > (5e-3 * size if rounded else 1e-9 * max(size, 1.0))


def equivalent(reference: str, answer: str) -> bool:
    """Whether `answer` has the reference's value; False where it cannot be read, or is no definite answer."""
    reference, answer = plain(reference), plain(answer)
    if doubtful(reference, answer):
        return False
    if _NUMBER.fullmatch(reference.strip("$\\ ")):
        answer = without_units(answer)
    expected, found = read(reference), read(answer)
    if any(untrue(value, answer) for value in found):
        return False
    # An inequality is a set where the reference is written as one; (1, 2) may be a point.
    sets = any(mark in reference for mark in ("[", "]", "\\infty", "\\cup", "\\in"))
    same = partial(verify, expected, timeout_seconds=None, allow_set_relation_comp=sets)
    if same(found):
        return True
    # "1/2 or 0.5" is one value in two forms.
    forms = found[0].args if found and isinstance(found[0], FiniteSet) and re.search(r"\bor\b", answer) else ()
    return bool(forms) and all(same([form]) for form in forms)


def next_line(busy: mmap.mmap) -> bytes:
    """One line of standard input, and nothing beyond: the next copy would miss it. Empty at the end."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        busy[0] = 1
        line += byte
    return line


def grade_lines(busy: mmap.mmap, replies: int) -> None:
    """Answer lines of standard input until it ends; each may take its seconds of processor time."""
    sys.addaudithook(_deny)
    while line := next_line(busy):
        reference, answer, seconds = json.loads(line)
        # Processor time, for a busy machine must not change a reward; the wall clock guards against a sleep.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_SECONDS_PER_CPU_SECOND)
        result = equivalent(reference, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[0] = 0
        os.write(replies, (json.dumps(result) + "\n").encode())


def main(megabytes: int) -> None:
    """Grade in copies of this process, one after the other: "true", "false", "limit" or "killed" a line."""
    for asked in (signal.SIGINT, signal.SIGTERM):  # the caller's affair, which finishes its step and closes the pipe
        signal.signal(asked, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # math-verify warns that we set the time limit ourselves
    sys.dont_write_bytecode = True
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    for warm in ("0.5", "x+1=2", "(1,2]", "it is 5"):  # what is imported on first use
        equivalent("\\frac{1}{2}", warm)
    replies = os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    busy = mmap.mmap(-1, 1)
    os.write(replies, b"ready\n")
    while True:
        copy = os.fork()
        if copy == 0:
            try:
                grade_lines(busy, replies)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if status == 0:
            return
        if busy[0]:
            busy[0] = 0
            os.write(replies, b"killed\n" if -status in _KILLED else b"limit\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
