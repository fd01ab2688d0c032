"""The table is that of the grades, and its differences are those worked by hand."""

import json
from pathlib import Path

import pytest

from studies.merging_back.__main__ import graded, table

STUDY = Path(__file__).parents[1]


def line(question: str, sample: int | None, correct: bool) -> str:
    return json.dumps({"prompt_id": question, "sample": sample, "correct": correct})


def test_grades_are_kept_by_question() -> None:
    lines = [line("a", None, True), line("b", None, False), line("a", 0, True), line("a", 1, False)]
    assert graded(lines) == {"greedy": {"a": [1], "b": [0]}, "sampled": {"a": [1, 0]}}


def test_differences_are_paired_on_the_questions_that_both_have() -> None:
    trained = {"greedy": {"a": [1], "b": [1], "c": [0]}, "sampled": {"a": [1, 0]}}
    other = {"greedy": {"b": [0], "a": [1]}, "sampled": {"b": [1, 1]}}
    rows = table({"trained": trained, "other": other}, "trained").splitlines()[2:]
    # Differences 0 and -1: mean -0.5, deviation 0.7071, standard error 0.5, 1.96 of them 0.98.
    assert rows[0] == "| trained | 3 | 0.667 | – | 1 | 0.500 | – |"
    assert rows[1] == "| other | 2 | 0.500 | -0.500 [-1.480, +0.480] | 0 | – | – |"


@pytest.mark.nightly
def test_the_table_is_that_of_the_grades() -> None:
    found = json.loads((STUDY / "merging_back.json").read_text())["results"]
    trained = next(name for name in found if name.endswith("as trained"))
    assert (STUDY / "merging_back.md").read_text().startswith(table(found, trained))
