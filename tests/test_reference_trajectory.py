"""The training loop against loops: some rollouts of the real thing, and the same by an independent plain trainer.

The real run goes through what a user has (configuration, rewards, logged metrics, the saved adapter), the plain one
(`plain_trainer`, `plain_objective`, `plain_policy`) through none of the package. They must draw the same tokens and
learn the same numbers, so that a mistake in what they do not share shows. Numbers of one trajectory are written down
below, against a mistake in both.

The package computes in float32, the plain trainer in float64; they agree to some 1e-6. A draw or a clip that is decided
by less would part them: one chance in some hundreds on another kind of processor, where a recipe then needs another
seed.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_objective import Question, Recipe
from plain_policy import PlainPolicy, Sample, Sampling
from plain_trainer import PlainTrainer
from reference_run import (
    BUFFER,
    LONGEST_COMPLETION,
    QUESTIONS,
    SCALING,
    STOP,
    Snapshots,
    build_base,
    is_right,
    plain_name,
    settings,
    vowels,
)
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.algorithm import RolloutCorrection
from qerl_pl.cli.main import QeRLCLI


def overlong(one: Sample) -> float:
    """DAPO's soft penalty: 0 up to `BUFFER` tokens below the longest completion, falling to -1 there."""
    return -min(1.0, max(0.0, (len(one.tokens) - (LONGEST_COMPLETION - BUFFER)) / BUFFER))


REWARDS = {
    "right": (1.0, lambda one: is_right(one.text)),
    "vowels": (0.5, lambda one: vowels(one.text)),
    "overlong": (0.25, overlong),
}
# Gradients are clipped, noise from the first rollout on, every group is replaced in time.
GRPO = Recipe("GRPO", Sampling(LONGEST_COMPLETION, 0.8, STOP), REWARDS, max_epochs=2, stages=3, max_grad_norm=0.5)
# Nothing is clipped, no noise at first, groups are left over, minibatches uneven, one without a completion that trains.
DAPO = replace(
    GRPO,
    algorithm="DAPO",
    sampling=Sampling(LONGEST_COMPLETION, 1.2, STOP),
    beta=0.0,
    epsilon_high=0.2,
    mask_truncated=True,
    resample_rounds=1,
    noiseless_first_stage=True,
    max_grad_norm=math.inf,
    seed=30,
)


def correction(**changes: Any) -> dict[str, Any]:
    """All settings of a correction."""
    return asdict(RolloutCorrection(**changes))


# One epoch of two rollouts, without dynamic sampling.
SHORT = replace(GRPO, max_epochs=1, stages=2, resample_rounds=0, max_grad_norm=math.inf)
RECIPES = {
    "GRPO": GRPO,
    "DAPO": DAPO,
    "DrGRPO": replace(  # one update a rollout; no completion is as long as it could be
        SHORT,
        algorithm="DrGRPO",
        sampling=Sampling(LONGEST_COMPLETION, 0.8, (*STOP, "e", "n", "o")),
        importance_cap=None,
        update_epochs=1,
        minibatches=1,
    ),
    "GSPO": replace(SHORT, algorithm="GSPO", epsilon_low=0.03, epsilon_high=0.02),
    "CISPO": replace(SHORT, algorithm="CISPO", epsilon_low=0.15, epsilon_high=0.1, beta=0.0),
    # Weights of completions; leave-one-out advantages.
    "SAPO": replace(
        SHORT,
        algorithm="SAPO",
        more={"correction": correction(weights="sequence", cap=1.003), "advantage_norm": "rloo"},
    ),
    # Tokens and completions are rejected; advantages divided by the mean reward, which no penalty makes negative.
    "DPPO": replace(
        SHORT,
        algorithm="DPPO",
        epsilon_low=0.02,
        epsilon_high=0.03,
        rewards={name: REWARDS[name] for name in ("right", "vowels")},
        more={
            "correction": correction(cap=None, rejection="token", low=0.8, high=1.2, outlier_low=0.6),
            "advantage_norm": "maxrl",
        },
    ),
    # A dual clip; an entropy bonus.
    "BNPO": replace(
        SHORT,
        algorithm="BNPO",
        max_epochs=2,
        more={
            "correction": correction(cap=1.15, rejection="geometric", low=0.95, high=1.08),
            "delta": 1.2,
            "entropy_coefficient": 0.05,
        },
    ),
}
POLICIES: dict[str, dict[str, Any]] = {"GRPO": {"train_norms": True}, "GSPO": {"gradient_checkpointing": True}}
"""More of `model.policy`, by recipe."""


