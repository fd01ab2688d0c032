"""Generated data: sums of the toy policy, and games that an environment plays with it."""

from collections.abc import Sequence
from typing import Any

from qerl_pl.chat_template import SYSTEM_PROMPT
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.tables import Row, TableConfig
from qerl_pl.errors import require_at_least
from qerl_pl.toy.game import GuessingGame
from qerl_pl.toy.task import ArithmeticTask, Split


class _GeneratedDataModule(PromptDataModule):
    """Problems that are generated; those to test on follow those to validate on.

    Args:
        train_size: Problems of the training set.
        test_size: Problems of the test set, from the validation split.
        settings: Of `PromptDataModule`.
    """

    def __init__(self, train_size: int, test_size: int, *settings: Any) -> None:
        super().__init__(*settings)
        require_at_least(1, {"data.train_size": train_size, "data.test_size": test_size})
        self.train_size = train_size
        self.test_size = test_size

    def problem(self, index: int, split: Split) -> tuple[str, str]:
        """Question and reference answer of a problem."""
        raise NotImplementedError

    def train_rows(self) -> Sequence[Row]:
        return self._rows("train", range(self.train_size))

    def val_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size))

    def test_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size, self.val_size + self.test_size))

    def _rows(self, split: Split, indices: range) -> list[Row]:
        problems = ((index, self.problem(index, split)) for index in indices)
        return [Row(f"{split}-{index}", question, answer) for index, (question, answer) in problems]


class ArithmeticDataModule(_GeneratedDataModule):
    """Word problems whose answer is a sum; training and validation have no sum in common.

    Args:
        task: Difficulty of the problems.
        train_size: Problems of the training set.
        test_size: Problems of the test set, from the validation split.
        batch_size: Prompts a training batch, over all devices.
        val_size: Prompts to validate on; 0 for none.
        val_batch_size: Prompts a validation batch; null takes batch_size.
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        system_prompt: The system message; null sends none.
        seed: Seed of the order; null takes the run's. The problems have their own, in the task.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
        sets: Tables to validate and test on, by name, in place of its own; see PromptDataModule.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking`.
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
        seed: int | None = None,
        tokenizer: str | None = None,
        sets: dict[str, TableConfig] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            train_size,
            test_size,
            batch_size,
            val_size,
            val_batch_size,
            max_prompt_tokens,
            system_prompt,
            seed,
            tokenizer,
            sets,
            chat_template_kwargs,
        )
        self.task = task

    def problem(self, index: int, split: Split) -> tuple[str, str]:
        problem = self.task.problem(index, split)
        return problem.question, str(problem.answer)


class GuessingDataModule(_GeneratedDataModule):
    """Numbers to guess, for `qerl_pl.toy.game.GuessNumber`; the reference answer is the number.

    Args:
        game: Range of the numbers.
        train_size: Games of the training set.
        test_size: Games of the test set.
        batch_size: Prompts a training batch, over all devices.
        val_size: Prompts to validate on; 0 for none.
        val_batch_size: Prompts a validation batch; null takes batch_size.
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        system_prompt: The system message; null sends none.
        seed: Seed of the order; null takes the run's. The numbers have their own, in the game.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
        sets: Tables to validate and test on, by name, in place of its own; see PromptDataModule.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking`.
    """

    def __init__(
        self,
        game: GuessingGame = GuessingGame(),  # noqa: B008 - frozen, and jsonargparse reads the default
        train_size: int = 4096,
        test_size: int = 512,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        max_prompt_tokens: int = 256,
        system_prompt: str | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
        sets: dict[str, TableConfig] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            train_size,
            test_size,
            batch_size,
            val_size,
            val_batch_size,
            max_prompt_tokens,
            system_prompt,
            seed,
            tokenizer,
            sets,
            chat_template_kwargs,
        )
        self.game = game

    def problem(self, index: int, split: Split) -> tuple[str, str]:
        question, number = self.game.problem(index, split)
        return question, str(number)
