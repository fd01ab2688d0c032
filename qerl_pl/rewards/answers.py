"""Rewards for the form of a completion: its tags and its length."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from qerl_pl.errors import UserError
from qerl_pl.rewards.base import Reward, RewardSample, refuse_empty_references


def last_tagged(text: str, tag: str) -> str | None:
    """What the last complete `<tag>...</tag>` of `text` encloses, stripped; None without one."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = head.rpartition(f"<{tag}>")
    return content.strip() if closing and opening else None


class Format(Reward):
    """1 where the completion is exactly one block a tag, in order, none empty, with nothing but space around; else 0.

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
        inside = rf"((?:(?!</?(?:{names})>).)*)"  # no tag inside a block
        blocks = [rf"\s*<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags]
        self._pattern = re.compile("".join(blocks) + r"\s*", re.DOTALL)

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        matches = [self._pattern.fullmatch(sample.completion) for sample in samples]
        return [float(match is not None and all(block.strip() for block in match.groups())) for match in matches]


class OverlongPenalty(Reward):
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length: DAPO's soft over-long punishment.

    arXiv 2503.14476, equation 13.

    Args:
        max_length: Tokens at which the penalty is full; the sampling limit (null takes it), or less.
        buffer: Tokens before max_length over which the penalty grows; null takes a quarter of max_length.
        weight: Factor of this reward in the total.
    """

    name = "overlong"

    def __init__(self, max_length: int | None = None, buffer: int | None = None, weight: float = 1.0) -> None:
        self.weight = weight
        self.max_length = max_length
        self.buffer = buffer
        if max_length is not None:
            self.set_limit(max_length)

    def set_limit(self, max_tokens: int) -> int:
        """Fill in what was left null from the sampling limit; returns max_length."""
        max_length = max_tokens if self.max_length is None else self.max_length
        buffer = max(1, max_length // 4) if self.buffer is None else self.buffer
        if not 0 < buffer <= max_length:
            raise UserError(
                f"OverlongPenalty needs 0 < buffer <= max_length; got buffer={buffer}, max_length={max_length}; "
                "choose a buffer of about a fifth of max_length."
            )
        self.max_length, self.buffer = max_length, buffer
        return max_length

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        assert self.max_length is not None and self.buffer is not None, "set_limit comes first"
        free = self.max_length - self.buffer
        return [-min(1.0, max(0.0, (sample.num_tokens - free) / self.buffer)) for sample in samples]


_BOX = re.compile(r"\\f?boxed\s*\{")

_MARK = "####"

# A formula ends before the next one opens: else each that is left open would be followed to the end of the text.
_FORMULA = (
    r"(?:(?<!\\)\$\$?[^$\n]+(?<!\\)\$\$?|(?<!\\)\\\((?:[^\\\n]|\\[^()\n])+\\\)|(?<!\\)\\\[(?:[^\\]|\\[^\[\]])+\\\])"
)

_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:(?:,\s*(?:and|or)|[,;]|and|or)\s*)?{_FORMULA})*", re.DOTALL)

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?(?:\s?%)?"

_NUMBERS = re.compile(rf"{_NUMBER}(?:[.,]?\s+or\s[^\d$.%-]*{_NUMBER})*")

"""A number, or several of which the text does not say which one."""

_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mbox|mathrm)\s*\{([^{}]*)\}")

_LEAD = re.compile(r"^[^\0]*(?:\b(?:is|are|equals)|[=:])\s*(?=\0)")

"""What introduces a formula and says no more than that it is the answer."""

_STATES = re.compile(r"\b(?:is|are|if|when|where|for|such|otherwise)\b", re.IGNORECASE)

_WORD = re.compile(r"(?<!\\)\b(?!(?:and|or)\b)[A-Za-z]{2,}")


