"""Prompts of many questions each, whose completions have 2048 tokens and more, and their reward.

    python -m studies.long_completions.long_answers OUT --gsm8k FOLDER       # OUT/train.jsonl and OUT/test.jsonl

A row asks 40 of GSM8K's questions of at most two calculations; its answer has the solutions, numbered, and behind ####
their numbers: "1. 48 / 2 = 24. ... #### 24; 72; 10". The start is fine-tuned on the first rows, the next are
held out, and `long_answers.yaml` trains on the others. The three have no question in common.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from qerl_pl.datamodules.tables import read_table
from qerl_pl.rewards.answers import answer_of, parse_number
from qerl_pl.runtime.files import atomic_write
from qerl_pl.seeds import stream_seed

NUMBERED = re.compile(r"^(\d+)\. ", re.MULTILINE)
INSTRUCTION = (
    "Solve these {count} problems one after the other. Give their numbers in this order, separated by semicolons."
)


def easy_rows(folder: Path, split: str, calculations: int) -> Iterator[dict[str, str]]:
    """Rows of GSM8K with at most so many calculations, without their << >> annotations."""
    for row in read_table(str(folder), split):
        answer = str(row["answer"])
        if answer.count("<<") <= calculations:
            yield {"question": str(row["question"]), "answer": re.sub(r"<<.*?>>", "", answer)}


def long_rows(rows: Sequence[dict[str, str]], questions: int, count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows that ask several questions each, drawn without repetition within a row.

    Args:
        rows: GSM8K's columns `question` and `answer`, the latter with a number behind ####.
        questions: Questions of a row; at most the number of `rows`.
        count: Number of rows.
        seed: Of the draws.
    """
    for index in range(count):
        chosen = random.Random(stream_seed(seed, "long answers", index)).sample(rows, questions)
        parts = [row["answer"].rpartition("####") for row in chosen]
        asked = [f"{number}. {row['question']}" for number, row in enumerate(chosen, 1)]
        solved = [f"{number}. {thought.strip()}" for number, (thought, _, _) in enumerate(parts, 1)]
        numbers = "; ".join(number.strip() for _, _, number in parts)
        yield {
            "question": "\n".join([INSTRUCTION.format(count=questions), *asked]),
            "answer": "\n".join([*solved, f"#### {numbers}"]),
        }


def share_right(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """The share of the questions whose numbered solution, before <answer>, ends in the right number."""
    shares = []
    for completion, reference in zip(completions, answer, strict=True):
        expected = [parse_number(number) for number in reference.rpartition("####")[2].split(";")]
        _, *parts = NUMBERED.split(completion.partition("<answer>")[0].replace("<think>", ""))
        solutions = dict(zip(parts[::2], parts[1::2], strict=True))
        given = [parse_number(answer_of(solutions.get(str(n), ""), None) or "") for n in range(1, len(expected) + 1)]
        right = sum(one is not None and one == other for one, other in zip(expected, given, strict=True))
        shares.append(right / len(expected))
    return shares


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K folder with train.jsonl and test.jsonl")
    parser.add_argument("--questions", type=int, default=40, help="questions of a row")
    parser.add_argument("--calculations", type=int, default=2, help="most calculations of a question")
    parser.add_argument(
        "--train",
        type=int,
        nargs="+",
        default=[2048, 1024, 1024],
        help="rows to fine-tune on, to hold out and to train on, each of as many questions by its share",
    )
    parser.add_argument("--test", type=int, default=256, help="rows to test on")
    args = parser.parse_args(words)
    for split, counts in (("train", args.train), ("test", [args.test])):
        rows = list(easy_rows(args.gsm8k, split, args.calculations))
        ends = [len(rows) * part // sum(counts) for part in itertools.accumulate(counts)]
        drawn = [
            row
            for start, end, count in zip([0, *ends], ends, counts, strict=False)
            for row in long_rows(rows[start:end], args.questions, count)
        ]
        file = args.out / f"{split}.jsonl"
        atomic_write(file, "".join(json.dumps(row) + "\n" for row in drawn).encode())
        print(f"{file}: {len(drawn)} rows of {args.questions} out of {len(rows)} questions")


if __name__ == "__main__":
    main()
