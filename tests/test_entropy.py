"""The adaptive entropy bonus by hand and through a resumed run, and training on the tokens of highest entropy."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from rank_helpers import on_ranks
from short_run import data, module_of, trainer_of
from test_update_steps import COMPLETIONS, SEED, FourNumbers, experience_of, updated
from torch import Tensor

from qerl_pl.algorithm import BNPO, GRPO, AdaptiveEntropy, Objective
from qerl_pl.algorithm.entropy import EntropyState, top_entropy_threshold
from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.distributed.communicator import Communicator
from qerl_pl.errors import UserError
from qerl_pl.modules.policy import TokenValues
from qerl_pl.modules.update import PolicyUpdate


def test_the_coefficient_follows_the_entropy_by_hand() -> None:
    control = AdaptiveEntropy(target=0.5, step=0.25, minimum=0.1, maximum=0.8)
    state = EntropyState(0.2)
    assert state.applied(control) == 0.2  # nothing is known of the first rollout
    expected = [(0.3, 0.45, True), (0.4, 0.7, True), (0.1, 0.8, True), (0.5, 0.8, True), (0.6, 0.55, False)]
    expected += [(0.7, 0.3, False), (math.nan, 0.3, False), (0.9, 0.1, False), (0.2, 0.35, True)]
    for entropy, coefficient, applies in expected:
        state = state.after(control, entropy)
        assert state.coefficient == pytest.approx(coefficient)
        assert state.applied(control) == (state.coefficient if applies else 0.0)


def test_without_a_control_the_coefficient_is_constant() -> None:
    state = EntropyState(0.2)
    assert state.after(None, 3.0) == state and state.applied(None) == 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": -1.0}, "adaptive_entropy.target must be a number of at least 0; got -1.0"),
        ({"target": 1.0, "step": math.inf}, "adaptive_entropy.step must be a number of at least 0; got inf"),
        ({"target": 1.0, "minimum": 2.0}, "adaptive_entropy.minimum must be at most .*; got 2.0 and 1.0; swap them"),
    ],
)
def test_bad_numbers_are_a_user_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AdaptiveEntropy(**arguments)


def test_yaml_configures_a_target() -> None:
    def configured(objective: Objective) -> Objective:
        return objective

    given = ["--objective=qerl_pl.algorithm.GRPO", "--objective.adaptive_entropy.target=0.3"]
    assert auto_cli(configured, args=given, as_positional=False) == GRPO(adaptive_entropy=AdaptiveEntropy(0.3))


class Coefficients(Callback):
    """Keeps the coefficient of each rollout, and its entropy."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.seen.append((float(metrics["policy/entropy_coefficient"]), float(metrics["policy/entropy"])))


def test_a_resumed_run_goes_on_with_the_coefficient(tiny_policy_dir: Path, tmp_path: Path) -> None:
    objective = GRPO(entropy_coefficient=0.5, adaptive_entropy=AdaptiveEntropy(100.0, step=0.25, maximum=9.0))
    whole, rest = Coefficients(), Coefficients()
    module = module_of(tiny_policy_dir, objective=objective)
    trainer_of(tmp_path / "whole", ResumeCheckpoint(1, keep=9), whole).fit(module, datamodule=data())
    assert [coefficient for coefficient, _ in whole.seen] == [0.5, 0.75, 1.0, 1.25]  # always below the target
    path = tmp_path / "whole" / "checkpoints" / "step=2.ckpt"
    resumed = module_of(tiny_policy_dir, objective=objective)
    trainer = trainer_of(tmp_path / "rest", rest)
    trainer.fit(resumed, datamodule=data(), ckpt_path=str(path), weights_only=True)
    assert rest.seen == whole.seen[2:]
    expected = module.policy.trained_state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.policy.trained_state().items())
    assert resumed.entropy_state == module.entropy_state == EntropyState(1.5, pytest.approx(whole.seen[3][1]))
    state = torch.load(path, weights_only=True)["qerl"]["entropy_state"]
    assert state == {"coefficient": 1.0, "entropy": pytest.approx(whole.seen[1][1])}
    # Another run's constant coefficient does not come with the checkpoint.
    constant = Coefficients()
    module = module_of(tiny_policy_dir, objective=GRPO(entropy_coefficient=0.125))
    trainer = trainer_of(tmp_path / "constant", constant)
    trainer.fit(module, datamodule=data(), ckpt_path=str(path), weights_only=True)
    assert [coefficient for coefficient, _ in constant.seen] == [0.125] * 2


