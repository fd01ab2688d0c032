"""TRL's and verl's own functions on the batch of `loss_parity.py`.

TRL has the formulas in methods of its trainers, which are called here on a trainer without model or data: generation,
rewards and log-probabilities are those of the batch. verl has functions; importing them needs ray, which they do not
use, and a stub stands for it.
"""

import importlib.machinery
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy
import torch
from accelerate import Accelerator
from loss_parity import CONTROL, ENTROPIES, GROUP, MAX_TOKENS, START, WEIGHTS, Batch, Results
from torch import Tensor, nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

for name in ("ray", "ray.experimental", "ray.experimental.state", "ray.util"):
    stub = MagicMock(name=name, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
    sys.modules.setdefault(name, stub)

from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as corr  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

END, PAD = 2, 0


@dataclass(frozen=True)
class Peer:
    """A function to compare with."""

    piece: str
    """Key of `loss_parity.OURS`."""
    package: str
    function: str
    call: Callable[[Batch], Results]
    differs: str = ""
    """Why its result differs by definition; empty if it must agree."""


def peer_versions() -> dict[str, str]:
    """Versions of the compared packages."""
    return {name: version(name) for name in ("trl", "verl")}


# TRL ------------------------------------------------------------------------------------------------------------------


@contextmanager
def float64() -> Any:
    """TRL makes tensors of lists in the default data type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class BatchMethods:
    """Replaces what a trainer samples, scores and computes by a batch's values."""

    def __init__(self, batch: Batch, rewards: Tensor, reward_weights: list[float], **settings: Any) -> None:
        arguments = GRPOConfig(tempfile.gettempdir(), use_cpu=True, bf16=False, report_to=[], **settings)
        vars(self).update(vars(arguments))  # what the constructor copies, under the same names
        self.args, self.batch, self.scores = arguments, batch, rewards
        self.model, self.ref_model, self.accelerator = nn.Linear(1, 1), nn.Linear(1, 1), Accelerator(cpu=True)
        self.model.is_gradient_checkpointing = False
        self.logprobs, self.entropy = (tensor.clone().requires_grad_() for tensor in (batch.logprobs, batch.entropy))
        self.epsilon_low = arguments.epsilon
        self.epsilon_high = arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high
        self.num_generations, self.max_completion_length = GROUP, MAX_TOKENS
        self.reward_weights = torch.tensor(reward_weights)
        self.reward_funcs = self.reward_func_names = [str(number) for number in range(len(reward_weights))]
        self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [END]
        self.num_iterations, self.mask_truncated_completions = 2, True
        self.current_gradient_accumulation_steps, self.args.steps_per_generation = 1, 1
        self.environment_factories = self.environments = self.tools = None
        self.aux_loss_enabled = self.log_multimodal = self._is_vlm = False
        self.normalize_advantages, self.reward_clip_range = False, None
        self._entropy_bonus_enabled = self.entropy_coef != 0 or self.use_adaptive_entropy
        self._last_world_entropy, self._entropy_window_stats = float("inf"), None
        self._metrics: Any = {"train": defaultdict(list)}
        self._logs = {name: deque() for name in ("prompt", "completion", "advantages")}
        self._logs |= {name: defaultdict(list) for name in ("rewards", "extra")}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        lengths = self.batch.lengths.tolist()
        ended = self.batch.mask.any(dim=1).tolist()
        ids = [[1] * (length - 1) + [END if end else 1] for length, end in zip(lengths, ended, strict=True)]
        if isinstance(self, RLOOTrainer):
            return [[1]] * len(ids), ids, prompts
        sampled = [row[:length].tolist() for row, length in zip(self.batch.sampler, lengths, strict=True)]
        tools = [[1] * length for length in lengths]
        tools[1] = self.batch.mask[1, : lengths[1]].int().tolist()
        return [[1]] * len(ids), ids, tools, prompts, sampled, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return self.scores.clone()

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        if model is self.ref_model:
            return self.batch.reference, None, None
        return (self.logprobs, self.entropy, None) if torch.is_grad_enabled() else (self.batch.old, None, None)

    def scored(self) -> dict[str, Tensor]:
        """The batch that the trainer would update with."""
        return self._generate_and_score_completions([{"prompt": "p"}] * len(self.batch.mask))

    def coefficients(self) -> list[float]:
        """Coefficients of the entropy bonus in a run of rollouts, from the bonus that each loss has."""
        inputs, applied = self.scored(), []
        for entropy in ENTROPIES:
            self.entropy = torch.full_like(self.batch.entropy, entropy).requires_grad_()
            (gradient,) = torch.autograd.grad(self._compute_loss(self.model, inputs), self.entropy)
            applied.append(-gradient.sum())
        return applied


class GRPO(BatchMethods, GRPOTrainer):
    """TRL's GRPO trainer over a batch."""


class RLOO(BatchMethods, RLOOTrainer):
    """TRL's RLOO trainer over a batch."""


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}


