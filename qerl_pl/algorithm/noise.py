"""Adaptive quantization noise (AQN): its schedule, and its draws.

Source: QeRL (arXiv 2510.11696), section 3.3. Noise Z ~ N(0, sigma^2), one number a channel, is added to the RMSNorm
scales that feed the quantized projections, in the sampler only: RMSNorm(x) = (w + Z) * x / sqrt(mean(x^2) + eps).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.runtime.import_path import load_named
from qerl_pl.seeds import stream_seed

Decay = Literal["exponential", "linear", "cosine", "logarithmic"]
DecayFunction = Callable[[float], float]


@dataclass(frozen=True)
class NormNoise:
    """Noise of one rollout: the same numbers in every process."""

    sigma: float
    """Standard deviation, in units of the norm scale, or of its root mean square if `relative`."""
    seed: int
    version: int
    """Policy version of the rollout."""
    relative: bool = False
    """Whether the noise is proportional to each norm's scale w: Z ~ N(0, (sigma * rms(w))^2)."""

    def of_norm(self, name: str, clean: Tensor) -> Tensor:
        """Noise for a norm's `clean` scale [size], on any device: float32 [size] on the CPU; see `draw`."""
        noise = self.draw(name, clean.numel())
        return noise * rms(clean) if self.relative else noise

    def draw(self, name: str, size: int) -> Tensor:
        """Absolute noise of the norm of a module name in the base model, such as "model.layers.0.input_layernorm".

        float32 [size] on the CPU, a function of (seed, version, name, size) and, linearly, of sigma. Gaussian, rescaled
        to a root mean square of sigma, which 128 channels would otherwise miss by 6 %.
        """
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "aqn", self.version, name))
        noise = torch.randn(size, generator=generator, dtype=torch.float32)
        return noise * (self.sigma / noise.square().mean().sqrt())


def rms(scale: Tensor) -> float:
    """Root mean square, in float64: trainer and engines compute one number whatever their order of summation."""
    return scale.double().square().mean().sqrt().item()


def noise_sigma(stage: int, stages: int, sigma_start: float, sigma_end: float, decay: Decay | DecayFunction) -> float:
    """Standard deviation in stage k = `stage` of K = `stages`: sigma_start at k = 1, sigma_end at k = K.

    With t = (k - 1) / (K - 1) and D = sigma_start - sigma_end:

    - "exponential": sigma_start * (sigma_end / sigma_start)^t. QeRL (arXiv 2510.11696), section 3.3.
    - "linear": sigma_start - D * t.
    - "cosine": sigma_end + D * (1 + cos(pi * t)) / 2.
    - "logarithmic": sigma_start - D * ln(k) / ln(K).
    - A function f of t: sigma_start - D * f(t).

    The paper compares the four and prefers the first; it gives no formulas of the others.
    """
    if stage == 1:
        return sigma_start
    if stage == stages:
        return sigma_end
    t = (stage - 1) / (stages - 1)
    if decay == "exponential":
        return sigma_start * (sigma_end / sigma_start) ** t
    if callable(decay):
        progress = decay(t)
    elif decay == "linear":
        progress = t
    elif decay == "cosine":
        progress = (1 - math.cos(math.pi * t)) / 2
    else:
        progress = math.log(stage) / math.log(stages)
    return sigma_start - (sigma_start - sigma_end) * progress


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviation of the noise over a run, in K stages spread evenly over the planned rollouts.

    Arguments as for `qerl_pl.callbacks.AdaptiveQuantizationNoise`.

    Raises:
        UserError: A sigma is not positive or grows, there are too few stages, or there is no such decay.
    """

    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    stages: int = 10
    decay: str = "exponential"
    noiseless_first_stage: bool = True

    def __post_init__(self) -> None:
        for name in ("sigma_start", "sigma_end"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0) and (self.sigma_start, self.sigma_end) != (0, 0):
                raise UserError(f"{name} must be a number above 0; got {value}; set both to 0 to train without noise.")
        if self.sigma_end > self.sigma_start:
            raise UserError(
                f"Noise must not grow: sigma_end is at most sigma_start; got sigma_start={self.sigma_start} and "
                f"sigma_end={self.sigma_end}; swap them."
            )
        fewest = 2 if self.noiseless_first_stage else 1
        if self.stages < fewest:
            raise UserError(
                f"stages must be at least {fewest} with noiseless_first_stage={self.noiseless_first_stage}; got "
                f"{self.stages}; raise stages."
            )
        self._decay()

    def _decay(self) -> Decay | DecayFunction:
        """The decay by its name, or the function of that name."""
        if self.decay in get_args(Decay):
            return cast(Decay, self.decay)
        names = ", ".join(get_args(Decay))
        rule = f"noise.decay must be one of {names}, or the name of a function of the progress from 0 to 1"
        return cast(DecayFunction, load_named(self.decay, rule, "choose one, or write my_noise.steps", "noise"))

    def stage(self, rollout: int, planned_rollouts: int) -> int:
        """Stage, from 1 to K, of the rollout after so many others; those past the plan are in stage K.

        With at least K planned rollouts, stages have equally many of them (up to one). With fewer, the first and the
        last rollout are in the first and the last stage, and stages in between are skipped. UserError if none is
        planned.
        """
        if planned_rollouts < 1:
            raise UserError(
                f"The noise schedule spreads over the planned rollouts; got {planned_rollouts} of them; "
                "plan at least 1."
            )
        if rollout >= planned_rollouts:
            return self.stages
        if planned_rollouts >= self.stages:
            return 1 + rollout * self.stages // planned_rollouts
        return 1 + rollout * (self.stages - 1) // max(planned_rollouts - 1, 1)

    def sigma(self, rollout: int, planned_rollouts: int) -> float:
        """Standard deviation for a rollout, in units of the norm scale; arguments and errors as for `stage`."""
        stage, stages = self.stage(rollout, planned_rollouts), self.stages
        if self.noiseless_first_stage:
            stage, stages = stage - 1, stages - 1
        if self.sigma_start == 0 or stage == 0:
            return 0.0
        return noise_sigma(stage, stages, self.sigma_start, self.sigma_end, self._decay())
