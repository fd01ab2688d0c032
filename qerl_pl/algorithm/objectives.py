"""Training objectives, as configured from YAML: each combines terms of `qerl_pl.algorithm.losses`.

A new objective is a subclass of `Objective` that sets `aggregation`, its defaults and, if needed, `_ratio`,
`_surrogate` and `has_other_terms`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from qerl_pl.algorithm import losses
from qerl_pl.algorithm.advantages import (
    AdvantageNorm,
    MultiObjectiveAggregation,
    Scores,
    advantages_and_signal,
    group_signal,
)
from qerl_pl.algorithm.losses import Aggregation, KLEstimator, Surrogate
from qerl_pl.algorithm.off_policy import CorrectionFunction, RolloutCorrection, correction_weights, named_correction
from qerl_pl.errors import UserError, require_one_of

Divergence = Literal["sampled_token", "full_vocabulary"]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Values outside the mask are ignored, even NaN."""

    logprobs: Tensor
    """[B, T], current policy, with gradient."""
    old_logprobs: Tensor
    """[B, T], clean trainer at the time of the rollout, detached."""
    sampler_logprobs: Tensor
    """[B, T], noisy, quantized sampler."""
    advantages: Tensor
    """[B]."""
    mask: Tensor
    """bool [B, T], completion tokens that train."""
    weights: Tensor
    """[B, T], the micro-batch's rows of `Objective.weights`."""
    ref_logprobs: Tensor | None = None
    """[B, T], reference policy, detached."""
    entropy: Tensor | None = None
    """[B, T], entropy of the current next-token distribution in nats; with gradient if there is an entropy bonus."""
    teacher_logprobs: Tensor | None = None
    """[B, T], teacher of on-policy distillation, detached."""
    teacher_kl: Tensor | None = None
    """[B, T], KL(current policy || teacher) over the vocabulary in nats, with gradient."""


@dataclass(frozen=True)
class LossOutputs:
    """Loss of one micro-batch; loss and metrics add up over micro-batches."""

    loss: Tensor
    """Scalar to call backward on."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Sums over the masked tokens, detached; divided by `tokens` they are means. Keys: tokens, ratio, clip_low,
    clip_high, is_weight, is_weight_squared, rejected, capped (of the correction), logprob_abs (|old - sampler|),
    mismatch_k3 (k3 of KL(sampler || old)), mismatch_ratio_squared ((old / sampler)^2), and kl, entropy and teacher_kl
    if their inputs are present."""


