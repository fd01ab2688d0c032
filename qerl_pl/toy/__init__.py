"""The embedded default: a synthetic task, a small tokenizer and a small policy that is mediocre at the task."""

from qerl_pl.toy.game import GuessingGame, GuessNumber
from qerl_pl.toy.policy import POSITIONS, ToyConfig, build_toy_policy
from qerl_pl.toy.task import ArithmeticTask

__all__ = ["POSITIONS", "ArithmeticTask", "GuessNumber", "GuessingGame", "ToyConfig", "build_toy_policy"]
