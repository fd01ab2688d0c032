"""The update on several ranks: the steps that one process with the whole batch would take."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_helpers import on_ranks
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

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
    RolloutCorrection,
)
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy.policy import TokenValues
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.types import Experience


@pytest.fixture(scope="module")
def policy(tiny_policy_dir: Path) -> Policy:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4))
    return Policy(tiny_policy_dir, config, torch.device("cpu"), seed=1)


def ragged(rows: int) -> Experience:
    """Rows of 6 to 15 tokens, the first five of them a prompt; every third is truncated."""
    draw = torch.Generator().manual_seed(rows)
    sampled = torch.randint(1, 11, (rows,), generator=draw)
    mask = (torch.arange(15) >= 5) & (torch.arange(15) < 5 + sampled[:, None])
    return Experience(
        version=0,
        tokens=torch.randint(5, 300, (rows, 15), generator=draw),
        lengths=5 + sampled,
        mask=mask,
        sampler_logprobs=(torch.rand(rows, 15, generator=draw) - 5) * mask,
        advantages=torch.randn(rows, generator=draw),
        truncated=torch.arange(rows) % 3 == 2,
        sampled_tokens=int(sampled.sum()),
        seconds=0.0,
        temperature=0.9,
        max_tokens=10,
    )


def share(experience: Experience, indices: list[int]) -> Experience:
    """What a rank holds that has the rows at `indices`."""
    rows = torch.tensor(indices, dtype=torch.int64)
    names = ("tokens", "lengths", "mask", "sampler_logprobs", "advantages", "truncated")
    return replace(experience, indices=rows, **{name: getattr(experience, name)[rows] for name in names})


def learn(
    start: Policy, update: PolicyUpdate, experience: Experience, ranks: Communicator
) -> tuple[list[Tensor], dict[str, float]]:
    policy = copy.deepcopy(start)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    metrics = update.run(
        policy,
        experience,
        optimizer,
        LambdaLR(optimizer, lambda _: 1.0),
        lambda loss: loss.backward(),
        ranks,  # type: ignore[arg-type]
    )
    return [parameter.detach() for parameter in trained], metrics


ON_TWO = (GRPO(beta=0.1), BNPO(), CISPO(), GSPO(epsilon_low=0.1, epsilon_high=0.1), SAPO())
ON_TWO += (DPPO(epsilon_low=0.0005, epsilon_high=0.0005),)
ON_TWO += (DAPO(correction=RolloutCorrection("geometric", 0.3, "geometric", 0.25, 1.0)),)
ON_THREE = (GRPO(beta=0.1), DAPO(), DrGRPO(), GSPO(epsilon_low=0.1, epsilon_high=0.1), BNPO(delta=1.5))
ON_THREE += (GRPO(beta=0.04, mask_truncated=True, entropy_coefficient=0.1),)
ROWS = {ON_TWO: [[0, 1, 4, 5], [2, 3, 6, 7, 8, 9]], ON_THREE: [[8, 9], [], [0, 1, 2, 3, 4, 5, 6, 7]]}
"""Rows of each rank, by objectives."""


@pytest.mark.parametrize(
    ("objective", "partition"),
    [(objective, partition) for objectives, partition in ROWS.items() for objective in objectives],
    ids=lambda value: type(value).__name__,
)
def test_ranks_take_the_steps_of_one_process(policy: Policy, objective: Objective, partition: list[list[int]]) -> None:
    experience = ragged(10)
    update = PolicyUpdate(objective, 2, 3, 20, 0.5, reference_share=1.0, seed=0)
    alone, expected = learn(policy, update, experience, SINGLE_PROCESS)
    before = [parameter.detach() for parameter in policy.parameters() if parameter.requires_grad]
    assert not torch.equal(alone[1], before[1])
    result = on_ranks(
        len(partition), lambda ranks: learn(policy, update, share(experience, partition[ranks.rank]), ranks)
    )
    for trained, metrics in result:
        for one, other, first in zip(alone, trained, result[0][0], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
            assert torch.equal(other, first)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)


def test_one_all_reduce_a_step_and_none_without_a_token_that_trains(policy: Policy) -> None:
    experience = replace(ragged(4), truncated=torch.tensor([True, True, True, False]))
    update = PolicyUpdate(DAPO(), 1, 4, None, 0.5, reference_share=0.0, seed=0)

    def work(ranks: Communicator) -> int:
        learn(policy, update, share(experience, [[0, 1], [2, 3]][ranks.rank]), ranks)
        return ranks.exchange.exchanges  # type: ignore[attr-defined]

    assert on_ranks(2, work) == [1, 1]


class Counted(Policy):
    """Counts the tokens of its largest forward pass with gradients."""

    largest = 0

    def token_values(self, tokens: Tensor, lengths: Tensor, *args: Any) -> TokenValues:
        if torch.is_grad_enabled():
            self.largest = max(self.largest, int(lengths.sum()))
        return super().token_values(tokens, lengths, *args)


def test_a_minibatch_may_be_all_of_one_ranks_completions(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of tokens. Rows of 9 and 7 tokens here, of 14 and 11 there, in two minibatches of two rows: a
    rank usually has one row at once, but both if a minibatch is its own, as in a third of the versions."""
    experience = ragged(4)
    lengths = torch.tensor([9, 7, 14, 11])
    mask = (torch.arange(15) >= 5) & (torch.arange(15) < lengths[:, None])
    experience = replace(experience, lengths=lengths, mask=mask, truncated=torch.zeros(4, dtype=torch.bool))
    update = PolicyUpdate(GRPO(), 1, 2, None, 1.0, 0.0, 11)

    def work(ranks: Communicator) -> tuple[list[int], int]:
        own = copy.deepcopy(policy)
        own.__class__ = Counted
        chosen: list[int] = []
        monkeypatch.setattr(own.checkpointing, "choose_mode", lambda tokens, ranks, longest: chosen.append(tokens))
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.0)
        local = share(experience, [[0, 1], [2, 3]][ranks.rank])
        for version in range(30):
            schedule = LambdaLR(optimizer, lambda _: 1.0)
            update.run(own, replace(local, version=version), optimizer, schedule, Tensor.backward, ranks)
        return chosen, own.largest

    assert on_ranks(2, work) == [([16] * 30, 16), ([25] * 30, 25)]
