"""Which part of a text is its answer, when two have the same text, and which references no more can be said of."""

import re

from qerl_pl.rewards.format_and_length import last_tagged

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