def trl_loss(**settings: Any) -> Callable[[Batch], Results]:
    """Loss and gradients of TRL's GRPO trainer; without `VLLM`, sampler and old policy are not told apart."""

    def call(batch: Batch) -> Results:
        with float64():
            trainer = GRPO(batch, batch.rewards[:, :1], [1.0], **settings)
            loss = trainer._compute_loss(trainer.model, trainer.scored())
            loss.backward()
        results = {"loss": loss.detach()[None], "gradient": trainer.logprobs.grad}
        return results | ({"entropy gradient": trainer.entropy.grad} if trainer._entropy_bonus_enabled else {})

    return call


def trl_advantages(
    kind: type = GRPO, partial: bool = False, both: bool = False, **settings: Any
) -> Callable[[Batch], Results]:
    """Advantages of the first reward, or of both."""

    def call(batch: Batch) -> Results:
        rewards = batch.partial_rewards if partial else batch.rewards
        weights = [*WEIGHTS.values()] if both else [1.0]
        with float64():
            trainer = kind(batch, rewards[:, : len(weights)], weights, beta=0.0, **settings)
            return {"advantages": trainer.scored()["advantages"]}

    return call


def trl_coefficients(first: bool) -> Callable[[Batch], Results]:
    """Coefficients of the entropy bonus of a run."""

    def call(batch: Batch) -> Results:
        control = {"entropy_target": CONTROL.target, "entropy_coef_delta": CONTROL.step}
        control |= {"entropy_coef_min": CONTROL.minimum, "entropy_coef_max": CONTROL.maximum}
        settings = {"use_adaptive_entropy": True, "entropy_coef": START, "loss_type": "bnpo"} | control
        with float64():
            found = torch.stack(GRPO(batch, batch.rewards[:, :1], [1.0], **settings).coefficients())
        return {"coefficient": found[:1] if first else found[1:]}

    return call


def trl_weights(mode: str, low: float | None, high: float) -> Callable[[Batch], Results]:
    """TRL's importance weights; it marks what it rejects by 0."""

    def call(batch: Batch) -> Results:
        with float64():
            weights = GRPO(batch, batch.rewards[:, :1], [1.0], **truncated(mode, low, high)).scored()[
                "importance_sampling_ratio"
            ]
        weights = weights.expand_as(batch.mask) * batch.mask
        return {"weights": weights, "kept": (weights != 0).double()}

    return call


def truncated(mode: str, low: float | None, high: float) -> dict[str, Any]:
    """Settings of the correction between vLLM and the trainer."""
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return VLLM | bounds | {"vllm_importance_sampling_mode": mode}


MODES: dict[str, tuple[str, float | None, float]] = {
    "token truncation": ("token_truncate", None, 1.2),
    "sequence truncation": ("sequence_truncate", None, 1.2),
    "token mask": ("token_mask", 0.8, 1.25),
    "sequence mask": ("sequence_mask", 0.7, 1.5),
}
PLAIN = {"loss_type": "grpo", "beta": 0.0}
KL = {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}
GSPO = PLAIN | {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2}
BONUS = {"entropy_coef": 0.01}
LOSS = "GRPOTrainer._compute_loss"
SCORE = "GRPOTrainer._generate_and_score_completions"
UNSCORED = ", with unscored completions"

