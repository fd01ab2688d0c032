"""Rollout engines: the protocol `RolloutEngine`, the readable `TransformersEngine`, the fast `VLLMEngine`."""

from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine
from qerl_pl.engines.vllm.engine import VLLMEngine

__all__ = ["EngineSpec", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
