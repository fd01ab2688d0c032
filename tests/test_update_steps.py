"""Each step of an update against plain loops, on a policy of four numbers: the same odds at every position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_helpers import on_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from qerl_pl.algorithm import BNPO, GRPO, DrGRPO, Objective, RolloutCorrection
from qerl_pl.algorithm.objectives import LossInputs, LossOutputs
from qerl_pl.errors import UserError
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.update import PolicyUpdate, local_rows, sampled_indices
from qerl_pl.policy.policy import TokenValues
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Experience

ODDS = [0.3, -0.4, 0.1, 0.8]
REFERENCE = [0.0, 0.5, -0.5, 0.2]
PROMPTS = [1, 2, 1, 3, 2, 1]
COMPLETIONS = [[0, 1, 2], [3], [2, 2], [1, 0, 3, 3], [0], [3, 1]]
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]
SAMPLER = -1.2
"""Log-probability of every token, as the sampler says."""
TEMPERATURE, VERSION, SEED = 0.7, 3, 11


class FourNumbers(nn.Module):
    """A policy as the update needs it. Notes each call: tokens of each row, whether it trains, and with gradient."""

    def __init__(self, random: bool = False) -> None:
        super().__init__()
        self.odds = nn.Parameter(torch.tensor(ODDS, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        self.trained = SimpleNamespace(has_dropout=random)
        self.checkpointing = SimpleNamespace(
            choose_mode=lambda tokens, ranks, longest: self.chosen.append((tokens, longest)),
            run_with_oom_fallback=lambda work, parameters: work(),
            synchronize_mode=lambda ranks: None,
        )
        self.calls: list[tuple[list[int], bool, bool, bool]] = []
        self.drawn: list[float] = []
        self.chosen: list[tuple[int, int]] = []

    def token_values(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        temperature: float,
        entropy_gradient: bool,
        reference: bool,
        routing: None,
        teacher: None,
        groups: None,
    ) -> TokenValues:
        if not mask.any():  # as `Policy`, without a gradient
            return TokenValues(*torch.zeros(2, *mask.shape, dtype=torch.float64))
        self.calls.append((lengths.tolist(), self.training, torch.is_grad_enabled(), reference))
        if self.trained.has_dropout and self.training:
            self.drawn.append(torch.rand(1).item())
        odds = torch.tensor(REFERENCE, dtype=torch.float64) if reference else self.odds
        logp = (odds / temperature).log_softmax(0)
        entropy = -(logp.exp() * logp).sum().expand(mask.shape)
        entropies = entropy if entropy_gradient else entropy.detach()
        return TokenValues(torch.where(mask, logp[tokens], torch.nan), entropies)


def experience_of(rows: Sequence[int] = range(6), **changes: Any) -> Experience:
    lengths = [PROMPTS[row] + len(COMPLETIONS[row]) for row in rows]
    tokens = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, PROMPTS[row] : lengths[index]] = torch.tensor(COMPLETIONS[row])
        mask[index, PROMPTS[row] : lengths[index]] = True
    experience = Experience(
        version=VERSION,
        tokens=tokens,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        mask=mask,
        sampler_logprobs=torch.full(tokens.shape, SAMPLER, dtype=torch.float64),
        advantages=torch.tensor([ADVANTAGES[row] for row in rows], dtype=torch.float64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        sampled_tokens=13,
        seconds=0.0,
        temperature=TEMPERATURE,
        max_tokens=4,
    )
    return replace(experience, **changes)


def updated(
    policy: FourNumbers, update: PolicyUpdate, experience: Experience, ranks: Communicator = SINGLE_PROCESS
) -> dict[str, float]:
    optimizer = torch.optim.SGD([policy.odds, policy.frozen], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward(), ranks)  # type: ignore[arg-type]


def logprob(odds: Sequence[float], token: int) -> float:
    scaled = [value / TEMPERATURE for value in odds]
    return scaled[token] - math.log(sum(map(math.exp, scaled)))


@dataclass
class Plain:
    """An objective with plain numbers: an epsilon of 0.2, importance weights up to 2."""

    aggregation: str
    beta: float
    max_norm: float

    def token(self, odds: Sequence[float], token: int, advantage: float) -> tuple[float, float, float, float]:
        """Loss, ratio, KL and importance weight."""
        old = logprob(ODDS, token)
        ratio, weight = math.exp(logprob(odds, token) - old), min(math.exp(old - SAMPLER), 2.0)
        gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        apart = logprob(REFERENCE, token) - logprob(odds, token)
        kl = math.exp(apart) - 1 - apart
        return self.beta * kl - weight * gain, ratio, kl, weight

    def loss(self, odds: Sequence[float], rows: Sequence[int]) -> float:
        total, tokens = 0.0, sum(len(COMPLETIONS[row]) for row in rows)
        for row in rows:
            share = {
                "sequence_mean": len(rows) * len(COMPLETIONS[row]),
                "token_mean": tokens,
                "constant": len(rows) * 4,
            }
            for token in COMPLETIONS[row]:
                total += self.token(odds, token, ADVANTAGES[row])[0] / share[self.aggregation]
        return total

    def run(self, steps: Sequence[Sequence[int]]) -> tuple[list[float], dict[str, float]]:
        odds, tokens, rate = list(ODDS), 0, 0.5
        sums = dict.fromkeys(("loss", "norm", "rate", "ratio", "kl", "weight"), 0.0)
        for rows in steps:
            sums["loss"] += self.loss(odds, rows)
            for row in rows:
                for token in COMPLETIONS[row]:
                    result = self.token(odds, token, ADVANTAGES[row])[1:]
                    for name, value in zip(("ratio", "kl", "weight"), result, strict=True):
                        sums[name] += value
                    tokens += 1
            slopes = []
            for index in range(4):
                up, down = ([o + sign * (i == index) for i, o in enumerate(odds)] for sign in (1e-5, -1e-5))
                slopes.append((self.loss(up, rows) - self.loss(down, rows)) / 2e-5)
            norm = math.sqrt(sum(slope**2 for slope in slopes))
            factor = min(1.0, self.max_norm / (norm or 1.0))
            odds = [value - rate * factor * slope for value, slope in zip(odds, slopes, strict=True)]
            sums["norm"] += norm
            sums["rate"] += rate
            rate *= 0.8
        means = {name: sums[name] / len(steps) for name in ("loss", "norm", "rate")}
        return odds, means | {name: sums[name] / tokens for name in ("ratio", "kl", "weight")}


def steps_of(epochs: int, minibatches: int) -> list[list[int]]:
    """Rows of each step: shuffled by epoch and version where there are several steps a pass, and divided evenly."""
    steps = []
    for epoch in range(epochs):
        rows = list(range(6))
        if minibatches > 1:
            generator = torch.Generator().manual_seed(stream_seed(SEED, "minibatches", VERSION, epoch))
            rows = torch.randperm(6, generator=generator).tolist()
        size, more = divmod(6, minibatches)
        for number in range(minibatches):
            end = size + (number < more)
            steps.append(rows[:end])
            rows = rows[end:]
    return steps


@pytest.mark.parametrize("objective", [GRPO(beta=0.3), BNPO(beta=0.3), DrGRPO(beta=0.3)])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (2, 2), (2, 3), (1, 4), (1, 6)])
@pytest.mark.parametrize("micro_batch_tokens", [None, 6])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_an_update_is_that_of_plain_loops(
    objective: Objective, epochs: int, minibatches: int, micro_batch_tokens: int | None, max_norm: float
) -> None:
    policy = FourNumbers()
    update = PolicyUpdate(objective, epochs, minibatches, micro_batch_tokens, max_norm, True, SEED)
    metrics = updated(policy, update, experience_of())
    odds, means = Plain(objective.aggregation, 0.3, max_norm).run(steps_of(epochs, minibatches))
    assert policy.odds.tolist() == pytest.approx(odds, abs=1e-6) and policy.frozen.item() == 1
    assert metrics["optim/loss"] == pytest.approx(means["loss"], abs=1e-6)
    assert metrics["optim/grad_norm"] == pytest.approx(means["norm"], abs=1e-6)
    assert metrics["optim/lr"] == pytest.approx(means["rate"])
    assert metrics["policy/ratio_mean"] == pytest.approx(means["ratio"], abs=1e-6)
    assert metrics["policy/kl"] == pytest.approx(means["kl"], abs=1e-6)
    assert metrics["mismatch/is_weight_mean"] == pytest.approx(means["weight"], abs=1e-6)


def test_micro_batches_are_as_few_and_as_even_as_their_tokens_allow() -> None:
    policy = FourNumbers()
    # Lengths 4, 3, 3, 7, 3 and 3, that is 23: in three of at most 8 the last one has no place.
    for most, dealt in ((8, [[7], [3, 3], [3, 3], [4]]), (13, [[3, 7, 3], [4, 3, 3]]), (2, [[7], [4], *4 * [[3]]])):
        policy.calls.clear()
        updated(policy, PolicyUpdate(GRPO(beta=0.0), 1, 1, most, 1.0, 0.0, SEED), experience_of())
        assert [rows for rows, *_ in policy.calls] == dealt


def test_only_rows_beyond_the_first_step_are_measured_before_it() -> None:
    policy = FourNumbers()
    updated(policy, PolicyUpdate(GRPO(beta=0.0), 1, 3, None, 1.0, 0.0, SEED), experience_of())
    lengths = [PROMPTS[row] + len(COMPLETIONS[row]) for row in range(6)]
    first, *others = steps_of(1, 3)
    late = [lengths[row] for row in range(6) if row not in first]
    # Without a limit at most 11 tokens at once, those of the largest minibatch there may be: 7 and 4.
    assert sorted(late) == [3, 3, 4, 7]
    assert policy.calls[:2] == [([7, 3], False, False, False), ([4, 3], False, False, False)]
    assert [rows for rows, *_ in policy.calls[2:]] == [[lengths[row] for row in step] for step in [first, *others]]


def test_kl_of_a_sample_is_that_of_all_on_average() -> None:
    def kl(share: float, version: int) -> tuple[float, list[list[int]]]:
        policy = FourNumbers()
        metrics = updated(
            policy, PolicyUpdate(GRPO(beta=0.0), 1, 1, 6, 1.0, share, SEED), experience_of(version=version)
        )
        return metrics["policy/kl"], [rows for rows, *_, reference in policy.calls if reference]

    exact, rows = kl(1.0, 0)
    assert sorted(sum(rows, [])) == [3, 3, 3, 3, 4, 7]
    # One of three, by version: two of six completions, whose KL counts three times.
    token = [Plain("", 0.0, 1.0).token(ODDS, number, 0.0)[2] for number in range(4)]
    sums = [sum(token[number] for number in completion) for completion in COMPLETIONS]
    result = []
    for version in range(60):
        generator = torch.Generator().manual_seed(stream_seed(SEED, "kl", version))
        drawn = sorted(torch.randperm(6, generator=generator)[:2].tolist())
        sampled, rows = kl(1 / 3, version)
        assert sorted(sum(rows, [])) == sorted(PROMPTS[row] + len(COMPLETIONS[row]) for row in drawn)
        assert sampled == pytest.approx(3 * sum(sums[row] for row in drawn) / 13)
        result.append(sampled)
    assert exact == pytest.approx(sum(sums) / 13)
    spread = torch.tensor(result).std().item() / math.sqrt(len(result))
    assert abs(sum(result) / len(result) - exact) < 3 * spread


@pytest.mark.parametrize(
    ("lengths", "minibatches", "most", "expected"),
    [
        ([5, 2, 9, 4, 7], 1, None, 27),
        ([5, 2, 9, 4, 7], 2, None, 21),  # three a step at most: the longest ones
        ([5, 2], 9, None, 5),  # one a step
        ([5, 2, 9], 1, 6, 9),  # a longer one goes alone
        ([5, 2, 9], 1, 10, 10),  # what may be filled
        ([], 2, None, 0),
        ([], 2, 8, 8),
    ],
)
def test_tokens_of_the_largest_micro_batch(
    lengths: list[int], minibatches: int, most: int | None, expected: int
) -> None:
    update = PolicyUpdate(GRPO(), 1, minibatches, most, 1.0, 0.0, SEED)
    assert update.max_micro_batch_tokens(torch.tensor(lengths, dtype=torch.int64), len(lengths)) == expected


@pytest.mark.parametrize(("most", "expected"), [(None, (23, 7)), (8, (8, 7))])
def test_activations_are_saved_by_the_largest_micro_batch_and_the_longest_row(
    most: int | None, expected: tuple[int, int]
) -> None:
    policy = FourNumbers()
    updated(policy, PolicyUpdate(GRPO(beta=0.0), 1, 1, most, 1.0, 0.0, SEED), experience_of())
    assert policy.chosen == [expected]


def test_minibatches_divide_the_completions_and_a_share_is_at_most_all() -> None:
    PolicyUpdate(GRPO(), minibatches=3).check_divides(6)
    with pytest.raises(UserError, match="got 3 and 7"):
        PolicyUpdate(GRPO(), minibatches=3).check_divides(7)
    for share in (-0.1, 1.5):
        with pytest.raises(UserError, match=rf"got {share}"):
            PolicyUpdate(GRPO(), reference_share=share)


def test_the_kl_of_one_completion_is_its_own_whatever_the_share() -> None:
    kl = Plain("", 0.0, 1.0).token(ODDS, COMPLETIONS[1][0], 0.0)[2]
    for share in (0.01, 1.0):
        metrics = updated(
            FourNumbers(), PolicyUpdate(GRPO(beta=0.0), 1, 1, 6, 1.0, share, SEED), experience_of(rows=[1])
        )
        assert metrics["policy/kl"] == pytest.approx(kl)


def test_a_sample_has_one_completion_at_least_and_each_rank_its_rows_of_it() -> None:
    assert [len(sampled_indices(share, 6, 1)) for share in (0.01, 1 / 3, 0.5, 1.0)] == [1, 2, 3, 6]
    assert sampled_indices(1.0, 4, 1).tolist() == [0, 1, 2, 3]
    assert {tuple(sampled_indices(0.5, 4, seed).tolist()) for seed in range(99)} == {
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    }  # fmt: skip
    # Of six completions this rank holds the fourth, the first and the last; the first and the fifth are wanted.
    assert local_rows(torch.tensor([0, 4]), torch.tensor([3, 0, 5]), 6).tolist() == [1]
    assert local_rows(torch.tensor([2, 3, 5]), torch.tensor([5, 3, 0]), 6).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("beta", "with_reference", "epochs", "random", "frozen"),
    [
        (0.0, False, 1, False, []),  # the first step's own forward gives the old log-probabilities
        (0.0, False, 2, False, []),
        (0.0, False, 1, True, [False]),
        (0.0, True, 1, False, [True]),
        (0.1, False, 1, False, [True]),
        (0.1, True, 2, True, [False, True]),
    ],
)
def test_what_is_frozen_is_measured_first_and_where_it_is_needed(
    beta: float, with_reference: bool, epochs: int, random: bool, frozen: list[bool]
) -> None:
    policy = FourNumbers(random)
    policy.train()
    update = PolicyUpdate(GRPO(beta=beta), epochs, 1, None, 1.0, with_reference, SEED)
    metrics = updated(policy, update, experience_of())
    lengths = [4, 3, 3, 7, 3, 3]
    expected = [(lengths, False, False, reference) for reference in frozen] + [(lengths, True, True, False)] * epochs
    assert policy.calls == expected and ("policy/kl" in metrics) == (True in frozen)


@pytest.mark.parametrize(("rank", "names"), [(0, ()), (1, (1,)), (2, (2,))])
def test_dropout_has_the_stream_of_its_version_and_rank(rank: int, names: tuple[int, ...]) -> None:
    drawn = []
    for version in (VERSION, VERSION, VERSION + 1):
        torch.manual_seed(len(drawn))
        policy, update = FourNumbers(random=True), PolicyUpdate(GRPO(), 2, 1, None, 1.0, True, SEED)
        updated(policy, update, experience_of(version=version), Communicator(rank))
        drawn.append(policy.drawn)
    generator = torch.Generator().manual_seed(stream_seed(SEED, "update", VERSION, *names))
    assert drawn[0] == drawn[1] == [torch.rand(1, generator=generator).item() for _ in range(2)] != drawn[2]


@pytest.fixture
def half_without_advantage(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the completions that have one."""
    monkeypatch.setitem(globals(), "ADVANTAGES", [1.0, 0.0, 0.5, 0.0, 0.0, -2.0])
    return [4, 3, 3]


