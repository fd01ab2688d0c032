"""Prompts of many questions, by hand."""

import json
from pathlib import Path

import pytest

from studies.long_completions.long_answers import long_rows, main, share_right

ROWS = [
    {"question": f"What is {one} + {one}?", "answer": f"{one} + {one} = {2 * one}.\n#### {2 * one}"}
    for one in (1, 2, 3)
]


def test_a_row_asks_several_questions_and_answers_them_in_order() -> None:
    (row,) = long_rows(ROWS, 3, 1)
    asked = [line.partition(". ")[2] for line in row["question"].splitlines()[1:]]
    assert sorted(asked) == [one["question"] for one in ROWS]
    solutions, _, numbers = row["answer"].partition("\n#### ")
    expected = [next(one["answer"] for one in ROWS if one["question"] == question) for question in asked]
    assert solutions.splitlines() == [f"{n}. {one.splitlines()[0]}" for n, one in enumerate(expected, 1)]
    assert numbers == "; ".join(one.partition("#### ")[2] for one in expected)
    assert row["question"].startswith("Solve these 3 problems")


def test_rows_are_the_same_each_time_and_differ_from_each_other() -> None:
    drawn = list(long_rows(ROWS, 2, 6))
    assert drawn == list(long_rows(ROWS, 2, 6)) and len({row["question"] for row in drawn}) > 1
    assert drawn != list(long_rows(ROWS, 2, 6, seed=1))


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("<think>1. 1 + 1 = 2.\n2. It is 4\n3. So 503 + 503 = 1006.</think><answer>9</answer>", 1.0),
        ("1. 2\n3. He has $1,006.", 2 / 3),  # the second is missing
        ("1. 2\nor 3\n2. 4 is 5 less 1", 0.0),  # the last number of each counts
        ("<think>1. 4\n2. 2\n3. 1006\n4. 8", 1 / 3),  # each at its number; one too many
        ("1. 3\n2. 4\n1. 2", 2 / 3),  # of two with a number, the last
        ("2; 4; 1006", 0.0),
        ("1. none\n</think><answer>1. 2\n2. 4\n3. 1006</answer>", 0.0),
    ],
)
def test_the_reward_is_the_share_of_solutions_with_the_right_number(completion: str, share: float) -> None:
    assert share_right([completion], ["1 + 1 = 2.\n#### 2; 4; 1,006"], question=["?"]) == [pytest.approx(share)]


def test_a_written_answer_is_right() -> None:
    (row,) = long_rows(ROWS, 3, 1)
    assert share_right([row["answer"].partition("\n####")[0]], [row["answer"]]) == [1.0]


def test_a_folder_of_gsm8k_becomes_one_of_long_rows(tmp_path: Path) -> None:
    """Of questions with few calculations, without the calculator's annotations."""
    hard = {"question": "Hard?", "answer": "<<1+1=2>> <<2+1=3>> <<3+1=4>>\n#### 4"}
    easy = [row | {"answer": row["answer"].replace(".", ". <<1=1>>")} for row in ROWS]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*easy, hard]))
    main([str(tmp_path / "out"), "--gsm8k", str(tmp_path), "--questions", "2", "--train", "5", "--test", "3"])
    for split, count in (("train", 5), ("test", 3)):
        rows = [json.loads(line) for line in (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == count and all(row["answer"].rpartition("#### ")[2].count(";") == 1 for row in rows)
        assert not any("<<" in row["answer"] or "Hard" in row["question"] for row in rows)


def test_rows_to_fine_tune_on_have_no_question_of_those_to_train_on(tmp_path: Path) -> None:
    rows = [{"question": f"What is {one} + 1?", "answer": f"So it is.\n#### {one + 1}"} for one in range(20)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = [12, 6, 6]
    words = ["--questions", "3", "--train", *map(str, counts), "--test", "2"]
    main([str(tmp_path / "out"), "--gsm8k", str(tmp_path), *words])
    drawn = [json.loads(line)["question"] for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    parts = [drawn[:12], drawn[12:18], drawn[18:]]
    asked = [{line.partition(". ")[2] for text in part for line in text.splitlines()[1:]} for part in parts]
    assert len(drawn) == sum(counts) and not asked[0] & asked[1] and not (asked[0] | asked[1]) & asked[2]
    assert max(int(question.split()[2]) for question in asked[0]) < 10  # half of the rows, half of the questions
