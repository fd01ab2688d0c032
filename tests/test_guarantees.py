"""What docs/limits.md guarantees, with the faults of other trainers planted in an engine: each is found."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.chat.template import render_prompts
from qerl_pl.engines import TransformersEngine
from qerl_pl.engines.base import EngineSpec
from qerl_pl.errors import UserError
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.rollout.parity_check import check_logprob_parity
from qerl_pl.types import PolicyWeights, Prompt, RolloutRequest, SamplingConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tiny_policy_dir: Path) -> Policy:
    """A policy whose adapter has been trained a little."""
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4))
    policy = Policy(tiny_policy_dir, config, CPU, seed=1)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in policy.trained_state().items():
        if "lora_B" in name:
            tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
    return policy


@pytest.fixture(scope="module")
def prompts(tiny_policy_dir: Path) -> list[Prompt]:
    questions = [f"There are {n} pens in one box and {n + 5} in another. How many pens are there?" for n in (12, 31)]
    ids = render_prompts(AutoTokenizer.from_pretrained(tiny_policy_dir), questions)
    return [Prompt(f"p{n}", tuple(tokens), questions[n], "0") for n, tokens in enumerate(ids)]


class NeverArrives(TransformersEngine):
    """Each sync delivers the base alone."""

    def sync(self, weights: PolicyWeights) -> float:
        return super().sync(replace(weights, adapter=None))


class Stale(TransformersEngine):
    """Samples from the first adapter that it was given."""

    first: Mapping[str, tuple[Tensor, Tensor]] | None = None

    def sync(self, weights: PolicyWeights) -> float:
        if weights.adapter is not None and self.first is None:
            self.first = {name: (a.clone(), b.clone()) for name, (a, b) in weights.adapter.items()}
        return super().sync(weights if weights.adapter is None else replace(weights, adapter=self.first))


class Doubled(TransformersEngine):
    """Adds the adapter with twice its scale."""

    def sync(self, weights: PolicyWeights) -> float:
        return super().sync(replace(weights, scaling=2 * weights.scaling))


class OneLayerLost(TransformersEngine):
    """Loses the adapter of the first layer."""

    def sync(self, weights: PolicyWeights) -> float:
        if weights.adapter is None:
            return super().sync(weights)
        lost = {name: (a, 0 * b if ".layers.0." in name else b) for name, (a, b) in weights.adapter.items()}
        return super().sync(replace(weights, adapter=lost))


class OtherBase(TransformersEngine):
    """Serves another model than the trainer has."""

    def launch(self, spec: EngineSpec) -> None:
        super().launch(spec)
        for linear in self._linears.values():
            linear.base.weight.data.mul_(1.5)


def launched(engine: TransformersEngine, policy: Policy) -> TransformersEngine:
    lora = policy.config.lora_spec
    assert lora is not None
    engine.launch(EngineSpec(policy.folder, torch.float32, CPU, lora.rank, lora.targets, 128))
    return engine


@pytest.fixture
def engine(policy: Policy) -> Iterator[TransformersEngine]:
    engine = launched(TransformersEngine(), policy)
    yield engine
    engine.close()


def test_an_engine_without_faults_agrees(engine: TransformersEngine, policy: Policy, prompts: list[Prompt]) -> None:
    check_logprob_parity(engine, policy, prompts, 1, 7, 8, 0.25)


@pytest.mark.parametrize("kind", [NeverArrives, Stale, Doubled, OneLayerLost, OtherBase])
def test_an_engine_that_samples_from_another_policy_is_found(
    kind: type[TransformersEngine], policy: Policy, prompts: list[Prompt]
) -> None:
    engine = launched(kind(), policy)
    with pytest.raises(UserError, match="must agree within 0.25 nats"):
        check_logprob_parity(engine, policy, prompts, 1, 7, 8, 0.25)
    engine.close()


def base_of(model: torch.nn.Module, adapted: bool) -> dict[str, Tensor]:
    """Copies of the frozen matrices of a trainer's policy or of an engine's model."""
    frozen = {name: tensor for name, tensor in model.named_parameters() if "lora" not in name and tensor.dim() == 2}
    return {name: tensor.detach().clone() for name, tensor in frozen.items() if not (adapted and tensor.requires_grad)}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Share of the numbers that are other bits."""
    assert before.keys() == after.keys() and before
    moved = sum(int((one != after[name]).sum()) for name, one in before.items())
    return moved / sum(one.numel() for one in before.values())


def test_the_base_never_moves(engine: TransformersEngine, policy: Policy, prompts: list[Prompt]) -> None:
    assert engine._model is not None
    trainers, engines = base_of(policy, adapted=True), base_of(engine._model, adapted=False)
    requests = [RolloutRequest(prompt.token_ids, (0, 1)) for prompt in prompts]
    for version in range(4):
        with policy.perturbed(version, 1.0):
            engine.sync(policy.weights(version))
            engine.generate(requests, SamplingConfig(max_tokens=4))
    check_logprob_parity(engine, policy, prompts, 5, 7, 8, 0.25)
    assert changed(trainers, base_of(policy, adapted=True)) == 0
    assert changed(engines, base_of(engine._model, adapted=False)) == 0
