"""Files of tables: those of a folder's split, and the rows of a file."""

import csv
import glob
import gzip
import io
import json
import logging
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from qerl_pl.errors import UserError

log = logging.getLogger("qerl_pl")

_TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*_TEXT_SUFFIXES[:2], ".parquet", *_TEXT_SUFFIXES[2:], *(f"{suffix}.gz" for suffix in _TEXT_SUFFIXES))
"""Names of files that are read end in one of these."""
_LFS_POINTER = b"version https://git-lfs"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def split_files(path: str, split: str, key: str, subset: str | None = None) -> list[Path]:
    """The files of a local table, in order; none for any other path, such as a hub name.

    Args:
        path: A file, a pattern of files, or a folder: with a file named by the split, or as the hub has them.
        split: Such as "train"; of a folder only.
        key: Where the user wrote the path, for errors.
        subset: Configuration of a folder that has several.

    Raises:
        UserError: The path is a folder without files of that split.
    """
    local = Path(path).expanduser()
    if not local.is_dir():
        return [local] if local.exists() else sorted(Path(name) for name in glob.glob(str(local)))
    plain = [local / f"{split}{suffix}" for suffix in SUFFIXES if (local / f"{split}{suffix}").is_file()]
    return plain[:1] or _files_of_hub_folder(local, split, key, subset)


def _files_of_hub_folder(folder: Path, split: str, key: str, subset: str | None) -> list[Path]:
    """Files of a split as `datasets` finds them: by the README, or by the names of files and folders."""
    import datasets  # slow

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
    places = sorted({str(file.parent.relative_to(folder.absolute())) for file in files})
    if len(places) > 1:
        raise UserError(
            f"a data folder has the files of a split in one place; {folder} has those of {split} in "
            f"{', '.join(places[:10])}; name one of these as data.subset, or as {key}"
        )
    if not files:
        entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise UserError(
            f"a data folder has a file a split, such as {split}.jsonl or {split}-00000-of-00001.parquet; {folder} "
            f"holds {entries or 'nothing'} ({problem}); name the file itself as {key}."
        )
    log.info("%s of %s: %d files, %s the first", split, folder, len(files), files[0].name)
    return files


def read_file(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of a JSONL, JSON, CSV, TSV or parquet file; all but parquet may be compressed by gzip.

    Raises:
        UserError: The file is none of these, or malformed; names the line if possible.
    """
    if not file.name.endswith(SUFFIXES):
        raise UserError(f"a data file ends in {', '.join(SUFFIXES)}; got {file}; convert it to JSONL.")
    kind = Path(file.name.removesuffix(".gz")).suffix
    try:
        with _open(file) as data:
            head = data.read(1000)
        if head.startswith(_LFS_POINTER):
            raise UserError(
                f"data is needed itself; {file} is a git-lfs pointer to it; run `git lfs pull` in its folder"
            )
        if kind == ".parquet":
            yield from _read_parquet(file)
        elif kind in (".csv", ".tsv"):
            yield from _read_csv(file, "\t" if kind == ".tsv" else None)
        elif kind == ".json" and _is_list(file):
            yield from _read_json_list(file)
        else:
            yield from _read_json_lines(file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file} as gzip: {first_line(error)}; check the file.") from error
    except UnicodeError as error:
        raise UserError(f"text is UTF-8 or UTF-16; {file}: {first_line(error)}; convert the file.") from error


def _open(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file) if file.suffix == ".gz" else file.open("rb"))


def _open_text(file: Path) -> io.TextIOWrapper:
    """The file's text, whose lines end as they do there."""
    with _open(file) as data:
        encoding = "utf-16" if data.read(2) in _UTF16_MARKS else "utf-8-sig"
    return io.TextIOWrapper(_open(file), encoding, newline="")


def _lines(file: Path) -> Iterator[bytes]:
    """Lines in UTF-8."""
    with _open(file) as data:
        if data.read(2) not in _UTF16_MARKS:
            data.seek(0)
            yield from data
            return
    with io.TextIOWrapper(_open(file), "utf-16", newline="\n") as text:
        yield from (line.encode() for line in text)


def _is_list(file: Path) -> bool:
    return next((line for line in _lines(file) if line.strip()), b"").removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_csv(file: Path, delimiter: str | None) -> Iterator[Mapping[str, Any]]:
    """Rows of a file whose first line names the columns; every value is text.

    Args:
        file: The file.
        delimiter: Separates values; None takes the comma, or what a first line without commas has in its place.
    """
    csv.field_size_limit(sys.maxsize)  # of a cell; by default 131,072 characters
    with _open_text(file) as lines:
        if delimiter is None:
            first = lines.readline()
            delimiter = next((mark for mark in ",;\t" if mark in first), ",")
            lines.seek(0)
        reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(
                        f"each line has a value for each of the columns {', '.join(reader.fieldnames or ())}; {file}, "
                        f"line {reader.line_num} has {'more' if None in row else 'fewer'}; quote values with commas"
                    )
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(
                f"a .csv file is comma-separated UTF-8; {file}, line {reader.line_num + 1}: {first_line(error)}; "
                "correct the line."
            ) from error


def _read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of a file by its literal path, which `datasets` would read as a pattern."""
    import pyarrow  # slow, and only for parquet
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {file} as parquet: {first_line(error)}; check the file.") from error


def _read_json_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of a file with their own types: `datasets` would infer types of columns, and turn text into dates."""
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # malformed JSON or UTF-8
            raise UserError(
                f"each line must be a JSON object; {file}, line {number}: {first_line(error)}; correct the line."
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"each line must be a JSON object; {file}, line {number} is a {type(row).__name__}; "
                "write one object of columns a line."
            )
        if b"\\ud" in line.lower():  # escaped surrogates, of which tokenizers and loggers take pairs only
            _check_surrogates(row, f"{file}, line {number}")
        yield row


def _read_json_list(file: Path) -> Sequence[Mapping[str, Any]]:
    """Rows of a .json file that is one list."""
    try:
        rows = json.loads(b"".join(_lines(file)))
    except ValueError as error:
        raise UserError(f"a .json file is JSON; {file}: {first_line(error)}; correct it, or write JSONL.") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"rows are objects of columns; row {number} of {file} is {row!r:.60}; write one")
        _check_surrogates(row, f"row {number} of {file}")
    return rows


def _check_surrogates(row: Mapping[str, Any], place: str) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text is Unicode, whose surrogates come in pairs; {place} has half a pair, "
            f"\\u{ord(error.object[error.start]):04x}; correct it."
        ) from error


def read_hub(name: str, split: str, subset: str | None, key: str) -> list[Mapping[str, Any]]:
    """Rows of a data set of the hub; arguments as of `split_files`."""
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
