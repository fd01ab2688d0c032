"""Answers in the notation that math-verify reads: signs, numbers, letters, words, units, and labels of choices.

`math_grader.py` imports it by itself, without this package.
"""

import re
from decimal import Decimal

_FONT = r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|mbox|math(?:rm|bf|it|sf|tt)|operatorname\*?)\s*"
TEXT = re.compile(_FONT + r"\{([^{}]*)\}")
_BASE = re.compile(r"(?<![A-Za-z\\])(?=[\dA-F]*\d)[\dA-F]+\s*_\s*\{?(\w+)\}?")
"""A number with its base; F_5 is a name."""
_PRIME = re.compile(r"(\\[A-Za-z]+|[^\s^{])\}?\s*(?:\^\s*\{?\s*)?((?:\\prime|['′’](?!s\b|t\b))+)")
_NAMED = re.compile(r"^[\s$]*[A-Za-z]{1,2}(?:_\{?\w+\}?)?['′’]+\s*(?:\(\w+\))?\s*=")
"""The left-hand side of an answer, such as f'(x) =."""
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|[ \u00a0\u202f])\d{3})+(?![\d.,]*\d)")
_COMMAS = re.compile(r"([(\[]|\\\{)|([)\]]|\\\})|(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,]*\d)|(,)")
"""Brackets, in which commas separate values; a number with commas between thousands; other commas."""
_SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?|\.\d+)([eE])([-+]?)(\d{1,2})(?![\w.]*\w)")
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\b\s*:?|\s*[:=])\s*",
    re.IGNORECASE,
)
_NAMES = r"(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp)"
_FUNCTION = re.compile(
    rf"(?<![A-Za-z\\{{])({_NAMES})(?=\s*(?:[\d(\\_^]|\s[a-z]\b))|{_FONT}\{{\s*({_NAMES}|gcd|lcm|max|min|det)\s*\}}"
)
"""A function's name without its backslash, which would be a product of letters, or in upright letters."""
_CONSTANT = re.compile(r"\\(?:text|mathrm|textrm|mathit|textit|operatorname)\s*\{\s*([ie])\s*\}")
"""The imaginary unit or Euler's number in upright letters, which would be a unit."""
_LETTER = re.compile(rf"(?:{_FONT}|\\(?:boldsymbol|bm)\s*)\{{\s*([A-Za-z])\s*\}}")
_ACCENT = "bar|overline|vec|overrightarrow|hat|tilde|widetilde|dot|ddot|mathcal|mathscr|mathfrak"
_CAPITAL = re.compile(
    rf"\\({_ACCENT})\s*\{{([^{{}}\\]*)\}}|(?:\\(?:begin|end|mathbb)\s*|{_FONT})\{{[^{{}}]*\}}"
    r"|\^\s*(?:T(?![A-Za-z])|\{\s*T\s*\})|(?:\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])"
    r"|\\[A-Za-z]+|([A-Z]))(\s*_)?"
)
"""A capital letter, Greek or Latin, or what holds capitals that are no letters."""
_SMALL = re.compile(r"breve\{(\w+)\}")
_MIXED = re.compile(r"(?<![\w.,/^)}])(\d+)\s+(\d+)/(\d+)(?![\d/])")
"""A mixed number in plain text, such as 1 1/2, of which math-verify reads the integer alone."""
_WITH_FRACTION = re.compile(
    r"(^|[-+=(\[{<>$;]|,\s|\b(?:or|and)\b(?:\s*\})?)(\s*)(\d{1,20})(?:\s|\\[ ,;:!])*\\[dt]?frac"
    r"\s*(?:\{\s*(\d{1,20})\s*\}|(\d))\s*(?:\{\s*(\d{1,20})\s*\}|(\d))(?!\s*(?:[\d^!]|\\[dt]?frac))"
)
"""A mixed number in LaTeX, which math-verify reads as a product before another factor or a percent sign."""
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{\s*(\d{1,20})\s*\}")
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
    "²": "^2", "³": "^3", "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∈": "\\in ", "≈": "\\approx ", "ℝ": "\\mathbb{R}",
    "€": "", "£": "", "¥": "",
}  # fmt: skip
FRACTION = r"\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)"
_SYNONYMS = {
    r"\\varnothing(?![A-Za-z])": r"\\emptyset", r"\\imath(?![A-Za-z])": " i ", r"\\hspace\*?\{[^{}]*\}": " ",
    r"\\langle([^<>]*,[^<>]*)\\rangle": r"(\1)", r"\\mathop\s*\{(\\?\w+(?:\{\w+\})?)\s*\}": r"\1",
    r"\\(?:Bbb|mathbb)(?:\s*\{\s*([A-Z])\s*\}|\s+([A-Z])(?![A-Za-z]))": r"\\mathbb{\1\2}",
    r"-\s*\\infty\s*<\s*[a-z]\s*<\s*\+?\s*\\infty(?![A-Za-z])": r"\\mathbb{R}",
    r"\\(vec|hat|bar|overline|tilde)\s+([A-Za-z])(?![A-Za-z])": r"\\\1{\2}",
    r"\^?\s*\\degree(?![A-Za-z])": r"^\\circ ", r"\^\s+\\circ": r"^\\circ",
    rf"(\\sqrt|\^)\s*({FRACTION})": r"\1{\2}",
}  # fmt: skip
_EACH = "(?:the )?(?:set of )?(?:all |any |every |the )"
_SETS = {
    rf"{_EACH}?reals?(?: numbers?| values?)?(?:(?: of)? [a-z])?": "R", rf"{_EACH}(?:integers?|integer values?)": "Z",
    rf"{_EACH}rational(?: number)?s?": "Q", rf"{_EACH}complex numbers?": "C",
    r"(?:the )?(?:empty|null) set|(?:there (?:is|are) )?no solutions?": "",
}  # fmt: skip
"""Sets in words, and the letter of each; the empty set has none."""
_FACTORS = {
    "dozen": "12", "hundred": "100", "thousand": "1000", "million": "10^{6}", "billion": "10^{9}",
    "trillion": "10^{12}", "half": "2^{-1}", "halve": "2^{-1}", "third": "3^{-1}", "fourth": "4^{-1}",
    "fifth": "5^{-1}", "sixth": "6^{-1}", "seventh": "7^{-1}", "eighth": "8^{-1}", "ninth": "9^{-1}",
    "tenth": "10^{-1}", "hundredth": "10^{-2}", "thousandth": "10^{-3}", "millionth": "10^{-6}", "billionth": "10^{-9}",
}  # fmt: skip
"""Words after a number that multiply it."""
_FACTOR = re.compile(
    rf"(?<=\d)(?:\s|~|\\[ ,])*({_FONT}\{{)?[\s~]*({'|'.join(sorted(_FACTORS, key=len, reverse=True))})s?(?![A-Za-z])"
    r"(?(1)([^{}]*)\}|())"
)
_NO_UNITS = {
    *_FACTORS, *(f"{word}s" for word in _FACTORS), *(
        "about above almost and approximately are around at base below between choose cos cot cubed down exactly "
        "exceeding except exp factorial fewer for gcd greater higher i e if is lcm least less log lower max maximum "
        "min minimum minus mod modulo more most nearly or over percent plus r remainder roughly sec sin smaller sqrt "
        "larger squared tan than times under unless up upward upwards when where with without xyz abc"
    ).split(),
}  # fmt: skip
"""Words after a number that may change it."""
_SYMBOL = (
    r"(?:[kcdm]?m|[km]?g|[km]?[lL]|ft|yd|mi|in|lbs?|oz|gal|hrs?|h|min|m?s|sq|cu|k?N|J|k?W|A|V|K|C|F|pm|am|mph|kmh|km/h)"
)
_UNIT = rf"(?:{_SYMBOL}(?![A-Za-z])|(?:[A-Za-z]{{3,}}|of|per)(?![A-Za-z]))(?:\s*\^\s*\{{?[23]\}}?)?"
_UNITS = re.compile(
    rf"(?:(?<![A-Za-z\\])(?:of |per )?{_UNIT}(?:(?:\s+|\s*/\s*)(?:{_UNIT}|[A-Za-z]{{2,}})){{0,4}}"
    r"|(?<=\\circ)\s*[CF])\s*$"
)
"""Words and units at the end of a number."""
_UNIT_TEXT = re.compile(
    rf"(?<=[\w)}}%])(?:\s|~|\\[ ,;:])*(?:{_FONT}\{{(?!\s*(?:and|or)\s*\}})[^{{}}]*\}}(?:\s*\^\s*\{{?-?\d\}}?)?"
    r"(?:\s|~|/|\\[ ,;:]|\\cdot)*)+(?=$|[-+,;.$}]|\\[\])]|(?:\\text\s*\{\s*)?(?:and|or)\b)"
)
_ORDINAL = re.compile(rf"(?<=\d)\s*\^?\s*\{{?\s*(?:{_FONT}\{{)?\s*(?:st|nd|rd|th)\s*\}}*\s*$")
_LABEL = re.compile(
    rf"^[\s$]*(?:(?:option|choice)\s+)?(?:{_FONT}\{{\s*\(?(?P<text>[A-J])(?P<mark>\s*[).:]+)?\s*(?P<inside>[^{{}}]*)\}}"
    r"|\((?P<round>[A-J])\)|(?P<bare>[A-J])(?:[).:](?=\s|$)|(?<=(?:option|choice) .)(?![A-Za-z])))"
    r"(?:[\s:.,~$]|\\[ ,;:]|\\quad)*(?P<rest>.*)$",
    re.IGNORECASE | re.DOTALL,
)
"""The letter of a choice before its value."""
CHOICE = re.compile(r"\([A-J]\)|(?<![A-Za-z\\])[A-J](?:\)|[.:](?=\s|$))")
"""The letter of another choice."""
_ELEMENT = re.compile(r"((?:^|[,;($=]|\\\{|\b(?:and|or)\b)\s*)([A-Za-z]{3,})(?=\s*(?:$|[,;)$]|\\\}|\b(?:and|or)\b))")
"""A run of letters that is a value by itself."""


