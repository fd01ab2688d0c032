"""Generated data: sums of the toy policy, and games that an environment plays with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from qerl_pl.datamodules.conversations import ConversationDataModule
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.tables import Row
from qerl_pl.errors import require_at_least
from qerl_pl.toy.game import GuessingGame
from qerl_pl.toy.task import ArithmeticTask, Split, careful_demonstration


class _GeneratedDataModule(PromptDataModule):
    """Problems that are generated; those to test on follow those to validate on.

    Args:
        train_size: Problems of the training set.
        test_size: Problems of the test set, from the validation split.
        settings: Keyword arguments of `PromptDataModule`.
    """

    task: ArithmeticTask | GuessingGame

    def __init__(self, train_size: int = 4096, test_size: int = 512, **settings: Any) -> None:
        super().__init__(**settings)
        require_at_least(1, {"data.train_size": train_size, "data.test_size": test_size})
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


class ArithmeticDataModule(_GeneratedDataModule):
    """Word problems whose answer is a sum; training and validation have no sum in common.

    Args:
        task: Difficulty of the problems.
        settings: Keyword arguments of `PromptDataModule`, `train_size` and `test_size`. The seed is of the order alone.
    """

    def __init__(
        self,
        task: ArithmeticTask = ArithmeticTask(),  # noqa: B008 - frozen, and jsonargparse reads the default
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.task = task


class GuessingDataModule(_GeneratedDataModule):
    """Numbers to guess, for `qerl_pl.toy.game.GuessNumber`; the reference answer is the number.

    Args:
        game: Range of the numbers.
        system_prompt: The system message; null sends none.
        settings: Keyword arguments of `PromptDataModule`, `train_size` and `test_size`. The seed is of the order alone.
    """

    def __init__(
        self,
        game: GuessingGame = GuessingGame(),  # noqa: B008 - frozen, and jsonargparse reads the default
        system_prompt: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(system_prompt=system_prompt, **settings)
        self.task = game


class ArithmeticConversations(ConversationDataModule):
    """Word problems whose answer is a sum, with careful solutions; training and validation have no sum in common.

    Args:
        task: Difficulty of the problems.
        train_size: Problems of the training set.
        max_length: Limit of tokens; longer conversations are dropped, and counted in the log.
        settings: Keyword arguments of `ConversationDataModule`. The seed is of the order alone.
    """

    def __init__(
        self,
        task: ArithmeticTask = ArithmeticTask(),  # noqa: B008 - frozen, and jsonargparse reads the default
        train_size: int = 4096,
        max_length: int = 256,
        **settings: Any,
    ) -> None:
        super().__init__(path=[], split="train", subset=None, max_length=max_length, **settings)
        require_at_least(1, {"data.train_size": train_size})
        self.task = task
        self.train_size = train_size

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("train", self.train_size)

    def val_rows(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("validation", self.val_size)

    def _rows(self, split: Split, size: int) -> list[dict[str, str]]:
        problems = (self.task.problem(index, split) for index in range(size))
        return [{"question": problem.question, "answer": careful_demonstration(problem)} for problem in problems]
