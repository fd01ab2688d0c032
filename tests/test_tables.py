"""Any table trains: what TableDataModule reads, renders, caches, weighs and holds out, and the page's example."""

import csv
import datetime
import json
import logging
import os
import runpy
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
from cli_helpers import built
from pages import ROOT, commands, fences
from PIL import Image
from pyarrow.parquet import write_table
from test_data import make_tokenizer, prompts_of, write_jsonl
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from qerl_pl.chat.continuation import ChatContinuation
from qerl_pl.chat.template import RENDERED_AT_ONCE, TemplateFrame, render_prompts
from qerl_pl.cli.main import main
from qerl_pl.datamodules import BigMathDataModule, Row, TableConfig, TableDataModule
from qerl_pl.errors import UserError
from qerl_pl.evaluation.evaluator import row_digest
from qerl_pl.toy.tokenizer import CHAT_TEMPLATE, build_tokenizer
from qerl_pl.types import Prompt

ROWS = [{"question": f"How many are {n} ?", "answer": str(n), "level": "easy"} for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}{% endfor %}"
        "{% if enable_thinking is false %}How {% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)


def write_csv(file: Path, rows: list[dict[str, Any]]) -> Path:
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "list"])
def test_a_table_is_a_file_or_a_list(tmp_path: Path, kind: str) -> None:
    path: Any = tmp_path / f"table.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        write_csv(path, ROWS)
    elif kind == "parquet":
        write_table(pyarrow.Table.from_pylist(ROWS), path)
    rows = TableDataModule(ROWS if kind == "list" else str(path)).train_rows()
    assert [(row.id, row.question, row.reference, row.messages) for row in rows] == [
        (f"train-{n}", f"How many are {n} ?", str(n), None) for n in range(20)
    ]
    assert [dict(row.columns) for row in rows] == ROWS


@pytest.mark.parametrize(
    ("row", "question", "reference"),
    [
        ({"prompt": "Why?"}, "Why?", ""),
        ({"problem": "1 + 1", "solution": "so #### 2"}, "1 + 1", "2"),
        ({"problem": "1 + 1", "solution": "#### Sum\n1+1\n#### 2"}, "1 + 1", "2"),
        ({"question": "Why?", "answer": 3}, "Why?", "3"),
        ({"prompt": [{"role": "user", "content": "Why?"}], "answer": "so"}, "Why?", "so"),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "A?"},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "B?"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "A?\n\na\n\nB?",
            "b",
        ),
    ],
)
def test_columns_that_are_found(row: dict[str, Any], question: str, reference: str) -> None:
    (found,) = TableConfig([row]).rows("set")
    assert (found.question, found.reference) == (question, reference)
    value = next(iter(row.values()))
    turns = value if isinstance(value, list) and value[-1]["role"] == "user" else value[:-1]
    assert found.messages == (tuple(turns) if isinstance(value, list) else None)


@pytest.mark.parametrize("name", ["table.csv", "table.json"])
def test_the_command_line_takes_a_path_for_a_path(tmp_path: Path, name: str) -> None:
    path = write_csv(tmp_path / name, ROWS) if name == "table.csv" else tmp_path / name
    if name == "table.json":
        path.write_text(json.dumps([{"question": "Which agent?", "answer": "007"}]))
    (tmp_path / "run.yaml").write_text(f"data: {{class_path: TableDataModule, init_args: {{path: {path}}}}}")
    for given in (["--data", "TableDataModule", "--data.path", str(path)], ["-c", str(tmp_path / "run.yaml")]):
        assert built("fit", "-c", "quickstart", *given).data.path == str(path)


def test_a_csv_file_of_pandas_has_a_column_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "index.csv").write_text(",question,answer\n0,a,b\n1,c,d\n")
    rows = TableDataModule(str(tmp_path / "index.csv")).train_rows()
    assert [(row.question, row.reference) for row in rows] == [("a", "b"), ("c", "d")]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("question, answer,answer\n1,2,3\n")
    with pytest.raises(UserError, match="columns must have different names; .*twice.csv has answer twice; rename one"):
        TableDataModule(str(tmp_path / "twice.csv")).train_rows()