def plain(text: str, reference: str = "") -> str:
    """Text in notation that math-verify parses.

    Args:
        text: A reference, or an answer.
        reference: The answer's reference after `plain`, which tells what its e, i and commas are.
    """
    text = _LEAD.sub("", text.strip().strip("*`").strip())
    if box := re.fullmatch(r"\\f?boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text):
        text = box[1].strip()
    if text.lower() in ("true", "false"):
        return rf"\text{{{text.capitalize()}}}"
    words = re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip(" $.").lower()
    for pattern, letter in _SETS.items():
        if re.fullmatch(pattern, words):
            return rf"\mathbb{{{letter}}}" if letter else r"\emptyset"
    for pattern, latex in _SYNONYMS.items():
        text = re.sub(pattern, latex, text)
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![A-Za-z\\{])pi(?![A-Za-z])", r"\\pi ", text)
    text = _FUNCTION.sub(lambda name: f"\\{name[1] or name[2]} ", text)
    if re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", reference) and "I" not in reference:
        text = re.sub(r"(?<![A-Za-z\\])I(?![A-Za-z])", "i", text)
    text = re.sub(r"(?<![A-Za-z\\])i(?![A-Za-z])", " i", _CONSTANT.sub(r"\1", text))  # or i may be real
    text = re.sub(_FONT + r"\{\s*(?:percent|pct)\s*\}", r"\\%", text)
    text = re.sub(r"\\angle\s*([A-Z]{3})", lambda name: rf"\text{{angle{min(name[1], name[1][::-1])}}}", text)
    text = _numbers(text, reference)
    text = re.sub(rf"{_FONT}\{{\s*([-+]?\d[\d.,/]*)\s*\}}", r" \1 ", text)  # \textbf{5}
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _WITH_FRACTION.sub(_one_fraction, text)
    text = _REPEATING.sub(_fraction, text)
    text = _OR.sub(" \\\\text{ or } ", text)
    text = re.sub(r"(?<=\d)\.(?=[-+*/^)}])", "", text)  # 1./3
    text = re.sub(r"\\gamma(?=\s*_)", r"\\kappa", text)  # math-verify skips its index
    text = re.sub(r"(?<!\\)\$\s+\$(?=\s*\S)", "$, $", text)  # two formulas side by side are two answers
    if len(re.findall(r"(?<![\w\\])[A-Za-z]\s*=", text)) > 1:
        text = re.sub(r"(?<=[\d)])\s+(?=[A-Za-z]\s*=)", ", ", text)
    return text


def _numbers(text: str, reference: str) -> str:
    """Text whose numbers have digits and powers alone."""
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if not _has_commas(reference) or re.search(r",\s", text):
        text = _without_commas(text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\times ", text)
    text = re.sub(r"\^\s*(-\s*\d+)", r"^{\1}", text)
    constant = re.search(r"(?<![A-Za-z\\{])e(?![A-Za-z])", TEXT.sub("", reference)) is not None
    text = _SCIENTIFIC.sub(lambda match: _decimal(match, constant if reference else None), text)
    return _FACTOR.sub(_multiplied, text)


def _without_commas(text: str) -> str:
    """Text without commas between thousands, outside of brackets."""
    depth = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal depth
        depth += bool(match[1]) - bool(match[2])
        return match[0] if depth or match[1] or match[2] or match[3] else match[0].replace(",", "")

    return _COMMAS.sub(replace, text)


def _has_commas(text: str) -> bool:
    """Whether commas outside of brackets separate values."""
    depth = 0
    for match in _COMMAS.finditer(text):
        depth += bool(match[1]) - bool(match[2])
        if match[3] and not depth:
            return True
    return False


def _decimal(number: re.Match[str], constant: bool | None) -> str:
    """The decimal of a number such as 1.2e3, unless its e is Euler's number.

    Whether the reference has that `constant` is None in the reference itself.
    """
    mantissa, letter, sign, _ = number.groups()
    if sign and letter == "e" and (constant or (constant is None and "." not in mantissa and mantissa != "1")):
        return number[0]
    return format(Decimal(number[0]), "f")


def _multiplied(match: re.Match[str]) -> str:
    """A factor as a number, and the text that follows it."""
    rest = (match[3] or "").strip()
    return rf"\cdot {_FACTORS[match[2]]}" + (rf"\text{{ {rest}}}" if rest else "")


def _one_fraction(mixed: re.Match[str]) -> str:
    """The fraction of a mixed number: 3\\frac{1}{2} is 7/2."""
    before, space, *digits = mixed.groups()
    whole, top, bottom = map(int, filter(None, digits))
    return rf"{before}{space}\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else mixed[0]


def _fraction(repeating: re.Match[str]) -> str:
    """The fraction of a repeating decimal: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, fixed, period = repeating.groups()
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(fixed)}}}"


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


def _primes(text: str) -> set[tuple[str, int]]:
    primes = _PRIME.findall(TEXT.sub("", text))
    return {(sign, len(re.findall(r"\\prime|['′’]", marks))) for sign, marks in primes}


def split_label(text: str) -> tuple[str, str]:
    """The letter of a choice and its value, such as B and 5 of \\textbf{(B)}\\ 5; either may be empty."""
    match = _LABEL.match(text)
    if match is None:
        return "", text
    letter = (match["text"] or match["round"] or match["bare"]).upper()
    inside, rest = (match["inside"] or "").strip(), match["rest"].strip()
    if re.match(r"[+*/^_=!<>]|\\(?:cdot|times|in)\b", rest) or (inside and not match["mark"]):
        return "", text  # a product, a name, or a word
    return letter, (inside + " " + rest).strip()


def words_of(text: str) -> str | None:
    """The words of an answer that is no mathematics, such as "june 20"; None for others."""
    if not re.search(r"[A-Za-z]", text) or re.match(r"[\s$\\]*[-+.]?\d", text):
        return None
    inside = TEXT.fullmatch(text.strip(" $."))
    outside = TEXT.sub(" ", text)
    runs = re.findall(r"[A-Za-z]+", outside)
    if inside or (TEXT.search(text) and not runs):
        return spelled(text)
    if re.search(r"[,;()|]|\b(?:and|or)\b", outside) or not any(is_word(run) for run in runs):
        return spelled(text) if re.fullmatch(r"[\s$]*[A-Z](?:(?:\s*-\s*|\s+)[A-Z]){2,}[\s$.]*", text) else None
    return spelled(text)


def spelled(text: str) -> str | None:
    """A text's letters and numbers in lower case, the same with and without marks of text; None for formulas."""
    text = re.sub(r"^[\s$]*[A-Za-z ]+=\s*", "", TEXT.sub(r" \1 ", text))
    text = re.sub(r"\\[ ,;:()\[\]]|\\quad|[~$\"“”]|(?<=\d)(?:st|nd|rd|th)\b", " ", text).strip()
    if not text or text[0] == "-" or re.search(r"[\\^=+*/<>|{}]", text):
        return None
    return re.sub(r"(?<=[^\W\d]) | (?=[^\W\d])", "", re.sub(r"[\W_]+", " ", text).strip()).casefold()


def is_word(run: str) -> bool:
    """Whether letters are a word, or letters in an order such as DCBA, instead of a product such as xyz or nRT."""
    if len(run) < 3 or run in ("and", "for"):
        return False
    if run.isupper():
        return True
    if not re.search("[aeiouy]" if run[0].isupper() else "[aeiou]", run.lower()):
        return False
    if run.islower():
        return any(first >= second for first, second in zip(run, run[1:], strict=False))  # abc, uvw
    return run[1:].islower() or len(run) > 4


def letters(text: str, reference: str = "") -> str:
    """Text whose words are marked, and whose capital letters are names of their own: math-verify drops their case."""
    products = {"".join(sorted(run)) for run in re.findall(r"[A-Za-z]{3,}", reference) if not is_word(run)}

    def word(match: re.Match[str]) -> str:
        product = not is_word(match[2]) or "".join(sorted(match[2])) in products
        return match[0] if product else rf"{match[1]}\text{{{match[2]}}}"

    return _CAPITAL.sub(_capital, _LETTER.sub(r" \1", _ELEMENT.sub(word, text)))


def _capital(match: re.Match[str]) -> str:
    accent, below, greek, latin, index = match.groups()
    if accent:
        return rf"\{accent}{{{re.sub('[A-Z]', lambda letter: letter[0].lower() + 'cap', below)}}}"
    if not (greek or latin):
        return match[0]
    name = rf"\breve{{{(greek or latin).lower()}}}"
    return f"{name}_" if index else f"{{{name}}}"


def with_capitals(text: str) -> str:
    """The text of a value, with the capitals that `letters` replaced."""
    return _SMALL.sub(lambda match: match[1].capitalize(), text)


def without_unit_texts(text: str) -> str:
    """Text without units in LaTeX, such as 5 \\text{ cm}, unless one of their words may change the number."""

    def replace(match: re.Match[str]) -> str:
        return "" if all(map(_is_unit, TEXT.findall(match[0]))) else match[0]

    return _UNIT_TEXT.sub(replace, text)


def _is_unit(text: str) -> bool:
    words = re.findall(r"[A-Za-z]+", text)
    return (
        not _changes(words)
        and not re.search(r"(?<!\^)\d", text)
        and (len("".join(words)) > 1 or re.fullmatch(_SYMBOL, words[0]) is not None)
    )


def _changes(words: list[str]) -> bool:
    """Whether words after a number are none, or may change it."""
    first, *others = [word.lower() for word in words] or ["if"]
    return first in _NO_UNITS or bool((_NO_UNITS - {"squared", "cubed", "and"}).intersection(others))


def is_number(text: str) -> bool:
    """Whether a text has no variables."""
    return not re.search(r"[A-Za-z]", re.sub(r"\\(?!text|math|mbox|operatorname)[A-Za-z]+", "", text)) and text != ""


def without_units(text: str, spaced: bool = True) -> str:
    """A number without the words and units that follow it, unless one of them may change it.

    Args:
        text: A number and perhaps its unit.
        spaced: Whether letters right after a digit are no unit, as m in 5m, unless they are two or more.
    """
    text = _ORDINAL.sub("", text.rstrip(". "))
    match = _UNITS.search(text)
    head = text[: match.start()] if match else ""
    number = re.sub(r"(?:\s|~|\\[ ,;:])+$", "", head)
    value = number.rpartition("=")[2]
    if match is None or not is_number(value) or not re.search(r"[\d}]|\\pi", value) or number[-1:] in "+-*/^(,":
        return text
    words = re.findall(r"[A-Za-z]+", match[0])
    close = number == head
    if _changes(words):
        return text
    if len(words[0]) == 1 and "\\circ" not in number:
        if not re.search(r"[\d}]$", number) or (spaced and (close or not re.fullmatch(r"\W*[\d.,/]+", number))):
            return text
    long = len(words[0]) > 2 and not re.fullmatch(_SYMBOL, words[0])
    if long and (close or not re.search("[aeiou]", words[0], re.IGNORECASE)):
        return text
    return number


_FORMULA = re.compile(
    r"(?<!\\)(\$\$?)((?:\\.|[^$\\])+)\1|(?<!\\)\\\(()((?:[^\\]|\\[^()])+)\\\)|(?<!\\)\\\[()((?:[^\\]|\\[^\[\]])+)\\\]",
    re.DOTALL,
)
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