WRITTEN: dict[str, dict[str, Any]] = {
    "GRPO": {
        "completions": [[" itred\x11inkell", 5], ["in", 1], ["und\ufffd\x05\x15\ufffdS\ufffd", 7]],
        "reward/mean": [0.5208333, 0.4194444, 0.5322917, 0.6302083],
        "optim/loss": [0.01209413, 0.1698623, 0.03312287, 0.0433208],
        "optim/grad_norm": [3.582618, 5.897181, 2.180964, 2.233714],
        "policy/kl": [0.1250262, 0.3086488, 0.1801282, 0.1678043],
        "adapter": [4.225182, 1.186285],
    },
    "DAPO": {
        "completions": [
            ["\ufffd\ufffdoney", 3],
            ["}\x07imBen him\ufffdwicear", 8],
            ["DAf6 moreoksoesam\ufffd", 8],
        ],
        "reward/mean": [0.205, 0.5808333, 0.4361111, 0.4238095],
        "optim/loss": [-0.3183306, -0.05578420, 0.1167735, -0.007965659],
        "optim/grad_norm": [1.875434, 1.756321, 2.184969, 3.831152],
        "policy/kl": [0.05621020, 0.8778161, 0.4865476, 0.4940163],
        "adapter": [4.497559, 1.848053],
    },
}
"""By recipe: text and tokens of the first completions sampled for training (six were sampled to evaluate), numbers of
each rollout, and the norms of all A and of all B at the end."""


@dataclass(frozen=True, repr=False)
class Both:
    """One recipe, trained twice."""

    recipe: Recipe
    real: Snapshots
    journal: list[list[Any]]
    """Of every completion that was scored: its question and text, how many tokens it has, whether it was truncated."""
    adapter: dict[str, Tensor]
    """What RUN/adapter holds."""
    plain: PlainTrainer


def fit(settings: dict[str, Any]) -> Snapshots:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["qerl"])
        cli = QeRLCLI({"subcommand": "fit", "fit": settings})
    (found,) = (one for one in cli.trainer.callbacks if isinstance(one, Snapshots))
    return found


def norm(state: dict[str, Tensor], kind: str) -> float:
    return math.sqrt(sum((t.double() ** 2).sum().item() for name, t in state.items() if name.endswith(kind)))


def questions(policy: PlainPolicy) -> tuple[list[Question], list[Question]]:
    """Those of the training set, and the two held out."""
    found = []
    for index, text in enumerate(QUESTIONS):
        name = f"train-{index}" if index < len(QUESTIONS) - 2 else f"validation-{index - len(QUESTIONS) + 2}"
        chat = [{"role": "user", "content": text}]
        prompt = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found.append(Question(name, policy.tokenizer(prompt, add_special_tokens=False)["input_ids"], text))
    return found[:-2], found[-2:]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("reference"))


EVERY_RUN = ("GRPO", "DAPO", "SAPO", "BNPO")
"""Recipes of `make test`: with noise, penalties, corrections, filters, a dual clip; others run nightly."""