@pytest.mark.parametrize("objective", [GRPO(), BNPO(), DrGRPO()])
@pytest.mark.parametrize("minibatches", [1, 2, 6])
def test_completions_without_an_advantage_count_and_are_not_computed(
    objective: Objective, minibatches: int, half_without_advantage: list[int]
) -> None:
    policy = FourNumbers()
    metrics = updated(policy, PolicyUpdate(objective, 2, minibatches, None, 100.0, 1.0, SEED), experience_of())
    odds, means = Plain(objective.aggregation, 0.0, 100.0).run(steps_of(2, minibatches))
    assert policy.odds.tolist() == pytest.approx(odds, abs=1e-6)
    assert metrics["optim/loss"] == pytest.approx(means["loss"], abs=1e-6)
    assert metrics["optim/grad_norm"] == pytest.approx(means["norm"], abs=1e-6)
    trained = sorted(length for rows, _, grad, _ in policy.calls for length in rows if grad)
    assert trained == sorted(2 * half_without_advantage)
    assert all(7 not in rows for rows, *_ in policy.calls)


@pytest.mark.parametrize("objective", [GRPO(), GRPO(entropy_coefficient=0.1), GRPO(beta=0.1)])
@pytest.mark.usefixtures("half_without_advantage")
def test_a_step_without_an_advantage_still_has_momentum(objective: Objective) -> None:
    class Thorough(type(objective)):  # type: ignore[misc]
        """Computes all completions."""

        has_other_terms = True

    found = []
    for one in (objective, Thorough(**vars(objective))):
        policy = FourNumbers()
        optimizer = torch.optim.Adam([policy.odds, policy.frozen], lr=0.1)
        update = PolicyUpdate(one, 2, 6, None, 1.0, 0.0, SEED)
        metrics = update.run(policy, experience_of(), optimizer, LambdaLR(optimizer, lambda step: 1.0))  # type: ignore[arg-type]
        found.append((policy.odds.tolist(), metrics["optim/grad_norm"]))
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("dealt", [[[0, 3, 4], [1, 2, 5]], [[5, 1], []], [[4], [0, 2], [1, 3, 5]]])
@pytest.mark.parametrize("minibatches", [1, 2, 6])
@pytest.mark.parametrize("beta", [0.3, 0.0])
@pytest.mark.usefixtures("half_without_advantage")
def test_ranks_take_together_the_steps_of_one(dealt: list[list[int]], minibatches: int, beta: float) -> None:
    rows = sorted(row for hand in dealt for row in hand)
    update = PolicyUpdate(BNPO(beta=beta), 2, minibatches, 6, 0.5, True, SEED)
    alone = FourNumbers()
    expected = updated(alone, update, experience_of(rows))

    def work(ranks: Communicator) -> tuple[list[float], dict[str, float]]:
        hand, policy = dealt[ranks.rank], FourNumbers()
        indices = torch.tensor([rows.index(row) for row in hand], dtype=torch.int64)
        metrics = updated(policy, update, experience_of(hand, indices=indices), ranks)
        return policy.odds.tolist(), metrics

    for odds, metrics in on_ranks(len(dealt), work):
        assert odds == pytest.approx(alone.odds.tolist()) and metrics == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("objective", "moves"), [(GRPO(), False), (GRPO(entropy_coefficient=0.5), True)])