TRL = [
    Peer("GRPO with KL penalty k3", "TRL", LOSS, trl_loss(**KL)),
    Peer(
        "GRPO with KL penalty k3, defaults of both",
        "TRL",
        LOSS,
        trl_loss(loss_type="grpo", beta=0.04),
        "TRL multiplies the KL penalty of a token by the policy ratio by default (`use_bias_correction_kl`); here, as in "
        "GRPO's eq. 3, it has no weight.",
    ),
    Peer("DAPO, clip-higher", "TRL", LOSS, trl_loss(loss_type="dapo", epsilon_high=0.28)),
    Peer("Dr. GRPO", "TRL", LOSS, trl_loss(loss_type="dr_grpo", scale_rewards="none")),
    Peer("BNPO", "TRL", LOSS, trl_loss(loss_type="bnpo")),
    Peer(
        "advantages over the batch's standard deviation, in the loss",
        "TRL",
        LOSS,
        trl_loss(**PLAIN, scale_rewards="batch"),
    ),
    Peer("two-sided clip, delta 1.5", "TRL", LOSS, trl_loss(loss_type="bnpo", delta=1.5)),
    Peer("GSPO", "TRL", LOSS, trl_loss(**GSPO)),
    Peer("GSPO with sequence truncation", "TRL", LOSS, trl_loss(**GSPO, **truncated(*MODES["sequence truncation"]))),
    Peer(
        "GSPO with token truncation",
        "TRL",
        LOSS,
        trl_loss(**GSPO, **truncated(*MODES["token truncation"])),
        "the losses are equal, but TRL's token weights act on a completion's one ratio, so that its tokens share the "
        "mean weight in the gradient; here and in verl each token's gradient has its own weight (GSPO-token).",
    ),
    Peer("SAPO", "TRL", LOSS, trl_loss(loss_type="sapo")),
    Peer("CISPO", "TRL", LOSS, trl_loss(loss_type="cispo", epsilon_high=1.5)),
    Peer("top-entropy mask, a quarter of 36 tokens", "TRL", LOSS, trl_loss(**KL, top_entropy_quantile=0.25)),
    Peer(
        "top-entropy mask, a fifth of 36 tokens",
        "TRL",
        LOSS,
        trl_loss(**KL, top_entropy_quantile=0.2),
        "the token beside the bound: TRL interpolates a quantile of the entropies and keeps 8 of the 36 tokens; here the "
        "number is rounded, 7 of 7.2.",
    ),
    Peer("entropy bonus of a token mean", "TRL", LOSS, trl_loss(loss_type="bnpo", **BONUS)),
    Peer(
        "entropy bonus of a mean over completions",
        "TRL",
        LOSS,
        trl_loss(**PLAIN, **BONUS),
        "TRL's bonus is the mean over tokens with every loss type; here it is aggregated as the loss is.",
    ),
    Peer(
        "entropy bonus with top-entropy mask",
        "TRL",
        LOSS,
        trl_loss(loss_type="bnpo", top_entropy_quantile=0.25, **BONUS),
        "TRL's bonus acts on the tokens of the mask alone; here on all, as the KL penalty does in both.",
    ),
    Peer("adaptive entropy, other rollouts", "TRL", LOSS, trl_coefficients(first=False)),
    Peer(
        "adaptive entropy, first rollout",
        "TRL",
        LOSS,
        trl_coefficients(first=True),
        "TRL applies no bonus before it has measured an entropy; here the first rollout has the initial coefficient.",
    ),
    *(Peer(name, "TRL", SCORE, trl_weights(*mode)) for name, mode in MODES.items()),
    *(Peer(f"loss with {name}", "TRL", LOSS, trl_loss(**KL, **truncated(*mode))) for name, mode in MODES.items()),
    *(
        Peer(f"advantages, {norm}", "TRL", SCORE, trl_advantages(scale_rewards=norm))
        for norm in ("group", "batch", "none")
    ),
    *(
        Peer(f"advantages, {norm}{UNSCORED}", "TRL", SCORE, trl_advantages(partial=True, scale_rewards=norm))
        for norm in ("group", "batch")
    ),
    Peer("advantages, rloo", "TRL", SCORE.replace("GRPO", "RLOO"), trl_advantages(RLOO)),
    Peer(f"advantages, rloo{UNSCORED}", "TRL", SCORE.replace("GRPO", "RLOO"), trl_advantages(RLOO, partial=True)),
    Peer(
        "advantages, GDPO",
        "TRL",
        SCORE,
        trl_advantages(both=True, multi_objective_aggregation="normalize_then_sum"),
    ),
    Peer(
        f"advantages, GDPO{UNSCORED}",
        "TRL",
        SCORE,
        trl_advantages(partial=True, both=True, multi_objective_aggregation="normalize_then_sum"),
    ),
]


# verl -----------------------------------------------------------------------------------------------------------------


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
            found = corrected(batch, **correction)
            mask, weights = found["kept"], found["weights"]
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
    found = corrected(batch, **settings)
    return {"weights": found["weights"] * found["kept"], "kept": found["kept"]}


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
    _, _, found = corr.compute_rollout_correction_and_rejection_mask(batch.old, batch.sampler, mask, **settings)
    names = {"k3": "k3_kl", "chi2": "chi2_token", "ess": "rollout_is_eff_sample_size"}
    return {name: torch.tensor([found[f"rollout_corr/{theirs}"]]).double() for name, theirs in names.items()}


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
        verl_loss(core_algos.compute_policy_loss_dppo_tv, clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=20.0),
        "the gradients are equal, but verl's loss is a detached ratio, truncated at 20, times the log-probability.",
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

PEERS = [*TRL, *VERL]
