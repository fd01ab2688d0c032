"""Does the engine sample from the policy that the trainer trains? The check that a corrupted sync cannot pass."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qerl_pl.engines.base import RolloutEngine
from qerl_pl.errors import UserError
from qerl_pl.rollout.experience import pad_completions
from qerl_pl.types import Completion, PolicyWeights, Prompt, RolloutRequest, SamplingConfig

TOKENS = 16

"""Tokens of each completion that is compared, at most."""


class CheckedPolicy(Protocol):
    """What the check needs of the policy that is trained; `qerl_pl.modules.Policy` has it."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def full_finetuning(self) -> bool:
        """Whether all of it trains: then it has neither adapter nor reference to compare with."""
        ...

    def weights(self, version: int, *, adapter: bool = True) -> PolicyWeights:
        """What an engine needs to sample from it, or without `adapter` from its reference."""
        ...

    def token_logprobs(
        self, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: float, *, reference: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the masked tokens, float32 [B, T] each; or those of the reference."""
        ...

    def perturbed(self, seed: int) -> AbstractContextManager[None]:
        """Inside the block its adapter is a random one, or some of its weights are."""
        ...

    def eval(self) -> object:
        """No dropout from here on."""
        ...


@dataclass(frozen=True)
class LogprobParity:
    """Mean absolute differences of log-probabilities, in nats a token, without noise."""

    adapter_on: float
    """Engine and trainer, both with the adapter."""
    adapter_off: float
    """Engine and trainer, both without: what rounding alone does."""
    adapter_effect: float
    """The trainer's policy and its reference: what the adapter does."""


def check_logprob_parity(
    engine: RolloutEngine,
    policy: CheckedPolicy,
    prompts: Sequence[Prompt],
    version: int,
    seed: int,
    max_tokens: int,
    bound: float,
) -> None:
    """Stop the run where the engine's log-probabilities are not the policy's, with its own adapter and with a probe.

    An adapter that has learned nothing yet does nothing: one that never reaches the engine, or no longer does after a
    sleep, would show only much later. So every check has a random one too, each another. A policy that trains whole is
    compared as it is and with some of its weights changed.

    Args:
        engine: What samples; sync it again before use.
        policy: What trains.
        prompts: Of which one completion each is compared.
        version: Of the policy.
        seed: Of the probe.
        max_tokens: Longest completion that the engine was launched for.
        bound: Nats a token.

    Raises:
        UserError: They differ by more than `require_logprob_parity` allows.
    """
    if policy.full_finetuning:
        require_logprob_parity(
            _measure_whole(engine, policy, prompts, version, seed, max_tokens), bound, perturbed=True
        )
        return
    for probe in (False, True):
        with policy.perturbed(seed) if probe else nullcontext():
            found = measure_logprob_parity(engine, policy, prompts, version, max_tokens)
        require_logprob_parity(found, bound, probe)


def measure_logprob_parity(
    engine: RolloutEngine, policy: CheckedPolicy, prompts: Sequence[Prompt], version: int, max_tokens: int = TOKENS
) -> LogprobParity:
    """Sample greedily with the adapter on and off, and compare with the trainer on the same tokens.

    Leaves the engine synced to the reference policy: sync it again before use.

    Args:
        engine: What samples.
        policy: What trains.
        prompts: Of which one completion each is compared.
        version: Of the policy.
        max_tokens: Longest completion that the engine was launched for.
    """
    compared = _Compared(engine, policy, prompts, max_tokens)
    with_adapter = compared.sample(policy.weights(version, adapter=True))
    without = compared.sample(policy.weights(version, adapter=False))
    on, own = compared.difference(with_adapter)
    _, reference = compared.difference(with_adapter, reference=True)
    off, _ = compared.difference(without, reference=True)
    return LogprobParity(on, off, (own - reference).abs().mean().item())


def _measure_whole(
    engine: RolloutEngine, policy: CheckedPolicy, prompts: Sequence[Prompt], version: int, seed: int, max_tokens: int
) -> LogprobParity:
    """The same for a policy that trains whole: as it is in place of "without adapter", and probed in place of "with".

    Leaves the engine synced to the probe: sync it again before use.
    """
    compared = _Compared(engine, policy, prompts, max_tokens)
    off, _ = compared.difference(compared.sample(policy.weights(version)))
    with policy.perturbed(seed):
        completions = compared.sample(policy.weights(version))
        on, own = compared.difference(completions)
    _, unprobed = compared.difference(completions)
    return LogprobParity(on, off, (own - unprobed).abs().mean().item())


class _Compared:
    """One greedy completion a prompt, by the engine, and the trainer's log-probabilities of its tokens."""

    def __init__(
        self, engine: RolloutEngine, policy: CheckedPolicy, prompts: Sequence[Prompt], max_tokens: int
    ) -> None:
        self.engine, self.policy, self.prompts = engine, policy, prompts
        self.sampling = SamplingConfig(max_tokens=min(TOKENS, max_tokens), temperature=0.0)

    def sample(self, weights: PolicyWeights) -> list[list[Completion]]:
        self.engine.sync(weights)
        return self.engine.generate([RolloutRequest(prompt.token_ids, (0,)) for prompt in self.prompts], self.sampling)

    def difference(self, completions: list[list[Completion]], reference: bool = False) -> tuple[float, Tensor]:
        """Mean absolute difference of the two, in nats a token, and the trainer's: float32 [tokens]."""
        device = self.policy.device
        tokens, lengths, mask, sampled = (t.to(device) for t in pad_completions(self.prompts, completions, 0))
        self.policy.eval()
        with torch.no_grad():
            own = self.policy.token_logprobs(tokens, lengths, mask, 1.0, reference=reference)[0]
        return (own - sampled)[mask].abs().mean().item(), own[mask]


def require_logprob_parity(agreement: LogprobParity, bound: float, perturbed: bool = False) -> None:
    """Stop the run where the engine's log-probabilities are not the policy's.

    With the adapter on, the engine may differ from the trainer by `bound`; and where the adapter's effect stands out of
    the rounding (`Policy.probed` makes it), the engine must be nearer to the policy than half way to the reference, so
    that an adapter that was never written, or a stale one, is seen. What rounding does is known from other tokens
    alone, those sampled without the adapter, and a young adapter's effect is itself rounding: such small ones are left
    to the probe.

    Args:
        agreement: What was measured.
        bound: Nats a token.
        probed: The adapter was a probe. It may make a policy of which rounding changes much: then only the second rule
            holds with the adapter on.

    Raises:
        UserError: It differs by more.
    """
    rounding = max(agreement.adapter_off, 1e-6)
    stands_out = agreement.adapter_effect > max(8 * rounding, 0.0 if perturbed else bound / 4)
    wrong_adapter = stands_out and agreement.adapter_on > agreement.adapter_effect / 2
    largest = math.inf if perturbed else bound
    if not (agreement.adapter_off <= bound and agreement.adapter_on <= largest) or wrong_adapter:  # nan is no agreement
        raise UserError(
            f"engine and trainer must agree within {bound:g} nats a token without noise; found "
            f"{agreement.adapter_on:.2g} with the adapter, {agreement.adapter_off:.2g} without it, the adapter's "
            f"effect being {agreement.adapter_effect:.2g}; the engine runs another base or adapter: check that both "
            "load the same folder, and restart with --resume auto"
        )
