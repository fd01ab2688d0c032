"""Settings of the rollout callback by group, and their checks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qerl_pl.algorithm.off_policy import CorrectionFunction, RolloutCorrection
from qerl_pl.chat.template import messages_of, template_texts
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.environments.pool import EnvironmentPool
from qerl_pl.evaluation.evaluator import EvaluatorConfig
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import Format, Reward
from qerl_pl.rollout.dialogue_sampler import DialogueConfig
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.types import EvalSampling, SamplingConfig

log = logging.getLogger(__name__)

POLICY_DISTRIBUTION = EvalSampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
"""Default sampling of held-out prompts: without filters, with training's token limit and stop strings."""


@dataclass(frozen=True)
class EnvironmentConfig(DialogueConfig):
    """Environment of each completion, which then is a dialogue.

    Args:
        factory: A class that keeps to TRL's contract, or a function from a row to such an object, by name
            (`my_games.Guess`, `my_games.py:Guess`) or as `{class_path: ..., init_args: ...}`. `sampling.max_tokens`
            then bounds the tokens after the prompt, the environment's included. null samples one turn.
        weight: Weight of the environment's own reward (`get_reward`), named `environment`. `rewards` may then be empty.
        tool_format: How the policy writes tool calls: `hermes` (also Qwen 2.5 and 3), `llama3_json`, or a regular
            expression with the group `name`, and `arguments` (JSON) or a group for each argument. auto chooses by the
            chat template.
        max_turns: Most turns of a dialogue.
        max_turn_tokens: Most tokens of a turn; null takes what is left of the dialogue.
        max_tool_response_tokens: Limit of tokens of an environment's answer, longer ones are cut; null does not cut.
        tool_time_limit: Seconds after which a tool, a step, `reset` or `get_reward` is ended.
        tool_wait: Seconds for which an engine that samples in rounds (TransformersEngine) waits for tools that have
            not answered, before it goes on with the dialogues whose tools have. vLLM goes on at once.
        workers: Most environments that are open at once, each in its process.
        variables: Names of variables that environments' processes get, such as that of an API key. They inherit few
            others, and no tokens.
    """

    factory: str | dict[str, Any] | Callable[..., Any] | None = None
    weight: float = 1.0
    tool_time_limit: float = 30.0
    variables: list[str] | None = None

    def pool(self) -> EnvironmentPool | None:
        """Where the environments are opened; None without a factory, with a warning of settings that need one."""
        if self.factory is None:
            if self != EnvironmentConfig():
                log.warning("rollout.environment has no effect without its factory")
            return None
        return EnvironmentPool(self.factory, self.tool_time_limit, self.workers, variables=self.variables or ())


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of validation and test alone.

    Args:
        samples: Samples a held-out prompt beside the greedy one, for pass@k and maj@k with k up to this number.
        sampling: Sampling parameters of held-out prompts; missing keys are those of `rollout.sampling`. The greedy
            sample has its token limit and stop strings too. null takes temperature 1 without filters, and the token
            limit and stop strings of `rollout.sampling`.
        batch: Most completions of held-out prompts in one call of the engine; null passes a batch of prompts at once.
        extra_sampling: More sampling parameters of held-out prompts, by name, each for `samples` further samples in the
            same evaluation, such as `{card: {temperature: 0.6, top_p: 0.95}}`; missing keys are those of `sampling`.
            Their metrics have the name in front, as in `val/card_pass@1`.
    """

    samples: int = 1
    sampling: EvalSampling | None = None
    batch: int | None = None
    extra_sampling: dict[str, EvalSampling] | None = None

    def evaluator(self, scorer: Scorer, training: SamplingConfig) -> EvaluatorConfig:
        """The evaluator's settings, with training's sampling parameters where these set none."""
        sampling = (self.sampling or POLICY_DISTRIBUTION).over(training)
        extra = {name: given.over(sampling) for name, given in (self.extra_sampling or {}).items()}
        return EvaluatorConfig(scorer, sampling, self.samples, self.batch, extra)


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
