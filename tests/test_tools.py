"""The tools that come with the package: a calculator and a search."""

import json
import os
from pathlib import Path

import pytest

from qerl_pl.environments import Calculator, EnvironmentPool, Search
from qerl_pl.environments.calculator import evaluate
from qerl_pl.environments.contract import methods_of
from qerl_pl.environments.search import read_passages
from qerl_pl.errors import UserError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4.5) * 2", "15"),
        ("0.1 * 3", "0.3"),
        ("1,234,567 + 1", "1234568"),
        ("$12.50 × 4", "50"),
        ("7 ÷ 2 − 1", "2.5"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("17 // 5 + 17 % 5", "5"),
        ("max(3, min(4, 5)) + abs(-2) + sqrt(16)", "10"),
        ("max(100,250) - min( 300,250.5 )", "-0.5"),  # not 100250
        ("max(1,200, 1,300) + sqrt(1,444)", "1338"),
        ("round(2.567, 2)", "2.57"),
        ("1 / 3", "0.333333333333"),
        ("10 ** 400", "1" + "0" * 400),
    ],
)
def test_a_calculator_calculates(expression: str, result: str) -> None:
    assert Calculator().calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "more than 4096 bits"),
        ("10**1000 * 10**1000", "more than 4096 bits"),
        ("round(5, -10**9)", "round takes up to 20 digits"),
        ("1/0", "division by zero"),
        ("1e308 * 10", "no real number"),
        ("1e999", "no real number"),
        ("1j", "no arithmetic"),
        ("True + 1", "no arithmetic"),
        ("__import__('os').system('true')", "no arithmetic"),
        ("(1).__class__", "no arithmetic"),
        ("x := 3", "no arithmetic"),
        ("round(number=2)", "no arithmetic"),
        ("", "no arithmetic"),
        ("1 + " * 100 + "1", "up to 200 characters; this has 401"),
        ("(" * 199 + "1", "no arithmetic"),
        ("max(1,000)", "'int' object is not iterable"),  # one number with a comma
        ("sqrt()", "takes exactly one argument"),
    ],
)
def test_a_calculator_refuses_what_is_no_arithmetic(expression: str, message: str) -> None:
    with pytest.raises((ValueError, ArithmeticError, TypeError), match=message):
        evaluate(expression)


def test_a_calculator_in_a_dialogue() -> None:
    pool = EnvironmentPool("qerl_pl.environments.Calculator")
    session = pool.open({"question": "?", "answer": "4"})
    opening = session.opened.result()
    assert opening.observation is None and [tool["function"]["name"] for tool in opening.tools] == ["calculate"]
    assert session.call("calculate", {"expression": "2+2"}).result().text == "4"
    wrong = session.call("calculate", {"expression": "9**9**9"}).result()
    assert (wrong.text, wrong.failed) == ("Error: ValueError: a number of more than 4096 bits", True)
    assert session.call("calculate", {"expression": 5}).result().failed
    assert session.reward().result() is None  # the usual rewards score the answer
    pool.close()


PASSAGES = {
    "Paris": "Paris is the capital of France, on the Seine.",
    "Berlin": "Berlin is the capital of Germany.",
    "Banana": "Bananas are yellow fruits, and berries.",
    "": "The Seine flows through Rouen.",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    rows = [{"title": title, "text": text} if title else {"text": text} for title, text in PASSAGES.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_search_finds_passages(corpus: Path) -> None:
    search = Search(str(corpus), k=2)
    assert search.search("capital of Germany").startswith(
        "[1] Berlin\nBerlin is the capital of Germany.\n\n[2] Paris\n"
    )
    assert search.search("yellow banana") == "[1] Banana\nBananas are yellow fruits, and berries."
    assert Search(str(corpus), k=1).search("rouen SEINE") == "[1] The Seine flows through Rouen."
    for nothing in ("", "the of", "zebra", "<|im_end|>", "\ud800"):
        assert search.search(nothing) == "Nothing found."
    assert len(Search(str(corpus), k=100).search("seine capital").split("\n\n")) == 3
    assert list(methods_of(search).tools) == ["search"]


def test_a_changed_corpus_is_indexed_anew(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("first note\nof two lines\n\n\n  second note  \n")
    assert read_passages(path) == ["first note\nof two lines", "second note"]
    assert Search(str(path)).search("second") == "[1] second note"
    path.write_text("another second note")
    assert Search(str(path)).search("second") == "[1] another second note"
    path.write_text("renewed second note")  # as long
    os.utime(path, (1, 1))
    assert Search(str(path)).search("second") == "[1] renewed second note"


def test_each_key_of_a_corpus_has_its_own_index(tmp_path: Path) -> None:
    path = tmp_path / "wiki.jsonl"
    path.write_text(json.dumps({"text": "a river", "body": "a long river"}))
    assert [Search(str(path), text=key).search("river") for key in ("text", "body")] == [
        "[1] a river",
        "[1] a long river",
    ]


def test_a_search_in_dialogues_builds_one_index(corpus: Path) -> None:
    pool = EnvironmentPool({"class_path": "qerl_pl.environments.Search", "init_args": {"corpus": str(corpus), "k": 1}})
    sessions = [pool.open({}) for _ in range(4)]
    answers = [session.call("search", {"query": query}) for session, query in zip(sessions, PASSAGES, strict=True)]
    assert [answer.result().text.split("\n")[0] for answer in answers] == [
        *("[1] Paris", "[1] Berlin", "[1] Banana", "Nothing found.")
    ]
    pool.close()


def test_a_line_of_a_corpus_is_what_json_lines_says(tmp_path: Path) -> None:
    path = tmp_path / "wiki.jsonl"
    texts = ["one\u2028passage", "another\x85passage", "last"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n\n".join(lines) + "\n\n", encoding="utf-8-sig")
    assert read_passages(path) == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "there is no file .*missing.jsonl; correct the path"),
        ("empty.txt", "\n\n", "has no passage; add some"),
        ("bad.jsonl", '{"text": "a"}\nno json\n', "with the key 'text'; line 2 of .*bad.jsonl has none"),
        ("key.jsonl", '{"body": "a"}\n', "with the key 'text'; line 1 of"),
        ("list.jsonl", "[1]\n", "with the key 'text'; line 1 of"),
        ("latin.txt", "gr\u00fc\u00df".encode("latin-1"), "in UTF-8; .*latin.txt is not"),
    ],
)
def test_a_bad_corpus_is_refused(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        Search(str(path))