@dataclass(frozen=True)
class Objective(ABC):
    """Policy-gradient loss over groups of completions.

    loss = sum over tokens of weight * (-importance weight * surrogate + beta * KL - entropy_coefficient * entropy
    + distillation_coefficient * KL to the teacher), the last for `full_vocabulary`

    Args:
        beta: Coefficient of the KL penalty against the reference policy: the policy with its adapter off, the adapter
            that training started from, or the start of full fine-tuning; 0 leaves the penalty out.
        kl_estimator: Estimator of the KL divergence, k1, k2 or k3; k3 is never negative and of low variance.
        epsilon_low: Distance of the lower clip bound of the policy ratio from 1.
        epsilon_high: Distance of the upper clip bound of the policy ratio from 1.
        advantage_norm: Divides a reward minus its group's mean: group, its standard deviation; batch, that of the
            batch; none, nothing; rloo, 1 - 1/G (leave-one-out); maxrl, the group's mean reward.
        correction: Importance weights and rejection between the sampler and the trainer: the name of a preset, their
            settings, or the import path of a function. `token_tis` truncates token weights at 2; `off` leaves all at 1.
        delta: Upper bound of the policy ratio where the advantage is negative (dual clip, two-sided clip), above
            1 + epsilon_high; null is no bound. Objectives without a ratio clip have none.
        mask_truncated: Leave completions that the token limit cut off out of the loss.
        entropy_coefficient: Coefficient of an entropy bonus; 0 leaves it out.
        distillation_coefficient: Factor of log teacher - log policy, which each token's advantage gets in addition
            (on-policy distillation from `model.teacher`); 0 leaves it out.
        distillation_divergence: How the reverse KL divergence to the teacher is computed: sampled_token estimates it by
            the sampled token, as an advantage; full_vocabulary sums over all tokens, without variance from sampling
            them, and adds it to the loss in place of the advantage, neither clipped nor with importance weights.
        multi_objective_aggregation: `sum_then_normalize` computes advantages of the rewards' weighted sum.
            `normalize_then_sum` (GDPO) normalizes each reward within its group, sums, and normalizes over the batch.

    Raises:
        UserError: A number is outside its range, a choice is unknown, or the objective has no ratio clip for `delta`.
    """

    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    advantage_norm: AdvantageNorm = "group"
    mask_truncated: bool = False
    entropy_coefficient: float = 0.0
    distillation_coefficient: float = 0.0
    correction: RolloutCorrection | str = "token_tis"  # jsonargparse tells the first type's error
    delta: float | None = None
    distillation_divergence: Divergence = "sampled_token"
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"

    clips_ratio = True
    """Whether the surrogate is `clipped_surrogate`, for which `delta` is."""

    def __post_init__(self) -> None:
        for name in ("beta", "epsilon_low", "epsilon_high", "entropy_coefficient", "distillation_coefficient"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} must be a number of at least 0; got {value}; set it to 0 or more.")
        if isinstance(self.correction, str):
            named_correction(self.correction)
        delta = self.delta
        if delta is not None and not self.clips_ratio:
            raise UserError(f"delta bounds a ratio clip; got {delta} for {type(self).__name__}; leave delta out.")
        if delta is not None and not (math.isfinite(delta) and delta > 1 + self.epsilon_high):
            raise UserError(
                f"delta must be a number above 1 + epsilon_high={1 + self.epsilon_high:g}; got {delta}; set it to 4, "
                "say, or to null for no bound."
            )
        require_one_of(get_args(KLEstimator), "kl_estimator", self.kl_estimator)
        require_one_of(get_args(AdvantageNorm), "advantage_norm", self.advantage_norm)
        require_one_of(get_args(Divergence), "distillation_divergence", self.distillation_divergence)
        aggregations = get_args(MultiObjectiveAggregation)
        require_one_of(aggregations, "multi_objective_aggregation", self.multi_objective_aggregation)
        if self.multi_objective_aggregation == "normalize_then_sum" and self.advantage_norm != "group":
            raise UserError(
                "normalize_then_sum (GDPO) divides each reward by its group's standard deviation; got advantage_norm "
                f"{self.advantage_norm} ({type(self).__name__}); set it to group, or multi_objective_aggregation to "
                "sum_then_normalize"
            )
        if self.distillation_divergence != "sampled_token" and not self.needs_teacher:
            raise UserError(
                f"distillation_divergence {self.distillation_divergence} needs a distillation_coefficient above 0; got "
                "0; raise it, or leave distillation_divergence out"
            )

    @property
    @abstractmethod
    def aggregation(self) -> Aggregation:
        """Aggregation of token losses, see `qerl_pl.algorithm.losses.token_weights`."""

    @property
    def rollout_correction(self) -> RolloutCorrection | CorrectionFunction:
        """The correction between sampler and trainer that `correction` sets."""
        return named_correction(self.correction) if isinstance(self.correction, str) else self.correction

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs `LossInputs.ref_logprobs`."""
        return self.beta != 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs `LossInputs.entropy`, with its gradient."""
        return self.entropy_coefficient != 0

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs `LossInputs.teacher_logprobs` or, for the full vocabulary, `teacher_kl`."""
        return self.distillation_coefficient != 0

    @property
    def needs_teacher_kl(self) -> bool:
        """Whether the loss needs `LossInputs.teacher_kl`, with its gradient."""
        return self.needs_teacher and self.distillation_divergence == "full_vocabulary"

    @property
    def has_other_terms(self) -> bool:
        """Whether a completion has a gradient without an advantage: a KL penalty, an entropy bonus, a teacher."""
        return self.needs_reference or self.needs_entropy or self.needs_teacher

    def advantages(self, scores: Scores, group_size: int) -> tuple[Tensor, Tensor]:
        """Advantages [B], of the summed rewards or GDPO's, and each group's `signal`; errors as `group_advantages`."""
        return advantages_and_signal(scores, group_size, self.advantage_norm, self.multi_objective_aggregation)

    def signal(self, scores: Scores, group_size: int) -> Tensor:
        """Whether the rewards of each group, as the advantages combine them, differ: bool [B / G]."""
        return group_signal(scores, group_size, self.multi_objective_aggregation)

    def training_mask(self, mask: Tensor, truncated: Tensor) -> Tensor:
        """Tokens that train, bool [B, T]: `mask` without truncated completions (bool [B]) if these are masked."""
        return mask & ~truncated[:, None] if self.mask_truncated else mask

    def weights(self, mask: Tensor, max_tokens: int, completions: float, tokens: float) -> Tensor:
        """Token weights [B, T] of a batch, see `qerl_pl.algorithm.losses.token_weights`."""
        return losses.token_weights(
            mask, self.aggregation, completions=completions, tokens=tokens, max_tokens=max_tokens
        )

    def loss(self, batch: LossInputs) -> LossOutputs:
        """Loss and metrics of one micro-batch.

        Raises:
            ValueError: The KL penalty, the entropy bonus or distillation is on and its input is missing.
        """
        mask = batch.mask

        def masked(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0)

        logprobs, old, sampler = masked(batch.logprobs), masked(batch.old_logprobs), masked(batch.sampler_logprobs)
        ratio = self._ratio(logprobs, old, mask)
        teacher = None if batch.teacher_logprobs is None else masked(batch.teacher_logprobs)
        surrogate = self._surrogate(ratio, logprobs, sampler, self._advantages(batch.advantages, old, teacher))
        correction = correction_weights(self.rollout_correction, old, sampler, mask)
        per_token = -correction.weights * surrogate.value
        sums = {
            "tokens": torch.ones_like(old),
            "ratio": ratio,
            "clip_low": surrogate.clipped_low,
            "clip_high": surrogate.clipped_high,
            "is_weight": correction.weights,
            "is_weight_squared": correction.weights.square(),
            "rejected": correction.rejected,
            "capped": correction.capped,
            "logprob_abs": (old - sampler).abs(),
            "mismatch_k3": losses.kl_divergence(sampler, old, "k3"),
            "mismatch_ratio_squared": losses.token_ratio(old, sampler).square(),
        }
        if batch.ref_logprobs is not None:
            sums["kl"] = losses.kl_divergence(logprobs, masked(batch.ref_logprobs), self.kl_estimator)
        if batch.entropy is not None:
            sums["entropy"] = masked(batch.entropy)
        if teacher is not None:
            sums["teacher_kl"] = losses.kl_divergence(old, teacher, self.kl_estimator)
        elif batch.teacher_kl is not None:
            sums["teacher_kl"] = masked(batch.teacher_kl)
        if self.needs_reference:
            if "kl" not in sums:
                raise ValueError(f"beta={self.beta} needs ref_logprobs; got None; pass them or set beta to 0.")
            per_token = per_token + self.beta * sums["kl"]
        if self.needs_entropy:
            if "entropy" not in sums:
                raise ValueError(
                    "entropy_coefficient needs the entropy; got None; pass it or set the coefficient to 0."
                )
            per_token = per_token - self.entropy_coefficient * sums["entropy"]
        if self.needs_teacher_kl:
            if batch.teacher_kl is None:
                raise ValueError("full_vocabulary needs teacher_kl; got None; pass it or choose sampled_token.")
            per_token = per_token + self.distillation_coefficient * sums["teacher_kl"]
        metrics = {name: masked(values.detach()).sum() for name, values in sums.items()}
        return LossOutputs((batch.weights * masked(per_token)).sum(), metrics)

    def _advantages(self, advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor | None) -> Tensor:
        """Advantages of the completions [B], or with distillation of their tokens [B, T]."""
        if not self.needs_teacher or self.needs_teacher_kl:
            return advantages
        if teacher_logprobs is None:
            raise ValueError("distillation needs teacher_logprobs; got None; pass them or set its coefficient to 0.")
        distilled = losses.distillation_advantages(old_logprobs, teacher_logprobs)
        return advantages[:, None] + self.distillation_coefficient * distilled

    def _ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        return losses.token_ratio(logprobs, old_logprobs)

    def _surrogate(self, ratio: Tensor, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Surrogate:
        return losses.clipped_surrogate(ratio, advantages, self.epsilon_low, self.epsilon_high, self.delta)


@dataclass(frozen=True)
class GRPO(Objective):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), eq. 3; its KL coefficient is `beta` 0.04."""

    aggregation = "sequence_mean"


