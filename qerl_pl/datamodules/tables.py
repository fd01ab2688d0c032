"""Tables of prompts and reference answers: from the hub, local files or memory; and sets of rows by name."""

import ast
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from qerl_pl.datamodules.table_files import SUFFIXES, first_line, read_file, read_hub, split_files
from qerl_pl.errors import UserError, require_at_least

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


def table_source(path: Any) -> Any:
    """The text of a path, or the list of whatever yields rows; UserError for a mapping or anything else."""
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    if isinstance(path, Mapping) or not isinstance(path, Iterable):
        splits = f" of {', '.join(map(str, path))}" if isinstance(path, Mapping) else ""
        raise UserError(
            f"data.path must be a file, a folder, a hub name or rows; got a {type(path).__name__}{splits}; give one "
            "split, data['train'], say"
        )
    return list(path)


def read_table(
    path: str | Sequence[Mapping[str, Any]],
    split: str,
    subset: str | None = None,
    key: str = "data.path",
) -> list[Mapping[str, Any]]:
    """All rows of a table, in its order.

    Args:
        path: A file or pattern of files, read whatever the split; a folder with files per split; a hub data set; or
            the rows themselves.
        split: Such as "train".
        subset: Configuration of the hub data set.
        key: Where the user wrote the path, for errors.

    Raises:
        UserError: The table is missing, unreadable (with file and line of malformed JSON) or empty.
    """
    source = "the list of rows"
    if not isinstance(path, str):
        rows: Sequence[Any] = path
    elif files := split_files(path, split, subset, key):
        rows = [row for file in files for row in read_file(file)]
        source = str(files[0] if len(files) == 1 else path)
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith(SUFFIXES):
        rows, source = read_hub(path, split, subset, key), f"{path} ({split})"
    else:
        raise UserError(f"data must be a local file or folder or a hub name; no such file: {path}; correct {key}.")
    if not rows:
        raise UserError(f"data must have rows; {source} has none; correct {key}.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            of = f" of {source}" if isinstance(path, str) else ""
            raise UserError(f"rows are dictionaries of columns; row {number}{of} is {row!r:.60}; write one")
    return [_with_lists(row) for row in rows]


def _with_lists(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with lists, as of a file, for arrays, as which pandas holds messages, and tuples."""
    lists = {
        name: list(value)
        for name, value in row.items()
        if isinstance(value, tuple) or (isinstance(value, numpy.ndarray) and value.ndim)
    }
    return {**row, **lists} if lists else row


def _check_columns(rows: Sequence[Mapping[str, Any]], source: str, columns: Collection[str]) -> None:
    """Refuse rows without text or a number in one of the columns."""
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
    """

    path: str | list[dict[str, Any]]
    split: str | None = None
    subset: str | None = None
    question: str | None = None
    answer: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", table_source(self.path))
        require_at_least(1, {"a set's limit": self.limit})

    def rows(
        self,
        name: str,
        split: str = "test",
        key: str = "data.path",
        select: Callable[[Sequence[Mapping[str, Any]]], Iterable[int]] | None = None,
    ) -> list[Row]:
        """Rows of the table, with ids after the set's `name`; their columns are those of the table.

        Args:
            name: Name of the set.
            split: Split to read unless the table names its own.
            key: Where the user wrote the path, for errors.
            select: Gives the indices of the rows to take; None takes all.

        Raises:
            UserError: The table cannot be read, lacks a column, or a prompt or an answer is empty.
        """
        table = read_table(self.path, self.split or split, self.subset, key)[: self.limit]
        source = self.path if isinstance(self.path, str) else "the list of rows"
        question = self.question or _first_column(table, _PROMPTS)
        answer = self.answer or _first_column(table, _ANSWERS)
        if question is None:
            raise UserError(
                f"a prompt is in a column {', '.join(_PROMPTS)}; {source} has {', '.join(table[0])}; "
                "name its column by `question`"
            )
        for index, row in enumerate(table):
            messages = messages_of_text(row.get(question), f"{question} of row {index + 1} of {source}")
            table[index] = row if messages is row.get(question) else {**row, question: messages}
        conversations = isinstance(table[0].get(question), list)
        columns = [column for column in (None if conversations else question, answer) if column is not None]
        _check_columns(table, source, columns)
        rows = []
        for index in range(len(table)) if select is None else select(table):
            row, place = table[index], f"row {index + 1} of {source}"
            turns, last = _conversation(row.get(question), place) if conversations else (None, "")
            said = [turn["content"] for turn in turns or () if turn["role"] != "system"]
            text = "\n\n".join(said) if turns else str(row[question])
            asked = turns[-1]["content"] if turns and turns[-1]["role"] == "user" else text
            if not asked.strip():
                raise UserError(f"a prompt must not be empty; {place} has none; fill it in, or remove the row")
            reference = last if answer is None else _reference(str(row[answer]))
            if answer is not None and not reference:
                raise UserError(f"an answer must not be empty; {place} has none; correct it.")
            rows.append(Row(f"{name}-{index}", text, reference, turns, row))
        return rows


def messages_of_text(value: Any, place: str) -> Any:
    """A list of messages of its JSON, or of what Python prints, as in CSV files; any other value as it is.

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


def _reference(answer: str) -> str:
    """The text after the last ####, or all of it."""
    _, mark, rest = answer.rpartition(ANSWER_MARK)
    return without_thousands(rest.strip()) if mark else rest.strip()


def checked_messages(value: Any, place: str, text_only: bool = False) -> list[Mapping[str, Any]]:
    """A list of messages; UserError for anything else, and for contents that are no text where they must be."""
    messages, kind = value if isinstance(value, list) else [], str if text_only else object
    are_mappings = all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages)
    if not messages or not are_mappings or not all("content" in m and isinstance(m["content"], kind) for m in messages):
        text = ", which are text" if text_only else ""
        raise UserError(
            f"a conversation is a list of messages with a role and a content{text}; {place} has {value!r:.80}; "
            "correct it"
        )
    return messages


def _conversation(value: Any, place: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Messages up to the last that is not the assistant's, and the assistant's answer to it, or ""."""
    messages = checked_messages(value, place, text_only=True)
    turns = [{key: text for key, text in message.items() if text is not None} for message in messages]
    last = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
    if not turns:
        raise UserError(f"a conversation starts with its user; {place} has an answer only; correct it")
    return tuple(turns), last


def warn_of_repeats(
    train: Iterable[tuple[Any, Any]], held_out: Collection[tuple[str, Any, Any]], rows: str, metric: str
) -> None:
    """Warn of held-out rows that are trained on, compared by text: ids differ between sets.

    A training prompt with several answers, as the same request to an environment in several states, does not identify
    a row; its answer does.

    Args:
        train: Prompt and answer of each training row.
        held_out: Id, prompt and answer of each row; the answer is None where it does not identify the row either.
        rows: What the held-out rows are called.
        metric: What is measured of them.
    """
    answers: dict[Any, set[Any]] = {}
    for prompt, answer in train:
        answers.setdefault(prompt, set()).add(answer)
    shared = [id for id, prompt, answer in held_out if len(known := answers.get(prompt, set())) == 1 or answer in known]
    if shared:
        log.warning(
            f"{len(shared)} of {len(held_out)} {rows} (the first is that of {shared[0]}) are trained on, too: {metric} "
            f"there is not that of new {rows.rpartition(' ')[2]}; take them out of one of the two"
        )
