"""Adaptive quantization noise (AQN): how large, and which numbers.

Source: QeRL (arXiv 2510.11696), section 3.3. Noise Z ~ N(0, sigma^2), one number a channel, is added to the RMSNorm
scales that feed the quantized projections, in the sampler only: RMSNorm(x) = (w + Z) * x / sqrt(mean(x^2) + eps).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from qerl_pl.errors import UserError, require_one_of
from qerl_pl.persistence.random_state import stream_seed

Decay = Literal["exponential", "linear", "cosine", "logarithmic"]


@dataclass(frozen=True)
class NormNoise:
    """Noise of one rollout; the same numbers wherever and whenever they are drawn."""

    sigma: float
    """Standard deviation, in units of the norm scale."""
    seed: int
    version: int
    """Policy version that the rollout samples from."""
    draw_number: int = 0
    """Which of several draws of one rollout, where each rank samples from a policy of its own."""

    def draw(self, name: str, size: int) -> Tensor:
        """Noise of one norm.

        Args:
            name: The norm's module name in the base model, such as "model.layers.0.input_layernorm".
            size: Number of channels.

        Returns:
            float32 [size] on the CPU, a function of (seed, version, draw number, name, size) and, linearly, of sigma.
            Gaussian, and rescaled so that its root mean square is sigma, which a draw of 128 channels alone would miss
            by 6 %.
        """
        another = (self.draw_number,) if self.draw_number else ()
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "aqn", self.version, name, *another))
        noise = torch.randn(size, generator=generator, dtype=torch.float32)
        return noise * (self.sigma / noise.square().mean().sqrt())


def noise_sigma(stage: int, stages: int, sigma_start: float, sigma_end: float, decay: Decay) -> float:
    """Standard deviation in stage k = `stage` of K = `stages`: sigma_start at k = 1, sigma_end at k = K.

    With t = (k - 1) / (K - 1) and D = sigma_start - sigma_end:

    - "exponential": sigma_start * (sigma_end / sigma_start)^t. QeRL (arXiv 2510.11696), section 3.3.
    - "linear": sigma_start - D * t.
    - "cosine": sigma_end + D * (1 + cos(pi * t)) / 2.
    - "logarithmic": sigma_start - D * ln(k) / ln(K).

    The paper compares all four and prefers the first; the other three formulas are this package's own reading.

    Args:
        stage: k, from 1 to K.
        stages: K; a single stage has sigma_start.
        sigma_start: Largest standard deviation, in units of the norm scale.
        sigma_end: Smallest one.
        decay: See above.

    Returns:
        The standard deviation, in units of the norm scale.
    """
    if stage == 1:
        return sigma_start
    if stage == stages:
        return sigma_end
    t = (stage - 1) / (stages - 1)
    if decay == "exponential":
        return sigma_start * (sigma_end / sigma_start) ** t
    if decay == "linear":
        gone = t
    elif decay == "cosine":
        gone = (1 - math.cos(math.pi * t)) / 2
    else:
        gone = math.log(stage) / math.log(stages)
    return sigma_start - (sigma_start - sigma_end) * gone


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviation of the noise over a run: K stages, spread evenly over the planned rollouts.

    Args:
        sigma_start: Standard deviation of the first noisy stage, in units of the norm scale. 0, with sigma_end 0 too,
            is no noise at all.
        sigma_end: Standard deviation of the last stage.
        stages: Number of stages K.
        decay: Shape of the way from sigma_start to sigma_end, exponential, linear, cosine or logarithmic.
        noiseless_first_stage: The first of the K stages has no noise, and the other K - 1 go from sigma_start to
            sigma_end.
    """

    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    stages: int = 10
    decay: Decay = "exponential"
    noiseless_first_stage: bool = True

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UserError: A sigma is not positive or grows, there are too few stages, or the decay is unknown.
        """
        for name in ("sigma_start", "sigma_end"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0) and (self.sigma_start, self.sigma_end) != (0, 0):
                raise UserError(
                    f"{name} must be a number above 0; found {value}; set both to 0 to train without noise."
                )
        if self.sigma_end > self.sigma_start:
            raise UserError(
                f"Noise must not grow: sigma_end is at most sigma_start; found sigma_start={self.sigma_start} and "
                f"sigma_end={self.sigma_end}; swap them."
            )
        fewest = 2 if self.noiseless_first_stage else 1
        if self.stages < fewest:
            raise UserError(
                f"stages must be at least {fewest} with noiseless_first_stage={self.noiseless_first_stage}; found "
                f"{self.stages}; raise stages."
            )
        require_one_of(get_args(Decay), "decay", self.decay)

    def stage(self, rollout: int, planned_rollouts: int) -> int:
        """Stage of a rollout.

        With at least K rollouts planned, each stage has the same number of them, up to one. With fewer, the first and
        the last planned rollout are in the first and the last stage, and stages between them are left out.

        Args:
            rollout: Rollouts before this one, from the beginning of the run (not of a resumed part of it).
            planned_rollouts: Rollouts of the whole run; those past the plan stay in the last stage.

        Returns:
            From 1 to K.

        Raises:
            UserError: No rollout is planned.
        """
        if planned_rollouts < 1:
            raise UserError(
                "The noise schedule spreads over the planned rollouts; found "
                f"{planned_rollouts} of them; plan at least 1."
            )
        if rollout >= planned_rollouts:
            return self.stages
        if planned_rollouts >= self.stages:
            return 1 + rollout * self.stages // planned_rollouts
        return 1 + rollout * (self.stages - 1) // max(planned_rollouts - 1, 1)

    def sigma(self, rollout: int, planned_rollouts: int) -> float:
        """Standard deviation for a rollout, in units of the norm scale; arguments and errors as for `stage`."""
        stage, stages = self.stage(rollout, planned_rollouts), self.stages
        if self.sigma_start == 0:
            return 0.0
        if self.noiseless_first_stage:
            stage, stages = stage - 1, stages - 1
            if stage == 0:
                return 0.0
        return noise_sigma(stage, stages, self.sigma_start, self.sigma_end, self.decay)
