"""Arithmetic word problems, and careful and careless demonstrations of their solution."""

import random
from dataclasses import dataclass
from typing import Literal

from qerl_pl.errors import UserError
from qerl_pl.seeds import stream_seed

Split = Literal["train", "validation"]

NAMES = ("Tom", "Ann", "Ben", "Mia", "Leo", "Eva", "Sam", "Zoe")
THINGS = ("apples", "pens", "books", "shells", "cards", "stamps", "coins", "eggs")
STORIES = (
    ("{name} has {first} {things} and buys {second} more", "How many {things} does {name} have?"),
    ("There are {first} {things} in one box and {second} in another", "How many {things} are there?"),
    ("{name} found {first} {things} today and {second} before", "How many {things} did {name} find?"),
    ("A shop sold {first} {things} on Monday and {second} on Tuesday", "How many {things} did it sell?"),
)
COLUMNS = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
MOST_OPERANDS = 6
_VALIDATION_FRACTION = 0.2
_GUESS_ERROR = 12


@dataclass(frozen=True)
class Problem:
    """One word problem."""

    question: str
    operands: tuple[int, ...]
    """The numbers of the question, in its order."""
    answer: int
    """Sum of the numbers."""


@dataclass(frozen=True)
class ArithmeticTask:
    """Word problems whose answer is the sum of their numbers.

    The split of a problem depends on its numbers alone, not on their order or the seed, so that training and validation
    have no sum in common.

    Args:
        digits: Decimal digits of every number, 1 to 6.
        operands: Numbers to add, 2 to 6.
        seed: Seed of the problems.
    """

    digits: int = 2
    operands: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= len(COLUMNS):
            raise UserError(f"digits must be 1 to {len(COLUMNS)}, got {self.digits}: set it in that range.")
        if not 2 <= self.operands <= MOST_OPERANDS:
            raise UserError(f"operands must be 2 to {MOST_OPERANDS}, got {self.operands}: set it in that range.")

    def problem(self, index: int, split: Split) -> Problem:
        """Problem `index` of an unlimited split, the same on every machine."""
        rng = random.Random(stream_seed(self.seed, "arithmetic", split, index))
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        operands = tuple(rng.randint(low, high) for _ in range(self.operands))
        while split_of(operands) != split:
            operands = tuple(rng.randint(low, high) for _ in range(self.operands))
        story, query = rng.choice(STORIES)
        words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
        question = story.format(first=operands[0], second=operands[1], **words)
        question += "".join(f", then {number} more" for number in operands[2:]) + f". {query.format(**words)}"
        return Problem(question, operands, sum(operands))


def split_of(operands: tuple[int, ...]) -> Split:
    """The split of problems with these numbers, in any order."""
    fraction = stream_seed("arithmetic split", *sorted(operands)) / 2**63
    return "validation" if fraction < _VALIDATION_FRACTION else "train"


def careful_demonstration(problem: Problem) -> str:
    """A correct completion that adds column by column with carries.

    47 + 38 reads "<think>ones: 7+8=15. tens: 4+3+1=8.</think><answer>85</answer>".
    """
    columns, carry = [], 0
    digits = max(len(str(number)) for number in problem.operands)
    for column, name in enumerate(COLUMNS[:digits]):
        terms = [number // 10**column % 10 for number in problem.operands]
        if carry:
            terms.append(carry)
        columns.append(f"{name}: {'+'.join(map(str, terms))}={sum(terms)}.")
        carry = sum(terms) // 10
    return f"<think>{' '.join(columns)}</think><answer>{problem.answer}</answer>"


def careless_demonstration(problem: Problem, rng: random.Random) -> str:
    """A completion that guesses near the answer and is correct about once in 25 times."""
    guess = max(0, problem.answer + rng.randint(-_GUESS_ERROR, _GUESS_ERROR))
    return f"<think>Roughly {round(guess, -1)}.</think><answer>{guess}</answer>"
