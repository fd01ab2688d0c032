"""The rollout callback: before each batch it syncs the engine, samples, scores, and hands over the experience."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from qerl_pl.algorithm.advantages import informative_groups
from qerl_pl.datamodules.base import PromptDataModule
from qerl_pl.engines.base import EngineSpec, RolloutEngine
from qerl_pl.engines.transformers import TransformersEngine
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import OverlongPenalty, Reward, ScoredBatch, check_rewards
from qerl_pl.rollout.agreement import check_agreement
from qerl_pl.rollout.experience import Experience, pad_completions, require_finite_logprobs
from qerl_pl.rollout.scoring import Groups, reward_metrics, score_completions
from qerl_pl.run.random_state import random_state_kept
from qerl_pl.run.seeding import stream_seed
from qerl_pl.types import Completion, Evaluation, Prompt, RolloutRequest, SamplingConfig

log = logging.getLogger(__name__)


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


class RolloutCallback(Callback):
    """Drives the engine: every completion of a run, for training and for evaluation, comes from here.

    A completion's random stream depends only on (run seed, policy version, prompt, sample index), so a resumed run
    draws the samples that an uninterrupted one would have drawn.

    Args:
        rewards: What scores a completion; the total is the weighted sum.
        engine: What samples.
        group_size: Completions a prompt (G), at least 2.
        sampling: How training completions are sampled. Evaluation samples at temperature 1 and greedily, with the
            same token limit and stop strings.
        resample_rounds: Dynamic sampling (DAPO): groups whose answers are all right or all wrong by `accuracy_reward`,
            whatever the other rewards say, are dropped (as are those of equal totals, which have no advantages), and
            other prompts are sampled instead, up to this many times. What is still missing then is left out: a rollout
            may train on fewer groups, or on none. 0 keeps every group.
        eval_samples: Samples a held-out prompt for pass@1.
        mismatch_bound: Nats a token that engine and trainer may differ by: more stops the run in the self-check
            (without noise, at the first rollout, after the first sleep, and then every `check_every` rollouts), and
            warns in training (with noise).
        check_every: Rollouts between self-checks.
        accuracy_reward: Name of the reward that tells whether a completion is right (above 0.5); null takes the first.
    """

    def __init__(
        self,
        rewards: list[Reward],
        engine: RolloutEngine | None = None,
        group_size: int = 8,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen, and jsonargparse reads the default
        resample_rounds: int = 0,
        eval_samples: int = 1,
        mismatch_bound: float = 0.25,
        check_every: int = 50,
        accuracy_reward: str | None = None,
    ) -> None:
        if group_size < 2:
            raise UserError(f"a group needs at least 2 completions; found group_size={group_size}; set it to 2 or more")
        require_at_least(0, {"resample_rounds": resample_rounds})
        require_at_least(1, {"eval_samples": eval_samples, "check_every": check_every})
        if sampling.temperature == 0:
            raise UserError("training samples, so sampling.temperature must be above 0; found 0; 1.0 is usual")
        check_rewards(rewards)
        names = [reward.name for reward in rewards]
        if accuracy_reward is not None and accuracy_reward not in names:
            raise UserError(f"accuracy_reward must name a reward; found {accuracy_reward!r}; choose among {names}")
        for reward in rewards:
            if isinstance(reward, OverlongPenalty) and reward.max_length > sampling.max_tokens:
                log.warning(
                    "OverlongPenalty is full at %d tokens, which no completion of at most %d reaches: lower max_length",
                    reward.max_length,
                    sampling.max_tokens,
                )
        self.rewards = rewards
        self.engine: RolloutEngine = engine if engine is not None else TransformersEngine()
        self.group_size = group_size
        self.sampling = sampling
        self.resample_rounds = resample_rounds
        self.eval_samples = eval_samples
        self.mismatch_bound = mismatch_bound
        self.check_every = check_every
        self.accuracy_reward = accuracy_reward or names[0]
        self._rollouts = 0
        self._launched = False

    # The engine's life ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the engine: before the policy is loaded, so that it can lend its weights."""
        module = _module(pl_module)
        module.sampled = True
        if self._launched:
            return
        if stage == "fit":
            module.update.check_divides(_data(trainer).batch_size // trainer.world_size * self.group_size)
        spec = EngineSpec(
            base=module.base_folder,
            dtype=module.policy_config.torch_dtype,
            device=trainer.strategy.root_device,
            lora_rank=module.policy_config.lora.rank,
            lora_targets=module.policy_config.lora.targets,
            max_tokens=_data(trainer).max_prompt_tokens + self.sampling.max_tokens,
        )
        self.engine.launch(spec)
        module.lent = self.engine.lend()
        self._launched = True

    def close(self) -> None:
        """Free the engine; the run is over."""
        if self._launched:
            self.engine.close()
            self._launched = False

    # Training ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: list[Prompt], batch_idx: int
    ) -> None:
        """Sample and score the batch's completions with the policy as it is now."""
        module = _module(pl_module)
        module.restore_random_state()
        version = module.policy_version
        noise = module.noise(version) if module.noise is not None else None
        times = {"time/check_s": 0.0}
        metrics: dict[str, float] = {}
        with _timed(times, "time/sleep_s"):
            self.engine.wake()
        if self._rollouts < 2 or self._rollouts % self.check_every == 0:
            with _timed(times, "time/check_s"):
                check_agreement(self.engine, module, batch[:2], self.sampling.max_tokens, self.mismatch_bound)
        self._rollouts += 1
        with _timed(times, "time/sync_s"):
            report = self.engine.sync(module.policy.weights(version, noise))
        if noise is not None:
            metrics |= {"aqn/sigma": noise.sigma, "aqn/measured_std": report.noise_std}
        groups = self._gather(module, _data(trainer), batch, times, metrics)
        with _timed(times, "time/sleep_s"):
            self.engine.sleep()
        module.receive(self._experience(module, groups, metrics | times))

    def _gather(
        self,
        module: QeRLModule,
        data: PromptDataModule,
        batch: list[Prompt],
        times: dict[str, float],
        metrics: dict[str, float],
    ) -> Groups:
        """Groups to learn from, by dynamic sampling where that is on."""
        version, wanted = module.policy_version, len(batch)
        groups, prompts, sampled = Groups(), batch, 0
        scores: list[ScoredBatch] = []
        for attempt in range(self.resample_rounds + 1):
            with _timed(times, "time/rollout_s"):
                completions = self._generate(module, prompts, self.sampling, self.group_size, ("rollout", version))
            with _timed(times, "time/reward_s"):
                scored, records = score_completions(self.rewards, module.tokenizer, prompts, completions)
            scores.append(scored)
            sampled += len(prompts)
            keep = torch.ones(len(prompts), dtype=torch.bool)
            if self.resample_rounds > 0:
                keep = informative_groups(scored.total, self._correct(scored), self.group_size)
            groups.extend(prompts, completions, records, keep)
            missing = wanted - len(groups.prompts)
            if missing <= 0 or attempt == self.resample_rounds:
                break
            used = {record.prompt_id for record in groups.records}
            prompts = data.replacement_prompts(("resample", version, attempt), missing, used)
            if not prompts:
                break
        metrics["completions/groups_dropped_frac"] = (sampled - len(groups.prompts)) / sampled
        metrics["completions/sampled_tokens"] = sum(record.tokens for record in groups.records)
        metrics |= reward_metrics(scores)
        if not groups.prompts:
            log.warning("rollout %d teaches nothing: none of %d groups has right and wrong answers", version, sampled)
        return groups

    def _generate(
        self,
        module: QeRLModule,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        samples: int,
        stream: tuple[int | str, ...],
    ) -> list[list[Completion]]:
        requests = [
            RolloutRequest(
                prompt_ids=prompt.token_ids,
                seeds=tuple(stream_seed(module.seed, *stream, prompt.id, sample) for sample in range(samples)),
            )
            for prompt in prompts
        ]
        return self.engine.generate(requests, sampling)

    def _experience(self, module: QeRLModule, groups: Groups, metrics: dict[str, float]) -> Experience:
        engine = type(self.engine).__name__
        require_finite_logprobs(groups.prompts, groups.completions, engine, module.policy_version)
        pad = module.tokenizer.pad_token_id
        tokens, lengths, mask, logprobs = pad_completions(
            groups.prompts, groups.completions, 0 if pad is None else int(pad)
        )
        sampled = mask.sum(dim=1).float()
        truncated = torch.tensor([one.truncated for group in groups.completions for one in group], dtype=torch.bool)
        metrics["completions/length_mean"] = sampled.mean().item()  # nan, as all means here, where nothing trains
        metrics["completions/length_max"] = sampled.max().item() if len(sampled) else math.nan
        metrics["completions/truncated_frac"] = truncated.float().mean().item()
        return Experience(
            version=module.policy_version,
            tokens=tokens,
            lengths=lengths,
            mask=mask,
            sampler_logprobs=logprobs,
            advantages=module.objective.advantages(torch.tensor(groups.rewards), self.group_size),
            truncated=truncated,
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            metrics=metrics,
            records=tuple(groups.records),
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warn where the sampler was farther from the trainer than it should be."""
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
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample held-out prompts without noise."""
        self._evaluate(_module(pl_module), batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Sample test prompts without noise."""
        self._evaluate(_module(pl_module), batch)

    def _evaluate(self, module: QeRLModule, batch: list[Prompt]) -> None:
        self.engine.wake()
        self.engine.sync(module.policy.weights(module.policy_version))
        correct = []
        for temperature, samples in ((0.0, 1), (1.0, self.eval_samples)):
            sampling = SamplingConfig(self.sampling.max_tokens, temperature, stop=self.sampling.stop)
            # The same streams at every evaluation: differences come from the policy, not from the draw.
            completions = self._generate(module, batch, sampling, samples, ("evaluation",))
            with random_state_kept():  # a reward may draw, and how often one evaluates must not change the training
                scored, _ = score_completions(self.rewards, module.tokenizer, batch, completions)
            correct.append(self._correct(scored).float().view(len(batch), samples).mean(dim=1))
        self.engine.sleep()
        module.evaluate(Evaluation(greedy_correct=correct[0], sampled_correct=correct[1]))

    def _correct(self, scored: ScoredBatch) -> Tensor:
        """Which completions are right, bool [B]."""
        return scored.parts[self.accuracy_reward] > 0.5


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
