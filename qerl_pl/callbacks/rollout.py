"""The rollout callback: samples and scores each batch before the step, training and evaluation alike."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.algorithm import OnPolicyDistillation
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine
from qerl_pl.errors import UserError, require_at_least, require_type
from qerl_pl.evaluation.evaluator import Evaluator, EvaluatorConfig
from qerl_pl.models.folder import end_token_ids
from qerl_pl.modules.qerl import QeRLModule, require_qerl_module
from qerl_pl.rewards import (
    Reward,
    TrainerState,
    as_rewards,
    check_references,
    functions_among,
    with_environment_reward,
)
from qerl_pl.rollout.collector import Collector, CollectorConfig
from qerl_pl.rollout.dialogue import EnvironmentConfig
from qerl_pl.rollout.dialogue_sampler import DialogueSampler
from qerl_pl.rollout.metrics import slowest_seconds, timed
from qerl_pl.rollout.parity_check import check_logprob_parity
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.runtime.checks import SamplingCallback, check_monitors, no_sampling_callback
from qerl_pl.runtime.strategy import communicator_of
from qerl_pl.seeds import stream_seed
from qerl_pl.types import EvalSampling, Prompt, PromptBatch, SamplingConfig

log = logging.getLogger(__name__)

PROMPTS_KEY = "qerl_prompts"
"""Checkpoint key of the state of the training prompts."""

POLICY_DISTRIBUTION = EvalSampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
"""Default sampling of held-out prompts: without filters, with training's token limit and stop strings."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of validation and test alone.

    Args:
        samples: Samples a held-out prompt beside the greedy one, for pass@k and maj@k with k up to this number.
        sampling: Sampling parameters of held-out prompts; missing keys are those of `rollout.sampling`. The greedy
            sample has its token limit and stop strings too. null takes temperature 1 without filters, and the token
            limit and stop strings of `rollout.sampling`.
        batch: Most completions of held-out prompts in one call of the engine; null passes a batch of prompts at once.
    """

    samples: int = 1
    sampling: EvalSampling | None = None
    batch: int | None = None

    def evaluator(self, scorer: Scorer, training: SamplingConfig) -> EvaluatorConfig:
        """The evaluator's settings, with training's sampling parameters where these set none."""
        sampling = (self.sampling or POLICY_DISTRIBUTION).over(training)
        return EvaluatorConfig(scorer, sampling, self.samples, self.batch)


class RolloutCallback(Callback, SamplingCallback):
    """Samples and scores the completions of training, validation and test batches.

    A completion's seed depends only on (run seed, policy version, prompt, sample index), so that a resumed run draws
    the samples of an uninterrupted one.

    Args:
        rewards: Rewards of a completion, by name or as a list: classes such as those of `qerl_pl.rewards`, functions
            with TRL's signature, or the names of such functions (`my_rewards.exact`, `my_rewards.py:exact`).
        engine: Rollout engine.
        group_size: Completions a prompt (G), at least 2.
        sampling: Sampling parameters of training completions. Evaluation samples greedily and at temperature 1, with
            the same token limit and stop strings, unless `evaluation.sampling` is set.
        resample_rounds: Dynamic sampling (DAPO): groups whose answers are all right or all wrong by `accuracy_reward`
            are dropped, as are groups of equal totals, and other prompts are sampled instead, up to this many times.
            What is still missing then is left out, so that a rollout may train on fewer groups or none. 0 drops
            nothing.
        mismatch_bound: Largest difference of engine and trainer, in nats a token: a larger one stops the run in the
            log-probability parity check (without noise, at the first rollout, after the first sleep, and then every
            `check_every` rollouts), and logs a warning in training (with noise).
        check_every: Rollouts between parity checks.
        accuracy_reward: Name of the reward whose value above 0.5 means that a completion is right; null takes the first
            reward.
        environment: Environment of each completion, which then is a dialogue.
        evaluation: Settings of validation and test alone.
    """

    def __init__(
        self,
        rewards: dict[str, Reward | str] | list[Reward | str],
        engine: RolloutEngine | None = None,
        group_size: int = 8,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        resample_rounds: int = 0,
        mismatch_bound: float = 0.25,
        check_every: int = 50,
        accuracy_reward: str | None = None,
        environment: EnvironmentConfig = EnvironmentConfig(),  # noqa: B008
        evaluation: EvaluationConfig = EvaluationConfig(),
    ) -> None:
        require_at_least(1, {"check_every": check_every})
        require_type(SamplingConfig, "sampling", sampling)
        require_type(EnvironmentConfig, "environment", environment)
        require_type(EvaluationConfig, "evaluation", evaluation)
        has_environment = environment.factory is not None
        listed = with_environment_reward(as_rewards(rewards), has_environment, environment.weight)
        self.scorer = Scorer(listed, accuracy_reward)
        self.mismatch_bound = mismatch_bound
        self.check_every = check_every
        self.environment = environment
        self._pool = environment.pool()
        self._dialogues: DialogueSampler | None = None
        self.config = CollectorConfig(self.scorer, group_size, sampling, resample_rounds)
        self.eval_config = evaluation.evaluator(self.scorer, sampling)
        self.engine: RolloutEngine = engine if engine is not None else TransformersEngine()
        self._launched = False
        self._expected_lengths: dict[str, float] = {}
        self._rollouts = 0
        """Since the engine started."""

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The expected lengths, by which prompts are partitioned over the ranks."""
        return {"expected_lengths": dict(self._expected_lengths)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load them; the collector shares the dictionary."""
        self._expected_lengths.clear()
        self._expected_lengths.update(state_dict["expected_lengths"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the data's state too: Lightning restores it only into a data module of the same class."""
        checkpoint[PROMPTS_KEY] = _data(trainer).state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse other prompts."""
        _data(trainer).load_state_dict(checkpoint[PROMPTS_KEY])

    # Engine --------------------------------------------------------------------------------------------------------

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse other modules and data modules, sizes that do not divide, and too long sequences."""
        self.check_sizes(_module(trainer.lightning_module), _data(trainer), trains=stage == "fit")

    def check_sizes(self, module: QeRLModule, data: PromptDataModule, trains: bool) -> None:
        """The part of `check_first` that needs no trainer."""
        positions = module.policy_config.positions()
        if trains:
            module.update.check_divides(data.batch_size * self.config.group_size)
            if self.config.resample_rounds and isinstance(module.objective, OnPolicyDistillation):
                raise UserError(
                    "dynamic sampling drops groups by their rewards, of which OnPolicyDistillation learns nothing; got "
                    f"rollout.resample_rounds={self.config.resample_rounds}; set it to 0"
                )
        if positions is not None and self.longest(data) > positions:
            raise UserError(
                f"prompt and completion must fit the model's {positions} positions; got {self.longest(data)} "
                "(data.max_prompt_tokens and the larger max_tokens of sampling and evaluation.sampling); lower them"
            )

    def open_environments(self, trainer: Trainer) -> Sequence[Mapping[str, Any]]:
        """Start the environments, and try one on the chat template and the tool format; returns its tools' schemas."""
        module, data = _module(trainer.lightning_module), _data(trainer)
        if self._pool is None:
            return ()
        self._dialogues = DialogueSampler(
            self.environment,
            self._pool,
            module.tokenizer,
            end_token_ids(module.base_folder),
            data.max_prompt_tokens,
            data.system_prompt,
            data.chat_template_kwargs,
            data.instruction,
        )
        opening = self._pool.check()
        if opening is None:
            return ()
        self._dialogues.check(opening)
        return opening.tools

    def longest(self, data: PromptDataModule) -> int:
        """Longest sequence in tokens, prompt and completion."""
        return data.max_prompt_tokens + max(self.config.sampling.max_tokens, self.eval_config.sampling.max_tokens)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Launch the engine: before the policy is loaded, which may share the engine's weights."""
        module, data = _module(pl_module), _data(trainer)
        if stage == "fit":
            module.start_afresh()  # or the engine would share no weights with a policy that is still loaded
            self._expected_lengths = {}  # of an earlier fit
        columns = data.columns
        for function in functions_among(self.scorer.rewards):
            function.data_columns = columns
        check_references(self.scorer.rewards, data.references)
        if self._launched:  # by a stage of which no end was told
            self.close()
        self._launch(trainer, module, data)

    def _launch(self, trainer: Trainer, module: QeRLModule, data: PromptDataModule) -> None:
        lora, ranks = module.policy_config.lora_spec, communicator_of(trainer)
        spec = EngineSpec(
            base=module.base_folder,
            dtype=module.policy_config.torch_dtype,
            device=trainer.strategy.root_device,
            lora_rank=0 if lora is None else lora.rank,
            lora_targets=() if lora is None else lora.targets,
            max_tokens=self.longest(data),
            full_finetuning=lora is None,
            ranks=ranks.size,
            record_routing=module.policy_config.replay_routing,
        )
        log.info("starting %s on %s", type(self.engine).__name__, spec.device)
        self._launched = True  # also if it fails half-way
        self.engine.launch(spec)
        # The policy of an earlier stage is still loaded, on the weights that it shared then.
        is_loaded = "policy" in dict(module.named_children())
        module.shared_weights = None if is_loaded else self.engine.shared_weights()
        tokenizer, dialogues, ends = module.tokenizer, self._dialogues, end_token_ids(module.base_folder)
        self.collector = Collector(
            self.config, self.engine, tokenizer, module.objective, module.seed, ranks, dialogues, ends
        )
        """Collects the rollouts of training; set from `setup` on."""
        self.collector.expected_lengths = self._expected_lengths
        self._rollouts = 0
        self.evaluator = Evaluator(self.eval_config, self.engine, tokenizer, module.seed, ranks, dialogues, ends)
        """Samples and scores in validation and test; set from `setup` on."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free the engine at the end of a stage (fit, validate, test); the next one launches it again."""
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free the engine after an exception, too, when Lightning calls no teardown."""
        self.close()

    def close(self) -> None:
        """Free the engine and the environments; a no-op if they are not running."""
        if self._pool is not None:
            self._pool.close()
        if self._launched:
            self._launched = False
            self.engine.close()

    # Training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to train if ranks have read different files."""
        module = _module(pl_module)
        facts = {
            "base model": module.base_identity,
            "adapter to start from": module.start_identity,
            "teacher": module.teacher_identity,
            "number of finished rollouts": module.policy_version,
        }
        communicator_of(trainer).require_same(facts | _data(trainer).state_dict())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Sample and score completions with the current policy and the batch's noise."""
        module = _module(pl_module)
        module.zero_grad()  # frees the last update's gradients for the waking engine's cache
        self._set_trainer_state(trainer, module)
        weights, seconds = module.sampling_weights(batch.noise), {"check": 0.0}
        with timed(seconds, "sleep"):
            self.engine.wake()
        if self._rollouts < 2 or self._rollouts % self.check_every == 0:
            with timed(seconds, "check"):
                self._check_parity(module, batch.prompts[:2])
        self._rollouts += 1
        with timed(seconds, "sync"):
            noise_std = self.engine.sync(weights)
        found = self.collector.collect(batch.prompts, weights.version, _data(trainer).replacement_prompts)
        with timed(seconds, "sleep"):
            self.engine.sleep()
        metrics = dict(found.metrics) | slowest_seconds(self.collector.ranks.all_gather(seconds))
        if weights.noise is not None:
            metrics |= {"aqn/sigma": weights.noise.sigma, "aqn/measured_std": noise_std}
        batch.experience = replace(found, metrics=metrics, seconds=found.seconds + sum(seconds.values()))

    def _check_parity(self, module: QeRLModule, prompts: Sequence[Prompt]) -> None:
        """Stop the run if the engine, which is awake, samples from another policy."""
        version, longest = module.policy_version, self.config.sampling.max_tokens
        seed = stream_seed(module.seed, "probe", version)
        check_logprob_parity(self.engine, module.policy, prompts, version, seed, longest, self.mismatch_bound)

    def _set_trainer_state(self, trainer: Trainer, module: QeRLModule) -> None:
        """Tell reward functions how far the run is."""
        for function in functions_among(self.scorer.rewards):
            function.trainer_state = TrainerState(
                global_step=module.policy_version * module.steps_per_batch,
                max_steps=module.planned_batches() * module.steps_per_batch,
                epoch=module.policy_version / _data(trainer).batches_per_epoch,
                num_train_epochs=max(trainer.max_epochs or 0, 0),
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Log a warning if sampler and trainer differ too much."""
        mismatch = float(trainer.callback_metrics["mismatch/logprob_abs_mean"])
        if mismatch > self.mismatch_bound:
            log.warning(
                "sampler and trainer differ by %.3f nats a token, more than mismatch_bound=%g: lower the noise, or "
                "look for a wrong sync",
                mismatch,
                self.mismatch_bound,
            )

    # Evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample and grade validation prompts, without noise."""
        self._evaluate(_module(pl_module), batch, _data(trainer).val_names[dataloader_idx])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse checkpoints and early stops by a metric that validations do not have, also in the sanity check."""
        check_monitors(trainer)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample and grade test prompts, without noise."""
        self._evaluate(_module(pl_module), batch, _data(trainer).test_names[dataloader_idx])

    def _evaluate(self, module: QeRLModule, batch: PromptBatch, name: str) -> None:
        module.zero_grad()
        weights = module.policy.weights(module.policy_version)
        batch.evaluation = self.evaluator.evaluate(batch.prompts, weights, name)


def rollout_callback(trainer: Trainer, needed_by: str) -> RolloutCallback:
    """The trainer's RolloutCallback.

    Raises:
        UserError: The trainer has no RolloutCallback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutCallback):
            return callback
    raise no_sampling_callback(needed_by)


def _module(module: LightningModule) -> QeRLModule:
    return require_qerl_module(module, "RolloutCallback")


def _data(trainer: Trainer) -> PromptDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, PromptDataModule):
        raise UserError(
            f"rollouts need a PromptDataModule; got {type(data).__name__}; pass one of qerl_pl.datamodules as data"
        )
    return data
