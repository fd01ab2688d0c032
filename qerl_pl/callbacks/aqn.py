"""Adaptive quantization noise (AQN) as a callback: it only decides how much noise each rollout gets."""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.algorithm.noise import Decay, NoiseSchedule, NormNoise
from qerl_pl.errors import UserError
from qerl_pl.modules.qerl import QeRLModule

log = logging.getLogger(__name__)


class AdaptiveQuantizationNoise(Callback):
    """Adds noise to the sampler's RMSNorm scales, less and less over the run (QeRL, arXiv 2510.11696, section 3.3).

    The engine writes clean scale + noise at each sync, so nothing accumulates; the trainer's own scales never change.
    Evaluation runs without noise. Place in the list of callbacks does not matter.

    Args:
        sigma_start: Standard deviation of the first noisy stage, in units of the norm scale. 0, with sigma_end 0 too,
            trains without noise.
        sigma_end: Standard deviation of the last stage.
        stages: Number of stages K, spread evenly over the planned rollouts.
        decay: Shape of the way from sigma_start to sigma_end, exponential, linear, cosine or logarithmic.
        noiseless_first_stage: The first of the K stages has no added noise, only that of quantization, and the other
            K - 1 go from sigma_start to sigma_end.
        per_rank: Each rank draws noise of its own, so that a rollout samples from as many perturbed policies as there
            are ranks (3PO, arXiv 2608.09805); samples then depend on their number. Off, all have the same, as
            published.
    """

    def __init__(
        self,
        sigma_start: float = 1e-2,
        sigma_end: float = 1e-4,
        stages: int = 10,
        decay: Decay = "exponential",
        noiseless_first_stage: bool = True,
        per_rank: bool = False,
    ) -> None:
        self.schedule = NoiseSchedule(sigma_start, sigma_end, stages, decay, noiseless_first_stage)
        self.per_rank = per_rank
        self.planned_rollouts: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the module where its sampler's noise comes from."""
        if not isinstance(pl_module, QeRLModule):
            raise UserError(f"AQN needs a QeRLModule; found a {type(pl_module).__name__}; train that instead")
        module = pl_module

        def noise(version: int) -> NormNoise:
            if self.planned_rollouts is None:
                self.planned_rollouts = module.planned_rollouts()
                if trainer.global_rank == 0:
                    _warn_of_few(self.schedule, self.planned_rollouts)
            sigma, draw = self.schedule.sigma(version, self.planned_rollouts), trainer.global_rank * self.per_rank
            return NormNoise(sigma, module.seed, version, draw)

        module.noise = noise

    def state_dict(self) -> dict[str, Any]:
        """The plan, so that a resumed run goes on with the stages it began with."""
        return {"planned_rollouts": self.planned_rollouts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plan over."""
        self.planned_rollouts = state_dict["planned_rollouts"]


def _warn_of_few(schedule: NoiseSchedule, rollouts: int) -> None:
    """Tell of a run that is too short for its stages: the strongest of them may be among those left out."""
    if rollouts < schedule.stages and schedule.sigma_start > 0:
        log.warning(
            "%d planned rollouts are fewer than %d stages of noise: sigma is at most %g (sigma_start=%g); lower "
            "stages, or plan more rollouts",
            rollouts,
            schedule.stages,
            max(schedule.sigma(rollout, rollouts) for rollout in range(rollouts)),
            schedule.sigma_start,
        )
