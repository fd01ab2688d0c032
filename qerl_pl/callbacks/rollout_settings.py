"""Checks of the rollout callback's settings."""

import logging
from collections.abc import Mapping, Sequence

from qerl_pl.algorithm.off_policy import RolloutCorrection
from qerl_pl.chat.template import messages_of, template_texts
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.errors import UserError, require_type
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import Format, Reward
from qerl_pl.types import EvalSampling, SamplingConfig

log = logging.getLogger(__name__)


def check_types(engine: object, sampling: object, eval_sampling: object, extra: object) -> None:
    """Refuse arguments of `RolloutCallback` of other types, as a script may give.

    Raises:
        UserError: One is.
    """
    if isinstance(engine, type | str | Mapping):
        raise UserError(f"rollout.engine must be an engine; got {engine!r:.60}; make one, VLLMEngine(), say")
    require_type(SamplingConfig, {"rollout.sampling": sampling}, "write SamplingConfig(max_tokens=256), say")
    remedy = "write EvalSampling(temperature=0.6), say"
    if eval_sampling is not None:
        require_type(EvalSampling, {"rollout.eval_sampling": eval_sampling}, remedy)
    if extra is not None:
        require_type(Mapping, {"rollout.extra_eval_sampling": extra}, "name each sampling: {'card': EvalSampling(...)}")
        assert isinstance(extra, Mapping)
        require_type(EvalSampling, {f"rollout.extra_eval_sampling.{name}": one for name, one in extra.items()}, remedy)


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