def test_pairs_of_surrogates_are_read(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(r'{"question": "\ud83d\ude00 \\ud83d", "answer": "a"}')
    assert TableDataModule(str(tmp_path / "pairs.jsonl")).train_rows()[0].question == "\U0001f600 \\ud83d"


def test_columns_of_other_names() -> None:
    rows = TableDataModule([{"prompt": "no", "q": "Why?", "answer": "no", "a": "so"}], question="q", answer="a")
    assert [(row.question, row.reference) for row in rows.train_rows()] == [("Why?", "so")]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [{"text": "a", "label": "b"}],
            "a prompt is in a column prompt, messages, .* has text, label; name its column",
        ),
        (["Why?"], "rows are dictionaries of columns; row 1 is 'Why\\?'"),
        ([], "data must have rows; the list of rows has none"),
        ([{"prompt": "a"}, {"question": "b"}], "row 2 of the list of rows has no prompt; got question; fill it in"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "starts with its user; row 1"),
        ([{"messages": [{"role": "user", "content": ["a"]}]}], "which are text; row 1 of the list of rows has"),
        ([{"messages": [{"role": "user", "content": "a"}, "b"]}], "which are text; row 1 of the list of rows has"),
        ([{"prompt": "a", "answer": "#### "}], "an answer must not be empty; row 1"),
        (
            [{"prompt": "a"}, {"prompt": "b", "answer": "c"}],
            "row 1 of the list of rows has no answer; got prompt; fill it in, rename",
        ),
        ("more.csv", "has a value for each of the columns question, answer; .*more.csv, line 3 has more"),
        ("fewer.csv", "more.csv|fewer.csv, line 2 has fewer; quote"),
        ("quote.csv", "comma-separated UTF-8; .*quote.csv, line 2"),
        ("list.json", r"row 2 of .*list.json is \[\]; write one"),
        ("broken.json", "a .json file is JSON; .*broken.json: Expecting .* line 2 column 1"),
        ("half.jsonl", r"come in pairs; .*half.jsonl, line 2 has half a pair, \\ud83d; correct it"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, table: Any, message: str) -> None:
    (tmp_path / "more.csv").write_text("question,answer\na,b\nc,d,e\n")
    (tmp_path / "fewer.csv").write_text("question,answer\na\n")
    (tmp_path / "quote.csv").write_text('question,answer\na,"b" c\n')
    (tmp_path / "half.jsonl").write_text('{"question": "a"}\n{"question": "b\\uD83D", "answer": "c"}\n')
    (tmp_path / "list.json").write_text('[{"question": "a"}, []]')
    (tmp_path / "broken.json").write_text('[{"question": "a"},\n')
    with pytest.raises(UserError, match=message):
        TableDataModule(str(tmp_path / table) if isinstance(table, str) else table).train_rows()


def test_conversations_and_template_variables_are_rendered(tokenizer: str) -> None:
    system = [{"role": "system", "content": "are"}, {"role": "user", "content": "How"}]
    rows = [{"prompt": [{"role": "user", "content": "many"}]}, {"prompt": system}]
    variables = {"enable_thinking": False}
    data = TableDataModule(
        rows, batch_size=2, val_size=0, system_prompt="?", tokenizer=tokenizer, chat_template_kwargs=variables
    )
    data.setup("fit")
    rendered = {prompt.id: prompt.token_ids for prompt in prompts_of(data, "train")}
    assert rendered == {"train-0": (1, 8, 2, 5, 4, 3), "train-1": (1, 6, 2, 4, 4, 3)}  # the last 4: no thinking
    with pytest.raises(UserError, match="variables of the chat template, .* got tokenize, tools, which"):
        TableDataModule(rows, chat_template_kwargs={"tokenize": True, "tools": []})


@pytest.mark.parametrize(
    ("rows", "asked", "batch", "held_out"),
    [
        (20, 16, 8, 4),
        (20, 4, 8, 4),
        (20, 10, 10, 10),
        (20, 10, 11, 4),
        (100, 50, 8, 50),
        (100, 51, 8, 20),
    ],
)
def test_a_small_table_holds_out_a_fifth(tokenizer: str, rows: int, asked: int, batch: int, held_out: int) -> None:
    table = [{"question": f"How many are {n} ?", "answer": str(n)} for n in range(rows)]
    data = TableDataModule(table, batch_size=batch, val_size=asked, tokenizer=tokenizer)
    data.setup("fit")
    assert len(prompts_of(data, "val")) == held_out
    assert len(prompts_of(data, "train")) == (rows - held_out) // batch * batch