@pytest.fixture(
    scope="module",
    params=[name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES],
)
def both(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    recipe, run = RECIPES[request.param], tmp_path_factory.mktemp("reference") / "run"
    real = fit(settings(recipe, base, run, POLICIES.get(request.param, {})))
    journal = [json.loads(line) for line in Path(f"{run}.jsonl").read_text().splitlines()]
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    plain_policy = PlainPolicy(base, real.trained[0], SCALING)
    plain = PlainTrainer(recipe, plain_policy, *questions(plain_policy))
    plain.run()
    return Both(recipe, real, journal, {plain_name(name): tensor for name, tensor in saved.items()}, plain)


def test_both_draw_the_same_completions(both: Both) -> None:
    plain = [[text, one.text, len(one.tokens), one.truncated] for text, one in both.plain.journal]
    assert both.journal == plain


def test_both_measure_the_same(both: Both) -> None:
    assert len(both.real.metrics) == len(both.plain.metrics)
    for real, plain in zip(both.real.metrics, both.plain.metrics, strict=True):
        assert {tag: real[tag] for tag in plain} == pytest.approx(plain, rel=1e-4, abs=3e-6, nan_ok=True)


def test_both_learn_the_same(both: Both) -> None:
    start, *states = both.real.trained
    assert all(not tensor.any() for name, tensor in start.items() if name.endswith("lora_B"))
    for real, plain in zip(states, both.plain.states, strict=True):
        for name, tensor in plain.items():
            learned = (tensor - start[name]).abs().max().item()
            torch.testing.assert_close(real[name].double(), tensor, rtol=0, atol=1e-3 * learned)
    assert both.adapter.keys() == states[-1].keys()
    assert all(torch.equal(tensor, both.adapter[name]) for name, tensor in states[-1].items())


def test_both_evaluate_alike(both: Both) -> None:
    real = [(found["val/accuracy"], found["val/pass@1"]) for found in both.real.evaluations]
    assert real == both.plain.evaluations


def test_a_recipe_meets_what_it_is_for(both: Both) -> None:
    recipe, metrics, samples = both.recipe, both.plain.metrics, [one for _, one in both.plain.journal]
    assert len({len(one.tokens) for one in samples}) >= 6
    assert all(0 < found["completions/truncated_frac"] < 1 for found in metrics) == (recipe.algorithm != "DrGRPO")
    assert any(found["policy/kl"] > 0.01 for found in metrics)
    dropped = [found["completions/groups_dropped_frac"] > 0 for found in metrics]
    assert any(dropped) == (recipe.resample_rounds > 0)
    assert (min(both.plain.groups) < recipe.batch_size) == (recipe.algorithm == "DAPO")
    assert (both.plain.learned < both.plain.step) == (recipe.algorithm == "DAPO")
    for tag in ("policy/clip_frac_low", "policy/clip_frac_high"):
        assert any(found[tag] > 0.05 for found in metrics) == (recipe.update_epochs > 1)
    assert all(found["optim/grad_norm"] > 2 * recipe.max_grad_norm for found in metrics) == (recipe.algorithm == "GRPO")


def test_a_recipe_meets_its_options(both: Both) -> None:
    recipe, metrics = both.recipe, both.plain.metrics
    correction = recipe.more.get("correction", {})
    assert any(found["mismatch/rejected_frac"] > 0 for found in metrics) == (correction.get("rejection") is not None)
    assert all(found["mismatch/is_weight_mean"] > 0.2 for found in metrics)
    capped = recipe.importance_cap if not correction else correction["weights"] and correction["cap"]
    assert any(found["mismatch/capped_frac"] > 0.05 for found in metrics) == (capped is not None)


@pytest.mark.parametrize("both", list(WRITTEN), indirect=True)
def test_the_trajectory_is_the_one_written_down(both: Both) -> None:
    written = WRITTEN[both.recipe.algorithm]
    assert [[one.text, len(one.tokens)] for _, one in both.plain.journal[6:9]] == written["completions"]
    assert [entry[1:3] for entry in both.journal[6:9]] == written["completions"]
    for metrics in (both.real.metrics, both.plain.metrics):
        for tag in ("reward/mean", "optim/loss", "optim/grad_norm", "policy/kl"):
            assert [found[tag] for found in metrics] == pytest.approx(written[tag], rel=1e-4)
    for state in (both.real.trained[-1], both.plain.states[-1]):
        assert [norm(state, kind) for kind in ("lora_A", "lora_B")] == pytest.approx(written["adapter"], rel=1e-5)


def test_dropout_acts_on_the_update_alone(base: Path, tmp_path: Path) -> None:
    # Of one step a rollout, the ratio to the old policy would be 1 without it. Engine and old policy have none. The
    # first two rollouts have a self-check besides, which switches it off.
    recipe = replace(
        SHORT, max_epochs=2, update_epochs=1, minibatches=1, warmup_ratio=0.0, sigma_start=0.0, sigma_end=0.0
    )
    lora = {"rank": 4, "alpha": 4 * SCALING, "dropout": 0.5}
    real = fit(settings(recipe, base, tmp_path / "run", {"lora": lora}))
    assert len(real.metrics) == 4
    assert all(abs(found["policy/ratio_mean"] - 1) > 1e-3 for found in real.metrics[1:])
    assert all(found["mismatch/logprob_abs_mean"] < 1e-5 for found in real.metrics)
