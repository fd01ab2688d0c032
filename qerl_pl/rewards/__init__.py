"""Rewards: they score completions, each with a weight."""

from qerl_pl.rewards.answers import Format, GSM8KAnswer, OverlongPenalty
from qerl_pl.rewards.base import (
    AnswerReward,
    EnvironmentReward,
    NormalizingReward,
    ReferenceReward,
    Reward,
    RewardSample,
    ScoredBatch,
    accuracy_reward,
    check_references,
    check_rewards,
    extract_answers,
    normalize_answers,
    score,
    with_environment_reward,
)
from qerl_pl.rewards.functions import RewardFunction, TrainerState, as_rewards, functions_among
from qerl_pl.rewards.judge import JudgeReward
from qerl_pl.rewards.math_answer import MathAnswer

__all__ = [
    "AnswerReward",
    "EnvironmentReward",
    "Format",
    "GSM8KAnswer",
    "JudgeReward",
    "MathAnswer",
    "NormalizingReward",
    "OverlongPenalty",
    "ReferenceReward",
    "Reward",
    "RewardFunction",
    "RewardSample",
    "ScoredBatch",
    "TrainerState",
    "accuracy_reward",
    "as_rewards",
    "check_references",
    "check_rewards",
    "extract_answers",
    "functions_among",
    "normalize_answers",
    "score",
    "with_environment_reward",
]
