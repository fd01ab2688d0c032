"""Adaptive quantization noise (AQN) as a callback."""

import logging
import statistics
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.algorithm.feedback import BoundWarning, Feedback, logged_value
from qerl_pl.algorithm.noise import Decay, NoiseSchedule, NoisyLayers, NormNoise, layer_indices, rms
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.formats.model_folder import load_config
from qerl_pl.modules.qerl import QeRLModule
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
        decay: Shape of the decay: exponential, linear, cosine or logarithmic. `feedback` starts from sigma_start and
            then steers sigma so that `metric` stays at `target`; it has no stages and no sigma_end.
        noiseless_first_stage: The first of the K stages has no added noise, and the other K - 1 go from sigma_start to
            sigma_end.
        per_rank: Each rank draws its own noise, so that a rollout samples from as many perturbed policies as there are
            ranks (3PO, arXiv 2608.09805); samples then depend on the number of ranks. By default all ranks draw the
            same noise, as published.
        metric: Of `feedback`: `completions/sampler_entropy`, `policy/entropy`, `mismatch/ess` or
            `completions/groups_without_signal_frac`; the latter two fall as sigma rises.
        target: Of `feedback`: the value at which the metric is held.
        gain: Of `feedback`: sigma changes by a factor of at most exp(gain) per rollout.
        sigma_min: Of `feedback`: smallest sigma.
        sigma_max: Of `feedback`: largest sigma.
        relative: Sigma is a fraction of the root mean square of each norm's own scale, instead of an absolute number
            that perturbs norms with small scales more.
        draws: Independent draws of noise in a rollout (3PO, arXiv 2608.09805): the prompts of a batch are dealt out to
            as many perturbed policies, all completions of a prompt from the same one. Costs a sync and a generation
            with fewer prompts for each draw.
        trainer: The trainer computes the old and current log-probabilities of the update under the same noise (ALP,
            arXiv 2603.19470): probability ratios, importance weights and entropies are then those of the perturbed
            policy, which is the one that sampled. The reference policy stays without noise.
        layers: Decoder layers whose norms have noise: `all`, `first_half`, `last_half`, or a list of their indices from
            0, or from the end if negative.
    """

    def __init__(
        self,
        sigma_start: float = 1e-2,
        sigma_end: float = 1e-4,
        stages: int = 10,
        decay: Decay | Literal["feedback"] = "exponential",
        noiseless_first_stage: bool = True,
        per_rank: bool = False,
        metric: str = "completions/sampler_entropy",
        target: float | None = None,
        gain: float = 0.2,
        sigma_min: float = 1e-4,
        sigma_max: float = 5e-2,
        relative: bool = False,
        draws: int = 1,
        trainer: bool = False,
        layers: NoisyLayers = "all",
    ) -> None:
        require_at_least(1, {"noise.draws": draws})
        if (decay == "feedback") != (target is not None):
            raise UserError(
                f"noise.decay feedback, and no other, needs a target; got {decay} and {target}; set noise.target to "
                f"the value at which {metric} is to stay, or leave it out"
            )
        self.feedback: Feedback | None = None
        self.schedule: NoiseSchedule | None = None
        if decay == "feedback":
            assert target is not None
            self.feedback = Feedback(target, metric, sigma_min, sigma_max, gain, "noise.sigma")
        else:
            self.schedule = NoiseSchedule(sigma_start, sigma_end, stages, decay, noiseless_first_stage)
        self.sigma_start, self.relative = sigma_start, relative
        self.per_rank, self.draws, self.layers = per_rank, draws, layers
        self.in_trainer = trainer
        self._layers: tuple[int, ...] | None = None
        self._start()

    def _start(self) -> None:
        """Set what a fit starts with."""
        self.planned_rollouts: int | None = None
        if self.feedback is not None:
            self._sigma = self.feedback.first(self.sigma_start)
            self._bound_warning = BoundWarning(self.feedback)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks, as the noise must be set before `RolloutCallback` samples.

        Raises:
            UserError: `layers` names layers that the model lacks.
        """
        if not isinstance(pl_module, QeRLModule):
            raise UserError(f"AQN needs a QeRLModule; got a {type(pl_module).__name__}; train that instead")
        if stage == "fit":  # which may not be the first
            self._start()
        if self.layers != "all":
            self._layers = layer_indices(self.layers, load_config(pl_module.base_folder).num_hidden_layers)
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log how large sigma is beside the scales that it is added to."""
        assert isinstance(pl_module, QeRLModule)
        if trainer.is_global_zero and self.sigma_start > 0 and not self.relative:
            noise = NormNoise(self.sigma_start, pl_module.seed, 0, layers=self._layers)
            norms = pl_module.policy.trained.norms().items()
            found = [rms(norm.multiplier(norm.weight.detach())) for name, norm in norms if noise.perturbs(name)]
            scale = statistics.median(found)
            log.info(
                "noise.sigma_start %g is %.2g %% of a norm's scale: %.3g (root mean square, median of %d norms)",
                self.sigma_start,
                100 * self.sigma_start / scale,
                scale,
                len(found),
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
            draw_number=trainer.global_rank * self.draws * self.per_rank,
            relative=self.relative,
            layers=self._layers,
            draws=self.draws,
            in_trainer=self.in_trainer,
        )

    def _sigma_of(self, trainer: Trainer, module: QeRLModule) -> float:
        """Standard deviation for the next rollout."""
        if self.schedule is None:
            return self._sigma
        if self.planned_rollouts is None:
            self.planned_rollouts = module.planned_rollouts()
            if trainer.global_rank == 0:
                _warn_if_too_short(self.schedule, self.planned_rollouts)
        return self.schedule.sigma(module.policy_version, self.planned_rollouts)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Steer sigma by the step's metric, which is the same on all ranks, before a checkpoint is saved."""
        if self.feedback is not None:
            measured = logged_value(trainer.callback_metrics, self.feedback.metric)
            if trainer.is_global_zero:
                self._bound_warning.record(self._sigma, measured)
            self._sigma = self.feedback.next(self._sigma, measured)

    def state_dict(self) -> dict[str, Any]:
        """The planned rollouts, so that a resumed run keeps the stages it began with; or sigma under feedback."""
        return {"planned_rollouts": self.planned_rollouts} | ({} if self.feedback is None else {"sigma": self._sigma})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the planned rollouts and, if both runs have feedback, sigma."""
        self.planned_rollouts = state_dict["planned_rollouts"]
        if self.feedback is not None and "sigma" in state_dict:
            self._sigma = state_dict["sigma"]


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
