"""The LightningModule that trains the policy, its optimizer and its learning-rate schedule."""

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from qerl_kernels import select_backend
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics import MeanMetric
from transformers import AutoTokenizer, PreTrainedTokenizerBase, get_scheduler

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.algorithm.objectives import GRPO, Objective
from qerl_pl.datamodules.prompts import require_planned_end
from qerl_pl.distributed.communicator import writes_files
from qerl_pl.distributed.strategy import communicator_of
from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.evaluation.metrics import evaluation_tag, prompt_metrics
from qerl_pl.memory import pending_state_bytes
from qerl_pl.modules.policy import Policy, PolicyConfig, require_memory
from qerl_pl.modules.update import NonFiniteLossError, PolicyUpdate
from qerl_pl.persistence.atomic_files import atomic_directory, folder_identity
from qerl_pl.persistence.checkpoint_io import CHECKPOINT_KEY, check_fits
from qerl_pl.persistence.random_state import deterministic, random_state, set_random_state, stream_seed
from qerl_pl.start_checks import ChecksFirst
from qerl_pl.types import Experience, PolicyWeights, PromptBatch

T = TypeVar("T")

BEFORE_TRAINING = -1
"""Logging step of measurements before the first rollout, whose own step is 0."""

RATES = ("initial_lr", "weight_decay")
"""Optimizer settings that a resumed run takes from its configuration, not from the checkpoint."""

PROGRESS_BAR = ("reward/mean", "policy/entropy")

LARGEST_RATE = 1e30

"""What Adam divides by its first bias correction, and float32 still holds."""


