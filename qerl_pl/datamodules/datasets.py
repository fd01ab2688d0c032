"""Data modules of any table, and its presets for GSM8K (arXiv 2110.14168) and Big-Math."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.table_files import is_one_table
from qerl_pl.datamodules.tables import ANSWER_MARK, Row, TableConfig, table_source
from qerl_pl.errors import UserError

log = logging.getLogger("qerl_pl")

_LEVELS = 5
_RATE = "llama8b_solve_rate"


class TableDataModule(PromptDataModule):
    """Any table with a column of prompts, from the hub, a local file or a list of dictionaries.

    A prompt is text or a list of messages. The columns of a row reach the rewards.

    Args:
        path: Hub name; a JSONL, CSV or parquet file; a folder with one such file a split; a list of rows; or several
            tables by name, each with its own options.
        split: Split to train on; a single file has none. Several tables may each name another.
        val_split: Split to validate on, such as validation; null splits prompts off the training split.
        test_split: Split to test on; null tests on the validation prompts. Like `val_split` only of a folder or a hub
            data set.
        subset: Configuration of a hub data set or its folder; files have none. Only of a single table.
        question: Column of the prompt; null takes prompt, messages, question or problem. Only of a single table.
        answer: Column of the reference answer, see TableConfig; null takes answer or solution if there is one. Only of
            a single table.
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        settings: Keyword arguments of `PromptDataModule` and `ResumableDataModule`. Of a table that `val_size` would
            leave too few prompts to train on, a fifth is held out.
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
        return self._fitting_val_size(rows)

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
        settings: Keyword arguments of `TableDataModule`.
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

    The solve rate is the fraction of correct answers of Llama-3.1-8B: level 1 is [0.8, 1], 2 is [0.6, 0.8), and so on
    to 5, which is [0, 0.2).
    """
    if row.get("level") is not None:
        digits = re.search(r"\d+", str(row["level"]))
        return int(digits.group()) if digits else None
    try:
        rate = float(row.get(_RATE, math.nan))
    except (TypeError, ValueError):
        return None
    return _LEVELS - min(_LEVELS - 1, math.floor(rate * _LEVELS)) if 0 <= rate <= 1 else None


class BigMathDataModule(TableDataModule):
    """Big-Math: columns `problem` and `answer`, and `level` or `llama8b_solve_rate` to choose rows by difficulty.

    Training rows with an empty answer are dropped. An answer is the reference as it is written.

    Args:
        path: Hub name, a folder with train.jsonl or train.parquet, or a single file.
        levels: Difficulties to keep, 1 (easy) to 5: the column level, or without it fifths of the solve rate (5 is
            below 0.2); rows without either are dropped. null keeps all.
        settings: Keyword arguments of `TableDataModule`.
    """

    val_count = PromptDataModule.val_count

    def __init__(
        self,
        path: str = "SynthLabsAI/Big-Math-RL-Verified",
        levels: Sequence[int] | None = None,
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
        self.levels = levels

    def rows_of(self, split: str) -> list[Row]:
        """The rows with the column of the answer as their reference."""
        return [replace(row, reference=str(row.columns["answer"])) for row in super().rows_of(split)]

    def select(self, table: Sequence[Mapping[str, Any]]) -> Iterable[int]:
        """Indices of the rows of the levels that have an answer: without one no completion is correct."""
        answered = [index for index, row in enumerate(table) if str(row["answer"]).strip()]
        kept = [index for index in answered if self.levels is None or level_of(table[index]) in self.levels]
        levels = "" if self.levels is None else f" of data.levels {self.levels}, by the column level or {_RATE}"
        if not kept:
            raise UserError(
                f"training needs rows with an answer{levels}; none of {len(table)} rows of {self.path} is one, the "
                f"first has {', '.join(table[0])}; correct data.path, or set data.levels to null"
            )
        if len(answered) < len(table):
            empty = len(table) - len(answered)
            log.warning("%d of %d rows of %s have an empty answer: they are left out", empty, len(table), self.path)
        log.info("%d of %d rows of %s have an answer and are taken%s", len(kept), len(table), self.path, levels)
        return kept
