"""Which part of a text is its answer, and when two answers have the same text."""

import re

from qerl_pl.rewards.format_and_length import last_tagged

_BOX = re.compile(r"\\f?boxed\s*\{")
_MARK = "####"
_FORMULA = r"(?:(?<!\\)\$\$?[^$\n]+(?<!\\)\$\$?|\\\([^\n]+?\\\)|\\\[.+?\\\])"
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:(?:,\s*(?:and|or)|[,;]|and|or)\s*)?{_FORMULA})*", re.DOTALL)
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?\s?%?")


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
    for pattern in (_FORMULAS, _NUMBER) if answer is None else ():
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
