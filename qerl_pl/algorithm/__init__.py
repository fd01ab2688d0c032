"""Advantages, losses, objectives, and the noise schedule."""

from qerl_pl.algorithm.noise import NoiseSchedule, NormNoise
from qerl_pl.algorithm.objectives import (
    BNPO,
    CISPO,
    DAPO,
    DPPO,
    GRPO,
    GSPO,
    SAPO,
    DrGRPO,
    Objective,
    OnPolicyDistillation,
)
from qerl_pl.algorithm.off_policy import RolloutCorrection

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "DPPO",
    "GRPO",
    "GSPO",
    "SAPO",
    "DrGRPO",
    "NoiseSchedule",
    "NormNoise",
    "Objective",
    "OnPolicyDistillation",
    "RolloutCorrection",
]
