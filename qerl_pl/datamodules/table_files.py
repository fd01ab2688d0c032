"""Files of tables: those of a folder's split, and the rows of a file."""

import csv
import glob
import io
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError

log = logging.getLogger("qerl_pl")

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Names of files that are read end in one of these."""
_LFS_POINTER = b"version https://git-lfs"


def is_one_table(path: str) -> bool:
    """Whether `split_files` gives the same files for every split: for a file or a pattern of files."""
    local = Path(path).expanduser()
    return not local.is_dir() and (local.exists() or any(mark in path for mark in "*?["))


def split_files(path: str, split: str, subset: str | None, key: str) -> list[Path]:
    """The files of a local table, in order; none for any other path, such as a hub name; see `read_table`."""
    local = Path(path).expanduser()
    if not local.is_dir():
        return [local] if local.exists() else sorted(Path(name) for name in glob.glob(str(local)))
    plain = [local / f"{split}{suffix}" for suffix in SUFFIXES if (local / f"{split}{suffix}").is_file()]
    return plain[:1] or _files_of_hub_folder(local, split, subset, key)


def _files_of_hub_folder(folder: Path, split: str, subset: str | None, key: str) -> list[Path]:
    """Files of a split as `datasets` finds them: by the README, or by the names of files and folders."""
    import datasets  # slow

    folder = folder.resolve()  # as `datasets` does for some patterns
    try:
        names = datasets.get_dataset_config_names(str(folder))
        if subset is not None and subset not in names and ((folder / subset).is_dir() or names == ["default"]):
            folder, subset = (folder / subset if (folder / subset).is_dir() else folder), None
        with tempfile.TemporaryDirectory() as cache:
            builder = datasets.load_dataset_builder(str(folder), subset, cache_dir=cache)
        splits = {str(name): [*map(Path, files)] for name, files in (builder.config.data_files or {}).items()}
        problem = f"{folder} has the splits {', '.join(splits) or 'none'}"
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        splits, problem = {}, f"{' '.join(str(error).split()):.200}"
    files = splits.get(split, [])
    parents = sorted({os.path.relpath(file.parent, folder) for file in files})
    if len(parents) > 1:
        raise UserError(
            f"a data folder has the files of a split in one place; {folder} has those of {split} in "
            f"{', '.join(parents[:10])}; name one of these as data.subset, or as {key}"
        )
    if not files:
        entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise UserError(
            f"a data folder has a file a split, such as {split}.jsonl or {split}-00000-of-00001.parquet; {folder} "
            f"holds {entries or 'nothing'} ({problem}); name the file itself as {key}."
        )
    log.info("%s of %s: %d files, %s the first", split, folder, len(files), files[0].name)
    return files


def read_file(file: Path) -> Sequence[Any]:
    """Rows of a JSONL, JSON, CSV or parquet file.

    Raises:
        UserError: The file is none of these, or malformed; names the line if possible.
    """
    if not file.name.endswith(SUFFIXES):
        raise UserError(f"a data file ends in {', '.join(SUFFIXES)}; got {file}; convert it to JSONL.")
    data = file.read_bytes()
    if data.startswith(_LFS_POINTER):
        raise UserError(f"data is needed itself; {file} is a git-lfs pointer to it; run `git lfs pull` in its folder")
    if file.suffix == ".parquet":
        return _read_parquet(data, file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"text is UTF-8; {file} is not ({first_line(error)}); convert the file.") from error
    if file.suffix == ".csv":
        return _read_csv(text, file)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return list(_parsed(text, "a .json file is JSON", str(file)))
    return _read_json_lines(text, file)


def _read_csv(text: str, file: Path) -> Sequence[Mapping[str, Any]]:
    """Rows of a text whose first line names the columns, between commas or semicolons; every value is text."""
    csv.field_size_limit(sys.maxsize)  # of a cell; by default 131,072 characters
    first = text.partition("\n")[0]
    delimiter = ";" if ";" in first and "," not in first else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    rows = []
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if repeated := [name for name, count in Counter(filter(None, reader.fieldnames)).items() if count > 1]:
            raise UserError(f"columns must have different names; {file} has {repeated[0]} twice; rename one")
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"each line has a value for each of the columns {', '.join(reader.fieldnames or ())}; {file}, "
                    f"line {reader.line_num} has {'more' if None in row else 'fewer'}; quote values with commas"
                )
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f"a .csv file is comma-separated UTF-8; {file}, line {reader.line_num + 1}: {first_line(error)}; "
            "correct the line."
        ) from error
    return rows


def _read_parquet(data: bytes, file: Path) -> Sequence[Mapping[str, Any]]:
    """Rows of a file's content: `datasets` would read its path as a pattern."""
    import pyarrow  # slow, and only for parquet
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(io.BytesIO(data)) as table:
            return [row for batch in table.iter_batches() for row in batch.to_pylist()]
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {file} as parquet: {first_line(error)}; check the file.") from error


def _read_json_lines(text: str, file: Path) -> Sequence[Mapping[str, Any]]:
    """Rows of a text with their own types: `datasets` would infer types of columns, and turn text into dates."""
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _parsed(line, "each line must be a JSON object", f"{file}, line {number}")
        if not isinstance(row, dict):
            raise UserError(
                f"each line must be a JSON object; {file}, line {number} is a {type(row).__name__}; "
                "write one object of columns a line."
            )
        rows.append(row)
    return rows


def _parsed(text: str, rule: str, place: str) -> Any:
    """The value of a JSON text, whose escaped surrogates come in pairs, as tokenizers and loggers need them."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text is Unicode, whose surrogates come in pairs; {place} has half a pair, "
            f"\\u{ord(error.object[error.start]):04x}; correct it."
        ) from error
    except ValueError as error:
        raise UserError(f"{rule}; {place}: {first_line(error)}; correct it.") from error
    return value


def read_hub(name: str, split: str, subset: str | None, key: str) -> Sequence[Mapping[str, Any]]:
    """Rows of a data set of the hub; see `read_table`."""
    import datasets

    try:
        return list(datasets.load_dataset(name, subset, split=split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data must be a local file or folder or a hub name; no file {name} is here, and the hub's data set cannot "
            f"be read: {first_line(error)}; correct {key}, or download the data and name its folder."
        ) from error


def first_line(error: Exception) -> str:
    """First line of an error's text, or its name."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
