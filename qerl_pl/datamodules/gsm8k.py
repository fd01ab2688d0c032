"""Grade-school word problems (GSM8K, arXiv 2110.14168)."""

import re
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.datamodules.base import PromptDataModule
from qerl_pl.datamodules.rows import Row, read_table
from qerl_pl.datamodules.sets import TableConfig
from qerl_pl.errors import UserError
from qerl_pl.prompting import SYSTEM_PROMPT

_MARK = "####"


class GSM8KDataModule(PromptDataModule):
    """GSM8K: columns `question` and `answer`, whose number after #### is the reference.

    Args:
        path: Hub name, or a folder with train.jsonl and test.jsonl (or parquet), or one such file, which is
            trained on.
        subset: Configuration of the hub's data set; local files have none.
        val_split: Split to take val_size prompts to validate on from, such as test; null holds them out of the training
            split.
        batch_size: Prompts a training batch, over all devices.
        val_size: Prompts to validate on; 0 for none.
        val_batch_size: Prompts a validation batch; null takes batch_size.
        max_prompt_tokens: Longer prompts, chat template included, are dropped.
        system_prompt: The system message; null sends none.
        seed: Seed of the split and of the order.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
        sets: Tables to validate and test on, by name, in place of its own; see PromptDataModule.
    """

    def __init__(
        self,
        path: str = "openai/gsm8k",
        subset: str | None = "main",
        val_split: str | None = None,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        max_prompt_tokens: int = 256,
        system_prompt: str | None = SYSTEM_PROMPT,
        seed: int = 0,
        tokenizer: str | None = None,
        sets: dict[str, TableConfig] | None = None,
    ) -> None:
        super().__init__(batch_size, val_size, val_batch_size, max_prompt_tokens, system_prompt, seed, tokenizer, sets)
        self.path = path
        self.subset = subset
        self.val_split = val_split

    def train_rows(self) -> Sequence[Row]:
        return self._rows("train")

    def val_rows(self) -> Sequence[Row] | None:
        if self.val_split is None:
            return None
        # A slice, such as train[:5%], or a sum of splits is the hub's way to name rows that are trained on, too.
        if {"train", "all"} & set(re.findall(r"\w+", self.val_split)) or self._is_file:
            raise UserError(
                f"val_split must be another split than is trained on; got val_split={self.val_split} of {self.path}; "
                "name a folder with both splits, or set val_split to null."
            )
        return self._rows(self.val_split)

    def test_rows(self) -> Sequence[Row] | None:
        return None if self._is_file else self._rows("test")

    @property
    def _is_file(self) -> bool:
        return Path(self.path).expanduser().is_file()

    def _rows(self, split: str) -> list[Row]:
        table = read_table(self.path, split, ("question", "answer"), self.subset)
        rows = []
        for index, row in enumerate(table):
            answer, mark, number = str(row["answer"]).rpartition(_MARK)
            if not mark or not number.strip():
                raise UserError(
                    f"a GSM8K answer ends in {_MARK} and a number; row {index + 1} of {self.path} ({split}) ends in "
                    f"{str(row['answer'])[-40:]!r}; correct it."
                )
            rows.append(Row(f"{split}-{index}", str(row["question"]), number.replace(",", "").strip()))
        return rows
