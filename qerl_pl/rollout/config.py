"""What is sampled, how much of it, and how it is scored."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.rewards import OverlongPenalty, Reward, check_rewards, extract_answers
from qerl_pl.rollout.experience import Group
from qerl_pl.types import EvalSampling, GradedAnswer, SamplingConfig

log = logging.getLogger("qerl_pl")

PLAIN = EvalSampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
"""The policy's own distribution, with training's token limit and stop strings."""


@dataclass(frozen=True)
class CollectorConfig:
    """What is sampled, how much of it, and how it is scored.

    Raises:
        UserError: A size is too small, the rewards are none, or the settings contradict each other.
    """

    rewards: Sequence[Reward]
    group_size: int
    """Completions a prompt (G)."""
    sampling: SamplingConfig
    """How training completions are sampled; evaluation has its token limit and stop strings."""
    resample_rounds: int
    """How often groups that teach nothing are replaced (dynamic sampling); 0 keeps every group."""
    eval_samples: int
    """Samples a held-out prompt beside the greedy one."""
    mismatch_bound: float
    """Nats a token that engine and trainer may differ by without noise."""
    check_every: int
    """Rollouts between self-checks; the first two have one, too."""
    accuracy_reward: str | None = None
    """Name of the reward that tells by a value above 0.5 that a completion is right; None takes the first."""
    eval_sampling: EvalSampling | None = None
    """How held-out prompts are sampled, beside greedily; None takes `PLAIN`."""
    eval_batch: int | None = None
    """Most completions of held-out prompts that the engine is asked for at once; None for all of a batch."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UserError(
                f"a group needs at least 2 completions; found group_size={self.group_size}; set it to 2 or more"
            )
        require_at_least(0, {"resample_rounds": self.resample_rounds})
        require_at_least(1, {"eval_samples": self.eval_samples, "check_every": self.check_every})
        require_at_least(1, {"eval_batch": self.eval_batch})
        if self.sampling.temperature == 0:
            raise UserError("training samples, so sampling.temperature must be above 0; found 0; 1.0 is usual")
        check_rewards(self.rewards)
        names = [reward.name for reward in self.rewards]
        if self.accuracy_reward is not None and self.accuracy_reward not in names:
            raise UserError(f"accuracy_reward must name a reward; found {self.accuracy_reward!r}; choose among {names}")
        for reward in self.rewards:
            if isinstance(reward, OverlongPenalty):
                longest = reward.set_limit(self.sampling.max_tokens)
                if longest > self.sampling.max_tokens:
                    log.warning(
                        "OverlongPenalty is full at %d tokens, which no completion of at most %d reaches: "
                        "lower max_length",
                        longest,
                        self.sampling.max_tokens,
                    )

    def evaluation_sampling(self) -> SamplingConfig:
        """How held-out prompts are sampled, beside greedily."""
        return (PLAIN if self.eval_sampling is None else self.eval_sampling).over(self.sampling)

    @property
    def answers(self) -> Reward:
        """The reward that tells which completions are right."""
        return next(one for one in self.rewards if self.accuracy_reward in (None, one.name))

    def correct(self, group: Group) -> Tensor:
        """Which completions of a group are right, bool [G]."""
        return group.parts[self.answers.name] > 0.5

    def graded(self, group: Group) -> list[GradedAnswer]:
        """The answers of a group's completions."""
        answers = extract_answers(self.answers, group.texts)
        correct = self.correct(group).tolist()
        columns = zip(correct, answers, group.lengths, group.truncated, strict=True)
        return [GradedAnswer(right, answer, tokens, cut) for right, answer, tokens, cut in columns]