def test_the_entropys_gradient_is_there_where_it_is_rewarded(objective: Objective, moves: bool) -> None:
    policy = FourNumbers()
    experience = experience_of(advantages=torch.zeros(6, dtype=torch.float64))
    update = PolicyUpdate(replace(objective, beta=0.0), 1, 1, None, 100.0, False, SEED)
    metrics = updated(policy, update, experience)
    assert (policy.odds.tolist() != ODDS) == moves
    probabilities = [math.exp(logprob(ODDS, token)) for token in range(4)]
    entropy = -sum(p * math.log(p) for p in probabilities) if moves else math.nan  # nothing was computed
    assert metrics["policy/entropy"] == pytest.approx(entropy, nan_ok=True)


class Infinite(GRPO):
    """A loss that is infinite and has a gradient all the same."""

    def loss(self, batch: LossInputs) -> LossOutputs:
        outputs = super().loss(batch)
        return replace(outputs, loss=outputs.loss + math.inf)


@pytest.mark.parametrize(
    ("objective", "advantage", "said"),
    [
        (GRPO(), math.nan, "loss nan and gradient norm nan"),
        (GRPO(), math.inf, "loss -inf and gradient norm (nan|inf)"),
        (Infinite(), 1.0, "loss inf and gradient norm [0-9.]+"),
    ],
)
def test_a_loss_that_is_not_finite_takes_no_step(objective: Objective, advantage: float, said: str) -> None:
    policy = FourNumbers()
    advantages = torch.tensor([advantage, *ADVANTAGES[1:]], dtype=torch.float64)
    with pytest.raises(UserError, match=f"must be finite; got {said}; lower"):
        updated(policy, PolicyUpdate(objective, 1, 1, None, 1.0, True, SEED), experience_of(advantages=advantages))
    assert policy.odds.tolist() == ODDS


