"""Adaptive quantization noise (AQN) as a callback."""

import logging
import statistics
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.algorithm.noise import NoiseSchedule, NormNoise, rms
from qerl_pl.errors import UserError
from qerl_pl.modules.qerl import QeRLModule, require_qerl_module
from qerl_pl.types import PromptBatch

log = logging.getLogger(__name__)


class AdaptiveQuantizationNoise(Callback):
    """Adds noise to the sampler's RMSNorm scales (QeRL, arXiv 2510.11696, section 3.3).

    The engine writes clean scale + noise at each sync, so that nothing accumulates; the trainer's own scales never
    change, and evaluation has no noise. The order in the list of callbacks does not matter.

    Args:
        sigma_start: Standard deviation of the first noisy stage, in units of the norm scale. 0, with sigma_end 0 too,
            trains without noise.
        sigma_end: Standard deviation of the last stage.
        stages: Number of stages K, spread evenly over the planned rollouts.
        decay: Shape of the decay: exponential, linear, cosine or logarithmic; or a function by name (`my_noise.steps`,
            `my_noise.py:steps`), from the progress t in (0, 1) to the share of the way to sigma_end.
        noiseless_first_stage: The first of the K stages has no added noise, and the other K - 1 go from sigma_start to
            sigma_end.
        relative: Sigma is a fraction of the root mean square of each norm's own scale, instead of an absolute number
            that perturbs norms with small scales more.
    """

    def __init__(
        self,
        sigma_start: float = 1e-2,
        sigma_end: float = 1e-4,
        stages: int = 10,
        decay: str = "exponential",
        noiseless_first_stage: bool = True,
        relative: bool = False,
    ) -> None:
        self.schedule = NoiseSchedule(sigma_start, sigma_end, stages, decay, noiseless_first_stage)
        try:  # a user's function, before the run comes to it
            sigmas = [self.schedule.sigma(stage, stages) for stage in range(stages)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"noise.decay {decay} must map progress to a number; it says: {error}; correct it"
            ) from error
        if not all(0 <= sigma <= sigma_start for sigma in sigmas):
            raise UserError(
                f"noise.decay must map progress in [0, 1] to [0, 1]; with {decay}, sigma is {min(sigmas):.4g} to "
                f"{max(sigmas):.4g}, not 0 to {sigma_start}; correct it"
            )
        self.relative = relative
        self.planned_rollouts: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks, as the noise must be set before `RolloutCallback` samples."""
        require_qerl_module(pl_module, "AdaptiveQuantizationNoise")
        if stage == "fit":  # which may not be the first
            self.planned_rollouts = None
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log how large sigma is beside the scales that it is added to."""
        assert isinstance(pl_module, QeRLModule)
        sigma = self.schedule.sigma_start
        if trainer.is_global_zero and sigma > 0 and not self.relative:
            norms = pl_module.policy.trained.norms().values()
            scales = [rms(norm.multiplier(norm.weight.detach())) for norm in norms]
            scale = statistics.median(scales)
            log.info(
                "noise.sigma_start %g is %.2g %% of a norm's scale: %.3g (root mean square, median of %d norms)",
                sigma,
                100 * sigma / scale,
                scale,
                len(scales),
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Set the noise of this batch's rollout."""
        assert isinstance(pl_module, QeRLModule)
        batch.noise = NormNoise(
            self._sigma_of(trainer, pl_module),
            pl_module.seed,
            pl_module.policy_version,
            relative=self.relative,
        )

    def _sigma_of(self, trainer: Trainer, module: QeRLModule) -> float:
        """Standard deviation for the next rollout."""
        if self.planned_rollouts is None:
            self.planned_rollouts = module.planned_batches()
            if trainer.global_rank == 0:
                _warn_if_too_short(self.schedule, self.planned_rollouts)
        return self.schedule.sigma(module.policy_version, self.planned_rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The planned rollouts, so that a resumed run keeps the stages it began with."""
        return {"planned_rollouts": self.planned_rollouts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the planned rollouts."""
        self.planned_rollouts = state_dict["planned_rollouts"]


def _warn_if_too_short(schedule: NoiseSchedule, rollouts: int) -> None:
    if rollouts < schedule.stages and schedule.sigma_start > 0:
        log.warning(
            "%d planned rollouts are fewer than %d stages of noise: sigma is at most %g (sigma_start=%g); lower "
            "stages, or plan more rollouts",
            rollouts,
            schedule.stages,
            max(schedule.sigma(rollout, rollouts) for rollout in range(rollouts)),
            schedule.sigma_start,
        )
