"""Tables of prompts and reference answers: from the hub, local files or memory; and sets of rows by name."""

import ast
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from qerl_pl.datamodules.table_files import SUFFIXES, first_line, read_file, read_hub, split_files
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Prompt

log = logging.getLogger("qerl_pl")

_PROMPTS = ("prompt", "messages", "question", "problem")
_ANSWERS = ("answer", "solution")
"""Default columns, in order of preference."""
_MESSAGE = ("role", "content")
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[?\s*\{.*["']role["']\s*:.*[\]}]\s*""", re.DOTALL)
"""What JSON or Python print a list of messages as."""
ANSWER_MARK = "####"
"""Stands before the final answer in GSM8K's format."""
_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?\s*%?")
"""A number with thousands separators; other commas separate answers."""


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_HasId)


@dataclass(frozen=True)
class Row:
    """A prompt of a data set, before rendering."""

    id: str
    """Stable name, such as "train-17" for the split's 18th row."""
    question: str
    """The prompt as the user reads it."""
    reference: str = ""
    """Reference answer; empty if there is none."""
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, hash=False)
    """A conversation to render in place of the question: messages with `role` and `content`."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Columns for the rewards, by name."""


def checked_rows(rows: Any, source: str) -> list[Row]:
    """The rows that a data module's method `source` returned, as a list; UserError for anything else."""
    rule = f"{source} must return rows (qerl_pl.datamodules.Row) whose id, question and reference are text"
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise UserError(f"{rule}; got {rows!r:.60}; return a list of them")
    checked = list(rows)
    for number, row in enumerate(checked, start=1):
        if not isinstance(row, Row) or not all(isinstance(text, str) for text in (row.id, row.question, row.reference)):
            raise UserError(f"{rule}; row {number} is {row!r:.80}; return such rows")
    return checked


def table_source(path: Any, key: str = "data.path") -> Any:
    """The text of a path, or the list of whatever yields rows; UserError for a mapping or anything else."""
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    if isinstance(path, Mapping) or not isinstance(path, Iterable):
        splits = f" of {', '.join(map(str, path))}" if isinstance(path, Mapping) else ""
        raise UserError(
            f"{key} must be a file, a folder, a hub name or rows; got a {type(path).__name__}{splits}; give one split, "
            "data['train'], say"
        )
    return list(path)


def read_table(
    path: str | Sequence[Mapping[str, Any]],
    split: str,
    columns: Collection[str] = (),
    subset: str | None = None,
    key: str = "data.path",
) -> list[Mapping[str, Any]]:
    """All rows of a table, in its order.

    Args:
        path: A file or pattern of files, read whatever the split; a folder with files per split; a hub data set; or
            the rows themselves.
        split: Such as "train".
        columns: Columns with text or a number in every row.
        subset: Configuration of the hub data set.
        key: Where the user wrote the path, for errors.

    Raises:
        UserError: The table is missing, unreadable (with file and line of malformed JSON) or empty, or columns are
            missing or hold lists.
    """
    rows, source = _read(path, split, subset, key)
    if not rows:
        raise UserError(f"data must have rows; {source} has none; correct {key}.")
    _check_columns(rows, source, columns)
    return rows


def _read(
    path: str | Sequence[Mapping[str, Any]], split: str, subset: str | None, key: str
) -> tuple[list[Mapping[str, Any]], str]:
    """Rows, and what they are called in errors."""
    if not isinstance(path, str):
        for number, row in enumerate(path, start=1):
            if not isinstance(row, Mapping):
                raise UserError(f"rows are dictionaries of columns; row {number} is {row!r:.60}; write one")
        return list(path), "the list of rows"
    files = split_files(path, split, key, subset)
    if files:
        return [row for file in files for row in read_file(file)], str(files[0] if len(files) == 1 else path)
    if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(SUFFIXES):
        return read_hub(path, split, subset, key), f"{path} ({split})"
    raise UserError(f"data must be a local file or folder or a hub name; no such file: {path}; correct {key}.")


def _check_columns(rows: Sequence[Mapping[str, Any]], source: str, columns: Collection[str]) -> None:
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns if _absent(row.get(column))]
        if missing:
            present = ", ".join(key for key, value in row.items() if not _absent(value))
            if all(any(not _absent(other.get(column)) for other in rows) for column in missing):
                remedy = "fill it in, rename the row's column, or remove the row"
            else:
                remedy = "rename the columns, or name them by `question` and `answer` of TableDataModule"
            raise UserError(
                f"data needs the columns {', '.join(columns)}; row {number} of {source} has no {', '.join(missing)}; "
                f"got {present or 'nothing'}; {remedy}"
            )
        for column in columns:
            if isinstance(row[column], list | dict):
                raise UserError(
                    f"the columns {', '.join(columns)} hold text or numbers; {column} of row {number} of {source} is "
                    f"{row[column]!r:.60}; write its text, or choose another column."
                )