@dataclass(frozen=True)
class DAPO(Objective):
    """Clip-higher, token mean over the batch of all processes, no KL (arXiv 2503.14476), eq. 8.

    The method's other half, dynamic sampling and the over-long penalty, acts on groups and rewards.
    """

    aggregation = "token_mean"
    epsilon_high: float = 0.28
    mask_truncated: bool = True


@dataclass(frozen=True)
class DrGRPO(Objective):
    """GRPO without its length and difficulty biases (arXiv 2503.20783): constant normalizer, undivided advantages."""

    aggregation = "constant"
    advantage_norm: AdvantageNorm = "none"


@dataclass(frozen=True)
class BNPO(Objective):
    """DAPO's loss with GRPO's clip: the mean over the tokens of a minibatch, independent of `micro_batch_tokens`.

    TRL's loss of this name, with which QeRL (arXiv 2510.11696) trains, averages the means of micro-batches, so that a
    token counts less in a micro-batch of more tokens.
    """

    aggregation = "token_mean"


@dataclass(frozen=True)
class GSPO(Objective):
    """Group Sequence Policy Optimization (arXiv 2507.18071): one ratio a completion, clipped as in its sec. 5.1."""

    aggregation = "sequence_mean"
    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4

    def _ratio(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        return losses.sequence_ratio(logprobs, old_logprobs, mask)


@dataclass(frozen=True)
class CISPO(Objective):
    """Clipped importance weights instead of clipped updates (MiniMax-M1, arXiv 2506.13585).

    No lower bound, as in the paper; the upper bound, which the paper leaves open, is 1 + 4.
    """

    aggregation = "token_mean"
    clips_ratio = False
    epsilon_low: float = 1.0
    epsilon_high: float = 4.0

    def _surrogate(self, ratio: Tensor, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Surrogate:
        return losses.cispo_surrogate(ratio, logprobs, advantages, self.epsilon_low, self.epsilon_high)


@dataclass(frozen=True)
class OnPolicyDistillation(Objective):
    """The teacher alone: reverse KL to it on the policy's own samples, without rewards (MiniLLM, arXiv 2306.08543).

    Rewards are logged and do not train. `Objective.distillation_coefficient` of the others adds the teacher to rewards.
    """

    aggregation = "token_mean"
    distillation_coefficient: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.needs_teacher:
            raise UserError("OnPolicyDistillation needs a distillation_coefficient above 0; got 0; leave it at 1")

    def _advantages(self, advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor | None) -> Tensor:
        return super()._advantages(torch.zeros_like(advantages), old_logprobs, teacher_logprobs)


@dataclass(frozen=True)
class SAPO(Objective):
    """Soft Adaptive Policy Optimization (arXiv 2511.20347): a sigmoid of the ratio instead of a clip.

    The clip fractions count the tokens that GRPO would clip at epsilon_low and epsilon_high, which act on nothing else.

    Args:
        tau_positive: Steepness of the soft clip where the advantage is positive; larger is nearer to a hard clip.
        tau_negative: The same where it is negative; the paper's is larger than `tau_positive`.
    """

    aggregation = "sequence_mean"
    clips_ratio = False
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_positive", "tau_negative"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be a number above 0; got {value}; the paper's is about 1.")

    def _surrogate(self, ratio: Tensor, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Surrogate:
        taus, epsilons = (self.tau_positive, self.tau_negative), (self.epsilon_low, self.epsilon_high)
        return losses.sapo_surrogate(ratio, advantages, *taus, *epsilons)


@dataclass(frozen=True)
class DPPO(Objective):
    """Divergence Proximal Policy Optimization (arXiv 2602.04879), Binary-TV: a mask by the change of probability.

    epsilon_low and epsilon_high bound the change of a sampled token's probability since the sampler, not the ratio,
    which is large for rare tokens that hardly move. 0.2 is the default of prime-rl.
    """

    aggregation = "token_mean"
    clips_ratio = False

    def _surrogate(self, ratio: Tensor, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Surrogate:
        return losses.dppo_surrogate(ratio, logprobs, sampler, advantages, self.epsilon_low, self.epsilon_high)
