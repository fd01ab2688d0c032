"""TRL's methods on the batch: of its trainers without model and data, which sample, score and compute the batch."""

import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from studies.loss_parity.pieces import ENTROPIES, GROUP, MAX_TOKENS, WEIGHTS, Batch, Peer, Results

END, PAD = 2, 0


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
        "TRL multiplies the KL penalty of a token by the policy ratio by default (`use_bias_correction_kl`); here, as "
        "in GRPO's eq. 3, it has no weight.",
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
    Peer("entropy bonus of a token mean", "TRL", LOSS, trl_loss(loss_type="bnpo", **BONUS)),
    Peer(
        "entropy bonus of a mean over completions",
        "TRL",
        LOSS,
        trl_loss(**PLAIN, **BONUS),
        "TRL's bonus is the mean over tokens with every loss type; here it is aggregated as the loss is.",
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