def test_no_more_rows_are_held_out_than_asked_for(tokenizer: str) -> None:
    data = TableDataModule(ROWS, batch_size=18, val_size=3, tokenizer=tokenizer)  # 17 of 20 are less than a batch
    assert data.val_count(20) == 3


def test_several_tables_are_trained_on_together(tokenizer: str) -> None:
    tables = {
        "long": TableConfig([{**ROWS[0], "question": "word " * 300}, ROWS[1]]),
        "some": TableConfig(ROWS, limit=4),
    }
    data = TableDataModule(tables, batch_size=1, val_size=0, max_prompt_tokens=64, tokenizer=tokenizer)
    data.setup("fit")
    ids = {prompt.id for prompt in prompts_of(data, "train")}
    assert ids == {"long-1", "some-0", "some-1", "some-2", "some-3"}  # ids seed completions


def test_splits_of_a_folder(tmp_path: Path, tokenizer: str) -> None:
    for split, rows in (("first", ROWS[:8]), ("second", ROWS[8:12]), ("third", ROWS[12:])):
        write_csv(tmp_path / f"{split}.csv", rows)
    splits = {"split": "first", "val_split": "second", "test_split": "third"}
    data = TableDataModule(str(tmp_path), **splits, batch_size=8, val_size=4, tokenizer=tokenizer)
    data.setup("fit")
    data.setup("test")
    for use, numbers in (("train", range(8)), ("val", range(8, 12)), ("test", range(12, 20))):
        assert sorted(int(prompt.reference) for prompt in prompts_of(data, use)) == list(numbers)
    with pytest.raises(UserError, match="val_split must be another split"):
        TableDataModule(str(tmp_path), split="first", val_split="first").val_rows()


IDENTITIES = """
import datetime, decimal, fractions, io
import datasets, numpy, torch
from PIL import Image
from qerl_pl.types import Prompt

def pixels(color):
    file = io.BytesIO()
    Image.new("RGB", (2, 2), color).save(file, "PNG")
    return [{"bytes": file.getvalue(), "path": None}]

def image(color):
    return datasets.Dataset.from_dict({"image": pixels(color)}).cast_column("image", datasets.Image())[0]["image"]

middle = numpy.eye(1, 5000, 2500)[0]  # an item that `repr` leaves out
columns = [
    image("red"), image("blue"), [{"more": image("red")}], (image("blue"), 1), slice(1), fractions.Fraction(1, 3),
    numpy.zeros(5000), middle, torch.zeros(5000), torch.tensor(middle), torch.tensor(1.0), torch.zeros(2).bfloat16(),
    set("abcdefgh"), {"of": set("abcdefg")},
]
for column in columns:
    print(Prompt("row", (1,), "Why?", "so", None, {"text": "a", "column": column}).fingerprint())
"""


@pytest.mark.nightly
def test_objects_in_columns_have_one_identity_in_every_process() -> None:
    found = []
    for seed in "01":
        command = [sys.executable, "-c", IDENTITIES]
        run = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout.splitlines())
    assert found[0] == found[1] and len(set(found[0])) == len(found[0]) == 14


def test_a_run_resumes_on_data_with_images_and_refuses_others(tokenizer: str) -> None:
    def digests(color: str) -> tuple[str, str]:
        row = {**ROWS[0], "image": Image.new("RGB", (2, 2), color)}
        data = TableDataModule([row], batch_size=1, val_size=0, tokenizer=tokenizer)
        data.setup("fit")
        (prompt,) = next(iter(data.train_dataloader())).prompts
        assert prompt.columns is row  # the rewards see the image
        return data.state_dict()["training prompts"], row_digest(prompt)

    red, again, blue = digests("red"), digests("red"), digests("blue")
    assert red == again and red[0] != blue[0] and red[1] != blue[1]


