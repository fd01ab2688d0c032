"""`qerl compare` by hand-worked differences, and `qerl completions`, whose page is parsed."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qerl_pl.cli import commands
from qerl_pl.cli.commands import answered
from qerl_pl.cli.compare import compare, paired_interval
from qerl_pl.errors import UserError

# Differences ----------------------------------------------------------------------------------------------------------


def evaluation(folder: Path, grades: dict[str, tuple[str, str]], name: str = "") -> Path:
    """A run's folder with samples: of each question the greedy grade and those of samples, as "1" and "0110"."""
    (folder / "evaluation").mkdir(parents=True)
    lines = []
    for prompt, kinds in grades.items():
        for samples, marks in zip(((None,), range(99)), kinds, strict=True):
            for sample, mark in zip(samples, marks, strict=False):
                lines.append({"set": name, "prompt_id": prompt, "sample": sample, "correct": mark == "1"})
    (folder / "evaluation" / "abc.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "evaluation.json").write_text(json.dumps({"samples": "evaluation/abc.jsonl"}))
    return folder


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:] if "|" in line]


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.0, 1.0, 0.0, 1.0], (0.5, 0.5 - 1.96 * 0.288675, 0.5 + 1.96 * 0.288675)),  # deviation sqrt(1/3), error half
        ([0.25, 0.25, 0.25], (0.25, 0.25, 0.25)),
    ],
)
def test_the_interval_worked_out(differences: list[float], expected: tuple[float, ...]) -> None:
    assert paired_interval(np.array(differences)) == pytest.approx(expected, abs=1e-5)


def test_questions_are_paired_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluation(
        tmp_path / "a", {"p": ("1", "10"), "q": ("0", "00"), "r": ("1", "11"), "s": ("0", "10"), "t": ("1", "1")}
    )
    b = evaluation(
        tmp_path / "b", {"s": ("1", "11"), "r": ("1", "11"), "q": ("1", "00"), "p": ("1", "11"), "u": ("0", "0")}
    )
    assert answered(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert rows(text) == [
        ["greedy", "4", "0.500", "1.000", "+0.500", "-0.066 to +1.066"],
        ["sampled", "4", "0.500", "0.750", "+0.250", "-0.033 to +0.533"],  # 0.5, 0, 0, 0.5
    ]
    assert "2 questions are in one of the evaluations only" in text
    assert rows(compare(b, a))[0][4:] == ["-0.500", "-1.066 to +0.066"]
    assert rows(compare(a, a))[0][4:] == ["+0.000", "–"]


def test_sets_ranks_cut_lines_and_repeated_ones(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {"p": ("0", ""), "q": ("0", "")}, "hard")
    b = evaluation(tmp_path / "b", {"p": ("0", "")}, "hard")
    file = b / "evaluation" / "abc.jsonl"
    line = {"set": "hard", "prompt_id": "p", "sample": None, "correct": True}  # the row was edited
    file.write_text(file.read_text() + json.dumps(line) + "\n" + '{"set": "ha')
    file.write_bytes(file.read_bytes() + b"\xff\n")  # as a power cut leaves it
    (b / "evaluation" / "abc.1.jsonl").write_text(json.dumps(line | {"prompt_id": "q", "correct": False}) + "\n")
    assert rows(compare(a, file)) == [["hard, greedy", "2", "0.000", "0.500", "+0.500", "-0.480 to +1.480"]]


def test_a_question_is_its_text_and_a_sample_one_of_those_asked_for(tmp_path: Path) -> None:
    for name, samples in {"a": 1, "b": 2}.items():
        evaluation(tmp_path / name, {}, "hard")
        lines = [
            {"set": "hard", "prompt_id": f"{row}", "prompt": text, "sample": sample, "correct": name == "b"}
            for row, text in enumerate(["1 + 1?", "2 + 2?", name])  # the last one is another question in each
            for sample in (None, 0, 1)
        ]
        lines += [one | {"sample": 2, "correct": name == "a"} for one in lines[::3]]  # of an earlier evaluation
        (tmp_path / name / "evaluation/abc.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = {"samples": "evaluation/abc.jsonl", "sets": {"hard": {"samples": samples}}}
        (tmp_path / name / "evaluation.json").write_text(json.dumps(report))
    text = compare(tmp_path / "a", tmp_path / "b")
    assert [row[1:5] for row in rows(text)] == [["2", "0.000", "1.000", "+1.000"]] * 2
    assert "2 questions are in one of the evaluations only" in text


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluation(tmp_path / "a", {"p": ("0", ""), "q": ("0", "")})
    b = evaluation(tmp_path / "b", {"r": ("0", ""), "q": ("0", "")})
    with pytest.raises(UserError, match="share 1 in 1 sets; evaluate both on the same data"):
        compare(a, b)
    both = tmp_path / "both.jsonl"  # one question of each set in common
    lines = [{"set": name, "prompt_id": "p", "sample": None, "correct": True} for name in ("easy", "hard")]
    both.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="share 2 in 2 sets; evaluate both"):
        compare(both, both)
    (b / "evaluation" / "abc.jsonl").unlink()
    with pytest.raises(UserError, match=r"abc.jsonl is not there; copy it too"):
        compare(a, b)
    for text in ("garbage", "{}", "[]"):
        (b / "evaluation.json").write_text(text)
        with pytest.raises(UserError, match="as `qerl test` writes it; .* is another .*; evaluate again"):
            compare(a, b)
    assert answered(["compare", str(a), str(tmp_path)]) == 2
    assert "has no evaluation.json" in capsys.readouterr().err
    assert answered(["compare", str(a)]) == 2


# The page -------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements, and the text of the data's script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.ids: set[str] = set()
        self.data, self._in_data = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.ids |= {value for name, value in attrs if name == "id" and value is not None}
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def record(version: int, completion: str, **more: Any) -> dict[str, Any]:
    fields = {"version": version, "prompt_id": "p", "prompt": "1 + 1?", "completion": completion, "reference": "2"}
    return (
        fields | {"rewards": {"accuracy": 1.0, "total": 1.0}, "truncated": False, "tokens": 3, "trained": True} | more
    )


def written(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "completions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "<!-- <script> a < b && c > d",
        "<img src=x onerror=alert(1)>",
        "quotes \" and ' and \\ and \u2028 and é",
        "DATA </SCRIPT > <answer>2</answer>",
    ],
)
def test_completions_come_back_as_they_are(tmp_path: Path, text: str) -> None:
    records = [record(0, text), record(1, "other", trained=False, messages=[{"role": "assistant", "content": text}])]
    assert answered(["completions", str(written(tmp_path, records))]) == 0
    page = Page((tmp_path / "completions.html").read_text())
    assert json.loads(page.data)["records"] == records
    assert page.elements.count("script") == 2 and "img" not in page.elements  # the data and the program
    assert {"search", "from", "to", "least", "most", "tokens", "kind", "order", "list", "more"} <= page.ids


