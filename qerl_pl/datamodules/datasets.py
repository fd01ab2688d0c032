"""Data modules of any table, and its presets for GSM8K (arXiv 2110.14168) and Big-Math."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.table_files import is_one_table, split_files
from qerl_pl.datamodules.tables import ANSWER_MARK, Row, TableConfig, draw, table_source
from qerl_pl.errors import UserError
from qerl_pl.types import Prompt

log = logging.getLogger("qerl_pl")

_LEVELS = 5
_RATE = "llama8b_solve_rate"


class TableDataModule(PromptDataModule):
    """Any table with a column of prompts, from the hub, a local file or a list of dictionaries.

    A prompt is text or a list of messages. The columns of a row reach the rewards.

    Args:
        path: Hub name; a JSONL, CSV or parquet file; a folder with one such file a split; a list of rows; or several
            tables by name, each with its own options and weight.
        split: Split to train on; a single file has none. Several tables may each name another.
        val_split: Split to validate on, such as validation; null splits prompts off the training split.
        test_split: Split to test on; null tests on the validation prompts. Like `val_split` only of a folder or a hub
            data set.
        subset: Configuration of a hub data set or its folder; files have none. Only of a single table.
        question: Column of the prompt; null takes prompt, messages, question or problem. Only of a single table.
        answer: Column of the reference answer, see TableConfig; null takes answer or solution if there is one. Only of
            a single table.
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        settings: Of `PromptDataModule` and `ResumableDataModule`. Of a table that `val_size` would leave too few
            prompts to train on, a fifth is held out.
    """

    def __init__(
        self,
        path: str | list[dict[str, Any]] | dict[str, TableConfig],
        split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        subset: str | None = None,
        question: str | None = None,
        answer: str | None = None,
        max_prompt_tokens: int = 1024,
        **settings: Any,
    ) -> None:
        super().__init__(max_prompt_tokens=max_prompt_tokens, **settings)
        is_several = isinstance(path, Mapping) and all(isinstance(table, TableConfig) for table in path.values())
        self.path = path if is_several else table_source(path)
        self.split = split
        self.val_split = val_split
        self.test_split = test_split
        self.subset = subset
        self.question = question
        self.answer = answer

    def train_rows(self) -> Sequence[Row]:
        self._check_options()
        if isinstance(self.path, Mapping):
            tables = self.path.items()
            return [row for name, table in tables for row in table.rows(name, self.split, f"data.path.{name}.path")]
        return self.rows_of(self.split)

    def val_rows(self) -> Sequence[Row] | None:
        if self.val_split is None:
            return None
        names, trained = (set(re.findall(r"[a-zA-Z]\w*", split)) for split in (self.val_split, self.split))
        # On the hub a slice, such as train[:5%], or a sum of splits may have training rows, too.
        if self._has_one_split or ((names & (trained | {"all"})) and "[" not in self.split):
            raise UserError(
                f"val_split must be another split than is trained on; got val_split={self.val_split} of {self._name}; "
                "name a folder with both splits, or set val_split to null."
            )
        return self.rows_of(self.val_split)

    def test_rows(self) -> Sequence[Row] | None:
        self._check_options()
        return None if self.test_split is None else self.rows_of(self.test_split)

    def rows_of(self, split: str) -> list[Row]:
        """Rows of a split of the single table."""
        table = TableConfig(cast(Any, self.path), split, self.subset, self.question, self.answer)
        return table.rows(split, select=self.select)

    def select(self, table: Sequence[Mapping[str, Any]]) -> Iterable[int]:
        """Indices of the rows to take of the single table: all."""
        return range(len(table))

    def val_count(self, rows: int) -> int:
        """`val_size`, or a fifth of the rows, if fewer, where that leaves less than half of them or than a batch."""
        if self.val_size <= rows // 5 or rows - self.val_size >= max(self.batch_size, rows / 2):
            return self.val_size
        log.info("%d of %d rows are held out for validation: val_size=%d is too many", rows // 5, rows, self.val_size)
        return rows // 5

    def weighted(self, prompts: list[Prompt]) -> list[Prompt]:
        """Prompts of each table as often as its weight says; the n-th time their ids end in `#n`."""
        if not isinstance(self.path, Mapping):
            return prompts
        taken = []
        for name, table in self.path.items():
            own = [prompt for prompt in prompts if prompt.id.rpartition("-")[0] == name]
            count = round(table.weight * len(own))
            if not count:
                log.warning(
                    f"no prompt of table {name} is trained on: {len(own)} have at most max_prompt_tokens="
                    f"{self.max_prompt_tokens}, the weight is {table.weight:g}; raise one of these, or leave the table "
                    "out"
                )
            ids = [prompt.id for prompt in own]
            for repeat, start in enumerate(range(0, count, len(own) or 1), start=1):
                ends = f"#{repeat}" if repeat > 1 else ""
                taken += [replace(own[index], id=ids[index] + ends) for index in draw(ids, count - start, self.seed)]
        return taken

    def weighted_count(self, rows: Sequence[Row], held_out: int) -> int:
        """As many as without held-out rows, which are drawn from rendered prompts."""
        if not isinstance(self.path, Mapping):
            return super().weighted_count(rows, held_out)
        own = Counter(row.id.rpartition("-")[0] for row in rows)
        return sum(round(table.weight * own[name]) for name, table in self.path.items())

    def _check_options(self) -> None:
        """Refuse options that the path cannot have."""
        if isinstance(self.path, Mapping):
            given = {"subset": self.subset, "question": self.question, "answer": self.answer}
            if names := [name for name, value in given.items() if value is not None]:
                raise UserError(
                    f"each of several tables has its own subset, question and answer; got {', '.join(names)} beside "
                    f"the tables {', '.join(self.path)}; set {'it' if len(names) == 1 else 'them'} in the tables"
                )
        if self.test_split is not None and self._has_one_split:
            raise UserError(
                f"test_split must be a split of a folder or a hub data set; got test_split={self.test_split} of "
                f"{self._name}; name a folder with both splits, or set test_split to null and name test tables in sets"
            )

    @property
    def _has_one_split(self) -> bool:
        return not isinstance(self.path, str) or is_one_table(self.path)

    @property
    def _name(self) -> str:
        return self.path if isinstance(self.path, str) else "rows without splits"


class GSM8KDataModule(TableDataModule):
    """GSM8K: columns `question` and `answer`, whose number after #### is the reference.

    Args:
        path: Hub name, a folder with train.jsonl and test.jsonl (or parquet), or a single file to train on.
        subset: Configuration of a hub data set or its folder; files have none.
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        settings: Of `TableDataModule`.
    """

    val_count = PromptDataModule.val_count

    def __init__(
        self,
        path: str = "openai/gsm8k",
        subset: str | None = "main",
        max_prompt_tokens: int = 256,
        **settings: Any,
    ) -> None:
        super().__init__(
            path,
            split="train",
            test_split="test",
            subset=subset,
            question="question",
            answer="answer",
            max_prompt_tokens=max_prompt_tokens,
            **settings,
        )
        if self._has_one_split:
            self.test_split = None

    def rows_of(self, split: str) -> list[Row]:
        rows = super().rows_of(split)
        for number, row in enumerate(rows, start=1):
            answer = str(row.columns["answer"])
            if ANSWER_MARK not in answer:
                raise UserError(
                    f"a GSM8K answer ends in {ANSWER_MARK} and a number; row {number} of {self.path} ({split}) ends in "
                    f"{answer[-40:]!r}; correct it, or read plain answers by `--data TableDataModule`."
                )
        return rows


def level_of(row: Mapping[str, Any]) -> int | None:
    """Difficulty of a row, 1 to 5: its column `level` (3 or "Level 3"), else by its solve rate; None without both.

    By solve rate, level 1 is [0.8, 1], 2 is [0.6, 0.8), and so on to 5, which is [0, 0.2).
    """
    if row.get("level") is not None:
        digits = re.search(r"\d+", str(row["level"]))
        return int(digits.group()) if digits else None
    rate = solve_rate_of(row)
    return None if math.isnan(rate) else _LEVELS - min(_LEVELS - 1, math.floor(rate * _LEVELS))


def solve_rate_of(row: Mapping[str, Any]) -> float:
    """Fraction of correct answers of Llama-3.1-8B, 0 to 1; NaN if the row has no such number."""
    try:
        rate = float(row.get(_RATE, math.nan))
    except (TypeError, ValueError):
        return math.nan
    return rate if 0 <= rate <= 1 else math.nan


_FILTERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Any], bool]]] = {
    "min_solve_rate": ((_RATE,), lambda row, least: solve_rate_of(row) >= least),
    "max_solve_rate": ((_RATE,), lambda row, most: solve_rate_of(row) <= most),
    "levels": (("level", _RATE), lambda row, levels: level_of(row) in levels),
    "sources": (("source",), lambda row, sources: row.get("source") in sources),
}
"""Columns that a filter needs, and whether it keeps a row, by argument."""


class BigMathDataModule(TableDataModule):
    """Big-Math: columns `problem` and `answer`; `source`, `llama8b_solve_rate` and `level` for the filters.

    A filter also drops rows without its column. Training rows with an empty answer are dropped. An answer is the
    reference as it is written.

    Args:
        path: Hub name, a folder with train.jsonl or train.parquet, or a single file.
        min_solve_rate: Least fraction of Llama-3.1-8B's answers that were correct, 0 to 1; null for no bound.
        max_solve_rate: Largest such fraction; null for no bound.
        levels: Difficulties to keep, 1 (easy) to 5: the column level, or without it fifths of the solve rate (5 is
            below 0.2); null keeps all.
        sources: Values of the column source to keep; null keeps all.
        val_path: Table to validate on, with columns problem and answer (a file, or a hub name with a split test, such
            as HuggingFaceH4/MATH-500); null splits val_size prompts off the training rows.
        settings: Of `TableDataModule`.
    """

    val_count = PromptDataModule.val_count

    def __init__(
        self,
        path: str = "SynthLabsAI/Big-Math-RL-Verified",
        min_solve_rate: float | None = None,
        max_solve_rate: float | None = None,
        levels: Sequence[int] | None = None,
        sources: Sequence[str] | None = None,
        val_path: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            path,
            split="train",
            val_split=None,
            test_split=None,
            subset=None,
            question="problem",
            answer="answer",
            **settings,
        )
        filters = {
            "min_solve_rate": min_solve_rate,
            "max_solve_rate": max_solve_rate,
            "levels": levels,
            "sources": sources,
        }
        self.filters: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        self.val_path = None if val_path is None else table_source(val_path, "data.val_path")

    def rows_of(self, split: str) -> list[Row]:
        return _as_written(super().rows_of(split))

    def val_rows(self) -> Sequence[Row] | None:
        if self.val_path is None:
            return None
        val_files = _files(self.val_path, "test", "data.val_path")
        if val_files & _files(self.path, "train", "data.path"):
            raise UserError(
                f"val_path must be another table than is trained on; got val_path={self.val_path} and "
                f"path={self.path}; name another, or set it to null to hold prompts out."
            )
        table = TableConfig(self.val_path, "test", question="problem", answer="answer")
        return _as_written(table.rows("validation", key="data.val_path"))

    def select(self, table: Sequence[Mapping[str, Any]]) -> Iterable[int]:
        """Indices of the rows that pass the filters and have an answer: without one no completion is correct."""
        passing = list(range(len(table)))
        for name, value in self.filters.items():
            columns, keeps = _FILTERS[name]
            if not any(row.get(column) is not None for row in table for column in columns):
                raise UserError(
                    f"{name} filters by the column {' or '.join(columns)}; {self.path} has {', '.join(table[0])}; "
                    "unset the filter."
                )
            passing = [index for index in passing if keeps(table[index], value)]
        if not passing:
            raise UserError(
                f"the filters must leave rows; none of {len(table)} of {self.path} passes {self.filters}; widen them."
            )
        log.info("%d of %d rows of %s pass %s", len(passing), len(table), self.path, self.filters or "(no filter)")
        empty = [index for index in passing if not str(table[index]["answer"]).strip()]
        if len(empty) == len(passing):
            raise UserError(
                f"an answer must not be empty; none of {len(empty)} rows of {self.path} has one; correct it, or "
                "data.path."
            )
        if empty:
            log.warning(
                f"{len(empty)} of {len(passing)} rows of {self.path} have an empty answer, row {empty[0] + 1} the "
                "first: they are left out"
            )
        return sorted({*passing} - {*empty})


def _files(path: Any, split: str, key: str) -> set[Path]:
    """Local files of a split; none for rows. Arguments as of `split_files`."""
    return {file.resolve() for file in split_files(path, split, key)} if isinstance(path, str) else set()


def _as_written(rows: Sequence[Row]) -> list[Row]:
    """The rows with the column of the answer as their reference."""
    return [replace(row, reference=str(row.columns["answer"])) for row in rows]