def _absent(value: Any) -> bool:
    return value is None or value != value  # NaN: a missing number


@dataclass(frozen=True)
class TableConfig:
    """A table of prompts, with or without reference answers.

    Args:
        path: Hub name; a JSONL, CSV or parquet file; a folder with one such file a split; or a list of rows.
        split: Split of the table; null takes train to train on and test to evaluate on. A single file has none.
        subset: Configuration of a hub data set or its folder; files have none.
        question: Column of the prompt, text or a list of messages; null takes prompt, messages, question or problem.
        answer: Column of the answer; the text after its last ####, if it has one, is the reference. null takes answer
            or solution, or else an assistant's message that ends the conversation; without any there is no reference.
        limit: Number of rows, from the first; null takes all.
        weight: How often each row occurs in an epoch of training; 0.5 takes every second row, drawn by the seed.
    """

    path: str | list[dict[str, Any]]
    split: str | None = None
    subset: str | None = None
    question: str | None = None
    answer: str | None = None
    limit: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", table_source(self.path))
        require_at_least(1, {"a set's limit": self.limit})
        if not 0 < self.weight < math.inf:
            raise UserError(f"a set's weight must be above 0; got {self.weight}; leave the set out instead")

    def rows(self, name: str, split: str = "test", key: str = "data.path") -> list[Row]:
        """Rows of the table, with ids after the set's `name`; their columns are those of the table.

        Args:
            name: Name of the set.
            split: Split to read unless the table names its own.
            key: Where the user wrote the path, for errors.

        Raises:
            UserError: The table cannot be read, lacks a column, or a prompt or an answer is empty.
        """
        table = read_table(self.path, self.split or split, subset=self.subset, key=key)[: self.limit]
        source = self.path if isinstance(self.path, str) else "the list of rows"
        question = self.question or _first_column(table, _PROMPTS)
        answer = self.answer or _first_column(table, _ANSWERS)
        if question is None:
            raise UserError(
                f"a prompt is in a column {', '.join(_PROMPTS)}; {source} has {', '.join(table[0])}; "
                "name its column by `question`"
            )
        table = [_with_messages(row, question, number, source) for number, row in enumerate(table, start=1)]
        conversations = isinstance(table[0].get(question), list)
        columns = [column for column in (None if conversations else question, answer) if column is not None]
        _check_columns(table, source, columns)
        rows = []
        for index, row in enumerate(table):
            messages, last = _conversation(row.get(question), index + 1, source) if conversations else (None, "")
            text = _text(messages) if messages else str(row[question])
            check_prompt(
                messages[-1]["content"] if messages and messages[-1]["role"] == "user" else text, index, source
            )
            reference = last if answer is None else _reference(str(row[answer]), index + 1, source)
            rows.append(Row(f"{name}-{index}", text, reference, messages, row))
        return rows


def check_prompt(text: str, index: int, source: str) -> None:
    """Refuse a prompt without text.

    Raises:
        UserError: It has none.
    """
    if not text.strip():
        raise UserError(
            f"a prompt must not be empty; row {index + 1} of {source} has none; fill it in, or remove the row"
        )


def _with_messages(row: Mapping[str, Any], column: str, number: int, source: str) -> Mapping[str, Any]:
    """The row with messages in place of their text, if the column has that."""
    messages = messages_of_text(row.get(column), f"{column} of row {number} of {source}")
    return row if messages is row.get(column) else {**row, column: messages}


def messages_of_text(value: Any, place: str) -> Any:
    """A list of messages of its JSON, or of what Python prints, as in CSV files; any other value as it is.

    Args:
        value: Of a column.
        place: Where it stands, for errors.

    Raises:
        UserError: The text looks like messages, but is neither.
    """
    if not isinstance(value, str) or not _MESSAGES_AS_TEXT.fullmatch(value):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        try:
            found = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError) as error:
            raise UserError(
                f"messages that are text are JSON; {place} is {value!r:.60}, which is not ({first_line(error)}); "
                "write the column by json.dumps"
            ) from error
    turns = found if isinstance(found, list) else [found]
    are_messages = all(isinstance(turn, Mapping) and turn.keys() >= set(_MESSAGE) for turn in turns)
    return turns if turns and are_messages else value