def test_completions_that_were_all_cut_off_teach_nothing_and_have_no_means() -> None:
    policy = FourNumbers()
    objective = GRPO(beta=0.04, mask_truncated=True)
    truncated = torch.ones(6, dtype=torch.bool)
    metrics = updated(policy, PolicyUpdate(objective, 2, 2, 6, 1.0, True, SEED), experience_of(truncated=truncated))
    assert policy.odds.tolist() == ODDS
    assert (metrics["optim/loss"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert metrics["optim/lr"] == pytest.approx(0.5 * (1 + 0.8 + 0.64 + 0.512) / 4)
    assert all(math.isnan(value) for name, value in metrics.items() if not name.startswith("optim/"))


def test_a_step_whose_advantages_were_all_cut_off_still_has_momentum() -> None:
    update = PolicyUpdate(GRPO(mask_truncated=True), 1, 1, None, 1.0, 0.0, SEED)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    cut = {"truncated": advantages != 0, "advantages": advantages}  # the others train, without a gradient

    def work(ranks: Communicator) -> list[list[float]]:
        hand, policy, found = [[*range(6)], [0, 1, 2], [3, 4, 5]][ranks.size + ranks.rank - 1], FourNumbers(), []
        optimizer = torch.optim.Adam([policy.odds, policy.frozen], lr=0.1)
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        for values in ({}, {name: value[hand] for name, value in cut.items()}):
            experience = experience_of(hand, indices=torch.tensor(hand), **values)
            update.run(policy, experience, optimizer, schedule, ranks=ranks)  # type: ignore[arg-type]
            found.append(policy.odds.tolist())
        return found

    first, second = work(SINGLE_PROCESS)
    assert all(abs(after - before) > 0.01 for before, after in zip(first, second, strict=True))
    for odds in on_ranks(2, work):
        assert odds[1] == pytest.approx(second)


def test_metrics_of_the_mismatch_by_hand() -> None:
    policy = FourNumbers()
    correction = RolloutCorrection(cap=1.1, rejection="token", low=0.5, high=2.0)
    update = PolicyUpdate(BNPO(correction=correction), 2, 3, 6, 1.0, True, SEED)
    metrics = updated(policy, update, experience_of())
    ratios = [[math.exp(logprob(ODDS, token) - SAMPLER) for token in completion] for completion in COMPLETIONS]
    flat = [ratio for completion in ratios for ratio in completion]
    weights = [min(ratio, 1.1) if 0.5 <= ratio <= 2.0 else 0.0 for ratio in flat]
    assert 0 < weights.count(0.0) < len(weights) and weights.count(1.1) > 0
    assert metrics["mismatch/chi2"] == pytest.approx(sum(ratio**2 for ratio in flat) / 13 - 1)
    assert metrics["mismatch/k3"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in flat) / 13)
    assert metrics["mismatch/ess"] == pytest.approx(sum(weights) ** 2 / (13 * sum(weight**2 for weight in weights)))
    assert metrics["mismatch/rejected_frac"] == pytest.approx(weights.count(0.0) / 13)
    assert metrics["mismatch/capped_frac"] == pytest.approx(weights.count(1.1) / 13)


# On a policy of a family ----------------------------------------------------------------------------------------------


class Counting(GRPO):
    """Notes the completions of each minibatch."""

    sizes: list[int] = []

    def weights(self, mask: Tensor, max_tokens: int, completions: float, tokens: float) -> Tensor:
        assert completions == len(mask)
        self.sizes.append(len(mask))
        return super().weights(mask, max_tokens, completions, tokens)


def nine_tokens(rows: int, version: int = 0) -> Experience:
    """Rows of nine tokens, the last four sampled, half of them better than the others."""
    mask = torch.zeros(rows, 9, dtype=torch.bool)
    mask[:, 5:] = True
    return Experience(
        version=version,
        tokens=torch.randint(5, 300, (rows, 9), generator=torch.Generator().manual_seed(rows)),
        lengths=torch.full((rows,), 9),
        mask=mask,
        sampler_logprobs=torch.full((rows, 9), -3.0) * mask,
        advantages=torch.tensor([1.0, -1.0] * (rows // 2)),
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampled_tokens=4 * rows,
        seconds=0.0,
        temperature=1.0,
        max_tokens=4,
    )


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [2, 2, 2, 2]), (6, [2, 2, 1, 1]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0])]
)
def test_fewer_completions_are_divided_evenly_and_steps_without_any_change_nothing(
    tiny_policy_dir: Path, rows: int, sizes: list[int]
) -> None:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4))
    policy = Policy(tiny_policy_dir, config, torch.device("cpu"), seed=1)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.5)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    counting = Counting()
    update = PolicyUpdate(counting, 2, 4, None, 1.0, reference_share=1.0, seed=0)

    def run(experience: Experience) -> dict[str, float]:
        counting.sizes.clear()
        return update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward())  # type: ignore[arg-type]

    run(nine_tokens(8))  # gives the optimizer a momentum
    before = [parameter.detach().clone() for parameter in trained]
    metrics = run(nine_tokens(rows, version=1))
    assert counting.sizes == 2 * sizes
    assert schedule.last_epoch == 2 * 2 * 4
    taken = 8 + 2 * sum(size > 0 for size in sizes)
    assert {int(state["step"]) for state in optimizer.state.values()} == {taken}
    same = all(torch.equal(parameter, old) for parameter, old in zip(trained, before, strict=True))
    assert same == (rows == 0)
    assert metrics["optim/lr"] == pytest.approx(0.01)
    assert torch.tensor(metrics["policy/kl"]).isnan() == (rows == 0)


def test_with_dropout_the_ratio_is_to_the_policy_without_it() -> None:
    class Dropping(FourNumbers):
        def token_values(self, *sequences: Any) -> Any:
            values = super().token_values(*sequences)
            return values._replace(logprobs=values.logprobs - 0.1) if self.training else values

    metrics = updated(Dropping(random=True), PolicyUpdate(GRPO(), 1, 1, None, 1.0, 0.0, SEED), experience_of())
    assert metrics["policy/ratio_mean"] == pytest.approx(0.9048374)  # exp(-0.1)
