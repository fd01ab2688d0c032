"""Data of games, which an environment plays with the policy."""

from collections.abc import Sequence
from typing import Any

from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.tables import Row, TableConfig
from qerl_pl.errors import require_at_least
from qerl_pl.toy.game import GuessingGame
from qerl_pl.toy.task import Split


class GuessingDataModule(PromptDataModule):
    """Numbers to guess, for `qerl_pl.toy.GuessNumber`; the reference answer is the number.

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
        require_at_least(1, {"data.train_size": train_size, "data.test_size": test_size})
        self.game = game
        self.train_size = train_size
        self.test_size = test_size

    def train_rows(self) -> Sequence[Row]:
        return self._rows("train", range(self.train_size))

    def val_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size))

    def test_rows(self) -> Sequence[Row]:
        return self._rows("validation", range(self.val_size, self.val_size + self.test_size))

    def _rows(self, split: Split, indices: range) -> list[Row]:
        problems = ((index, self.game.problem(index, split)) for index in indices)
        return [Row(f"{split}-{index}", question, str(number)) for index, (question, number) in problems]
