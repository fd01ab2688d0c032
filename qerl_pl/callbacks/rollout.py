"""The rollout callback: before each step it has the collector sample, and hands over what that gathered."""

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.distributed.strategy import communicator_of
from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine
from qerl_pl.errors import UserError
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import Reward, check_references
from qerl_pl.rollout.collector import Collector
from qerl_pl.rollout.config import CollectorConfig
from qerl_pl.rollout.hand_over import HandOver
from qerl_pl.types import EvalSampling, Prompt, SamplingConfig

log = logging.getLogger(__name__)

PROMPTS_KEY = "qerl_prompts"
"""Where a checkpoint says which prompts it was trained on, whatever class the data module has."""


class RolloutCallback(Callback):
    """Drives the engine: every completion of a run, for training and for evaluation, comes from here.

    A completion's random stream depends only on (run seed, policy version, prompt, sample index), so a resumed run
    draws the samples that an uninterrupted one would have drawn.

    Args:
        rewards: What scores a completion, by name (or a list); the total is the weighted sum.
        engine: What samples.
        group_size: Completions a prompt (G), at least 2.
        sampling: How training completions are sampled. Evaluation samples at temperature 1 and greedily, with the
            same token limit and stop strings, unless `eval_sampling` says otherwise.
        resample_rounds: Dynamic sampling (DAPO): groups whose answers are all right or all wrong by `accuracy_reward`,
            whatever the other rewards say, are dropped (as are those of equal totals, which have no advantages), and
            other prompts are sampled instead, up to this many times. What is still missing then is left out: a rollout
            may train on fewer groups, or on none. 0 keeps every group.
        eval_samples: Samples a held-out prompt, beside the greedy one: for pass@k and maj@k up to so many.
        mismatch_bound: Nats a token that engine and trainer may differ by: more stops the run in the self-check
            (without noise, at the first rollout, after the first sleep, and then every `check_every` rollouts), and
            warns in training (with noise).
        check_every: Rollouts between self-checks.
        accuracy_reward: Name of the reward that tells whether a completion is right (above 0.5); null takes the first.
        eval_sampling: How held-out samples are sampled; a key that is left out is as in `sampling`. The greedy sample
            has its token limit and stop strings too. null takes temperature 1 without filters, and those of `sampling`.
        eval_batch: Most completions of held-out prompts that the engine is asked for at once, whosever they are; null
            asks for all of a batch of prompts.
    """

    def __init__(
        self,
        rewards: dict[str, Reward] | list[Reward],
        engine: RolloutEngine | None = None,
        group_size: int = 8,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        resample_rounds: int = 0,
        eval_samples: int = 1,
        mismatch_bound: float = 0.25,
        check_every: int = 50,
        accuracy_reward: str | None = None,
        eval_sampling: EvalSampling | None = None,
        eval_batch: int | None = None,
    ) -> None:
        if isinstance(rewards, dict):
            for name, reward in rewards.items():
                reward.name = name
            rewards = list(rewards.values())
        self.config = CollectorConfig(
            rewards,
            group_size,
            sampling,
            resample_rounds,
            eval_samples,
            mismatch_bound,
            check_every,
            accuracy_reward,
            eval_sampling,
            eval_batch,
        )
        self.engine: RolloutEngine = engine if engine is not None else TransformersEngine()
        self._collector: Collector | None = None
        self._hand_over = HandOver()
        self._foreseen: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """What the prompts are dealt to ranks by, so that a resumed run deals as one that never stopped."""
        return {"expected_lengths": dict(self._foreseen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it over."""
        self._foreseen.clear()
        self._foreseen.update(state_dict["expected_lengths"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep which prompts it is trained on: by itself Lightning asks no data module of another class for them."""
        checkpoint[PROMPTS_KEY] = _data(trainer).state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with other prompts; a checkpoint of an earlier version does not say."""
        if PROMPTS_KEY in checkpoint:
            _data(trainer).load_state_dict(checkpoint[PROMPTS_KEY])

    # The engine's life ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the engine: before the policy is loaded, so that it can lend its weights."""
        module = _module(pl_module)
        module.hand_over = self._hand_over
        data = _data(trainer)
        check_references(self.config.rewards, data.references)
        if self._collector is not None:
            return
        if stage == "fit":
            module.update.check_divides(data.batch_size * self.config.group_size)
        adapter = module.policy_config.adapter
        spec = EngineSpec(
            base=module.base_folder,
            dtype=module.policy_config.torch_dtype,
            device=trainer.strategy.root_device,
            lora_rank=0 if adapter is None else adapter.rank,
            lora_targets=() if adapter is None else adapter.targets,
            max_tokens=data.max_prompt_tokens
            + max(self.config.sampling.max_tokens, self.config.evaluation_sampling().max_tokens),
            full_finetuning=adapter is None,
            ranks=communicator_of(trainer).size,
        )
        log.info("starting %s on %s", type(self.engine).__name__, spec.device)
        self.engine.launch(spec)
        self._hand_over.shared = self.engine.shared_weights()
        self._hand_over.cache_gib = self.engine.memory_gib().get("releasable", 0.0)
        self._collector = Collector(
            self.config, self.engine, module.tokenizer, module.objective, module.seed, communicator_of(trainer)
        )
        self._collector.expected_lengths = self._foreseen

    @property
    def collector(self) -> Collector:
        """What samples and scores, from `setup` to `close`."""
        assert self._collector is not None, "setup comes first"
        return self._collector

    def close(self) -> None:
        """Free the engine; the run is over."""
        if self._collector is not None:
            self.engine.close()
            self._collector = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse ranks that have read other files than the first."""
        module = _module(pl_module)
        facts = {"base model": module.base_identity, "number of finished rollouts": module.policy_version}
        communicator_of(trainer).require_same(facts | _data(trainer).state_dict())

    # Training ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: list[Prompt], batch_idx: int
    ) -> None:
        """Sample and score the batch's completions with the policy as it is now."""
        module = _module(pl_module)
        module.zero_grad()  # the last update's gradients: the engine wakes, and its cache needs the room
        others = _data(trainer).replacement_prompts
        self._hand_over.experience = self.collector.collect(batch, module.sampling_weights(), module.policy, others)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warn where the sampler was farther from the trainer than it should be."""
        mismatch = float(trainer.callback_metrics["mismatch/logprob_abs_mean"])
        if mismatch > self.config.mismatch_bound:
            log.warning(
                "sampler and trainer differ by %.3f nats a token, more than mismatch_bound=%g: lower the noise, or "
                "look for a wrong sync",
                mismatch,
                self.config.mismatch_bound,
            )

    # Evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample held-out prompts without noise."""
        self._evaluate(_module(pl_module), batch, _data(trainer).val_names[dataloader_idx])

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample test prompts without noise."""
        self._evaluate(_module(pl_module), batch, _data(trainer).test_names[dataloader_idx])

    def _evaluate(self, module: QeRLModule, batch: list[Prompt], name: str) -> None:
        module.zero_grad()  # as before a rollout
        weights = module.policy.weights(module.policy_version)
        self._hand_over.evaluation = self.collector.evaluate(batch, weights, name, self._hand_over.samples)


def _module(module: LightningModule) -> QeRLModule:
    if not isinstance(module, QeRLModule):
        raise UserError(f"RolloutCallback drives a QeRLModule; found a {type(module).__name__}; train that instead")
    return module


def _data(trainer: Trainer) -> PromptDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, PromptDataModule):
        raise UserError(
            f"rollouts need a PromptDataModule; found {type(data).__name__}; pass one of qerl_pl.datamodules as data"
        )
    return data
