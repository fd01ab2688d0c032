"""Rewards for format, length and numeric answers, and the extraction of answers from completions."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from qerl_pl.errors import UserError
from qerl_pl.rewards import math_notation as notation
from qerl_pl.rewards.base import Reward, RewardSample, refuse_empty_references


def last_tagged(text: str, tag: str) -> str | None:
    """The stripped content of the last complete `<tag>...</tag>` of `text`; None if there is none."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = head.rpartition(f"<{tag}>")
    return content.strip() if closing and opening else None


class Format(Reward):
    """1 if the completion consists of one non-empty block for each tag, in order, and white space; else 0.

    Args:
        weight: Factor of this reward in the total.
        tags: Names of the blocks; the default asks for <think>...</think><answer>...</answer>.
    """

    name = "format"

    def __init__(self, weight: float = 1.0, tags: Sequence[str] = ("think", "answer")) -> None:
        if not tags:
            raise UserError("Format needs at least one tag; got none; name them, such as [think, answer].")
        self.weight = weight
        self.tags = tuple(tags)
        names = "|".join(map(re.escape, tags))
        content = rf"((?:(?!</?(?:{names})>).)*)"  # without nested tags
        blocks = [rf"\s*<{re.escape(tag)}>{content}</{re.escape(tag)}>" for tag in tags]
        self._pattern = re.compile("".join(blocks) + r"\s*", re.DOTALL)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        matches = [self._pattern.fullmatch(sample.completion) for sample in samples]
        return [float(match is not None and all(block.strip() for block in match.groups())) for match in matches]


class OverlongPenalty(Reward):
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length: DAPO's soft over-long punishment.

    arXiv 2503.14476, equation 13.

    Args:
        max_length: Tokens at which the penalty is full; training's sampling limit (null takes it), or less.
        buffer: Tokens before max_length over which the penalty grows; null takes a quarter of max_length.
        weight: Factor of this reward in the total.
    """

    name = "overlong"

    def __init__(self, max_length: int | None = None, buffer: int | None = None, weight: float = 1.0) -> None:
        self.weight = weight
        self.max_length = max_length
        self.buffer = buffer
        self._given = max_length, buffer
        if max_length is not None:
            self.set_limit(max_length)

    def set_limit(self, max_tokens: int) -> None:
        """Set the arguments that are null from the sampling limit."""
        given, buffer = self._given
        max_length = max_tokens if given is None else given
        buffer = max(1, max_length // 4) if buffer is None else buffer
        if not 0 < buffer <= max_length:
            raise UserError(
                f"OverlongPenalty needs 0 < buffer <= max_length; got buffer={buffer}, max_length={max_length}; "
                "choose a buffer of about a fifth of max_length."
            )
        self.max_length, self.buffer = max_length, buffer

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        assert self.max_length is not None and self.buffer is not None, "set_limit comes first"
        free = self.max_length - self.buffer
        return [-min(1.0, max(0.0, (sample.num_tokens - free) / self.buffer)) for sample in samples]


_BOX = re.compile(r"\\f?boxed\s*\{")
_MARK = "####"
_INSIDE = r"(?:[^$\\\n]|\\[^\n])+"
# A formula ends before the next one opens, or each unclosed one would be searched to the end of the text. Dollar signs
# enclose a formula by pandoc's rule: no spaces inside of them, or at both ends; and a formula ends in no operator. So
# "9 * $2=$18" has none.
_FORMULA = (
    r"(?:(?<!\\)\$\$(?:[^$\\]|\\[\s\S])+\$\$"
    rf"|(?<!\\)\$(?=\S){_INSIDE}(?<=[^\s=+*/(<-])\$(?!\d)|(?<!\\)\$(?=\s){_INSIDE}(?<=\s)\$(?!\s?\d)"
    r"|(?<!\\)\\\((?:[^\\\n]|\\[^()\n])+\\\)|(?<!\\)\\\[(?:[^\\]|\\[^\[\]])+\\\])"
)
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:(?:,\s*(?:and|or)|[,;]|and|or)\s*)?{_FORMULA})*", re.DOTALL)
_POWER = r"\^\s?(?:\{\s?[-−+]?\d+\s?\}|[-−+]?\d+)"
_NUMBER = (
    r"(?:(?<![\w.)\]}])[-−])?\$?(?:\d+\s(?=\d+/\d))?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?::\d+)*"
    rf"(?:/\d+|[eE][-+−]?\d+(?!\w)|(?:\s?(?:\*|×|x|·|\\times|\\cdot)\s?10)?\s?{_POWER})?(?:\s?%)?"
    r"(?:\s(?:dozen|hundred|thousand|million|billion|trillion)\b)?"
)
_NUMBERS = re.compile(rf"{_NUMBER}(?:[.,]?\s+or\s[^\d$.%−-]*{_NUMBER})*")  # a number, or alternatives ("5 or 6")
_TEXT_MARK = r"\\(?:text|textrm|textbf|textit|mbox|mathrm)"
_TEXT = re.compile(rf"{_TEXT_MARK}\s*\{{([^{{}}]*)\}}")
_LEAD = re.compile(r"^[^\0]*(?:\b(?:is|are|equals)|[=:])\s*(?=\0)")  # "The answer is" before a formula (\0)
_STATES = re.compile(r"\b(?:is|are|if|when|where|for|such|otherwise)\b", re.IGNORECASE)
_WORD = re.compile(r"(?<!\\)\b(?!(?:and|or)\b)[A-Za-z]{2,}")


def last_boxed(text: str) -> str | None:
    """The stripped content of the last closed `\\boxed{...}` of `text`, counting braces; None if there is none."""
    end = len(text)
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for index in range(start, end):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[start:index].strip()
        end = start  # boxes around an unclosed box are unclosed too
    return None


def marked_answer(text: str) -> str | None:
    """The last box of a text, or else the line after its last ####; None if there is neither."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition(_MARK)
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def answer_of(completion: str, tag: str | None) -> str | None:
    """The answer of a completion, verbatim; None if there is none.

    Args:
        completion: Text of the completion.
        tag: The answer is the content of the last block of this tag, or its marked answer. None takes the completion's
            marked answer, or else its last formulas next to each other, or else its last number.
    """
    text = completion if tag is None else last_tagged(completion, tag)
    if text is None:
        return None
    answer = marked_answer(text)
    if answer is None and tag is not None:
        answer = text
    for pattern in (_FORMULAS, _NUMBERS) if answer is None else ():
        if matches := list(pattern.finditer(text)):
            return matches[-1][0].strip() or None
    return answer or None


