"""The embedded default: a synthetic task, a small tokenizer and a small policy that is mediocre at the task."""

from qerl_pl.toy.policy import ToyConfig, build_toy_policy
from qerl_pl.toy.task import ArithmeticTask

__all__ = ["ArithmeticTask", "ToyConfig", "build_toy_policy"]
