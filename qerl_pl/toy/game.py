"""A game of several turns: guess a number by asking whether it is higher or lower."""

import random
from dataclasses import dataclass
from typing import Any

from qerl_pl.errors import require_at_least
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.task import NAMES, Problem, Split

HELD_OUT_NAMES = 2
"""Names that only validation's questions have."""


class GuessNumber:
    """The game as an environment: the number is the row's reference answer, and the reward 1 if it is found."""

    def reset(self, answer: str, **row: Any) -> None:
        """Begin a game.

        Args:
            answer: The number.
            row: Other columns.
        """
        self._number = int(answer)
        self.dialogue_done = False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether the number is higher, lower, or found.
        """
        if number == self._number:
            self.dialogue_done = True
            return "found"
        return "higher" if self._number > number else "lower"

    def get_reward(self) -> float:
        """1 if the number was found."""
        return float(self.dialogue_done)


@dataclass(frozen=True)
class GuessingGame:
    """Questions of the game, and demonstrations of good and bad play.

    Args:
        highest: Numbers are from 1 to this.
        turns: Guesses of a demonstration.
        seed: Seed of the numbers.
    """

    highest: int = 31
    turns: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(2, {"highest": self.highest})
        require_at_least(1, {"turns": self.turns})

    def problem(self, index: int, split: Split) -> Problem:
        """Question and number of game `index` of an unlimited split; the splits differ by names."""
        rng = random.Random(stream_seed(self.seed, "guessing", split, index))
        names = NAMES[:-HELD_OUT_NAMES] if split == "train" else NAMES[-HELD_OUT_NAMES:]
        question = f"{rng.choice(names)} has a number from 1 to {self.highest}."
        return Problem(question, (), rng.randint(1, self.highest))

    def play(self, number: int, careless: bool) -> list[tuple[str, str]]:
        """The turns of a demonstration and the answers to them; the last is right, or the game's last.

        Careful play halves the numbers that are left; careless play counts from 1.
        """
        game, low, high = GuessNumber(), 1, self.highest
        game.reset(str(number))
        turns: list[tuple[str, str]] = []
        while len(turns) < self.turns and not game.dialogue_done:
            guess = low if careless else (low + high) // 2
            answer = game.guess(guess)
            turns.append((f"guess {guess}", answer))
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        return turns
