"""The vLLM engine: all code that touches vLLM is in this package."""

from qerl_pl.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