def _first_column(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """The first of these columns in which any row has a value."""
    return next((name for name in names if any(not _absent(row.get(name)) for row in table)), None)


def without_thousands(answer: str) -> str:
    """A number without its thousands separators; any other text as it is."""
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _reference(answer: str, number: int, source: str) -> str:
    """The text after the last ####, or all of it."""
    _, mark, rest = answer.rpartition(ANSWER_MARK)
    reference = without_thousands(rest.strip()) if mark else rest.strip()
    if not reference:
        raise UserError(f"an answer must not be empty; row {number} of {source} has none; correct it.")
    return reference


def _conversation(value: Any, number: int, source: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Messages up to the last that is not the assistant's, and the assistant's answer to it, or ""."""
    messages = value if isinstance(value, list) else []
    if not messages or not all(_is_message(message) for message in messages):
        raise UserError(
            f"a conversation is a list of messages with a role and a content, which are text; row {number} of {source} "
            f"has {value!r:.80}; correct it"
        )
    turns = [{key: text for key, text in message.items() if text is not None} for message in messages]
    last = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
    if not turns:
        raise UserError(f"a conversation starts with its user; row {number} of {source} has an answer only; correct it")
    return tuple(turns), last


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in _MESSAGE)


def _text(messages: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["role"] != "system")


def warn_of_repeats(train: Sequence[Prompt], sets: Mapping[str, Sequence[Prompt]], use: str) -> None:
    """Warn of held-out questions (`sets`, by name) that are trained on, compared by text: ids differ between sets.

    A training text with several answers, as the same request to an environment in several states, is left out: the text
    does not identify its question.
    """
    answers: dict[str, set[str]] = {}
    for prompt in train:
        answers.setdefault(prompt.text, set()).add(prompt.reference)
    train_texts = {text for text, references in answers.items() if len(references) == 1}
    for name, prompts in sets.items():
        shared = [prompt.id for prompt in prompts if prompt.text in train_texts]
        warn_of_shared(shared, len(prompts), f"{use}{f' on {name}' if name else ''} questions", "accuracy")


def warn_of_shared(shared: Sequence[str], count: int, rows: str, metric: str) -> None:
    """Warn that these of `count` held-out rows are trained on."""
    if shared:
        log.warning(
            "%d of %d %s (the first is that of %s) are trained on, too: %s there is not that of new %s; take them out "
            "of one of the two",
            len(shared),
            count,
            rows,
            shared[0],
            metric,
            rows.rpartition(" ")[2],
        )


def check_sizes(total: int, held_out: int, batch_size: int, weighted: int | None = None) -> None:
    """Refuse a training set that leaves nothing to train on, or less than a batch.

    Args:
        total: prompts in all, or rows, of which some may yet prove too long.
        held_out: how many of them validation takes.
        batch_size: prompts a training batch.
        weighted: an epoch's training prompts, if these are others than those that are not held out.

    Raises:
        UserError: too few are left.
    """
    if held_out >= total:
        raise UserError(
            f"val_size must leave prompts to train on; got val_size={held_out} of {total} prompts; lower it."
        )
    left = total - held_out if weighted is None else weighted
    if left < batch_size:
        which = f" ({held_out} of {total} are held out for validation by val_size)" if held_out else ""
        prompts = "prompts" if left == total - held_out else "weighted prompts"
        raise UserError(
            f"batch_size must not exceed the training set; got batch_size={batch_size} for {left} {prompts}{which}; "
            f"lower {'one of them' if held_out else 'it'}."
        )


def sets_by_name(
    named: Mapping[str, Sequence[Row]],
    single: Callable[[], Sequence[Row] | None],
    owner: str,
    keep_name: bool = False,
) -> Mapping[str, Sequence[Row]] | None:
    """The held-out sets of a data module; the name of a single set is empty, as its metrics need none.

    Args:
        named: Sets by name.
        single: Returns the only set if `named` is empty, or None.
        owner: Class of the data module.
        keep_name: Whether a single set of `named` keeps its name.

    Raises:
        UserError: A name cannot be part of a metric's name, or a set has other things than rows.
    """
    if not isinstance(named, Mapping):
        raise UserError(f"{owner} must give its sets by name; got {named!r:.60}; return a dictionary of rows.")
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"sets are named by letters, digits, and . + - _; got {name!r}; rename it.")
    sets = {name: checked_rows(rows, f"{owner}'s set {name}") for name, rows in named.items()}
    if len(sets) > 1 or (sets and keep_name):
        return sets
    rows = next(iter(sets.values())) if sets else single()
    return None if rows is None else {"": checked_rows(rows, f"{owner}.{single.__name__}")}


def draw(prompts: Sequence[T], count: int, seed: int) -> list[T]:
    """Draw prompts by seed and id, so that another token limit or filter changes few of them."""
    drawn = sorted(prompts, key=lambda prompt: stream_seed(seed, "held out", prompt.id))[:count]
    return sorted(drawn, key=lambda prompt: (len(prompt.id), prompt.id))
