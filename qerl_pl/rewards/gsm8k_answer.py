"""Exact answers of GSM8K, which are single numbers."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from qerl_pl.errors import UserError
from qerl_pl.rewards.base import RewardSample, refuse_empty_references
from qerl_pl.rewards.format_and_length import last_tagged

_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


def parse_number(text: str) -> Decimal | None:
    """The value of `text` if it is one number and nothing else, else None.

    Dollar and percent signs, also escaped as in LaTeX, commas between thousands and a final full stop do not count:
    "$1,234.50." is 1234.5.
    """
    plain = re.sub(r"\\?[$%]", "", text.strip().removesuffix(".")).strip()
    return Decimal(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None


class GSM8KAnswer:
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
