"""What this package computes of a random batch, by the pieces that TRL or verl have too.

All values are float64, but for the token weights (`qerl_pl.algorithm.losses.token_weights`), which are float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from qerl_pl.algorithm import (
    BNPO,
    CISPO,
    DAPO,
    DPPO,
    GRPO,
    GSPO,
    SAPO,
    DrGRPO,
    Objective,
    OnPolicyDistillation,
    RolloutCorrection,
)
from qerl_pl.algorithm.advantages import AdvantageNorm, Scores, group_advantages, normalized_then_summed
from qerl_pl.algorithm.losses import KLEstimator, distillation_advantages, kl_divergence
from qerl_pl.algorithm.objectives import LossInputs
from qerl_pl.algorithm.off_policy import PRESETS, correction_weights
from qerl_pl.modules.update import update_metrics

Results = dict[str, Tensor]
TOLERANCE = 1e-7
"""Absolute and relative, of float64 values with float32 token weights."""
GROUP, MAX_TOKENS = 4, 10


@dataclass(frozen=True)
class Batch:
    """Two groups of four completions with up to nine tokens."""

    logprobs: Tensor
    """Of the current policy, [B, T]; so are the others, of the policies that `LossInputs` has."""
    old: Tensor
    sampler: Tensor
    reference: Tensor
    teacher: Tensor
    entropy: Tensor
    """In nats, [B, T]."""
    mask: Tensor
    """Tokens that train, bool [B, T]: row 1 has two that do not, as tool results, and row 5 none, as if truncated."""
    lengths: Tensor
    """Tokens of each completion, int64 [B]."""
    rewards: Tensor
    """Two rewards, [B, 2]."""
    partial_rewards: Tensor
    """The same where some do not apply, NaN: one of two in row 0, both in row 6."""

    @classmethod
    def random(cls) -> Self:
        draw = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        lengths = torch.tensor([9, 8, 2, 5, 1, 4, 7, 6])
        shape = (len(lengths), int(lengths.max()))
        mask = torch.arange(shape[1]) < lengths[:, None]
        mask[1, 3:5], mask[5] = False, False
        old = -0.3 - normal(*shape).abs()
        spread = torch.tensor([0.05, 0.1, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1], dtype=torch.float64)[:, None]
        rewards = torch.stack([normal(shape[0]).round(decimals=1), (normal(shape[0]) > 0).double()], dim=1)
        partial = rewards.clone()
        partial[0, 1], partial[6] = torch.nan, torch.nan
        policies = (old + 0.4 * normal(*shape), old, old + spread * normal(*shape), old + 0.3 * normal(*shape))
        return cls(*policies, old + 0.5 * normal(*shape), normal(*shape).abs(), mask, lengths, rewards, partial)

    def json(self) -> dict[str, list[float]]:
        """Lists, in which NaN is None."""
        return {field.name: as_lists(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, list[float]]) -> Self:
        batch = cls(**{name: from_lists(value) for name, value in values.items()})
        return replace(batch, mask=batch.mask.bool(), lengths=batch.lengths.long())


def as_lists(values: Tensor) -> list[float]:
    """Nested lists in which NaN is None, as JSON has none."""
    return [as_lists(row) for row in values] if values.dim() > 1 else [None if x != x else x for x in values.tolist()]


def from_lists(values: list[float]) -> Tensor:
    """The tensor of `as_lists`, float64."""
    nested = values and isinstance(values[0], list)
    rows = [from_lists(row) if nested else torch.nan if row is None else float(row) for row in values]
    return torch.stack(rows) if nested else torch.tensor(rows, dtype=torch.float64)


# This package's functions, by piece -----------------------------------------------------------------------------------

OFF = PRESETS["off"]
CORRECTIONS = {
    "token truncation": RolloutCorrection(cap=1.2),
    "sequence truncation": RolloutCorrection("sequence", 1.2),
    "token mask": RolloutCorrection(cap=None, rejection="token", low=0.8, high=1.25),
    "sequence mask": RolloutCorrection("sequence", None, "sequence", low=0.7, high=1.5),
}


def loss_of(objective: Objective, sampler_is_old: bool = False) -> Callable[[Batch], Results]:
    """Loss of a batch with advantages of the first reward, and its gradients by log-probabilities and by entropy.

    Args:
        objective: See there.
        sampler_is_old: Leaves sampler and old policy equal.
    """

    def compute(batch: Batch) -> Results:
        logprobs, entropy = (tensor.clone().requires_grad_() for tensor in (batch.logprobs, batch.entropy))
        mask = batch.mask
        outputs = objective.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=batch.old,
                sampler_logprobs=batch.old if sampler_is_old else batch.sampler,
                advantages=objective.advantages(Scores(batch.rewards[:, 0]), GROUP)[0],
                mask=mask,
                weights=objective.weights(mask, MAX_TOKENS, len(mask), float(mask.sum())),
                ref_logprobs=batch.reference,
                entropy=entropy if objective.needs_entropy else None,
                teacher_logprobs=batch.teacher,
            )
        )
        outputs.loss.backward()
        results = {"loss": outputs.loss.detach()[None], "gradient": logprobs.grad}
        return results | ({"entropy gradient": entropy.grad} if objective.needs_entropy else {})

    return compute


def weights_of(correction: RolloutCorrection) -> Callable[[Batch], Results]:
    """Importance weights of the tokens that train, and whether they are kept, 0 at others."""

    def compute(batch: Batch) -> Results:
        ours = correction_weights(correction, batch.old, batch.sampler, batch.mask)
        return {"weights": ours.weights * batch.mask, "kept": (~ours.rejected & batch.mask).double()}

    return compute


def advantages_of(norm: AdvantageNorm, partial: bool = False) -> Callable[[Batch], Results]:
    """Advantages of the first reward; of partial rewards those of the completions that have any."""

    def compute(batch: Batch) -> Results:
        rewards = (batch.partial_rewards if partial else batch.rewards)[:, 0].clone()
        return {"advantages": group_advantages(rewards, GROUP, norm)}

    return compute


WEIGHTS = {"first": 1.0, "second": 0.5}


def summed(batch: Batch, partial: bool = False) -> Results:
    """Advantages of both rewards, normalized each."""
    rewards = dict(zip(WEIGHTS, (batch.partial_rewards if partial else batch.rewards).T, strict=True))
    return {"advantages": normalized_then_summed(rewards, WEIGHTS, GROUP)}


def divergence_of(estimator: KLEstimator) -> Callable[[Batch], Results]:
    """KL divergence from the reference policy at each token that trains."""
    return lambda batch: {"kl": kl_divergence(batch.logprobs, batch.reference, estimator) * batch.mask}


def distilled(batch: Batch) -> Results:
    """Advantages of on-policy distillation at each token that trains."""
    return {"advantages": distillation_advantages(batch.old, batch.teacher) * batch.mask}


def mismatch(batch: Batch) -> Results:
    """Logged measures of the difference of sampler and trainer, with token weights capped at 1.2."""
    objective = BNPO(correction=CORRECTIONS["token truncation"])
    mask = batch.mask
    inputs = LossInputs(batch.logprobs, batch.old, batch.sampler, batch.rewards[:, 0], mask, mask.double())
    totals = {name: float(value) for name, value in objective.loss(inputs).metrics.items()}
    metrics = update_metrics(totals | dict.fromkeys(("grad_norm", "loss", "lr"), 0.0), steps=1)
    return {name: torch.tensor([metrics[f"mismatch/{name}"]], dtype=torch.float64) for name in ("k3", "chi2", "ess")}


dppo = loss_of(DPPO(correction=OFF, epsilon_low=0.1, epsilon_high=0.1), sampler_is_old=True)

OURS: dict[str, Callable[[Batch], Results]] = {
    "GRPO with KL penalty k3": loss_of(GRPO(beta=0.04, correction=OFF)),
    "GRPO with KL penalty k3, defaults of both": loss_of(GRPO(beta=0.04, correction=OFF)),
    "DAPO, clip-higher": loss_of(DAPO(correction=OFF)),
    "Dr. GRPO": loss_of(DrGRPO(correction=OFF)),
    "BNPO": loss_of(BNPO(correction=OFF)),
    "advantages over the batch's standard deviation, in the loss": loss_of(
        GRPO(correction=OFF, beta=0, advantage_norm="batch")
    ),
    "two-sided clip, delta 1.5": loss_of(BNPO(correction=OFF, delta=1.5)),
    "dual clip, delta 1.5": loss_of(BNPO(correction=OFF, delta=1.5)),
    "GRPO's aggregation": loss_of(GRPO(correction=OFF, beta=0, delta=3.0)),
    "Dr. GRPO's aggregation": loss_of(DrGRPO(correction=OFF, delta=3.0)),
    "GSPO": loss_of(GSPO(correction=OFF, epsilon_low=0.1, epsilon_high=0.2)),
    "GSPO with token truncation": loss_of(
        GSPO(correction=CORRECTIONS["token truncation"], epsilon_low=0.1, epsilon_high=0.2)
    ),
    "GSPO with sequence truncation": loss_of(
        GSPO(correction=CORRECTIONS["sequence truncation"], epsilon_low=0.1, epsilon_high=0.2)
    ),
    "SAPO": loss_of(SAPO(correction=OFF)),
    "CISPO": loss_of(CISPO(correction=OFF, epsilon_high=0.5)),
    "CISPO, both bounds": loss_of(CISPO(correction=OFF, epsilon_low=0.3, epsilon_high=0.5)),
    "DPPO, Binary-TV": dppo,
    "DPPO, Binary-TV, gradient": lambda batch: {"gradient": dppo(batch)["gradient"]},
    "entropy bonus of a token mean": loss_of(BNPO(correction=OFF, entropy_coefficient=0.01)),
    "entropy bonus of a mean over completions": loss_of(GRPO(correction=OFF, beta=0, entropy_coefficient=0.01)),
    **{
        f"loss with {name}": loss_of(GRPO(beta=0.04, correction=correction)) for name, correction in CORRECTIONS.items()
    },
    **{
        f"loss of a token mean with {name}": loss_of(BNPO(correction=CORRECTIONS[name], delta=3.0))
        for name in CORRECTIONS
    },
    **{name: weights_of(correction) for name, correction in CORRECTIONS.items()},
    "rejection by the geometric mean": weights_of(RolloutCorrection(None, rejection="geometric", low=0.95, high=1.02)),
    "KL k1": divergence_of("k1"),
    "KL k2": divergence_of("k2"),
    "KL k3": divergence_of("k3"),
    "mismatch metrics": mismatch,
    "on-policy distillation, advantages": distilled,
    "on-policy distillation, loss": loss_of(OnPolicyDistillation(correction=OFF, delta=3.0)),
    "advantages, group": advantages_of("group"),
    "advantages, batch": advantages_of("batch"),
    "advantages, none": advantages_of("none"),
    "advantages, rloo": advantages_of("rloo"),
    "advantages, group, with unscored completions": advantages_of("group", partial=True),
    "advantages, batch, with unscored completions": advantages_of("batch", partial=True),
    "advantages, rloo, with unscored completions": advantages_of("rloo", partial=True),
    "advantages, GDPO": summed,
    "advantages, GDPO, with unscored completions": lambda batch: summed(batch, partial=True),
}
"""What this package computes of a batch, by piece."""


@dataclass(frozen=True)
class Peer:
    """A function to compare with."""

    piece: str
    """Key of `OURS`."""
    package: str
    function: str
    call: Callable[[Batch], Results]
    differs: str = ""
    """Why its result differs by definition; empty if it must agree."""


def largest_difference(ours: Results, expected: Results) -> tuple[float, bool]:
    """Largest absolute difference, and whether each is within the tolerance.

    Raises:
        ValueError: Names or shapes differ.
    """
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in expected.items()}:
        raise ValueError(f"results must have the same names and shapes; got {ours} and {expected}")
    size = max(float((value - expected[name]).abs().max()) for name, value in ours.items())
    close = (torch.allclose(value, expected[name], TOLERANCE, TOLERANCE) for name, value in ours.items())
    return size, all(close)
