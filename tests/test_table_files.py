"""Files of tables as people have them: the hub's folders and shards, compressed, of spreadsheets, pointers to data."""

import csv
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from qerl_pl.datamodules import BigMathDataModule, ConversationDataModule, GSM8KDataModule, TableDataModule
from qerl_pl.datamodules.tables import read_table
from qerl_pl.errors import UserError

README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/train-*}
---
"""
ONE_CONFIG = "---\nconfigs: [{config_name: default, data_files: [{split: train, path: sums.jsonl}]}]\n---\n"


def row(name: str) -> dict[str, str]:
    return {"question": name, "answer": "so #### 1"}


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        write_table(pyarrow.Table.from_pylist([*rows]), file)
    else:
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))


def hub(folder: Path, *names: str, readme: str = "") -> Path:
    """A folder of files, each with a row of its own name."""
    for name in names:
        write(folder / name, row(name))
    if readme:
        (folder / "README.md").write_text(readme)
    return folder


MAIN = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "other") for split in ("train", "test")]
SHARDS = [f"data/train-0000{n}-of-00003.parquet" for n in range(3)] + ["data/validation-00000-of-00001.parquet"]
FOLDERS: dict[str, tuple[list[str], str, str | None, str, list[str]]] = {
    "the readme's configuration": (MAIN, README, "main", "train", MAIN[:1]),
    "its other split": (MAIN, README, "main", "test", MAIN[1:2]),
    "another configuration": (MAIN, README, "other", "train", MAIN[2:3]),
    "a configuration's folder": (MAIN, "", "other", "test", MAIN[3:]),
    "shards": (SHARDS, "", None, "train", SHARDS[:3]),
    "shards, and a configuration that is none of theirs": (SHARDS, "", "main", "train", SHARDS[:3]),
    "another split than shards": (SHARDS, "", None, "validation", SHARDS[3:]),
    "JSONL shards": (["train-1.jsonl", "train-2.jsonl", "test-1.jsonl"], "", None, "test", ["test-1.jsonl"]),
    "a folder a split": (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], "", None, "test", ["test/a.jsonl"]),
    "one table": (["sums.jsonl"], ONE_CONFIG, None, "train", ["sums.jsonl"]),
    "a file of the split's name before all": ([*SHARDS, "train.jsonl"], "", None, "train", ["train.jsonl"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_as_the_hub_has_it_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "no-folder")
    (tmp_path / "file").touch()
    names, readme, subset, split, found = FOLDERS[name]
    rows = read_table(str(hub(tmp_path / "data", *names, readme=readme)), split, subset)
    assert [one["question"] for one in rows] == found


@pytest.mark.parametrize("name", ["link", "real/../real"])
def test_a_folder_is_read_by_another_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("real")
    for readme in ("", README):
        hub(tmp_path / "real", *MAIN, readme=readme)
        assert [one["question"] for one in read_table(str(tmp_path / name), "train", "main")] == MAIN[:1]


def test_every_data_module_takes_the_hubs_folders(tmp_path: Path) -> None:
    folder = str(hub(tmp_path / "data", *MAIN, readme=README))
    gsm8k = GSM8KDataModule(folder)  # whose subset is main
    assert [[one.question for one in rows] for rows in (gsm8k.train_rows(), gsm8k.test_rows())] == [
        [MAIN[0]],
        [MAIN[1]],
    ]
    table = TableDataModule(folder, subset="main", val_split="test")
    assert [one.question for one in table.val_rows()] == [MAIN[1]]
    assert len(ConversationDataModule(folder, subset="other").train_rows()) == 1
    write(tmp_path / "big" / "data" / "train-00000-of-00001.parquet", {"problem": "a", "answer": "1"})
    assert len(BigMathDataModule(str(tmp_path / "big")).train_rows()) == 1


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("data/train-*.parquet", SHARDS[:3]),
        ("data/*-0000[12]-*", SHARDS[1:3]),
        ("*/validation-?????-of-00001.parquet", SHARDS[3:]),
        ("data/train-00001-of-00003.parquet", SHARDS[1:2]),
        ("**/train*", SHARDS[:3]),
        ("data/train-0000?-of-00003.parquet", SHARDS[:3]),
        ("data/train-0000[12]-of-00003.parquet", SHARDS[1:3]),
    ],
)
def test_shards_are_named_by_a_pattern(tmp_path: Path, pattern: str, found: list[str]) -> None:
    data = TableDataModule(f"{hub(tmp_path, *SHARDS)}/{pattern}", test_split=None)
    assert [one.question for one in data.train_rows()] == found
    with pytest.raises(UserError, match="val_split must be another split"):
        TableDataModule(data.path, val_split="test").val_rows()


REFUSED: dict[str, tuple[list[str], str, str | None, str, str]] = {
    "no configuration": (MAIN, README, None, "train", r"Config name is missing.*'main', 'other'"),
    "an unknown configuration": (MAIN, README, "mian", "train", "mian.*main.*other"),
    "two places": (MAIN, "", None, "train", "has those of train in main, other; name one of these as data.subset"),
    "an unknown split": (SHARDS, "", None, "test", r"has the splits train, validation\); name the file itself as data"),
    "no data": (["notes.md"], "", None, "train", "a data file ends in .*notes.md; convert it"),
    "other data": (["data/train-0.arrow"], "", None, "train", "a data file ends in .*train-0.arrow; convert it"),
    "slices": (SHARDS, "", None, "train[:5%]", "has the splits train, validation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_without_the_rows_is_one_line(tmp_path: Path, name: str) -> None:
    names, readme, subset, split, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as raised:
        read_table(str(hub(tmp_path, *names, readme=readme)), split, subset)
    assert "\n" not in str(raised.value)


# Kinds of files ------------------------------------------------------------------------------------------------------

ROWS = [{"question": "a, \"b\"; c\td", "answer": "ä\n2"}, {"question": "数学", "answer": "3"}]  # fmt: skip


def as_csv(delimiter: str, encoding: str = "utf-8", end: str = "\r\n") -> Callable[[Path], None]:
    def write_rows(file: Path) -> None:
        with file.open("w", encoding=encoding, newline="") as lines:
            writer = csv.DictWriter(lines, list(ROWS[0]), delimiter=delimiter, lineterminator=end)
            writer.writeheader()
            writer.writerows(ROWS)

    return write_rows


def as_json(encoding: str = "utf-8", lines: bool = True) -> Callable[[Path], None]:
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in ROWS) if lines else json.dumps(ROWS, indent=1)
    return lambda file: file.write_bytes(text.encode(encoding))


KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "semicolons": ("a.csv", as_csv(";")),
    "semicolons of a spreadsheet": ("a.csv", as_csv(";", "utf-8-sig")),
    "commas": ("a.csv", as_csv(",")),
    "a space in the header": (
        "a.csv",
        lambda file: file.write_text('question, answer\n"a, ""b""; c\td","ä\n2"\n数学,3\n', "utf-8"),
    ),
    "marked JSONL": ("a.jsonl", as_json("utf-8-sig")),
    "marked JSON": ("a.json", as_json("utf-8-sig", lines=False)),
    "JSON lines named JSON": ("a.json", as_json()),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_read_whatever_wrote_it(tmp_path: Path, name: str) -> None:
    file, write_rows = KINDS[name]
    write_rows(tmp_path / file)
    assert read_table(str(tmp_path / file), "train") == ROWS


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[str, bytes, str]] = {
    **{
        f"a pointer to {suffix}": (f"a{suffix}", POINTER, f"a{suffix} is a git-lfs pointer to it; run `git lfs pull`")
        for suffix in (".jsonl", ".json", ".csv", ".parquet")
    },
    "compressed": ("a.jsonl.gz", b"", "a data file ends in .jsonl, .*; got .*a.jsonl.gz; convert it to JSONL"),
    "tabs": ("a.tsv", b"question\tanswer\n", "a data file ends in .jsonl, .*; got .*a.tsv; convert it to JSONL"),
    "another compression": ("a.jsonl.zst", b"", "a data file ends in .jsonl, .*; got .*a.jsonl.zst; conv"),
    "compressed parquet": ("a.parquet.gz", b"", "a data file ends in .*; got .*a.parquet.gz"),
    "Latin-1": ("a.csv", "question,answer\nä,1\n".encode("latin-1"), "text is UTF-8; .*a.csv is not .*can't decode"),
    "UTF-16": ("a.jsonl", '{"question": "a"}'.encode("utf-16"), "text is UTF-8; .*a.jsonl is not .*; convert the file"),
    "a workbook": ("a.xlsx", b"PK", "a data file ends in .*; got .*a.xlsx"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    file, content, message = BROKEN[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        read_table(str(tmp_path / file), "train")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("size", [131_072, 131_073, 10**6])
@pytest.mark.parametrize("mark", [",", ";"])
def test_cells_of_any_size_are_read(tmp_path: Path, size: int, mark: str) -> None:
    limit = csv.field_size_limit()
    try:
        csv.field_size_limit(131_072)
        (tmp_path / "a.csv").write_text(f"question{mark}answer\n{'x' * size}{mark}1\n")
        (found,) = read_table(str(tmp_path / "a.csv"), "train")
    finally:
        csv.field_size_limit(limit)
    assert found == {"question": "x" * size, "answer": "1"}


def test_what_is_read_of_a_folder_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qerl_pl"):
        read_table(str(hub(tmp_path, *SHARDS)), "train")
    assert re.search(r"train of .*: 3 files, train-00000-of-00003.parquet the first", caplog.text)