def test_the_identity_of_plain_columns_is_their_text_and_what_has_none_is_refused(tokenizer: str) -> None:
    day = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    plain = {"a": 1, "b": [0.5, None, (True, "x")], "c": {"d": b"e", "f": day.date()}, "g": Decimal("1.5"), "h": day}
    prompt = Prompt("row", (1,), "Why?", "so", None, plain)
    assert prompt.fingerprint() == repr(prompt)
    data = TableDataModule([{**ROWS[0], "check": lambda text: text}], batch_size=1, val_size=0, tokenizer=tokenizer)
    with pytest.raises(UserError, match="check of row train-0 is <function .*; give its name as text"):
        data.setup("fit")


@pytest.mark.parametrize("kind", ["file", "rows", "tables"])
def test_a_single_table_without_splits_has_none_to_test_on(tmp_path: Path, tokenizer: str, kind: str) -> None:
    file = str(write_csv(tmp_path / "train.csv", ROWS))
    path, name = {
        "file": (file, file),
        "rows": (ROWS, "rows without splits"),
        "tables": ({"a": TableConfig(file)}, "rows without splits"),
    }[kind]
    data = TableDataModule(path, test_split="test", batch_size=1, tokenizer=tokenizer)  # type: ignore[arg-type]
    for stage in ("fit", "test"):
        with pytest.raises(UserError, match=f"got test_split=test of {name}; name a folder with both splits, or set"):
            data.setup(stage)
    with pytest.raises(UserError, match="got test_split=test"):
        data.test_rows()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "question"}, "got question beside the tables a, b; set it in the tables"),
        ({"subset": "main", "answer": "answer"}, "got subset, answer beside the tables a, b; set them in the tables"),
    ],
)
def test_options_of_a_single_table_beside_several_are_refused(options: dict[str, Any], message: str) -> None:
    tables = {"a": TableConfig(ROWS[:4]), "b": TableConfig(ROWS[4:])}
    with pytest.raises(UserError, match=message):
        TableDataModule(tables, **options).train_rows()
    assert len(TableDataModule(tables, split="other").train_rows()) == len(ROWS)


