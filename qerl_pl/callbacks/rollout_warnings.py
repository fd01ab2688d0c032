"""Warnings of the rollout callback about settings that contradict each other."""

import logging
from collections.abc import Sequence

from qerl_pl.algorithm.off_policy import RolloutCorrection
from qerl_pl.chat_template import messages_of, template_texts
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import Format, Reward
from qerl_pl.types import SamplingConfig

log = logging.getLogger(__name__)


def warn_of_filters(sampling: SamplingConfig, correction: RolloutCorrection) -> None:
    """Log a warning if training samples with filters and the objective corrects for the sampler's probabilities.

    A filter divides the probabilities of the remaining tokens by their sum, so that every ratio of trainer to sampler
    is below 1.
    """
    filters = [name for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(sampling, name) != off]
    outliers = correction.outlier_low is not None or correction.outlier_high is not None
    if filters and (correction.weights is not None or correction.rejection is not None or outliers):
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