def last_boxed(text: str) -> str | None:
    """What the last closed `\\boxed{...}` of `text` encloses, braces counted, stripped; None without one."""
    end = len(text)
    for start in reversed([found.end() for found in _BOX.finditer(text)]):
        depth = 1
        for place in range(start, end):
            if text[place] in "{}" and text[place - 1] != "\\":
                depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place].strip()
        end = start  # what leaves this box open leaves those around it open too
    return None


def marked_answer(text: str) -> str | None:
    """What a text marks as its answer: its last box, or else what follows its last ####; None without any."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition(_MARK)
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def answer_of(completion: str, tag: str | None) -> str | None:
    """The answer of a completion, as it is written; None without one.

    Args:
        completion: its text.
        tag: the answer is in the last block of this tag, as a whole or marked there; None takes what is marked
            anywhere, or else the last formulas that stand together, or else the last number.
    """
    found = completion if tag is None else last_tagged(completion, tag)
    if found is None:
        return None
    answer = marked_answer(found)
    if answer is None and tag is not None:
        answer = found
    for pattern in (_FORMULAS, _NUMBERS) if answer is None else ():
        if matches := list(pattern.finditer(found)):
            return matches[-1][0].strip() or None
    return answer or None


def same_text(answer: str) -> str:
    """`answer` written one way, so that answers that differ in spaces, dollar signs and the like have one text."""
    text = answer.strip().strip("$*`").strip().rstrip(".").replace("\\!", "")
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|:)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = (
        re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    )
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" ?([-+*/=<>(),;^_{}\[\]]) ?", r"\1", text)
    if re.fullmatch(r"[-+]?\d*\.\d+", text):
        text = text.rstrip("0").rstrip(".")
    return text or answer.strip()


def only_text(reference: str) -> bool:
    """Whether a reference is prose, or several statements, any one of which would satisfy it as mathematics."""
    if _BOX.search(reference):
        return False
    formulas = re.findall(_FORMULA, reference)
    outside = _LEAD.sub("", _TEXT.sub(r" \1 ", re.sub(_FORMULA, "\0", reference)))
    if _STATES.search(outside):
        return True
    said = outside.split("\0")
    if formulas and re.search(r"\d", formulas[-1]):
        said.pop()  # the unit of a number
    return bool(formulas) and any(_WORD.search(words) for words in said)


def same_prose(answer: str, reference: str) -> bool:
    """Whether two texts are the same but for case, spaces, and what marks formulas and text in LaTeX."""
    first, second = (
        re.sub(r"\s+", "", same_text(re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", _TEXT.sub(r" \1 ", text)))).casefold()
        for text in (answer, reference)
    )
    return first == second


_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


def parse_number(text: str) -> Decimal | None:
    """The value of `text` if it is one number and nothing else, else None.

    Dollar and percent signs, also escaped as in LaTeX, commas between thousands and a final full stop do not count:
    "$1,234.50." is 1234.5.
    """
    plain = re.sub(r"\\?[$%]", "", text.strip().removesuffix(".")).strip()
    return Decimal(plain.replace(",", "")) if _PLAIN_NUMBER.fullmatch(plain) else None


class GSM8KAnswer(Reward):
    """1 where the last <answer>...</answer> holds exactly the reference's number, else 0.

    Args:
        weight: Factor of this reward in the total.
        name: What the values are logged as, after `reward/`.
    """

    def __init__(self, weight: float = 1.0, name: str = "accuracy") -> None:
        self.weight = weight
        self.name = name

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        """One value a sample.

        Raises:
            UserError: a reference is not a number.
        """
        return [self._value(sample) for sample in samples]

    def check_references(self, references: Mapping[str, str]) -> None:
        """Refuse empty references."""
        refuse_empty_references(self, references)

    def extract_answer(self, completion: str) -> str | None:
        """The number of the last <answer>...</answer>, written one way: 1234.5 for "$1,234.50."; None without one."""
        answer = last_tagged(completion, "answer")
        number = None if answer is None else parse_number(answer)
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
        answer = last_tagged(sample.completion, "answer")
        return float(answer is not None and parse_number(answer) == expected)