def test_numbers_that_a_browser_does_not_read_are_text(tmp_path: Path) -> None:
    extra = {"reference_length": [math.nan, -math.inf, 1.5]}
    assert answered(["completions", str(written(tmp_path, [record(0, "8", extra=extra)]))]) == 0
    data = json.loads(Page((tmp_path / "completions.html").read_text()).data, parse_constant=pytest.fail)
    assert data["records"] == [record(0, "8", extra={"reference_length": ["NaN", "-Infinity", 1.5]})]


def test_the_program_of_the_page_writes_text_alone_and_loads_nothing() -> None:
    template = commands.COMPLETIONS_PAGE.read_text()
    assert "innerHTML" not in template and "insertAdjacentHTML" not in template and "document.write" not in template
    assert "http" not in template and "src=" not in template


def test_rollouts_are_left_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_COMPLETIONS", 4)
    written(tmp_path, [record(version, "x") for version in range(10)])
    assert answered(["completions", str(tmp_path), str(tmp_path / "page.html")]) == 0
    data = json.loads(Page((tmp_path / "page.html").read_text()).data)
    assert [one["version"] for one in data["records"]] == [0, 3, 6, 9]
    assert data["about"].endswith("4 completions of 4 rollouts, one of each 3 of 10")


def test_bytes_that_a_power_cut_leaves_are_left_out(tmp_path: Path) -> None:
    with (written(tmp_path, [record(0, "8")]) / "completions.jsonl").open("ab") as file:
        file.write(b'\xff\xfe"version": 1\n')
    assert answered(["completions", str(tmp_path)]) == 0
    assert json.loads(Page((tmp_path / "completions.html").read_text()).data)["records"] == [record(0, "8")]


def test_runs_without_completions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(["completions", str(tmp_path)]) == 2
    assert "train with --completions.jsonl true" in capsys.readouterr().err
    (tmp_path / "completions.jsonl").write_text('{"question": "1 + 1?"}')
    assert answered(["completions", str(tmp_path)]) == 2
    assert "is another file; name the run" in capsys.readouterr().err
    (tmp_path / "completions.jsonl").write_text('{"version": 0')
    assert answered(["completions", str(tmp_path)]) == 2
    assert "wait for the first" in capsys.readouterr().err
