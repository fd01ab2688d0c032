"""What every training of the policy shares: optimizer, learning-rate schedule, checkpoints, the run's result."""

import logging
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from qerl_kernels import select_backend_of
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError, install_sigusr1_handler, require_at_least, require_type
from qerl_pl.models.memory import pending_state_bytes
from qerl_pl.modules.optimizer import (
    WARMUP_RATIO,
    build_optimizer,
    build_schedule,
    default_optimizer,
    describe_schedule,
    load_schedule,
    trial_weight,
)
from qerl_pl.policy.policy import Policy, PolicyConfig
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY, check_fits
from qerl_pl.runtime.checks import (
    ChecksFirst,
    check_devices,
    limit_epochs,
    require_planned_end,
)
from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.files import atomic_directory, folder_fingerprint
from qerl_pl.runtime.random_state import forget_cublas_config, random_state, set_random_state
from qerl_pl.runtime.strategy import communicator_of
from qerl_pl.seeds import stream_seed

log = logging.getLogger(__name__)

_REFUSED = (
    WeightAveraging,
    StochasticWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    BatchSizeFinder,
)
"""Callbacks that need Lightning's automatic optimization, or train weights that checkpoints do not hold."""

RATES = ("initial_lr", "weight_decay")
"""Optimizer settings that a resumed run takes from its configuration, not from the checkpoint."""
MOMENTS = ("betas", "eps", "momentum", "alpha", "nesterov")
"""The same, unless a schedule may have changed them."""


