"""Reading tables of questions and answers, from the hub or from local files."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.types import Prompt

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


def require_different_ids(rows: Iterable[Row], use: str) -> None:
    """Refuse rows of one name.

    Args:
        rows: Those of one set.
        use: What it is for.

    Raises:
        UserError: An id comes twice.
    """
    names = Counter(row.id for row in rows)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise UserError(
            f"rows must have different ids, which seed their completions; {use} has {repeated[0]!r} "
            f"{names[repeated[0]]} times; number them"
        )


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
    file = local_file(path, split)
    if file is not None:
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


def local_file(path: str, split: str) -> Path | None:
    """The file of a local table, or None where there is none: a hub name, or a mistake.

    Raises:
        UserError: it is a folder without a file of that split.
    """
    local = Path(path).expanduser()
    if not local.exists():
        return None
    return local if local.is_file() else _split_file(local, split)


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


log = logging.getLogger("qerl_pl")

_MARK = "####"

_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?\s*%?")

"""One number whose thousands are told apart; other commas tell answers apart."""


@dataclass(frozen=True)
class TableConfig:
    """A table of questions and answers to validate and test on.

    Args:
        path: Hub name, a JSONL or parquet file, or a folder with one such file a split.
        split: Split of it; a single file is taken as it is.
        subset: Configuration of the hub's data set; local files have none.
        question: Column of the question.
        answer: Column of the answer; of one with a #### what follows the last counts.
        limit: Take the first so many rows; null takes all.
    """

    path: str
    split: str = "test"
    subset: str | None = None
    question: str = "question"
    answer: str = "answer"
    limit: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"a set's limit": self.limit})

    def rows(self, name: str) -> list[Row]:
        """Its rows, called after the set's name.

        Raises:
            UserError: It cannot be read, lacks a column, or an answer is empty.
        """
        table = read_table(self.path, self.split, (self.question, self.answer), self.subset)[: self.limit]
        rows = []
        for index, row in enumerate(table):
            _, mark, rest = str(row[self.answer]).rpartition(_MARK)
            reference = rest.strip()
            if mark and _THOUSANDS.fullmatch(reference):
                reference = reference.replace(",", "")
            if not reference:
                raise UserError(f"an answer must not be empty; row {index + 1} of {self.path} has none; correct it.")
            rows.append(Row(f"{name}-{index}", str(row[self.question]), reference))
        return rows


def require_prompts(stage: str, sets: Mapping[str, Sequence[object]], val_size: int) -> None:
    """Refuse to measure nothing: Lightning would end as if all were well.

    Raises:
        UserError: No set has a prompt.
    """
    if not any(sets.values()):
        others = ", and there is no test set" if stage == "test" else ""
        raise UserError(
            f"to {stage} takes prompts that are held out; found none, for data.val_size is {val_size}{others}; "
            "raise it, or name sets by data.sets"
        )


def warn_of_repeats(train: Sequence[Prompt], sets: Mapping[str, Sequence[Prompt]], use: str) -> None:
    """Tell how many held-out questions are trained on, too: by their text, for each set numbers its own rows.

    Args:
        train: What is trained on.
        sets: What is held out, by name.
        use: What for.
    """
    known = {prompt.text for prompt in train}
    for name, prompts in sets.items():
        shared = [prompt.id for prompt in prompts if prompt.text in known]
        if shared:
            log.warning(
                "%d of %d %s questions (the first is that of %s) are trained on, too: accuracy there is not that of "
                "new questions; take them out of one of the two",
                len(shared),
                len(prompts),
                f"{use} on {name}" if name else use,
                shared[0],
            )


def check_sizes(total: int, held_out: int, batch_size: int) -> None:
    """Refuse a training set that leaves nothing to train on, or less than a batch.

    Args:
        total: prompts in all, or rows, of which some may yet prove too long.
        held_out: how many of them validation takes.
        batch_size: prompts a training batch.

    Raises:
        UserError: too few are left.
    """
    if held_out >= total:
        raise UserError(
            f"val_size must leave prompts to train on; got val_size={held_out} of {total} prompts; lower it."
        )
    if total - held_out < batch_size:
        which = f" ({held_out} of {total} are held out for validation by val_size)" if held_out else ""
        raise UserError(
            f"batch_size must not exceed the training set; got batch_size={batch_size} for {total - held_out} "
            f"prompts{which}; lower {'one of them' if held_out else 'it'}."
        )


def sets_by_name(
    named: Mapping[str, Sequence[Row]],
    single: Callable[[], Sequence[Row] | None],
    owner: str,
    keep_name: bool = False,
) -> Mapping[str, Sequence[Row]] | None:
    """The sets of a data module; where there is only one its name is empty, for its metrics need none.

    Args:
        named: what the data module has by name.
        single: gives the one set where there are none; None: it has none either.
        owner: the data module's class.
        keep_name: whether one set alone keeps its name.

    Raises:
        UserError: a name cannot be part of a metric's, or what is given are no rows.
    """
    if not isinstance(named, Mapping):
        raise UserError(f"{owner} must give its sets by name; found {named!r:.60}; return a dictionary of rows.")
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"sets are named by letters, digits, and . + - _; found {name!r}; rename it.")
    sets = {name: checked_rows(rows, f"{owner}'s set {name}") for name, rows in named.items()}
    if len(sets) > 1 or (sets and keep_name):
        return sets
    rows = next(iter(sets.values())) if sets else single()
    return None if rows is None else {"": checked_rows(rows, f"{owner}.{single.__name__}")}


def draw(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """So many prompts by seed and id, so that another token limit or filter keeps most of the set."""
    drawn = sorted(prompts, key=lambda prompt: stream_seed(seed, "held out", prompt.id))[:count]
    return sorted(drawn, key=lambda prompt: (len(prompt.id), prompt.id))
