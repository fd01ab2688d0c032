"""Synthetic word problems, made on the fly."""

from collections.abc import Sequence

from qerl_pl.datamodules.base import PromptDataModule
from qerl_pl.datamodules.rows import Row
from qerl_pl.datamodules.sets import TableConfig
from qerl_pl.errors import require_at_least
from qerl_pl.prompting import SYSTEM_PROMPT
from qerl_pl.toy.task import ArithmeticTask, Split


class ArithmeticDataModule(PromptDataModule):
    """Word problems whose answer is a sum; no validation sum is ever trained on.

    Args:
        task: How hard the problems are.
        train_size: Problems of the training set.
        test_size: Problems of the test set, other draws of the kind validated on.
        batch_size: Prompts a training batch, over all devices.
        val_size: Prompts to validate on; 0 for none.
        val_batch_size: Prompts a validation batch; null takes batch_size.
        max_prompt_tokens: Longer prompts, chat template included, are dropped.
        system_prompt: The system message; null sends none.
        seed: Seed of the order; the problems have their own, in the task.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
        sets: Tables to validate and test on, by name, in place of its own; see PromptDataModule.
    """

    def __init__(
        self,
        task: ArithmeticTask = ArithmeticTask(),  # noqa: B008 - frozen, and jsonargparse reads the default
        train_size: int = 4096,
        test_size: int = 512,
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
        require_at_least(1, {"data.train_size": train_size, "data.test_size": test_size})
        self.task = task
        self.train_size = train_size
        self.test_size = test_size

    def train_rows(self) -> Sequence[Row]:
        return self._rows("train", range(self.train_size))

    def val_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size))

    def test_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size, self.val_size + self.test_size))

    def _rows(self, split: Split, indices: range) -> list[Row]:
        problems = ((index, self.task.problem(index, split)) for index in indices)
        return [Row(f"{split}-{index}", problem.question, str(problem.answer)) for index, problem in problems]
