"""Samplers: `RolloutEngine` is the seam, `TransformersEngine` the readable oracle."""

from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine

__all__ = ["EngineSpec", "RolloutEngine", "TransformersEngine"]
