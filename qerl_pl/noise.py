"""Adaptive quantization noise (AQN): how large, and which numbers.

Source: QeRL (arXiv 2510.11696), section 3.3. Noise Z ~ N(0, sigma^2), one number a channel, is added to the RMSNorm
scales that feed the quantized projections, in the sampler only: RMSNorm(x) = (w + Z) * x / sqrt(mean(x^2) + eps).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.seeding import stream_seed

NOISY_NORM = re.compile(r"(^|\.)layers\.\d+\.(input_layernorm|post_attention_layernorm)$")
"""Modules that AQN perturbs: the norms before q, k, v and before gate, up. The final norm and the q/k norms of Qwen3
feed no quantized linear, so they get none."""


@dataclass(frozen=True)
class NormNoise:
    """Noise of one rollout; the same numbers wherever and whenever they are drawn."""

    sigma: float
    """Standard deviation, in units of the norm scale."""
    seed: int
    version: int
    """Policy version that the rollout samples from."""

    def draw(self, name: str, size: int) -> Tensor:
        """Noise of one norm.

        Args:
            name: The norm's module name in the base model, such as "model.layers.0.input_layernorm".
            size: Number of channels.

        Returns:
            float32 [size] on the CPU, a function of (seed, version, name, size) and, linearly, of sigma.
        """
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "aqn", self.version, name))
        return self.sigma * torch.randn(size, generator=generator, dtype=torch.float32)


def noisy_norm_names(names: Iterable[str]) -> list[str]:
    """Those of `names` (module names) that AQN perturbs, in their order."""
    return [name for name in names if NOISY_NORM.search(name)]
