"""What scores a completion: a list of `Reward` objects, each with a weight."""

from qerl_pl.rewards.base import Reward, RewardSample, ScoredBatch, check_rewards, score
from qerl_pl.rewards.gsm8k_answer import GSM8KAnswer
from qerl_pl.rewards.math_answer import MathAnswer
from qerl_pl.rewards.shape import Format, OverlongPenalty

__all__ = [
    "Format",
    "GSM8KAnswer",
    "MathAnswer",
    "OverlongPenalty",
    "Reward",
    "RewardSample",
    "ScoredBatch",
    "check_rewards",
    "score",
]
