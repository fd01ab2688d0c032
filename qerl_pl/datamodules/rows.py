"""Reading tables of questions and answers, from the hub or from local files."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError

_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """A question of a data set, before it is rendered."""

    id: str
    """Stable name, such as "train-17" for the split's 18th row."""
    question: str
    reference: str


def checked_rows(given: Any, source: str) -> list[Row]:
    """Rows that a data module gives, of whatever kind of sequence or generator, as a list.

    Args:
        given: What its method returned.
        source: The method, such as "MyData.train_rows".

    Raises:
        UserError: These are no rows.
    """
    rule = f"{source} must return rows (qerl_pl.datamodules.Row) whose id, question and reference are text"
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise UserError(f"{rule}; found {given!r:.60}; return a list of them")
    rows = list(given)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Row) or not all(isinstance(text, str) for text in (row.id, row.question, row.reference)):
            raise UserError(f"{rule}; row {number} is {row!r:.80}; return such rows")
    return rows


def read_table(path: str, split: str, columns: Collection[str], subset: str | None = None) -> list[Mapping[str, Any]]:
    """All rows of a table, in its order.

    Args:
        path: a JSONL or parquet file; a folder with one such file a split, named after it; or a hub data set. A local
            file is taken for the split asked for.
        split: such as "train".
        columns: what every row must have: text or a number, not null.
        subset: configuration of the hub data set; local tables have none.

    Raises:
        UserError: nothing is there, it cannot be read (with file and line where JSON is malformed), it is empty, or
            columns are missing or hold lists.
    """
    local = Path(path).expanduser()
    if local.exists():
        file = local if local.is_file() else _split_file(local, split)
        rows = list(_read_file(file))
        source = str(file)
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(_SUFFIXES):
        rows = _read_hub(path, split, subset)
        source = f"{path} ({split})"
    else:
        raise UserError(f"data must be a local file or folder or a hub name; no such file: {path}; correct `path`.")
    if not rows:
        raise UserError(f"data must have rows; {source} has none; correct `path`.")
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns if _absent(row.get(column))]
        if missing:
            found = ", ".join(key for key, value in row.items() if not _absent(value))
            raise UserError(
                f"data needs the columns {', '.join(columns)}; row {number} of {source} has no {', '.join(missing)}, "
                f"found {found or 'nothing'}; rename the columns or choose another data module."
            )
        for column in columns:
            if isinstance(row[column], list | dict):
                raise UserError(
                    f"the columns {', '.join(columns)} hold text or numbers; {column} of row {number} of {source} is "
                    f"{row[column]!r:.60}; write its text, or choose another column."
                )
    return rows


def _absent(value: Any) -> bool:
    return value is None or value != value  # what a table of numbers lacks is not a number


def _split_file(folder: Path, split: str) -> Path:
    names = [split + suffix for suffix in _SUFFIXES]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    found = sorted(entry.name for entry in folder.iterdir())[:10]
    raise UserError(
        f"a data folder needs one of {', '.join(names)}; {folder} holds {', '.join(found) or 'nothing'}; "
        "name the file itself as `path`."
    )


def _read_file(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix not in _SUFFIXES:
        raise UserError(f"a data file ends in {', '.join(_SUFFIXES)}; found {file}; convert it to JSONL.")
    return _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)


def _read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of this one file: `datasets` would take its path for a pattern, and read any other that fits it, or none."""
    import pyarrow  # other data modules do without
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {file} as parquet: {_first_line(error)}; check the file.") from error


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of one file, each as it is written there: a table's reader would guess types, and turn text into dates."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                raise UserError(
                    f"each line must be a JSON object; {file}, line {number}: {_first_line(error)}; correct the line."
                ) from error
            if not isinstance(row, dict):
                raise UserError(
                    f"each line must be a JSON object; {file}, line {number} is a {type(row).__name__}; "
                    "write one object of columns a line."
                )
            yield row


def _read_hub(name: str, split: str, subset: str | None) -> list[Mapping[str, Any]]:
    import datasets

    try:
        return list(datasets.load_dataset(name, subset, split=split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data must be a local file or folder or a hub name; no file {name} is here, and the hub's data set cannot "
            f"be read: {_first_line(error)}; correct `path`, or download the data and name its folder."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def require_different_ids(rows: Sequence[Row], use: str) -> None:
    """Refuse rows of which two have the same id.

    Raises:
        UserError: Two have.
    """
    names = Counter(row.id for row in rows)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise UserError(
            f"rows must have different ids, which seed their completions; {use} has {repeated[0]!r} "
            f"{names[repeated[0]]} times; number them"
        )
