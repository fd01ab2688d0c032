"""Settings of the rollout callback by group, and their checks."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from qerl_pl.algorithm.off_policy import CorrectionFunction, RolloutCorrection
from qerl_pl.chat.template import messages_of, template_texts
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.evaluation.evaluator import EvaluatorConfig
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import Format, Reward
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.types import EvalSampling, SamplingConfig

log = logging.getLogger(__name__)

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


def warn_of_filters(sampling: SamplingConfig, correction: RolloutCorrection | CorrectionFunction) -> None:
    """Log a warning if training samples with filters and the objective corrects for the sampler's probabilities.

    A filter divides the probabilities of the remaining tokens by their sum, so that every ratio of trainer to sampler
    is below 1.
    """
    filters = [name for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(sampling, name) != off]
    if filters and correction != RolloutCorrection(weights=None):
        log.warning(
            "rollout.sampling.%s raises the sampler's probabilities above the trainer's, which importance weights and "
            "rejection count as a mismatch: sample without it, or set model.objective.correction to off",
            filters[0],
        )


def warn_of_opened_tags(rewards: Sequence[Reward], module: QeRLModule, data: PromptDataModule) -> None:
    """Log a warning if the chat template opens the first tag of a `Format` reward, so that no completion does."""
    formats = [reward for reward in rewards if isinstance(reward, Format)]
    if not formats:
        return
    chats = [messages_of("?", data.system_prompt)]
    (prompt,) = template_texts(module.tokenizer, chats, data.chat_template_kwargs)
    for reward in formats:
        if prompt.rstrip().endswith(f"<{reward.tags[0]}>"):
            log.warning(
                "reward %s is 0 for every completion: the chat template ends prompts with <%s>, which completions then "
                "lack; use a reward function of your own instead",
                reward.name,
                reward.tags[0],
            )