class PolicyModule(LightningModule, ChecksFirst):
    """A policy with its optimizer and checkpoints; subclasses train it in `training_step`.

    Args:
        policy: Base model, number format and adapter.
        optimizer: Builds the optimizer from the trained parameters.
        lr_scheduler: Name of a transformers learning-rate schedule (cosine, linear, constant_with_warmup, …); or a
            class of torch.optim.lr_scheduler or a function, named `module.function` or `file.py:function`, that makes
            a schedule of the optimizer, with settings and a warm-up of its own.
        warmup_ratio: Share of the optimizer steps over which the learning rate of a named schedule rises from 0.
        micro_batch_tokens: Most tokens of a forward pass, prompts included and padding not (a longer sequence is a
            micro-batch by itself); null takes a minibatch at once. Gradients depend on it only by LoRA dropout.
        max_grad_norm: Largest gradient norm; larger gradients are scaled down.
        seed: Seed of the run: adapter initialisation, sampling, noise, dropout.
    """

    kind = ""
    """How checkpoints name the training; a run resumes from its own kind."""

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        *,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: str | LRSchedulerCallable = "cosine",
        warmup_ratio: float = WARMUP_RATIO,
        micro_batch_tokens: int | None = None,
        max_grad_norm: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_type(PolicyConfig, "policy", policy)
        require_at_least(1, {"model.micro_batch_tokens": micro_batch_tokens})
        require_at_least(0, {"model.seed": seed})
        if not max_grad_norm > 0:
            raise UserError(f"model.max_grad_norm must be above 0; got {max_grad_norm}; .inf clips nothing")
        if not 0 <= warmup_ratio <= 1:
            raise UserError(f"model.warmup_ratio must be in [0, 1]; got {warmup_ratio}; set it to 0.1, say")
        self.lr_scheduler = load_schedule(lr_scheduler, warmup_ratio)
        # Tried first, to refuse bad settings before the policy is loaded.
        build_schedule(self.lr_scheduler, build_optimizer(optimizer, [trial_weight()]), 0, 1)
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints lack the frozen base; `on_load_checkpoint` checks the rest
        self.policy_config = policy
        self.make_optimizer = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.max_grad_norm = max_grad_norm
        self.warmup_ratio = warmup_ratio
        self.seed = seed
        self.policy_version = 0
        """Training batches so far."""
        self.shared_weights: SharedWeights | None = None
        """An engine's weights that the policy shares."""
        self._random_state: dict[str, Any] | None = None
        self._saved: dict[str, str] = {}
        """Optimizer and learning-rate schedule, which a checkpoint has; before the start, those of the one resumed."""
        self._rates: list[dict[str, float]] = []
        self._is_changed = False
        """Whether the policy has been trained, or has a checkpoint's weights."""

    @property
    def trainer(self) -> Trainer:
        """The trainer, which attaches itself."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            limit_epochs(trainer)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a training batch."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs a reference policy."""
        return False

    # The policy ----------------------------------------------------------------------------------------------------

    @cached_property
    def base_folder(self) -> Path:
        """Local folder of the base model; on first use downloaded, quantized or, as toy policy, trained."""
        return self.policy_config.base_folder()

    @cached_property
    def base_identity(self) -> str:
        """Digest of the base model, saved in checkpoints."""
        return folder_fingerprint(self.base_folder)

    @property
    def start_identity(self) -> str | None:
        """Digest of the adapter that training starts from, saved in checkpoints; None for a new one."""
        start = self.policy_config.start
        return None if start is None else start.digest

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return AutoTokenizer.from_pretrained(self.base_folder)

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse other precisions and strategies, and a run without an end."""
        if (precision := trainer.precision) != "32-true":
            remedy = "leave it at 32-true and set model.policy.dtype"
            raise UserError(f"the policy sets its own precision; trainer.precision is {precision}; {remedy}")
        check_devices(trainer)
        if stage == "fit":
            require_planned_end(trainer)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, _REFUSED):
                    raise UserError(
                        "a run trains the policy's own weights, at rates and in micro-batches that model sets; got "
                        f"{type(callback).__name__}; leave it out"
                    )
            if trainer.barebones:
                raise UserError("training logs its metrics; got a Trainer with barebones=True; leave it out")

    def setup(self, stage: str) -> None:
        """Start a fit afresh, with a used trainer too; Lightning loads a checkpoint later."""
        install_sigusr1_handler()  # for callbacks, before Lightning has its own
        if stage != "fit":
            return
        self.start_afresh()
        loop = self.trainer.fit_loop
        if loop.total_batch_idx >= 0:  # Lightning would go on counting
            loop.load_state_dict(type(loop)(self.trainer).state_dict())
            loop.epoch_loop.restarting = False

    def start_afresh(self) -> None:
        """Forget an earlier fit: what it has trained, and how far it has come."""
        if self._is_changed:
            log.warning(
                "this fit starts afresh, without what the module has learned before: to go on from a checkpoint, give "
                "its path to trainer.fit as ckpt_path"
            )
            del self.policy
            self.shared_weights, self._is_changed = None, False
        self.policy_version, self._random_state, self._saved = 0, None, {}

    def configure_model(self) -> None:
        """Load the policy, once."""
        if "policy" not in self._modules:
            device = self.trainer.strategy.root_device
            select_backend_of(device)
            forget_cublas_config(device)
            seed = stream_seed(self.seed, "adapter")
            self.policy = Policy(
                self.base_folder, self.policy_config, device, seed, self.shared_weights, self.needs_reference
            )

    # The optimizer -------------------------------------------------------------------------------------------------

    def planned_batches(self) -> int:
        """Training batches of the run, by the trainer's limits on epochs, batches and steps."""
        # Not `trainer.estimated_stepping_batches`: it makes the loader early, and a resumed run then restarts its epoch
        # (Lightning 2.6).
        trainer, plans = self.trainer, []
        if trainer.max_steps and trainer.max_steps > 0:
            plans.append(-(-trainer.max_steps // self.steps_per_batch))
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            plans.append(trainer.datamodule.batches_per_epoch * trainer.max_epochs)  # type: ignore[attr-defined]
        return max(1, min(plans))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = build_optimizer(self.make_optimizer, [p for p in self.policy.parameters() if p.requires_grad])
        steps = self.planned_batches() * self.steps_per_batch
        warmup = min(round(self.warmup_ratio * steps), steps - 1)  # or no step would have a rate above 0
        schedule = build_schedule(self.lr_scheduler, optimizer, warmup, steps)
        built = {"optimizer": type(optimizer).__name__, "lr_scheduler": describe_schedule(schedule)}
        for name, saved in self._saved.items():  # their states fit no others
            if built[name] != saved:
                raise UserError(f"a resumed run keeps its {name}; got {built[name]} for {saved}; set that again")
        self._saved = built
        names = (*RATES, *MOMENTS) if isinstance(schedule, LambdaLR) else RATES
        self._rates = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_and_schedule(self) -> tuple[LightningOptimizer, LRScheduler]:
        """The only ones of the training."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        if not (isinstance(optimizer, LightningOptimizer) and isinstance(schedule, LRScheduler)):
            raise UserError(
                f"a policy is trained by one optimizer and one schedule; configure_optimizers of {type(self).__name__} "
                "returns others; remove it, and set model.optimizer and model.lr_scheduler"
            )
        return optimizer, schedule

    def on_train_start(self) -> None:
        """Set the configuration's optimizer settings, also in a resumed run."""
        self._is_changed = True
        optimizer, schedule = self.optimizer_and_schedule()
        for index, (group, rates) in enumerate(zip(optimizer.param_groups, self._rates, strict=True)):
            if isinstance(schedule, LambdaLR):
                group.update(rates)
                schedule.base_lrs[index] = rates["initial_lr"]
                group["lr"] = rates["initial_lr"] * schedule.lr_lambdas[index](schedule.last_epoch)
                continue
            if group["initial_lr"] != rates["initial_lr"]:  # other schedules go on from their last rate
                log.warning(
                    "the learning rate of a resumed run with a %s is the checkpoint's, %g; to train with another one, "
                    "start a run from the exported adapter by model.policy.adapter",
                    type(schedule).__name__,
                    group["initial_lr"],
                )
            group.update(rates | {"initial_lr": group["initial_lr"]})
        self.policy.checkpointing.set_state_bytes(
            lambda: pending_state_bytes(optimizer.optimizer, self.make_optimizer, self.device)
        )

    # Checkpoints ---------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> "PolicyModule":
        """Raise UserError: checkpoints lack the base model, which a trainer's module loads."""
        raise UserError(
            f"a checkpoint is loaded into a {cls.__name__} by a Trainer, without one {checkpoint_path} cannot be; give "
            "it as ckpt_path to trainer.fit, validate or test, or export it by `qerl export`"
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what training changes, without the base model."""
        checkpoint["state_dict"] = {}
        checkpoint[CHECKPOINT_KEY] = {
            "trained": self.policy.trained_state(),
            "kind": self.kind,
            "policy_version": self.policy_version,
            "steps_per_batch": self.steps_per_batch,
            "base": self.base_identity,
            "finetune": self.policy_config.finetune,
            # A relative path would be of this working directory.
            "policy": asdict(self.policy_config) | {"path": self.policy_config.path and self.policy_config.base_name},
            "scaling": self.policy_config.scaling,
            "lora": None if self.policy_config.lora_spec is None else asdict(self.policy_config.lora_spec),
            "start": self.start_identity,
            "built": self._saved,
            # A checkpoint before the first batch of a resumed run has the states that are not set yet.
            "random_states": communicator_of(self.trainer).all_gather(self._random_state or random_state()),
            "recomputation": self.policy.checkpointing.state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load weights, version and random states; UserError if the checkpoint is of another policy."""
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is None:
            raise UserError("a checkpoint must be one of this trainer's; this one is not; name another with --resume")
        if self.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
            raise UserError(
                "a run goes on from a checkpoint with its optimizer's state; this one has weights alone, by "
                "save_weights_only; name another, or start a run from its export by model.policy.adapter"
            )
        if self.trainer.state.fn == TrainerFn.FITTING and (kind := state["kind"]) != self.kind:
            raise UserError(
                f"a run goes on as it began; the checkpoint is of {kind} and this is {self.kind}; export it, and start "
                "another run from the adapter by model.policy.adapter"
            )
        config = self.policy_config
        check_fits(
            state, base=self.base_identity, finetune=config.finetune, scaling=config.scaling, start=self.start_identity
        )
        steps = state["steps_per_batch"]
        if self.trainer.state.fn == TrainerFn.FITTING and steps != self.steps_per_batch:
            log.warning(
                "the learning rate's schedule counts optimizer steps; a batch had %d of them and has %d now, so that "
                "it goes on at another share of the run: keep model.minibatches and model.update_epochs",
                steps,
                self.steps_per_batch,
            )
        self._is_changed = True
        self.policy.load_trained_state(state["trained"])
        self.policy.checkpointing.load(state["recomputation"])
        self.policy_version, self._saved = state["policy_version"], state["built"]
        states, rank = state["random_states"], self.global_rank
        self._random_state = states[rank if len(states) == self.trainer.world_size else 0]

    def restore_random_state(self) -> None:
        """Set the checkpoint's random states at the first batch of a resumed run: nothing may draw before it."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def on_fit_end(self) -> None:
        """Write RUN/adapter or RUN/model, also if a resumed run had nothing left to train."""
        if 0 < self.policy_version < self.planned_batches() and not self.trainer.should_stop:
            log.warning(
                "nothing was left to train: the checkpoint ends its epoch after %d batches, which a higher "
                "trainer.limit_train_batches does not extend; raise trainer.max_epochs",
                self.policy_version,
            )
        if writes_files(self.trainer) and self.policy_version:
            path = Path(self.trainer.default_root_dir) / self.policy.trained.result
            with atomic_directory(path, replace=True) as folder:
                self.policy.save(folder)