# The tokens of highest entropy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "kept"),
    [(0.01, [4.0]), (0.2, [4.0]), (0.4, [4.0, 3.0, 3.0]), (0.6, [4.0, 3.0, 3.0]), (1.0, [1.0, 3.0, 4.0, 3.0, 2.0])],
)
def test_the_threshold_leaves_a_share_and_its_ties(share: float, kept: list[float]) -> None:
    entropies = torch.tensor([1.0, 3.0, 4.0, 3.0 - 1e-5, 2.0])
    threshold = top_entropy_threshold(entropies, share)
    found = [entropy for entropy in entropies.tolist() if entropy >= threshold]
    assert sorted(found) == pytest.approx(sorted(kept), abs=1e-4)
    assert top_entropy_threshold(torch.zeros(0), share) == -math.inf


class Uneven(FourNumbers):
    """A policy whose entropy is that of the token's position: larger towards the end."""

    def token_values(self, tokens: Tensor, lengths: Tensor, mask: Tensor, *args: Any) -> TokenValues:
        logprobs, entropy, _ = super().token_values(tokens, lengths, mask, *args)
        return TokenValues(logprobs, entropy * torch.where(mask, mask.cumsum(dim=1).to(entropy.dtype), torch.nan))


def by_hand(share: float) -> list[float]:
    """The parameters after one update by the first tokens of highest entropy: the longest completions' ends."""
    places = sorted((place for completion in COMPLETIONS for place in range(len(completion))), reverse=True)
    least = places[max(round(share * len(places)), 1) - 1]
    keep = torch.zeros(6, 7, dtype=torch.bool)
    experience = experience_of()
    for row, completion in enumerate(COMPLETIONS):
        start = int(experience.mask[row].nonzero()[0])
        keep[row, start + least : start + len(completion)] = True
    policy = FourNumbers()

    # The same weights of 1/13 for fewer tokens.
    class Chosen(BNPO):
        def weights(self, mask: Tensor, *args: Any) -> Tensor:
            return mask.double() / 13

    update = PolicyUpdate(Chosen(), 1, 1, None, 100.0, 0.0, SEED)
    updated(policy, update, replace(experience, mask=experience.mask & keep))
    return policy.odds.tolist()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_an_update_by_the_tokens_of_highest_entropy(share: float) -> None:
    found = []
    for micro_batch_tokens in (None, 6):
        policy = Uneven()
        update = PolicyUpdate(BNPO(top_entropy_quantile=share), 1, 1, micro_batch_tokens, 100.0, 0.0, SEED)
        updated(policy, update, experience_of())
        found.append(policy.odds.tolist())
    expected = by_hand(share)
    assert found == [pytest.approx(expected, abs=1e-6)] * 2
    alone = FourNumbers()
    updated(alone, PolicyUpdate(BNPO(), 1, 1, None, 100.0, 0.0, SEED), experience_of())
    assert found[0] != pytest.approx(alone.odds.tolist(), abs=1e-3)


def test_ranks_choose_the_tokens_of_one_process() -> None:
    update = PolicyUpdate(BNPO(top_entropy_quantile=0.3), 2, 2, 6, 0.5, 0.0, SEED)
    alone = Uneven()
    updated(alone, update, experience_of())

    def work(ranks: Communicator) -> list[float]:
        policy, rows = Uneven(), [[0, 1, 4], [5, 2, 3]][ranks.rank]
        updated(policy, update, experience_of(rows, indices=torch.tensor(rows)), ranks)
        return policy.odds.tolist()

    for odds in on_ranks(2, work):
        assert odds == pytest.approx(alone.odds.tolist())


def test_only_a_share_of_the_tokens_needs_all_old_entropies_first() -> None:
    for share, first in ((1.0, []), (0.5, [([4, 3, 3, 7, 3, 3], False, False, False)])):
        policy = Uneven()
        update = PolicyUpdate(BNPO(top_entropy_quantile=share), 1, 1, None, 1.0, 0.0, SEED)
        updated(policy, update, experience_of())
        assert policy.calls == [*first, ([4, 3, 3, 7, 3, 3], True, True, False)]
