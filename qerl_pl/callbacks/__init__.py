"""Callbacks; training needs `RolloutCallback` alone."""

from qerl_pl.callbacks.aqn import AdaptiveQuantizationNoise
from qerl_pl.callbacks.completions import CompletionLog
from qerl_pl.callbacks.evaluation import EvaluationReport
from qerl_pl.callbacks.monitor import Monitor
from qerl_pl.callbacks.resume import ResumeCheckpoint
from qerl_pl.callbacks.rollout import EvaluationConfig, RolloutCallback
from qerl_pl.callbacks.summary import RolloutLines, RunSummary
from qerl_pl.errors import Preempted
from qerl_pl.rollout.dialogue import EnvironmentConfig

__all__ = [
    "AdaptiveQuantizationNoise",
    "CompletionLog",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationReport",
    "Monitor",
    "Preempted",
    "ResumeCheckpoint",
    "RolloutCallback",
    "RolloutLines",
    "RunSummary",
]
