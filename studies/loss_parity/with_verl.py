"""verl's functions on the batch. Importing them needs ray, which they do not use; a stub stands for it."""

import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy
import torch
from torch import Tensor

from studies.loss_parity.pieces import GROUP, MAX_TOKENS, WEIGHTS, Batch, Peer, Results

for name in ("ray", "ray.experimental", "ray.experimental.state", "ray.util"):
    stub = MagicMock(name=name, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
    sys.modules.setdefault(name, stub)

from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as corr  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402


def actor(batch: Batch, **settings: Any) -> ActorConfig:
    """verl's settings of a policy loss; completions without tokens count in means over completions, as here."""
    totals = {"global_batch_size": len(batch.mask), "loss_scale_factor": MAX_TOKENS}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP,
        use_dynamic_bsz=True,
        **{"clip_ratio_c": 3.0} | settings,
        global_batch_info=totals,
    )


def group_index(batch: Batch) -> numpy.ndarray:
    """Group of each completion, [B]."""
    return numpy.arange(len(batch.mask)) // GROUP


def outcome(batch: Batch) -> tuple[Tensor, Tensor]:
    """First rewards, each at its completion's first token, and a mask that has this token alone, [B, 1] each."""
    return batch.rewards[:, :1].clone(), torch.ones(len(batch.mask), 1, dtype=torch.float64)


def verl_advantages(function: Callable[..., Any], **settings: Any) -> Callable[[Batch], Results]:
    """Advantages of the first reward."""

    def call(batch: Batch) -> Results:
        return {"advantages": function(*outcome(batch), index=group_index(batch), **settings)[0][:, 0].double()}

    return call


def verl_gdpo(batch: Batch) -> Results:
    """Advantages of both rewards, which each have one token."""
    rewards, mask = outcome(batch)
    config = AlgoConfig(gdpo_reward_keys=[*WEIGHTS], gdpo_reward_weights=[*WEIGHTS.values()])
    ones = torch.ones(len(batch.mask), 2, dtype=torch.int64)
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        rewards,
        mask,
        group_index(batch),
        epsilon=1e-4,
        config=config,
        non_tensor_batch=dict(zip(WEIGHTS, batch.rewards.T.numpy(), strict=True)),
        batch={"prompts": ones[:, :1], "attention_mask": ones},
    )
    return {"advantages": advantages[:, 0].double()}


def verl_loss(
    function: Callable[..., Any],
    aggregation: str = "token-mean",
    normalize: bool = True,
    correction: dict[str, Any] | None = None,
    **settings: Any,
) -> Callable[[Batch], Results]:
    """Loss and gradient of a policy loss, after verl's own advantages and correction."""

    def call(batch: Batch) -> Results:
        advantages = verl_advantages(
            core_algos.compute_grpo_outcome_advantage, epsilon=1e-4, norm_adv_by_std_in_grpo=normalize
        )(batch)["advantages"]
        mask, weights = batch.mask.double(), None
        if correction is not None:
            corrections = corrected(batch, **correction)
            mask, weights = corrections["kept"], corrections["weights"]
        return policy_loss(function, batch, advantages[:, None].expand_as(mask), mask, weights, aggregation, **settings)

    return call


def policy_loss(
    function: Callable[..., Any],
    batch: Batch,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    aggregation: str,
    **settings: Any,
) -> Results:
    """Loss and gradient of one of verl's policy losses."""
    logprobs = batch.logprobs.clone().requires_grad_()
    config = actor(batch, **settings)
    loss, _ = function(batch.old, logprobs, advantages, mask, aggregation, config, rollout_is_weights=weights)
    loss.backward()
    return {"loss": loss.detach()[None], "gradient": logprobs.grad}


def corrected(batch: Batch, **settings: Any) -> Results:
    """verl's importance weights, and the mask of what it keeps."""
    mask = batch.mask.double()
    proto, kept, _ = corr.compute_rollout_correction_and_rejection_mask(batch.old, batch.sampler, mask, **settings)
    weights = mask if proto is None else proto.batch["rollout_is_weights"]
    return {"weights": weights, "kept": kept.double()}


def rejecting(batch: Batch, **settings: Any) -> Results:
    """As `corrected`, with weight 0 where rejected."""
    corrections = corrected(batch, **settings)
    return {"weights": corrections["weights"] * corrections["kept"], "kept": corrections["kept"]}


def weighting(batch: Batch, **settings: Any) -> Results:
    """As `corrected`, where weights of 0 count as rejected: verl's IcePop is such."""
    weights = corrected(batch, **settings)["weights"]
    return {"weights": weights, "kept": (weights != 0).double()}


def verl_divergence(estimator: str) -> Callable[[Batch], Results]:
    """KL divergence from the reference policy at each token that trains."""
    return lambda batch: {"kl": core_algos.kl_penalty(batch.logprobs, batch.reference, estimator) * batch.mask}


def verl_mismatch(batch: Batch) -> Results:
    """Measures of the difference of sampler and trainer."""
    settings = {"rollout_is": "token", "rollout_is_threshold": 1.2}
    mask = batch.mask.double()
    _, _, corrections = corr.compute_rollout_correction_and_rejection_mask(batch.old, batch.sampler, mask, **settings)
    names = {"k3": "k3_kl", "chi2": "chi2_token", "ess": "rollout_is_eff_sample_size"}
    return {name: torch.tensor([corrections[f"rollout_corr/{theirs}"]]).double() for name, theirs in names.items()}


def verl_distilled(batch: Batch) -> Results:
    """Minus k1 of the teacher, which verl's distillation takes as advantages."""
    return {"advantages": -core_algos.kl_penalty(batch.old, batch.teacher, "k1") * batch.mask}


