"""Samplers: `RolloutEngine` is the seam, `TransformersEngine` the readable oracle, `VLLMEngine` the fast one."""

from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine
from qerl_pl.engines.vllm.engine import VLLMEngine

__all__ = ["EngineSpec", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