def test_the_page_s_example_trains(
    tmp_path: Path, tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, from a folder with the repository's configs; only the policy is smaller."""
    page = ROOT / "docs" / "your-own-data.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for block in fences(page, "python")[:2]:
        name = block.partition("\n")[0].removeprefix("# ")
        Path(name).write_text(block)
    script, train, *_ = commands(page)
    runpy.run_path(script.removeprefix("python "))
    assert len(Path("my_questions.jsonl").read_text().splitlines()) == 20
    words = train.split()
    assert main([*words[1:], "--model.policy.path", str(tiny_policy_dir)]) == 0
    output = capsys.readouterr()
    assert "batch" not in output.err.lower(), output.err
    records = [json.loads(line) for line in next(Path("runs").rglob("completions*.jsonl")).read_text().splitlines()]
    assert {record["prompt_id"].partition("-")[0] for record in records} == {"train"}
    assert all(record["rewards"]["accuracy"] in (0.0, 1.0) for record in records)


def test_where_nothing_is_validated_no_row_is_held_out(tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{number} ?", "answer": str(number)} for number in range(6)]
    assert TableDataModule(rows, batch_size=8, val_size=0, tokenizer=tokenizer).val_count(len(rows)) == 0
    data = TableDataModule(rows * 20, batch_size=8, val_size=32, tokenizer=tokenizer)
    with caplog.at_level("INFO", logger="qerl_pl"):
        for _ in range(2):  # as Lightning does
            data.setup("fit")
    assert "held out" not in caplog.text and caplog.text


# Texts of conversations ----------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "How\nmany?"}, {"role": "assistant", "content": 'it\'s "3"'}]
AS_TEXT: dict[str, Any] = {
    "JSON": json.dumps(MESSAGES),
    "indented JSON": json.dumps(MESSAGES, indent=1),
    "what Python prints": repr(MESSAGES),
    "a message": json.dumps(MESSAGES[0]),
    "messages": MESSAGES,
}


@pytest.mark.parametrize(("column", "kind"), [("prompt", "list"), ("prompt", "csv"), ("messages", "parquet")])
@pytest.mark.parametrize("name", AS_TEXT)
def test_messages_may_be_text(tmp_path: Path, name: str, kind: str, column: str) -> None:
    given = {column: AS_TEXT[name], "answer": "3"}
    path: Any = [given] if kind == "list" else str(tmp_path / f"table.{kind}")
    if kind == "csv":
        write_csv(Path(path), [given])
    elif kind == "parquet":
        write_table(pyarrow.Table.from_pylist([given]), path)
    (row,) = TableDataModule(path).train_rows()
    assert (row.question, row.reference, row.messages) == ("How\nmany?", "3", (MESSAGES[0],))
    assert [{**turn} for turn in row.columns[column]] == (MESSAGES[:1] if name == "a message" else MESSAGES)


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[:1]])
def test_messages_may_be_an_array_or_a_tuple(messages: list[dict[str, str]]) -> None:
    array = numpy.empty(len(messages), dtype=object)
    array[:] = messages
    given: list[dict[str, Any]] = [{"prompt": one, "answer": "3"} for one in (messages, tuple(messages), array)]
    assert len({TableDataModule([one]).train_rows()[0].messages == (MESSAGES[0],) for one in given}) == 1
    assert [TableDataModule([one]).train_rows()[0].columns["prompt"] for one in given] == [messages] * 3


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user"}] What is missing?',
        '{"name": "Tom", "role": "cook"}',
        "[1, 2, 3]",
        "Is {role: user} a set?",
        '[{"from": "human", "value": "a"}]',
    ],
)
def test_other_text_stays_text(text: str) -> None:
    (row,) = TableDataModule([{"prompt": text, "answer": "3"}]).train_rows()
    assert (row.question, row.messages) == (text, None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([{"prompt": "[{'role': 'user', 'content': 'a'}\n {'role': 'b'}]"}], "are JSON; prompt of row 1 of .*; write"),
        ([{"messages": '[{"role": "user", "content": "a}]'}], "are JSON; messages of row 1 of the list of rows is"),
        ([{"prompt": "a"}, {"prompt": AS_TEXT["JSON"]}], "hold text or numbers; prompt of row 2"),
        ([{"prompt": AS_TEXT["JSON"]}, {"prompt": "a"}], "a conversation is a list of messages.* row 2"),
        ([{"prompt": "a"}, {"prompt": " \n"}], "a prompt must not be empty; row 2 of the list of rows has none; fi"),
        ([{"question": "", "answer": "1"}], "a prompt must not be empty; row 1"),
        ([{"prompt": [{"role": "user", "content": ""}]}], "a prompt must not be empty; row 1"),
        ([{"prompt": [{"role": "system", "content": "b"}, {"role": "user", "content": " "}]}], "must not be empty"),
        ([{"prompt": [*MESSAGES, {"role": "user", "content": ""}]}], "a prompt must not be empty; row 1"),
        ("empty.csv", "a prompt must not be empty; row 2 of .*empty.csv"),
    ],
)  # fmt: skip
def test_messages_and_prompts_that_are_none_are_refused(tmp_path: Path, table: Any, message: str) -> None:
    (tmp_path / "empty.csv").write_text("question,answer\na,1\n,2\n")
    with pytest.raises(UserError, match=message) as raised:
        TableDataModule(str(tmp_path / table) if isinstance(table, str) else table).train_rows()
    assert "\n" not in str(raised.value)
    big: Any = [{"problem": "a", "answer": "1"}, {"problem": " ", "answer": "1"}]
    with pytest.raises(UserError, match="a prompt must not be empty; row 2"):
        BigMathDataModule(big).train_rows()