def verl_distillation(batch: Batch) -> Results:
    """Policy loss with these advantages."""
    advantages, mask = verl_distilled(batch)["advantages"], batch.mask.double()
    return policy_loss(core_algos.compute_policy_loss_vanilla, batch, advantages, mask, None, "token-mean")


SEQUENCE_MEAN = "seq-mean-token-mean"
CLIPS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 1.2}
SEQUENCE_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 1.2}
CORRECT = "compute_rollout_correction_and_rejection_mask"
vanilla = core_algos.compute_policy_loss_vanilla

DPPO_TV = verl_loss(core_algos.compute_policy_loss_dppo_tv, clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=20.0)

VERL = [
    Peer("dual clip, delta 1.5", "verl", "compute_policy_loss_vanilla", verl_loss(vanilla, clip_ratio_c=1.5)),
    Peer("GRPO's aggregation", "verl", "agg_loss", verl_loss(vanilla, SEQUENCE_MEAN)),
    Peer("Dr. GRPO's aggregation", "verl", "agg_loss", verl_loss(vanilla, "seq-mean-token-sum-norm", normalize=False)),
    Peer(
        "GSPO",
        "verl",
        "compute_policy_loss_gspo",
        verl_loss(core_algos.compute_policy_loss_gspo, SEQUENCE_MEAN, **CLIPS),
    ),
    Peer(
        "GSPO with token truncation",
        "verl",
        "compute_policy_loss_gspo",
        verl_loss(core_algos.compute_policy_loss_gspo, SEQUENCE_MEAN, correction=TOKEN_TIS, **CLIPS),
    ),
    Peer("SAPO", "verl", "compute_policy_loss_sapo", verl_loss(core_algos.compute_policy_loss_sapo)),
    Peer(
        "CISPO, both bounds",
        "verl",
        "compute_policy_loss_cispo",
        verl_loss(core_algos.compute_policy_loss_cispo, clip_ratio_low=0.3, clip_ratio_high=0.5),
    ),
    Peer(
        "DPPO, Binary-TV",
        "verl",
        "compute_policy_loss_dppo_tv",
        DPPO_TV,
        "verl's loss is a detached ratio, truncated at 20, times the log-probability.",
    ),
    Peer(
        "DPPO, Binary-TV, gradient",
        "verl",
        "compute_policy_loss_dppo_tv",
        lambda batch: {"gradient": DPPO_TV(batch)["gradient"]},
    ),
    Peer("token truncation", "verl", CORRECT, lambda batch: weighting(batch, **TOKEN_TIS)),
    Peer("sequence truncation", "verl", CORRECT, lambda batch: weighting(batch, **SEQUENCE_TIS)),
    Peer(
        "token mask",
        "verl",
        CORRECT,
        lambda batch: weighting(batch, rollout_is="token", rollout_is_threshold="0.8_1.25"),
    ),
    Peer(
        "sequence mask",
        "verl",
        CORRECT,
        lambda batch: weighting(batch, rollout_is="sequence", rollout_is_threshold="0.7_1.5"),
    ),
    Peer(
        "rejection by the geometric mean",
        "verl",
        "compute_rollout_rejection_mask",
        lambda batch: rejecting(
            batch, rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.02:.17g}_{1 / 0.95:.17g}"
        ),
    ),
    Peer(
        "loss of a token mean with token truncation",
        "verl",
        "compute_policy_loss_vanilla",
        verl_loss(vanilla, correction=TOKEN_TIS),
    ),
    Peer(
        "loss of a token mean with sequence truncation",
        "verl",
        "compute_policy_loss_vanilla",
        verl_loss(vanilla, correction=SEQUENCE_TIS),
    ),
    Peer(
        "loss of a token mean with token mask",
        "verl",
        "compute_policy_loss_vanilla",
        verl_loss(vanilla, correction={"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"}),
    ),
    Peer(
        "loss of a token mean with sequence mask",
        "verl",
        "compute_policy_loss_vanilla",
        verl_loss(
            vanilla,
            correction=SEQUENCE_TIS
            | {"rollout_is_threshold": 1e9, "rollout_rs": "seq_sum_k1"}
            | {"rollout_rs_threshold": f"{1 / 1.5:.17g}_{1 / 0.7:.17g}"},
        ),
        "verl takes rejected tokens out of the mean's denominator, so that the others weigh more; here they stay in "
        "it, as in TRL and in verl's own IcePop.",
    ),
    *(Peer(f"KL {estimator}", "verl", "kl_penalty", verl_divergence(estimator)) for estimator in ("k1", "k2", "k3")),
    Peer("mismatch metrics", "verl", "compute_offpolicy_metrics, compute_is_metrics", verl_mismatch),
    Peer("on-policy distillation, advantages", "verl", "kl_penalty", verl_distilled),
    Peer("on-policy distillation, loss", "verl", "compute_policy_loss_vanilla", verl_distillation),
    Peer(
        "advantages, group",
        "verl",
        "compute_grpo_outcome_advantage, epsilon=1e-4",
        verl_advantages(core_algos.compute_grpo_outcome_advantage, epsilon=1e-4),
    ),
    Peer(
        "advantages, none",
        "verl",
        "compute_grpo_outcome_advantage",
        verl_advantages(core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    ),
    Peer(
        "advantages, rloo",
        "verl",
        "compute_rloo_outcome_advantage",
        verl_advantages(core_algos.compute_rloo_outcome_advantage),
    ),
    Peer(
        "advantages, GDPO",
        "verl",
        "compute_gdpo_outcome_advantage, epsilon=1e-4",
        verl_gdpo,
        "verl divides the sum by the square root of its variance over tokens + 1e-8; here, as in TRL, it is divided by "
        "its standard deviation over completions + 1e-4.",
    ),
]