def build_optimizer(make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    """Build the optimizer of `model.optimizer`.

    Raises:
        UserError: Its class refuses its arguments or the parameters, its learning rate is not a number, or its `step`
            needs a closure or takes none.
    """
    try:
        optimizer = make(parameters)
    except (RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"model.optimizer must take its init_args and the trained matrices; it says: {message:.200}; correct them"
        ) from error
    for rate in [group.get("lr") for group in optimizer.param_groups]:
        if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE:
            raise UserError(
                f"model.optimizer needs a learning rate from 0 to {LARGEST_RATE:g}; got {rate}; set its init_args.lr"
            )
    name, closure = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None:
        raise UserError(
            f"model.optimizer must have step(closure=None), which Lightning calls; {name} has another; use AdamW"
        )
    if closure.default is inspect.Parameter.empty:
        raise UserError(f"model.optimizer must step once a minibatch; {name} asks for several losses a step; use AdamW")
    return optimizer


def build_schedule(name: str, optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """Build a learning-rate schedule of transformers.

    Args:
        name: Name of the schedule.
        optimizer: Optimizer whose learning rate it sets.
        warmup: Optimizer steps of the warm-up.
        steps: All optimizer steps.

    Raises:
        UserError: transformers has no such schedule, or it needs more than the number of steps.
    """
    try:
        schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        if not isinstance(schedule, LambdaLR):
            raise ValueError(f"{type(schedule).__name__} needs a metric")
    except (TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"lr_scheduler must be a schedule of transformers that steps are enough for; got {name!r}, which says: "
            f"{message:.120}; use cosine, linear or constant_with_warmup"
        ) from error
    return schedule


class QeRLModule(LightningModule, ChecksFirst):
    """Trains a policy by reinforcement learning (GRPO and relatives).

    A training step is all updates from one rollout: `update_epochs` passes over the experience, each of `minibatches`
    optimizer steps, each accumulated over micro-batches.

    Args:
        policy: Base model, number format and adapter.
        objective: The loss; see `qerl_pl.algorithm.objectives`. GRPO by default.
        optimizer: Builds the optimizer from the trained parameters.
        lr_scheduler: Name of a transformers learning-rate schedule (cosine, linear, constant_with_warmup, …).
        warmup_ratio: Share of the optimizer steps over which the learning rate rises from 0.
        update_epochs: Passes over each rollout (μ).
        minibatches: Optimizer steps of a pass; divides the completions of a rollout.
        micro_batch_tokens: Most tokens of a forward pass, prompts included and padding not (a longer completion is a
            micro-batch by itself); null takes a minibatch at once. Gradients depend on it only by LoRA dropout.
        max_grad_norm: Largest gradient norm; larger gradients are scaled down.
        monitor_kl: Share of a rollout's completions on which `policy/kl` is measured if the loss has no KL term and an
            adapter trains; costs that share of a forward pass, and is unbiased. `true` takes all, `false` none.
        seed: Seed of the run: adapter initialisation, sampling, noise, dropout.
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        objective: Objective | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-5, betas=(0.9, 0.99), weight_decay=0.1
        ),
        lr_scheduler: str = "cosine",
        warmup_ratio: float = 0.1,
        update_epochs: int = 1,
        minibatches: int = 1,
        micro_batch_tokens: int | None = None,
        max_grad_norm: float = 0.2,
        monitor_kl: bool | float = 0.125,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"update_epochs": update_epochs, "minibatches": minibatches, "micro_batch_tokens": micro_batch_tokens}
        require_at_least(1, {f"model.{name}": size for name, size in sizes.items()})
        require_at_least(0, {"model.seed": seed})
        if not max_grad_norm > 0:
            raise UserError(f"model.max_grad_norm must be above 0; got {max_grad_norm}; .inf clips nothing")
        if not 0 <= warmup_ratio <= 1:
            raise UserError(f"model.warmup_ratio must be in [0, 1]; got {warmup_ratio}; set it to 0.1, say")
        # Tried on a 1x1 matrix, to refuse bad settings before the policy is loaded.
        build_schedule(lr_scheduler, build_optimizer(optimizer, [nn.Parameter(torch.zeros(1, 1))]), 0, 1)
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints lack the frozen base; `on_load_checkpoint` checks the rest
        self.policy_config = policy
        # No default instance: jsonargparse would pass its values to any other class that a user names.
        self.objective = GRPO() if objective is None else objective
        self.make_optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.warmup_ratio = warmup_ratio
        measured = 0.0 if policy.adapter is None else float(monitor_kl)
        self.update = PolicyUpdate(
            self.objective, update_epochs, minibatches, micro_batch_tokens, max_grad_norm, measured, seed
        )
        self.seed = seed
        self.policy_version = 0
        self.shared_weights: SharedWeights | None = None
        """The engine's weights that the policy shares; see `use_engine_weights`."""
        self._releasable_gib = 0.0
        self._means: dict[str, MeanMetric] = {}
        self._random_state: dict[str, Any] | None = None
        self._optimizer: str | None = None
        self._rates: list[dict[str, float]] = []

    # The policy ----------------------------------------------------------------------------------------------------

    @cached_property
    def base_folder(self) -> Path:
        """Local folder of the base model; on first use downloaded, quantized or, as toy policy, trained."""
        return self.policy_config.base_folder()

    @cached_property
    def base_identity(self) -> str:
        """Digest of the base model, saved in checkpoints."""
        return folder_identity(self.base_folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return AutoTokenizer.from_pretrained(self.base_folder)

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse another precision, a run without an end, and a trainer without a callback that samples."""
        if (precision := trainer.precision) not in ("32-true", "32", 32):
            remedy = "leave it at 32-true and set model.policy.dtype"
            raise UserError(f"the policy sets its own precision; trainer.precision is {precision}; {remedy}")
        if stage == "fit":
            require_planned_end(trainer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, ChecksFirst) and callback.fills_batches for callback in callbacks):
            raise UserError(
                f"{stage} needs a callback that samples completions; trainer.callbacks has none; "
                "add qerl_pl.callbacks.RolloutCallback"
            )

    def use_engine_weights(self, shared: SharedWeights | None, releasable_gib: float) -> None:
        """Have the policy, which `configure_model` loads, share weights with the engine.

        Args:
            shared: The engine's weights; None loads a copy.
            releasable_gib: Memory that the engine releases during an update.
        """
        self.shared_weights = shared
        self._releasable_gib = releasable_gib

    def configure_model(self) -> None:
        """Load the policy, once."""
        if "policy" not in self._modules:
            device = self.trainer.strategy.root_device
            if device.type == "cuda":
                select_backend("triton")
            base, config, reference = self.base_folder, self.policy_config, self.objective.needs_reference
            make = self.make_optimizer if self.trainer.state.fn == TrainerFn.FITTING else None
            require_memory(base, config, make, device, reference, self._releasable_gib)
            seed = stream_seed(self.seed, "adapter")
            self.policy = Policy(base, config, device, seed, self.shared_weights, reference)

    def planned_rollouts(self) -> int:
        """Rollouts of the run, by the trainer's limits on epochs, batches and steps.

        Raises:
            UserError: The run has no planned end.
        """
        # Not `trainer.estimated_stepping_batches`: it makes the loader early, and a resumed run then restarts its epoch
        # (Lightning 2.6).
        trainer, plans = self.trainer, []
        require_planned_end(trainer)
        if trainer.max_steps and trainer.max_steps > 0:
            plans.append(-(-trainer.max_steps // self.update.steps))
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            plans.append(trainer.datamodule.batches_per_epoch * trainer.max_epochs)  # type: ignore[attr-defined]
        return max(1, min(plans))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = build_optimizer(self.make_optimizer, [p for p in self.policy.parameters() if p.requires_grad])
        name = type(optimizer).__name__
        if self._optimizer not in (None, name):  # it may fail to load another optimizer's state
            raise UserError(f"a resumed run keeps its optimizer; got {name} for {self._optimizer}; set that again")
        steps = self.planned_rollouts() * self.update.steps
        schedule = build_schedule(self.lr_scheduler, optimizer, round(self.warmup_ratio * steps), steps)
        self._rates = [{name: group[name] for name in RATES if name in group} for group in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_start(self) -> None:
        """Set the configuration's learning rate and weight decay, also in a resumed run."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(schedule, LambdaLR)
        for index, (group, rates) in enumerate(zip(optimizer.param_groups, self._rates, strict=True)):
            group.update(rates)
            schedule.base_lrs[index] = rates["initial_lr"]
            group["lr"] = rates["initial_lr"] * schedule.lr_lambdas[index](schedule.last_epoch)
        self.policy.checkpointing.set_state_bytes(
            lambda: pending_state_bytes(optimizer.optimizer, self.make_optimizer, self.device)
        )

    # The update ----------------------------------------------------------------------------------------------------

    def sampling_weights(self, noise: NormNoise | None = None) -> PolicyWeights:
        """Weights for the next rollout.

        The first rollout of a resumed run sets the checkpoint's random states here: nothing may draw before it.
        """
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        return self.policy.weights(self.policy_version, noise)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Update the policy from the batch's experience."""
        experience = _filled_in(batch.experience, "training")
        assert experience.version == self.policy_version
        start = time.perf_counter()
        metrics = {**experience.metrics, **self._run_update(experience.to(self.device))}
        self.policy_version += 1
        metrics["time/update_s"] = seconds = time.perf_counter() - start
        metrics["perf/tokens_per_s"] = experience.sampled_tokens / (experience.seconds + seconds)
        for name, value in metrics.items():
            self.log(name, value, batch_size=1, prog_bar=name in PROGRESS_BAR)

    def _run_update(self, experience: Experience) -> dict[str, float]:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(schedule, LRScheduler)
        try:
            with deterministic():
                ranks = communicator_of(self.trainer)
                return self.update.run(self.policy, experience, optimizer, schedule, self.manual_backward, ranks)
        except NonFiniteLossError as error:
            path = Path(self.trainer.default_root_dir) / "failed" / f"version-{self.policy_version}.ckpt"
            self.trainer.save_checkpoint(path)
            raise UserError(
                f"loss and gradient must be finite; at policy version {self.policy_version} they are not ({error}); "
                f"the state then is in {path}, to look into; lower the learning rate and go on with --resume auto"
            ) from error

    # Evaluation ----------------------------------------------------------------------------------------------------

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of the batch's evaluation."""
        self._log_evaluation("val", batch, dataloader_idx)

    def test_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the metrics of the batch's evaluation."""
        self._log_evaluation("test", batch, dataloader_idx)

    def _log_evaluation(self, stage: str, batch: PromptBatch, loader: int) -> None:
        evaluation = _filled_in(batch.evaluation, "validation")
        # Tags have the set's name; Lightning would add the loader's index.
        options: dict[str, Any] = {"batch_size": len(evaluation.prompts), "add_dataloader_idx": False}
        for kind, values in prompt_metrics(evaluation.prompts, evaluation.tells_answers).items():
            tag = evaluation_tag(stage, evaluation.name, kind)
            mean = self._means.setdefault(tag, MeanMetric(sync_on_compute=False).to(self.device))  # every rank has all
            mean.update(values.float())
            self.log(tag, mean, on_epoch=True, prog_bar=kind == "accuracy", metric_attribute=tag, **options)
        if loader == 0:
            self.log("rollouts", float(self.policy_version), logger=False, **options)
            if self.trainer.state.fn != TrainerFn.FITTING:  # the point of the run's curves with this policy
                self.log("step", float(self.policy_version + BEFORE_TRAINING), **options)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what training changes, without the base model."""
        checkpoint["state_dict"] = {}
        checkpoint[CHECKPOINT_KEY] = {
            "trained": self.policy.trained_state(),
            "policy_version": self.policy_version,
            "base": self.base_identity,
            "finetune": self.policy_config.finetune,
            "policy": asdict(self.policy_config),
            "scaling": self.policy_config.scaling,
            "optimizer": type(self.trainer.optimizers[0]).__name__,
            # A checkpoint before the first rollout of a resumed run has the states that are not set yet.
            "random_states": communicator_of(self.trainer).gather(self._random_state or random_state()),
            "recomputation": self.policy.checkpointing.state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load weights, version and random states; UserError if the checkpoint is of another policy."""
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is None:
            raise UserError("a checkpoint must be one of this trainer's; this one is not; name another with --resume")
        check_fits(state, self.base_identity, self.policy_config.finetune, self.policy_config.scaling)
        self.policy.load_trained_state(state["trained"])
        self.policy.checkpointing.load(state.get("recomputation"))
        self.policy_version, self._optimizer = state["policy_version"], state["optimizer"]
        states, rank = state["random_states"], self.global_rank
        self._random_state = states[rank if len(states) == self.trainer.world_size else 0]

    def on_fit_end(self) -> None:
        """Write RUN/adapter or RUN/model, also if a resumed run had nothing left to train."""
        if writes_files(self.trainer) and self.policy_version:
            path = Path(self.trainer.default_root_dir) / self.policy.trained.result
            with atomic_directory(path, replace=True) as folder:
                self.policy.save(folder)


def _filled_in(value: T | None, step: str) -> T:
    if value is None:
        raise UserError(
            f"{step} needs a callback that samples completions; trainer.callbacks has none; "
            "add qerl_pl.callbacks.RolloutCallback"
        )
    return value
