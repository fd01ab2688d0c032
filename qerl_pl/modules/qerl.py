"""The LightningModule that trains the policy by reinforcement learning."""

import logging
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import MeanMetric

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.algorithm.objectives import GRPO, Objective
from qerl_pl.errors import UserError, require_at_least, require_type
from qerl_pl.evaluation.metrics import evaluation_tag, prompt_metrics
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy.policy import PolicyConfig
from qerl_pl.policy.teacher import Teacher, TeacherConfig
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY, check_fits
from qerl_pl.runtime.checks import SamplingCallback, no_sampling_callback
from qerl_pl.runtime.files import folder_fingerprint
from qerl_pl.runtime.random_state import deterministic
from qerl_pl.runtime.strategy import communicator_of
from qerl_pl.types import Experience, PolicyWeights, PromptBatch

log = logging.getLogger(__name__)

T = TypeVar("T")

BEFORE_TRAINING = -1
"""Logging step of measurements before the first rollout, whose own step is 0."""

PROGRESS_BAR = ("reward/mean", "policy/entropy", "completions/length_mean")


class QeRLModule(PolicyModule):
    """Trains a policy by reinforcement learning (GRPO and relatives).

    A training step is all updates from one rollout: `update_epochs` passes over the experience, each of `minibatches`
    optimizer steps, each accumulated over micro-batches.

    Args:
        policy: Base model, number format and adapter.
        objective: The loss; see `qerl_pl.algorithm.objectives`. GRPO by default.
        update_epochs: Passes over each rollout (μ).
        minibatches: Optimizer steps of a pass; divides the completions of a rollout.
        monitor_kl: Share of a rollout's completions on which `policy/kl` is measured if the loss has no KL term and an
            adapter trains; costs that share of a forward pass, and is unbiased. `true` takes all, `false` none.
        teacher: Model that on-policy distillation learns from, if the objective has it.
        share_prompts: The update computes a prompt once for the completions of it that a micro-batch has. Changes the
            rounding of log-probabilities and gradients; on a GPU FlashAttention 2 computes attention then. Without
            effect on models with more than full attention: sliding windows, soft caps, sinks, gated delta nets.
        settings: Keyword arguments of `PolicyModule`.
    """

    kind = "reinforcement learning"

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        objective: Objective | None = None,
        *,
        update_epochs: int = 1,
        minibatches: int = 1,
        monitor_kl: bool | float = 0.125,
        teacher: TeacherConfig = TeacherConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        share_prompts: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policy, **settings)
        require_at_least(1, {"model.update_epochs": update_epochs, "model.minibatches": minibatches})
        # No default instance: jsonargparse would pass its values to any other class that a user names.
        self.objective = GRPO() if objective is None else objective
        require_type(Objective, "objective", self.objective)
        require_type(TeacherConfig, "teacher", teacher)
        measured = 0.0 if policy.finetune == "full" else float(monitor_kl)
        limits = self.micro_batch_tokens, self.max_grad_norm
        self.update = PolicyUpdate(
            self.objective, update_epochs, minibatches, *limits, measured, self.seed, share_prompts
        )
        self.teacher_config = teacher
        self.teacher: Teacher | None = None
        self._means: dict[str, MeanMetric] = {}

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a rollout."""
        return self.update.steps

    @property
    def needs_reference(self) -> bool:
        """Whether the objective has a KL term."""
        return self.objective.needs_reference

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse another precision, a run without an end, no callback that samples, and another kind of teacher."""
        super().check_first(trainer, stage)
        if stage == "fit" and self.objective.needs_teacher:
            self.teacher_config.check(self.policy_config)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, SamplingCallback) for callback in callbacks):
            raise no_sampling_callback(stage)

    def setup(self, stage: str) -> None:
        """Drop the metrics of an earlier stage, whose tensors `trainer.validate` makes in inference mode."""
        super().setup(stage)
        self._means.clear()
        if stage == "fit" and not self.objective.needs_teacher and self.teacher_config != TeacherConfig():
            log.warning("model.teacher has no effect without a model.objective that distils, OnPolicyDistillation, say")
        data = self.trainer.datamodule if stage != "test" else None  # type: ignore[attr-defined]
        first = next(iter(getattr(data, "val_names", ())), "")
        accuracy, of_first = (evaluation_tag("val", name, "accuracy") for name in ("", first))
        for best in self.trainer.checkpoint_callbacks if first else ():
            if isinstance(best, ModelCheckpoint) and best.monitor == accuracy:  # which sets with names do not log
                best.monitor = of_first

    def configure_model(self) -> None:
        """Load the policy and, for training, its teacher, once."""
        super().configure_model()
        learns = self.trainer.state.fn == TrainerFn.FITTING and self.objective.needs_teacher
        if learns and self.teacher is None:
            dtype, device = self.policy_config.torch_dtype, self.trainer.strategy.root_device
            self.teacher = Teacher(self.teacher_config, self.teacher_folder, dtype, device)

    @cached_property
    def teacher_folder(self) -> Path:
        """Local folder of the teacher."""
        return self.teacher_config.folder(self.policy_config)

    @cached_property
    def teacher_identity(self) -> str | None:
        """Digest of the teacher, saved in checkpoints; None where the objective has none."""
        return folder_fingerprint(self.teacher_folder) if self.objective.needs_teacher else None

    # The update ----------------------------------------------------------------------------------------------------

    def sampling_weights(self, noise: NormNoise | None = None) -> PolicyWeights:
        """Weights for the next rollout."""
        self.restore_random_state()
        return self.policy.weights(self.policy_version, noise)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Update the policy from the batch's experience."""
        experience = _filled_in(batch.experience, "training")
        assert experience.version == self.policy_version
        start = time.perf_counter()
        experience, metrics = experience.to(self.device), dict(experience.metrics)
        if self.teacher is not None:
            experience = self._with_teacher(self.teacher, experience)
            metrics["time/teacher_s"] = time.perf_counter() - start
        optimizer, schedule = self.optimizer_and_schedule()
        with deterministic():
            ranks = communicator_of(self.trainer)
            metrics |= self.update.run(self.policy, experience, optimizer, schedule, self.manual_backward, ranks)
        self.policy_version += 1
        self.log("rollouts", float(self.policy_version), logger=False, batch_size=1)
        metrics["time/update_s"] = seconds = time.perf_counter() - start
        metrics["perf/tokens_per_s"] = experience.sampled_tokens / (experience.seconds + seconds)
        for name, value in metrics.items():
            self.log(name, value, batch_size=1, prog_bar=name in PROGRESS_BAR)

    def _with_teacher(self, teacher: Teacher, experience: Experience) -> Experience:
        mask = self.objective.training_mask(experience.mask, experience.truncated)
        limit = self.update.forward_limit(experience)
        if self.objective.needs_teacher_kl:
            return replace(experience, teacher_states=teacher.states(experience, mask, limit))
        return replace(experience, teacher_logprobs=teacher.logprobs(experience, mask, limit))

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save which teacher it has, too."""
        super().on_save_checkpoint(checkpoint)
        if self.teacher_identity is not None:
            checkpoint[CHECKPOINT_KEY]["teacher"] = self.teacher_identity

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another teacher."""
        super().on_load_checkpoint(checkpoint)
        if self.trainer.state.fn == TrainerFn.FITTING and self.teacher_identity is not None:
            check_fits(checkpoint[CHECKPOINT_KEY], teacher=self.teacher_identity)

    # Evaluation ----------------------------------------------------------------------------------------------------

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of the batch's evaluation."""
        self._log_evaluation("val", batch, dataloader_idx)

    def test_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of the batch's evaluation."""
        self._log_evaluation("test", batch, dataloader_idx)

    def validation_metrics(self) -> dict[str, float]:
        """Metrics of the validation that has just ended, by tag; none of a sanity check on fewer prompts.

        Of a sanity check on several sets, Lightning has them neither among `callback_metrics` nor for its loggers.
        """
        trainer = self.trainer
        logged = {tag: float(value) for tag, value in trainer.callback_metrics.items() if tag.startswith("val/")}
        if not trainer.sanity_checking:
            return logged
        if trainer.num_sanity_val_batches != trainer.num_val_batches:
            return {}
        return logged | {tag: mean.compute().item() for tag, mean in self._means.items() if mean.update_called}

    def _log_evaluation(self, stage: str, batch: PromptBatch, loader: int) -> None:
        evaluation = _filled_in(batch.evaluation, "validation")
        # Tags have the set's name; Lightning would add the loader's index.
        options: dict[str, Any] = {"batch_size": len(evaluation.prompts), "add_dataloader_idx": False}
        for kind, values in prompt_metrics(evaluation.prompts, evaluation.extracts_answers).items():
            tag = evaluation_tag(stage, evaluation.name, kind)
            mean = self._means.setdefault(tag, MeanMetric(sync_on_compute=False).to(self.device))  # every rank has all
            mean.update(values.float())
            self.log(tag, mean, on_epoch=True, prog_bar=kind == "accuracy", metric_attribute=tag, **options)
        if loader == 0:
            self.log("rollouts", float(self.policy_version), logger=False, **options)
            if self.trainer.state.fn != TrainerFn.FITTING:  # the point of the run's curves with this policy
                self.log("step", float(self.policy_version + BEFORE_TRAINING), **options)


def require_qerl_module(module: LightningModule, callback: str) -> QeRLModule:
    """The module of a trainer, for a callback that works with rollouts.

    Raises:
        UserError: It trains by another, such as an SFTModule.
    """
    if not isinstance(module, QeRLModule):
        raise UserError(f"{callback} needs a QeRLModule; got a {type(module).__name__}; train that, or leave it out")
    return module


def _filled_in(value: T | None, step: str) -> T:
    if value is None:
        raise no_sampling_callback(step)
    return value
