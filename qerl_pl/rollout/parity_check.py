"""Log-probability parity check: whether the engine samples from the policy that is trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qerl_pl.engines.base import RolloutEngine
from qerl_pl.errors import UserError
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.collector import pad_completions, pad_routing
from qerl_pl.types import Completion, PolicyWeights, Prompt, RolloutRequest, SamplingConfig

MAX_PROMPT_TOKENS = 512
"""To which prompts are truncated: the trainer's forward pass runs while the engine's full cache is allocated."""

MAX_COMPARED_TOKENS = 16
"""Tokens of each completion that the check compares."""

STRENGTHS = (1.0, 0.25, 0.0625)
"""Strengths of the random adapter, tried in this order until its effect is moderate."""

MODERATE_EFFECT = 2.0
"""Nats a token. A pretrained policy that is changed by more is chaotic: rounding alone changes it by nats."""


@dataclass(frozen=True)
class LogprobParity:
    """Mean absolute differences of log-probabilities, in nats a token, without noise.

    With full fine-tuning, "adapter on" is the policy with some weights perturbed, "adapter off" the policy as it is.
    """

    adapter_on: float
    """Engine against trainer, both with the adapter."""
    adapter_off: float
    """Engine against trainer, both the reference policy: the effect of rounding alone."""
    adapter_effect: float
    """The trainer's policy against the reference policy, its own start or the base."""


def check_logprob_parity(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    version: int,
    seed: int,
    max_tokens: int,
    bound: float,
) -> None:
    """Stop the run if the engine's log-probabilities differ from the policy's, with its own and with a random adapter.

    A new adapter has no effect, so that a failed sync, or an adapter lost in a sleep, would be noticed much later. Each
    check therefore also compares with a random adapter (some random weights in full fine-tuning), as strong as the
    policy tolerates. One greedy completion of each prompt is compared. Sync the engine afterwards.

    Args:
        engine: Rollout engine.
        policy: Trained policy.
        prompts: Prompts to compare on.
        version: Policy version.
        seed: Seed of the random adapter.
        max_tokens: Longest completion that the engine supports.
        bound: Nats a token.

    Raises:
        UserError: They differ by more than `require_logprob_parity` allows.
    """
    if not policy.full_finetuning:
        require_logprob_parity(measure_logprob_parity(engine, policy, prompts, version, max_tokens), bound)
    for strength in STRENGTHS:
        if policy.full_finetuning:
            parity = measure_full_finetuning_parity(engine, policy, prompts, version, seed, max_tokens, strength)
        else:
            with policy.perturbed(seed, strength):
                parity = measure_logprob_parity(engine, policy, prompts, version, max_tokens)
        if parity.adapter_effect <= MODERATE_EFFECT:
            break
    require_logprob_parity(parity, bound, perturbed=True)


def measure_logprob_parity(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    version: int,
    max_tokens: int,
) -> LogprobParity:
    """Sample greedily with the adapter on and off, and compare log-probabilities with the trainer's.

    Leaves the engine synced to the reference policy. Arguments as for `check_logprob_parity`.
    """
    comparison = _Comparison(engine, policy, prompts, max_tokens)
    with_adapter = comparison.sample(policy.weights(version))
    without = comparison.sample(policy.weights(version, reference=True))
    on, logprobs = comparison.difference(with_adapter)
    _, reference_logprobs = comparison.difference(with_adapter, reference=True)
    off, _ = comparison.difference(without, reference=True)
    return LogprobParity(on, off, (logprobs - reference_logprobs).abs().mean().item())


def measure_full_finetuning_parity(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    version: int,
    seed: int,
    max_tokens: int,
    strength: float = 1.0,
) -> LogprobParity:
    """Measure parity in full fine-tuning; leaves the engine synced to the perturbed weights."""
    comparison = _Comparison(engine, policy, prompts, max_tokens)
    off, _ = comparison.difference(comparison.sample(policy.weights(version)))
    with policy.perturbed(seed, strength):
        completions = comparison.sample(policy.weights(version))
        on, logprobs = comparison.difference(completions)
    _, unperturbed_logprobs = comparison.difference(completions)
    return LogprobParity(on, off, (logprobs - unperturbed_logprobs).abs().mean().item())


class _Comparison:
    """One greedy completion a prompt by the engine, and the trainer's log-probabilities of its tokens."""

    def __init__(self, engine: RolloutEngine, policy: Policy, prompts: Sequence[Prompt], max_tokens: int) -> None:
        self.engine, self.policy = engine, policy
        self.prompts = [replace(prompt, token_ids=prompt.token_ids[:MAX_PROMPT_TOKENS]) for prompt in prompts]
        self.sampling = SamplingConfig(max_tokens=min(MAX_COMPARED_TOKENS, max_tokens), temperature=0.0)

    def sample(self, weights: PolicyWeights) -> list[list[Completion]]:
        self.engine.sync(weights)
        return self.engine.generate([RolloutRequest(prompt.token_ids, (0,)) for prompt in self.prompts], self.sampling)

    def difference(self, completions: list[list[Completion]], reference: bool = False) -> tuple[float, Tensor]:
        """Mean absolute difference in nats a token, and the trainer's log-probabilities, float32 [tokens]."""
        padded = pad_completions(self.prompts, completions, 0)
        tokens, lengths, mask, sampled = (tensor.to(self.policy.device) for tensor in padded)
        routing = pad_routing(completions, tokens.shape)
        routing = None if routing is None else routing.to(tokens.device)
        self.policy.eval()
        with torch.no_grad():
            logprobs, *_ = self.policy.token_values(tokens, lengths, mask, 1.0, reference=reference, routing=routing)
        return (logprobs - sampled)[mask].abs().mean().item(), logprobs[mask]


def require_logprob_parity(parity: LogprobParity, bound: float, perturbed: bool = False) -> None:
    """Stop the run if the engine's log-probabilities differ from the policy's.

    Two rules. The difference is at most `bound`, with and without the adapter. And if the adapter's effect exceeds
    rounding by far, the engine is nearer to the policy than half way to the reference, which catches a missing or
    stale adapter. Rounding is measured on other tokens (those sampled without the adapter), and a young adapter's
    effect is itself rounding: such small effects are left to the random adapter of `Policy.perturbed`.

    Args:
        parity: Measured differences.
        bound: Nats a token.
        perturbed: Measured with a random adapter. Rounding may change such a policy much, so that with the adapter on
            only the second rule holds.

    Raises:
        UserError: A rule is broken.
    """
    rounding = max(parity.adapter_off, 1e-6)
    significant = parity.adapter_effect > max(8 * rounding, 0.0 if perturbed else bound / 4)
    wrong_adapter = significant and parity.adapter_on > parity.adapter_effect / 2
    largest = math.inf if perturbed else bound
    if not (parity.adapter_off <= bound and parity.adapter_on <= largest) or wrong_adapter:  # NaN fails both
        reason = "runs another base or adapter: check that both load the same folder, and restart with --resume auto"
        if math.isnan(parity.adapter_off + parity.adapter_on):
            reason = "has a policy that diverged: lower the learning rate, and go on from an earlier checkpoint"
        raise UserError(
            f"engine and trainer must agree within {bound:g} nats a token without noise; got "
            f"{parity.adapter_on:.2g} with the adapter, {parity.adapter_off:.2g} without it, the adapter's effect "
            f"being {parity.adapter_effect:.2g}; the engine {reason}"
        )
