"""Generate word problems of two or three steps in GSM8K's format.

    python -m studies.train_on_4_bits.word_problems OUT                       # OUT/train.jsonl and OUT/test.jsonl
    python -m studies.train_on_4_bits.word_problems OUT --gsm8k FOLDER --steps 2    # GSM8K's of at most two steps

An answer reads "47 + 38 = 85. 85 - 12 = 73. 73 * 2 = 146. #### 146": the text before #### is the solution. The split of
a problem depends only on its numbers and steps.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qerl_pl.datamodules.tables import read_table
from qerl_pl.runtime.files import atomic_write
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.task import NAMES, THINGS

TEST_SHARE = 0.2
STEPS = ("add", "take", "times")
SYMBOLS = {"add": "+", "take": "-", "times": "*"}
TELLING = {
    "add": ("{they} buys {n} more", "a friend gives {n} more", "{they} finds another {n}"),
    "take": ("{they} gives {n} away", "{they} loses {n}", "{they} sells {n}"),
    "times": ("then {they} collects until there are {n} times as many", "the number then grows to {n} times as many"),
}


@dataclass(frozen=True)
class WordProblem:
    """One problem and its solution."""

    first: int
    steps: tuple[tuple[str, int], ...]
    """Operations and operands; at most one multiplication."""
    question: str

    @property
    def lines(self) -> list[str]:
        """The solution, step by step."""
        lines, number = [], self.first
        for kind, other in self.steps:
            result = applied(number, kind, other)
            lines.append(f"{number} {SYMBOLS[kind]} {other} = {result}.")
            number = result
        return lines

    @property
    def answer(self) -> int:
        """The number in the end."""
        number = self.first
        for kind, other in self.steps:
            number = applied(number, kind, other)
        return number

    @property
    def split(self) -> str:
        """The split, "train" or "test"."""
        share = stream_seed("word problem split", self.first, *(value for step in self.steps for value in step)) / 2**63
        return "test" if share < TEST_SHARE else "train"


def applied(number: int, kind: str, other: int) -> int:
    """Apply one step."""
    return {"add": number + other, "take": number - other, "times": number * other}[kind]


def word_problem(seed: int, index: int, split: str) -> WordProblem:
    """The problem at `index` of an infinite split."""
    rng = random.Random(stream_seed(seed, "word problem", split, index))
    while (problem := _drawn(rng)).split != split:
        pass
    return problem


def _drawn(rng: random.Random) -> WordProblem:
    number = first = rng.randint(11, 60)
    steps: list[tuple[str, int]] = []
    for _ in range(rng.choice((2, 3))):
        most = {"add": 60, "take": min(60, number - 1), "times": 0 if "times" in dict(steps) else 4}
        kind = rng.choice([kind for kind in STEPS if most[kind] > 1])
        other = rng.randint(11 if kind == "add" else 2, most[kind])
        steps.append((kind, other))
        number = applied(number, kind, other)
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    clauses = [f"{name} has {first} {things}"]
    clauses += [rng.choice(TELLING[kind]).format(they=name, n=other) for kind, other in steps]
    sentences = ". ".join(sentence[0].upper() + sentence[1:] for sentence in clauses)
    return WordProblem(first, tuple(steps), f"{sentences}. How many {things} does {name} have now?")


def rows(seed: int, split: str, count: int) -> Iterator[dict[str, str]]:
    """Rows with GSM8K's columns."""
    for index in range(count):
        problem = word_problem(seed, index, split)
        yield {"question": problem.question, "answer": f"{' '.join(problem.lines)}\n#### {problem.answer}"}


def easy_rows(folder: Path, split: str, steps: int) -> Iterator[dict[str, str]]:
    """Rows of GSM8K with at most `steps` calculations, without their << >> annotations."""
    for row in read_table(str(folder), split):
        answer = str(row["answer"])
        if answer.count("<<") <= steps:
            yield {"question": str(row["question"]), "answer": re.sub(r"<<.*?>>", "", answer)}


def write_rows(file: Path, rows: Iterable[Mapping[str, str]]) -> int:
    """Write a JSONL file; returns the number of rows."""
    lines = [json.dumps(row) + "\n" for row in rows]
    atomic_write(file, "".join(lines).encode())
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=8192, help="problems to train on")
    parser.add_argument("--test", type=int, default=512, help="problems to test on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K folder with train.jsonl and test.jsonl to filter")
    parser.add_argument("--steps", type=int, default=2, help="maximum number of calculations of a row")
    args = parser.parse_args()
    for split, count in (("train", args.train), ("test", args.test)):
        made = easy_rows(args.gsm8k, split, args.steps) if args.gsm8k else rows(args.seed, split, count)
        file = args.out / f"{split}.jsonl"
        print(f"{file}: {write_rows(file, made)} rows")


if __name__ == "__main__":
    main()
