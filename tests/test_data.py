"""Data modules: what they read, split and refuse, and that a resumed run sees the same batches."""

import json
import logging
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_pl.chat.template import SYSTEM_PROMPT, render_prompt, render_prompts
from qerl_pl.cli.quantize import calibration_texts
from qerl_pl.datamodules import (
    ArithmeticDataModule,
    BigMathDataModule,
    ConversationDataModule,
    GSM8KDataModule,
    PromptDataModule,
    TableDataModule,
)
from qerl_pl.datamodules.conversations import Conversation
from qerl_pl.datamodules.datasets import level_of
from qerl_pl.datamodules.tables import Row, TableConfig, read_table
from qerl_pl.errors import UserError
from qerl_pl.modules import PolicyConfig
from qerl_pl.toy.task import ArithmeticTask, split_of
from qerl_pl.toy.tokenizer import build_tokenizer
from qerl_pl.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> str:
    """A tokenizer of one token a word, whose name is its folder."""
    words = ["[UNK]", "<system>", "<user>", "<assistant>", "How", "many", "are", "and", "?", *map(str, range(100))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", chat_template=template)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    for split, count in (("train", 9), ("test", 3)):
        rows = [
            {"question": f"How many are {n} and {n} ?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n + 1000:,}"}
            for n in range(count)
        ]
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def prompts_of(data: PromptDataModule, loader: str) -> list[Prompt]:
    return [prompt for batch in getattr(data, f"{loader}_dataloader")() for prompt in batch.prompts]


# GSM8K ---------------------------------------------------------------------------------------------------------------


def test_gsm8k_prompts(gsm8k: Path, tokenizer: str) -> None:
    data = GSM8KDataModule(str(gsm8k), batch_size=2, val_size=0, tokenizer=tokenizer, system_prompt="How are ?")
    data.setup("fit")
    batches = [batch.prompts for batch in data.train_dataloader()]
    assert [len(batch) for batch in batches] == [2, 2, 2, 2]  # of 9: the rest is left out
    prompt = next(prompt for batch in batches for prompt in batch if prompt.id != "train-0")
    number = int(prompt.id.removeprefix("train-"))
    assert prompt.text == f"How many are {number} and {number} ?"
    assert prompt.reference == str(2 * number + 1000)  # without the comma between thousands
    assert prompt.token_ids == (1, 4, 6, 8, 2, 4, 5, 6, 9 + number, 7, 9 + number, 8, 3)
    assert prompts_of(data, "val") == []


def test_prompt_without_system_message(gsm8k: Path, tokenizer: str) -> None:
    asked = GSM8KDataModule(
        str(gsm8k), batch_size=2, val_size=0, tokenizer=tokenizer, system_prompt=None, instruction="How are ?"
    )
    data = GSM8KDataModule(str(gsm8k), batch_size=2, val_size=0, tokenizer=tokenizer, system_prompt=None)
    data.setup("fit")
    assert {prompt.token_ids[0] for prompt in prompts_of(data, "train")} == {2}
    asked.setup("fit")
    plain = {prompt.id: prompt.token_ids for prompt in prompts_of(data, "train")}
    for prompt in prompts_of(asked, "train"):  # behind the question, and in no reward's text
        *question, end = plain[prompt.id]
        assert prompt.token_ids == (*question, 4, 6, 8, end) and "How are" not in prompt.text


def test_one_prompt_renders_as_in_a_batch(gsm8k: Path, tokenizer: str) -> None:
    data = GSM8KDataModule(str(gsm8k), batch_size=2, tokenizer=tokenizer, val_size=0)
    data.setup("fit")
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for prompt in prompts_of(data, "train"):
        assert prompt.token_ids == tuple(render_prompt(loaded, prompt.text))
    for tag in ("<think></think>", "<answer></answer>"):
        assert tag in SYSTEM_PROMPT


@pytest.mark.parametrize(("stage", "others"), [("validate", ";"), ("test", ", and there is no test set;")])
def test_to_measure_on_no_prompts_is_refused(tmp_path: Path, tokenizer: str, stage: str, others: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many are 1 and 2 ?", "answer": "#### 3"}) + "\n")
    data = GSM8KDataModule(str(tmp_path / "train.jsonl"), batch_size=1, val_size=0, tokenizer=tokenizer)
    with pytest.raises(UserError, match=f"{stage} needs held-out prompts; .*val_size is 0{others} raise it, or name"):
        data.setup(stage)
    data.setup("fit")  # which needs none


def test_held_out_prompts(gsm8k: Path, tokenizer: str) -> None:
    def split(seed: int) -> tuple[set[str], list[str]]:
        data = GSM8KDataModule(str(gsm8k), batch_size=3, val_size=3, seed=seed, tokenizer=tokenizer)
        data.setup("fit")
        return {prompt.id for prompt in prompts_of(data, "train")}, [prompt.id for prompt in prompts_of(data, "val")]

    train, val = split(0)
    assert len(train) == 6 and len(val) == 3
    assert train | set(val) == {f"train-{n}" for n in range(9)}
    assert split(0) == (train, val)
    assert any(split(seed)[1] != val for seed in range(1, 4))


def test_validation_and_test_split(gsm8k: Path, tokenizer: str) -> None:
    data = GSM8KDataModule(str(gsm8k), val_split="test", batch_size=9, val_size=2, tokenizer=tokenizer)
    data.setup("test")
    assert len(prompts_of(data, "train")) == 9
    val, test = (prompts_of(data, use) for use in ("val", "test"))
    assert [prompt.id for prompt in test] == ["test-0", "test-1", "test-2"]
    assert len(val) == 2 and set(val) < set(test)


def test_a_single_file_is_never_its_own_test_set(gsm8k: Path, tokenizer: str) -> None:
    file = str(gsm8k / "train.jsonl")
    data = GSM8KDataModule(file, batch_size=2, val_size=3, tokenizer=tokenizer)
    data.setup("test")
    assert prompts_of(data, "test") == prompts_of(data, "val")
    with pytest.raises(UserError, match="another split"):
        GSM8KDataModule(file, val_split="test", batch_size=2, val_size=3, tokenizer=tokenizer).setup("fit")


def test_long_prompts_are_dropped_and_counted(gsm8k: Path, tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "How " * words, "answer": "#### 1"} for words in (1, 2, 3, 4, 5)]
    file = write_jsonl(gsm8k / "long.jsonl", rows)
    data = GSM8KDataModule(
        str(file), batch_size=1, val_size=0, max_prompt_tokens=5, tokenizer=tokenizer, system_prompt=None
    )
    with caplog.at_level(logging.INFO, "qerl_pl"):
        data.setup("fit")  # a prompt is <user>, its words, <assistant>
    assert {prompt.id for prompt in prompts_of(data, "train")} == {"train-0", "train-1", "train-2"}
    assert "3 training prompts; 2 longer than max_prompt_tokens=5 dropped" in caplog.text
    with caplog.at_level(logging.INFO, "qerl_pl"):
        GSM8KDataModule(
            str(file), batch_size=1, val_size=1, max_prompt_tokens=5, tokenizer=tokenizer, system_prompt=None
        ).setup("fit")
    assert "3 training and validation prompts; 2 longer" in caplog.text


def test_a_path_is_taken_as_it_is_written(tmp_path: Path) -> None:
    """By `datasets` [1] were a choice of one, ? any letter, and :: a file within another."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("run[1]", "a?", "ab", "x::y"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"question": [name], "answer": ["1"]}), tmp_path / name / "train.parquet")
    for name in ("run[1]", "a?", "x::y"):
        (row,) = read_table(str(tmp_path / name), "train")
        assert row["question"] == name


# Big-Math and arithmetic ---------------------------------------------------------------------------------------------

BIGMATH = [
    {"problem": f"p{n}", "answer": f"a{n}", "source": source, "domain": ["d"], "llama8b_solve_rate": rate}
    for n, (source, rate) in enumerate([("math", 0.0), ("math", 0.5), ("orca", 0.6), ("math", 1.0), ("math", None)])
]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"levels": [3, 4, 5]}, {0, 1}),
        ({"levels": [2]}, {2}),
    ],
)
def test_bigmath_filters(tmp_path: Path, tokenizer: str, filters: dict, kept: set[int]) -> None:
    file = write_jsonl(tmp_path / "bigmath.jsonl", BIGMATH)
    data = BigMathDataModule(str(file), batch_size=1, val_size=0, tokenizer=tokenizer, **filters)
    data.setup("fit")
    prompts = prompts_of(data, "train")
    assert {prompt.id for prompt in prompts} == {f"train-{n}" for n in kept}
    assert all((prompt.text, prompt.reference) == (f"p{prompt.id[6:]}", f"a{prompt.id[6:]}") for prompt in prompts)


def test_bigmath_drops_rows_without_an_answer(tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    """No completion is right there."""
    rows = [{"problem": f"p{n}", "answer": answer} for n, answer in enumerate(["1", "", "2", " \n", "3"])]
    file = write_jsonl(tmp_path / "bigmath.jsonl", rows)
    data = BigMathDataModule(str(file), batch_size=1, val_size=0, tokenizer=tokenizer)
    data.setup("fit")
    assert {prompt.id for prompt in prompts_of(data, "train")} == {"train-0", "train-2", "train-4"}
    assert f"2 of 5 rows of {file} have an empty answer: they are left out" in caplog.text
    write_jsonl(file, rows[1:2])
    with pytest.raises(UserError, match="needs rows with an answer; none of 1 rows of .*bigmath.jsonl is one"):
        BigMathDataModule(str(file), batch_size=1, val_size=0, tokenizer=tokenizer).setup("fit")


def test_questions_that_are_trained_on_and_held_out_are_counted(
    tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Repeats(PromptDataModule):
        own, tested = 2, 3

        def train_rows(self) -> list[Row]:
            return [Row(f"r-{n}", f"How many are {n % 6} ?", "1") for n in range(10)]

        def val_rows(self) -> list[Row]:
            return [Row(f"v-{n}", f"How many are {n} ?", "1") for n in range(self.own, self.own + 5)]

        def test_rows(self) -> list[Row]:
            return [Row(f"t-{n}", f"How many are {n} ?", "1") for n in range(self.tested, self.tested + 20)]

    def warned(data: PromptDataModule, stage: str) -> list[str]:
        caplog.clear()
        data.setup(stage)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    data = Repeats(batch_size=1, val_size=64, tokenizer=tokenizer)
    rest = "are trained on, too: accuracy there is not that of new questions; take them out of one of the two"
    assert warned(data, "fit") == [f"4 of 5 validation questions (the first is that of v-2) {rest}"]
    assert warned(data, "test") == [f"3 of 20 test questions (the first is that of t-3) {rest}"]
    Repeats.own = Repeats.tested = 50
    assert warned(Repeats(batch_size=1, tokenizer=tokenizer), "test") == []
    Repeats.val_rows = Repeats.test_rows = PromptDataModule.val_rows  # type: ignore[method-assign]
    drawn = Repeats(batch_size=1, val_size=9, tokenizer=tokenizer)  # of ten prompts, four questions stand there twice
    (line,) = warned(drawn, "test")
    assert line.startswith("1 of 9 validation questions")


def test_a_request_with_several_answers_is_no_repeated_question(
    tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "How many ?", "answer": str(n)} for n in range(6)]  # what an environment hides differs
    rows += [{"question": "How many are 1 ?", "answer": "1"}] * 6
    TableDataModule(rows, batch_size=1, val_size=6, tokenizer=tokenizer).setup("fit")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.match(r"[1-5] of 6 validation questions", line)
    caplog.clear()
    TableDataModule(rows[:6], batch_size=1, val_size=2, tokenizer=tokenizer).setup("fit")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("row", "level"),
    [
        *[({"llama8b_solve_rate": rate}, level) for rate, level in ((1.0, 1), (0.8, 1), (0.79, 2), (0.6, 2))],
        *[({"llama8b_solve_rate": rate}, level) for rate, level in ((0.4, 3), (0.2, 4), (0.19, 5), (0.0, 5))],
        ({"level": "Level 3", "llama8b_solve_rate": 1.0}, 3),
        ({"level": 4}, 4),
        ({"llama8b_solve_rate": "0.5"}, 3),
        *[({"llama8b_solve_rate": rate}, None) for rate in (None, math.nan, "unknown", 50)],
    ],
)
def test_bigmath_level(row: dict, level: int | None) -> None:
    assert level_of(row) == level


def test_arithmetic_splits_do_not_meet(tokenizer: str) -> None:
    data = ArithmeticDataModule(
        ArithmeticTask(digits=1), train_size=50, batch_size=50, val_size=20, test_size=10, tokenizer=tokenizer
    )
    data.setup("test")
    train, val, test = (prompts_of(data, use) for use in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (50, 20, 10)
    assert not {prompt.id for prompt in val} & {prompt.id for prompt in test}
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in (*val, *test)}
    for prompts, split in ((train, "train"), (val, "validation"), (test, "validation")):
        for prompt in prompts:
            numbers = tuple(int(word) for word in prompt.text.replace(".", " ").split() if word.isdigit())
            assert int(prompt.reference) == sum(numbers) and split_of(numbers) == split


def test_a_trainer_takes_a_part_of_an_epoch(tokenizer: str) -> None:
    data = ArithmeticDataModule(train_size=8, batch_size=2, val_size=0, tokenizer=tokenizer)
    data.setup("fit")
    data.trainer = SimpleNamespace(limit_train_batches=0.5)  # type: ignore[assignment]
    assert data.batches_per_epoch == 2


def test_validation_has_batches_of_its_own_size(tokenizer: str) -> None:
    data = ArithmeticDataModule(train_size=8, batch_size=2, val_size=5, val_batch_size=3, tokenizer=tokenizer)
    data.setup("fit")
    assert [len(batch.prompts) for batch in data.val_dataloader()] == [3, 2]


def test_values_of_json_lines_stay_as_they_are_written(tmp_path: Path, tokenizer: str) -> None:
    answers = ["2024-01-15", "2024-01-15T10:00:00", 10**30, 0.1, "1/2"]
    rows: list[dict] = [{"problem": f"p {n}", "answer": answer} for n, answer in enumerate(answers)]
    rows += [{"problem": "p", "answer": "1"}] * 3000 + [{"problem": "p", "answer": "late", "level": 2}]
    file = write_jsonl(tmp_path / "bigmath.jsonl", rows)
    data = BigMathDataModule(str(file), batch_size=1, val_size=0, tokenizer=tokenizer)
    references = [row.reference for row in data.train_rows()]
    assert references[:5] == ["2024-01-15", "2024-01-15T10:00:00", str(10**30), "0.1", "1/2"]
    assert references[-1] == "late"


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", ', r"data\.jsonl, line 2: "),
        ('{"question": "a", "answer": "#### 1"}\n\n[1]\n', r"data\.jsonl, line 3 is a list"),
        ("", "has none"),
        ('{"problem": "a", "answer": "#### 1"}\n', r"row 1 of .*data\.jsonl has no question; got problem, answer"),
        ('{"question": "a", "answer": "1"}\n{"question": null, "answer": "1"}\n', "row 2 .* no question; .*; fill"),
        ("{}", "row 1 of .* has no question, answer; got nothing; rename"),
        ('{"question": "a", "answer": NaN}\n', "row 1 of .* has no answer; got question; rename"),
        ('{"question": "a", "answer": ["1"]}\n', r"hold text or numbers; answer of row 1 of .* is \['1'\]; write its"),
        (
            '{"question": [{"role": "user"}], "answer": "1"}\n',
            r"with a role and a content, which are text; row 1 of .* has \[{'role': 'user'}\]; correct",
        ),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "so 1"}\n', "row 2 .* ends in 'so 1'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer: str, content: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        GSM8KDataModule(str(file), batch_size=1, val_size=0, tokenizer=tokenizer).setup("fit")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.jsonl"}, "no such file: nowhere.jsonl; correct data.path"),
        ({"path": "no/such-data"}, "no file no/such-data is here, .*; correct data.path, or"),
        ({"batch_size": 10}, "batch_size=10 for 9 prompts"),
        ({"val_size": 9}, "val_size=9 of 9"),
        (
            {"batch_size": 4, "val_size": 6},
            r"for 3 prompts \(6 of 9 are held out .* by val_size\); lower one of",
        ),
        ({"max_prompt_tokens": 3}, "none of 9 is, the shortest has"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"tokenizer": "no/such-tokenizer"}, "no/such-tokenizer cannot be loaded"),
        ({"tokenizer": None}, "set tokenizer"),
    ],
)
def test_bad_options(gsm8k: Path, tokenizer: str, options: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    given = {"path": str(gsm8k), "batch_size": 2, "val_size": 0, "tokenizer": tokenizer} | options
    with pytest.raises(UserError, match=message) as raised:
        GSM8KDataModule(**given).setup("fit")
    assert "\n" not in str(raised.value)


ABSENT = "no/such-data"
WITH_KEYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "table": (lambda _: TableDataModule(ABSENT).train_rows(), "data.path"),
    "tables": (lambda _: TableDataModule({"hard": TableConfig(ABSENT)}).train_rows(), "data.path.hard.path"),
    "an evaluation set": (
        lambda file: GSM8KDataModule(str(file), sets={"hard": TableConfig(ABSENT)}).setup("fit"),
        "data.sets.hard.path",
    ),
    "GSM8K": (lambda _: GSM8KDataModule(ABSENT).train_rows(), "data.path"),
    "Big-Math": (lambda _: BigMathDataModule(ABSENT).train_rows(), "data.path"),
    "conversations": (lambda _: ConversationDataModule(ABSENT).train_rows(), "data.path"),
    "calibration": (lambda _: calibration_texts(ABSENT, None, 1), "--calibration"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WITH_KEYS)
def test_data_that_are_not_there_are_told_by_their_key(gsm8k: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    read, key = WITH_KEYS[case]
    with pytest.raises(UserError, match=f"no file {ABSENT} is here, .*; correct {key}, or download"):
        read(gsm8k)


@pytest.mark.parametrize(("method", "use"), [("train_rows", "training"), ("val_rows", "validation")])
def test_a_module_that_gives_no_rows_is_told_so(tokenizer: str, method: str, use: str) -> None:
    class Empty(PromptDataModule):
        def train_rows(self) -> list[Row]:
            return [Row("a", "one ?", "1")]

    setattr(Empty, method, lambda self: [])
    with pytest.raises(UserError, match=f"{use} needs rows; Empty returns none; correct its method"):
        Empty(batch_size=1, val_size=1, tokenizer=tokenizer).setup("fit")


@pytest.mark.parametrize("split", ["train", "train[:5%]", "test+train[90%:]", "all"])
def test_no_part_of_what_is_trained_on_is_held_out(split: str) -> None:
    data = GSM8KDataModule("no/such-data", val_split=split)
    with pytest.raises(UserError, match="val_split must be another split than is trained on; got val_split="):
        data.val_rows()


def test_rows_that_share_an_id_are_refused(tokenizer: str) -> None:
    class Twice(PromptDataModule):
        def train_rows(self) -> list[Row]:
            return [Row("a", "one ?", "1"), Row("b", "two ?", "2"), Row("a", "three ?", "3")]

    with pytest.raises(UserError, match="training has 'a' 2 times"):
        Twice(batch_size=1, val_size=0, tokenizer=tokenizer).setup("fit")


def test_folder_without_the_split(gsm8k: Path, tokenizer: str) -> None:
    (gsm8k / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl.* holds test\.jsonl"):
        GSM8KDataModule(str(gsm8k), tokenizer=tokenizer).setup("fit")


@pytest.mark.parametrize(
    ("filters", "rows", "message"),
    [
        ({"levels": [7]}, BIGMATH, "none of 5"),
        (
            {"levels": [3]},
            [{"problem": "p", "answer": "1"}],
            "level or llama8b_solve_rate.* has problem, answer",
        ),
    ],
)
def test_filters_that_leave_nothing(tmp_path: Path, filters: dict, rows: list[dict], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BigMathDataModule(str(write_jsonl(tmp_path / "bigmath.jsonl", rows)), **filters).train_rows()


def test_a_template_that_names_the_day_renders_the_same_on_every_day() -> None:
    tokenizer = build_tokenizer()
    own = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    for template in (own + "{{ date_string }}", "{{ date_string }}", "{{ strftime_now( '%d %b %Y' ) }}"):
        tokenizer.chat_template = template
        (ids,) = render_prompts(tokenizer, ["How many?"])
        assert ids == tokenizer("26 Jul 2024", add_special_tokens=False)["input_ids"]
        assert ids != tokenizer("27 Jul 2024", add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = own + "{{ date_string }}"
    (ids,) = render_prompts(tokenizer, ["How many?"], template_kwargs={"date_string": "1 May 2025"})
    assert tokenizer.decode(ids) == "1 May 2025"  # a user's own


def test_templates_that_are_none_or_refuse_a_system_message(gsm8k: Path, tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    strict, bare = make_tokenizer(tmp_path / "strict", template), make_tokenizer(tmp_path / "bare", template=None)
    refusals = {strict: "no system role; .*system_prompt to null"}
    refusals |= {bare: "need a chat template; .* the folder that model.policy.path names"}
    for tokenizer, message in refusals.items():
        with pytest.raises(UserError, match=message):
            GSM8KDataModule(str(gsm8k), tokenizer=tokenizer, batch_size=2, val_size=1).setup("fit")
    GSM8KDataModule(str(gsm8k), tokenizer=strict, system_prompt=None, batch_size=2, val_size=1).setup("fit")


@pytest.mark.parametrize("highest", [99, 100])
def test_tokens_without_an_embedding_are_refused(tiny_policy_dir: Path, highest: int) -> None:
    data = ArithmeticDataModule(train_size=8, batch_size=2, val_size=0)
    policy = SimpleNamespace(vocab_size=lambda: 100)
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(policy_config=policy))  # type: ignore[assignment]
    rows = [Prompt("a", (1, 2), "", ""), Conversation("b", torch.tensor([3, highest]), torch.tensor([False, True]))]
    message = "an embedding of each token; b of training has token 100 of 100; resize the embeddings to the tokenizer"
    with pytest.raises(UserError, match=message) if highest == 100 else nullcontext():
        data._check_tokens(rows, "training")
    vocab_size = json.loads((tiny_policy_dir / "config.json").read_text())["vocab_size"]
    assert PolicyConfig(path=str(tiny_policy_dir)).vocab_size() == vocab_size
    assert PolicyConfig().vocab_size() == len(build_tokenizer())