BOS_TEXT = "<|bos|><|user|>How many?<|assistant|>"
RENDERED: dict[str, tuple[str, str | None]] = {
    "as the template writes it": (BOS_TEXT, None),
    "without its beginning": (BOS_TEXT.removeprefix("<|bos|>"), None),
    "with a system message": (f"<|bos|><|system|>Brief.{BOS_TEXT.removeprefix('<|bos|>')}", None),
    "with turns": ("<|user|>a<|assistant|>b<|eos|><|user|>c<|assistant|>", None),
    "with the answer's beginning": (f"{BOS_TEXT}<think>", None),
    "its end alone": ("How many?<|assistant|>\n", None),
    "a question": ("How many?", "<|bos|><|system|>S<|user|>How many?<|assistant|>"),
    "a question of tokens": ("What is <|user|>?", "<|bos|><|system|>S<|user|>What is <|user|>?<|assistant|>"),
    "a question of tags": ("<think>?", "<|bos|><|system|>S<|user|><think>?<|assistant|>"),
}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", RENDERED)
def test_text_that_is_rendered_already_is_taken_as_it_is(
    name: str, adds_bos: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = build_tokenizer()
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            "<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
    text, expected = RENDERED[name]
    data = TableDataModule([{"prompt": text}], system_prompt="S")
    with caplog.at_level(logging.INFO, "qerl_pl"):
        (prompt,) = data._render(tokenizer, data.train_rows(), "training")
    begins = "<|bos|>" if adds_bos and not text.startswith("<|bos|>") else ""
    assert tokenizer.decode(prompt.token_ids) == (f"{begins}{text}" if expected is None else expected)
    assert ("1 of 1 training prompts hold the chat template's text already" in caplog.text) == (expected is None)
    assert ("that of row train-0 the first, have control tokens" in caplog.text) == (name == "a question of tokens")


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (" \n<|user|>How many?", True),
        ("How many?<|assistant|>\n<think>", True),  # the line break behind it is not kept everywhere
        ("<think> is which tag?", False),  # of the template, but no control token
        ("<|pad|> is which token?", False),  # a control token, but not of the template
    ],
)
def test_text_is_rendered_that_begins_or_ends_as_a_prompt_does(text: str, made: bool) -> None:
    template = CHAT_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|>\n<think>\n{% endif %}")
    assert TemplateFrame(build_tokenizer(template)).made(text) == made


def test_an_environment_takes_no_rendered_text() -> None:
    continuation = ChatContinuation(build_tokenizer(), [2])
    with pytest.raises(UserError, match="got text that a chat template has rendered already, '<|bos|>"):
        continuation.prompt(BOS_TEXT, observation="3")
    messages = [{"role": "user", "content": "How many?"}]
    assert continuation.prompt("How many?") == continuation.prompt(messages)
    continuation.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="the chat template of .* leaves it out; give the rows a user's message"):
        continuation.prompt([*messages, {"role": "system", "content": "Go."}], observation="3")


def test_prompts_of_an_environment_have_tools_and_instruction_of_others(
    tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [Row("a", "How many?"), Row("b", "Few?", messages=({"role": "user", "content": "Few?"},))]
    data, loaded = (
        TableDataModule([{"question": "How many?"}], instruction="Few."),
        AutoTokenizer.from_pretrained(tokenizer),
    )
    loaded.chat_template = "{% if tools %}many {% endif %}" + loaded.chat_template
    data.tools = [{}]
    prompts = [
        [continuation.prompt(row.question if row.messages is None else row.messages, data.tools) for row in rows]
        for instruction in ("Few.", None)
        for continuation in [ChatContinuation(loaded, [2], None, data.system_prompt, instruction)]
    ]
    assert prompts[0] == [prompt.token_ids for prompt in data._render(loaded, rows, "training")]
    assert "data.instruction is not added to 1 of 2 training prompts, which are lists of messages" in caplog.text
    assert [one == other for one, other in zip(*prompts, strict=True)] == [False, True]


def test_a_template_that_leaves_the_system_prompt_out_is_warned_of(
    tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, warned = AutoTokenizer.from_pretrained(tokenizer), []
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for chat_template, prompt in ((template, "Be brief."), (template, None), (loaded.chat_template, "Be brief.")):
        loaded.chat_template = chat_template
        caplog.clear()
        TableDataModule([{"question": "1?"}], system_prompt=prompt)._warn_of_lost_system_prompt(loaded)
        warned.append("leaves data.system_prompt out: ask by data.instruction, and set it to null" in caplog.text)
    assert warned == [True, False, False]


def test_token_ids_of_many_prompts_share_their_numbers(tokenizer: str) -> None:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.add_tokens([f"rare{n}" for n in range(600)])
    chats = [f"rare{n % 600} rare{n % 600}" for n in range(RENDERED_AT_ONCE + 1)]
    rendered = render_prompts(loaded, chats, None)
    assert [rendered[0], rendered[-1]] == [render_prompts(loaded, [chats[n]], None)[0] for n in (0, -1)]
    large = [token for ids in rendered for token in ids if token > 256]
    assert len({id(token) for token in large}) == len(set(large)) > 400