def same_text(answer: str) -> str:
    """An answer with spaces, dollar signs, fractions and numbers normalized."""
    text = answer.strip().strip("$*`").strip().rstrip(".").replace("\\!", "")
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|:)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?([-+*/=<>(),;^_{}\[\]]) ?", r"\1", text)
    if re.fullmatch(r"[-+]?\d*\.\d+", text):
        text = text.rstrip("0").rstrip(".")
    return text or answer.strip()


def only_text(reference: str) -> bool:
    """Whether a reference is prose or several statements, which math-verify would reduce to one of its formulas."""
    if _BOX.search(reference):
        return False
    formulas = re.findall(_FORMULA, reference)
    prose = _LEAD.sub("", _TEXT.sub(r" \1 ", re.sub(_FORMULA, "\0", reference)))
    if _STATES.search(prose):
        return True
    texts = prose.split("\0")
    if formulas and re.search(r"\d", formulas[-1]):
        texts.pop()  # the unit of a number
    return bool(formulas) and any(_WORD.search(text) for text in texts)


def same_prose(answer: str, reference: str) -> bool:
    """Whether two texts are equal except for the case of words, spaces, and LaTeX's marks of formulas and text."""
    first, second = (
        re.sub(r"\s+", "", same_text(re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", _TEXT.sub(r" \1 ", text))))
        for text in (
            re.sub(r"(?<![A-Za-z\\])(?:[A-Za-z][a-z]+|[A-Z]{3,})", lambda word: word[0].lower(), text)
            for text in (answer, reference)
        )
    )
    return first == second


_PLAIN_NUMBER = re.compile(r"[-−+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def parse_number(text: str) -> Decimal | None:
    """The value of `text` if it is exactly one number, else None.

    Ignores dollar and percent signs (also escaped), commas between thousands, a final full stop and Markdown's marks of
    bold text and code: "**$1,234.50**." is 1234.5.
    """
    bare = text.strip().removesuffix(".").strip("*`").removesuffix(".")
    plain = re.sub(r"\\?[$%]", "", bare).strip()
    return Decimal(plain.replace(",", "").replace("−", "-")) if _PLAIN_NUMBER.fullmatch(plain) else None


_COMPARISON = re.compile(rf"({_TEXT_MARK}\s*\{{)\s*(?:percent|times|more|fewer|less)\b")
"""Text whose first word answers "how many more", or is a percent sign."""
_LONGEST_BOX = 200
"""Characters of a box whose words are read: it takes time that grows with the square of its length."""
_NO_WORDS = re.compile(rf"{_TEXT_MARK}\s*\{{[^{{}}\w]*\}}")


def _without_words(box: str) -> str:
    """A box without LaTeX's spaces, and without the words after its number unless they may change it."""
    text = re.sub(r"\\[,!; ]", "", box.replace("{,}", ","))
    if len(text) > _LONGEST_BOX:
        return text
    text = " ".join(text.split())
    text = notation.without_unit_texts(_NO_WORDS.sub(" ", _COMPARISON.sub(r"\1", text))).strip()
    as_text = notation.TEXT.fullmatch(text)
    return notation.without_units(as_text[1]) if as_text else text


class GSM8KAnswer(Reward):
    """1 if the last <answer>...</answer>, or without one the last \\boxed{...}, is the reference's number, else 0.

    Args:
        weight: Factor of this reward in the total.
        name: Logged as `reward/<name>`.
    """

    def __init__(self, weight: float = 1.0, name: str = "accuracy") -> None:
        self.weight = weight
        self.name = name

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        return [self._value(sample) for sample in samples]

    def check_references(self, references: Mapping[str, str]) -> None:
        """Refuse references that are no numbers."""
        refuse_empty_references(self, references)
        others = [row for row, reference in references.items() if parse_number(reference) is None]
        if others:
            raise UserError(
                f"GSM8KAnswer needs numbers as references; {len(others)} of {len(references)} are none, that of row "
                f"{others[0]} the first: {references[others[0]]!r:.60}; correct them, or use MathAnswer"
            )

    def extract_answer(self, completion: str) -> str | None:
        """The number of the answer, normalized: 1234.5 for "$1,234.50."; None if there is none."""
        number = self._number(completion)
        if number is None:
            return None
        digits = format(number, "f")
        return (digits.rstrip("0").rstrip(".") if "." in digits else digits) if number else "0"

    def _value(self, sample: RewardSample) -> float:
        expected = parse_number(sample.reference)
        if expected is None:
            raise UserError(
                f"GSM8KAnswer needs numbers as references; got {sample.reference!r}; use MathAnswer for others."
            )
        return float(self._number(sample.completion) == expected)

    @staticmethod
    def _number(completion: str) -> Decimal | None:
        tagged = last_tagged(completion, "answer")
        boxed = last_boxed(completion if tagged is None else tagged)
        answer = tagged if boxed is None else _without_words(boxed)
        return None if answer is None else parse_number(answer)
