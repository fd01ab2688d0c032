"""Replayed routing (R3): the update gives each token to the experts that the sampler chose."""

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from light_helpers import Echo
from lightning.pytorch import Callback, LightningModule, Trainer
from model_copies import copy_of
from safetensors.torch import load_file
from short_run import trainer_of
from test_every_way import written
from test_families import CPU, LOGPROB_BOUND, NOISE, PROMPTS, changed, completions_of, policy_of
from tiny_families import EXPERTS as OF_ATTENTION
from tiny_families import STORED, write_checkpoint
from torch import Tensor

from benchmarks.random_model import noisy_norms
from qerl_pl.callbacks import EnvironmentConfig, RolloutCallback
from qerl_pl.cli.main import main
from qerl_pl.datamodules import GuessingDataModule
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import end_token_ids
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.policy.experts import PackedExperts
from qerl_pl.rollout.collector import pad_completions, pad_routing
from qerl_pl.toy.game import GuessingGame
from qerl_pl.types import Completion, PromptBatch, SamplingConfig

LAYERS, CHOSEN, EXPERTS = 2, 2, 6
MIXTURES = (*OF_ATTENTION, "qwen3.5-moe")
"""The last has gated delta nets, which vLLM's CPU build does not compute in float32."""
VLLM = importlib.util.find_spec("vllm")
RECORDS = VLLM is None or not Path(VLLM.submodule_search_locations[0], "config", "aux_output.py").is_file()  # type: ignore[index]
"""Whether vLLM's CPU build says which experts it chose: since 0.31 it refuses, as a test of its own shows."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in 4 bits of each mixture of experts."""
    folder = tmp_path_factory.mktemp("replay")
    for name in MIXTURES:
        quantize_checkpoint(write_checkpoint(name, folder / "source" / name), folder / name, STORED[name])  # type: ignore[arg-type]
    return {name: folder / name for name in MIXTURES}


@pytest.fixture(scope="module")
def base(bases: dict[str, Path]) -> Path:
    """Qwen3's, in NVFP4."""
    return bases["qwen3-moe"]


@pytest.fixture(
    scope="module",
    params=[
        *itertools.product(["transformers"], MIXTURES),
        *(pytest.param(("vllm", name), marks=pytest.mark.vllm) for name in OF_ATTENTION if RECORDS),
    ],
    ids="-".join,
)
def sampled(request: pytest.FixtureRequest, bases: dict[str, Path]) -> Iterator[tuple[Policy, RolloutEngine]]:
    """A policy with a random adapter, and an engine that records its routing."""
    base = bases[request.param[1]]
    policy = changed(policy_of(base, replay_routing=True))
    kind = request.param[0]
    engine = TransformersEngine() if kind == "transformers" else VLLMEngine(kv_cache_gib=0.25, max_num_seqs=16)
    lora = policy.config.lora_spec
    assert lora is not None
    engine.launch(EngineSpec(base, torch.float32, CPU, lora.rank, lora.targets, 96, record_routing=True))
    yield policy, engine
    engine.close()


def gap(policy: Policy, completions: list[list[Completion]], replay: bool, trainer: Any = None) -> float:
    """Mean difference between the engine's log-probabilities and the trainer's, nats a token."""
    tokens, lengths, mask, said = pad_completions(PROMPTS, completions, 0)
    routing = pad_routing(completions, tokens.shape) if replay else None
    with noisy_norms(policy, trainer):
        found = policy.token_values(tokens, lengths, mask, 1.0, routing=routing)[0]
    return (found - said)[mask].abs().mean().item()


def own_routing(policy: Policy, completions: list[list[Completion]]) -> Tensor:
    """What the trainer's router chooses for the same tokens, sorted, int64 [B, T, layers, k]."""
    tokens, lengths, mask, _ = pad_completions(PROMPTS, completions, 0)
    blocks = [module for module in policy.modules() if isinstance(module, PackedExperts)]
    chosen: list[Tensor] = []
    routes = [block.route for block in blocks]
    for block, route in zip(blocks, routes, strict=True):
        block.route = lambda x, route=route: (chosen.append((found := route(x))[1]), found)[1]  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            policy.token_values(tokens, lengths, mask, 1.0)
    finally:
        for block in blocks:
            del block.route
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    result = torch.full((*tokens.shape, LAYERS, CHOSEN), -1)
    result[real] = torch.stack(chosen, dim=1)
    return result


def test_engines_say_which_experts_they_chose_for_every_token_but_the_last(
    sampled: tuple[Policy, RolloutEngine],
) -> None:
    policy, engine = sampled
    engine.sync(policy.weights(0))
    completions = completions_of(engine)
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for completion in group:
            assert completion.routing is not None and completion.routing.dtype == torch.int16
            tokens = len(prompt.token_ids) + len(completion.token_ids) - 1
            assert completion.routing.shape == (tokens, LAYERS, CHOSEN)
    tokens, lengths, *_ = pad_completions(PROMPTS, completions, 0)
    routing = pad_routing(completions, tokens.shape)
    assert routing is not None and 0 <= routing[routing >= 0].min() and routing.max() == EXPERTS - 1
    recorded = torch.arange(tokens.shape[1]) < lengths[:, None] - 1
    assert torch.equal(routing[..., 0, 0] >= 0, recorded)
    found, own = routing[recorded].long().sort(-1).values, own_routing(policy, completions)[recorded].sort(-1).values
    assert (found == own).float().mean() > 0.99  # in float32 nearly always the same


def test_replayed_routing_makes_up_for_a_router_that_chooses_otherwise(sampled: tuple[Policy, RolloutEngine]) -> None:
    """The sampler's noise moves its router: without replay the trainer chooses other experts, with replay the same."""
    policy, engine = sampled
    # Noise reaches the state of a gated delta net, too: less of it, or its effect hides the router's.
    noise = replace(NOISE, sigma=0.05 if policy.folder.name == "qwen3.5-moe" else 0.2)
    engine.sync(policy.weights(0))
    clean = completions_of(engine)
    assert gap(policy, clean, replay=True) < LOGPROB_BOUND
    engine.sync(policy.weights(0, noise))
    noisy = completions_of(engine)
    assert gap(policy, noisy, replay=True, trainer=noise) < LOGPROB_BOUND  # the same weights, and the same routing
    without, with_replay = gap(policy, noisy, replay=False), gap(policy, noisy, replay=True)
    print(f"mean gap with noise in the sampler alone: {without:.4f} nats without replay, {with_replay:.4f} with it")
    assert with_replay < 0.9 * without


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_are_of_the_replayed_experts_and_recomputing_changes_no_bit(
    bases: dict[str, Path], name: str
) -> None:
    base = bases[name]
    ids, mask = torch.arange(60)[None] + 20, (torch.arange(60) > 0)[None]
    generator = torch.Generator().manual_seed(3)
    routing = torch.rand(1, 60, LAYERS, EXPERTS, generator=generator).topk(CHOSEN, dim=-1).indices.short()
    found = {}
    for checkpointing in (False, True, "selective"):
        policy = changed(policy_of(base, gradient_checkpointing=checkpointing)).train()
        loss = policy.token_values(ids, torch.tensor([60]), mask, 1.0, routing=routing)[0].sum()
        # Another pass comes before the backward one, as that of a reference policy may.
        policy.token_values(ids, torch.tensor([60]), mask, 1.0)
        loss.backward()
        found[checkpointing] = [p.grad for p in policy.parameters() if p.requires_grad]
    own = changed(policy_of(base)).train()
    own.token_values(ids, torch.tensor([60]), mask, 1.0)[0].sum().backward()
    gradients = [p.grad for p in own.parameters() if p.requires_grad]
    assert not any(torch.equal(a, b) for a, b in zip(found[False], gradients, strict=True))  # type: ignore[arg-type]
    for other in (True, "selective"):
        pairs = zip(found[False], found[other], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MIXTURES)
def test_replaying_the_routers_own_choice_changes_no_bit(bases: dict[str, Path], name: str) -> None:
    policy = changed(policy_of(bases[name]))
    completions = [[Completion((31, 32, 33), (-1.0,) * 3, "stop")] for _ in PROMPTS]
    tokens, lengths, mask, _ = pad_completions(PROMPTS, completions, 0)
    with torch.no_grad():
        plain = policy.token_values(tokens, lengths, mask, 1.0)[0]
        for routing in (own_routing(policy, completions), torch.full((*tokens.shape, LAYERS, CHOSEN), -1)):
            assert torch.equal(policy.token_values(tokens, lengths, mask, 1.0, routing=routing)[0], plain)


@pytest.mark.usefixtures("process_state")
def test_a_run_replays_what_its_sampler_chose(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[Tensor] = []
    route = PackedExperts.route

    def watched(self: PackedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        topk_weights, topk_ids = route(self, x)
        if self.training:
            assert self.replayed is not None
            replayed.append(topk_ids[self.replayed[:, 0] >= 0] == self.replayed[self.replayed[:, 0] >= 0])
        return topk_weights, topk_ids

    monkeypatch.setattr(PackedExperts, "route", watched)
    path = written(base, tmp_path / "run", "nvfp4")
    assert main(["fit", "-c", str(path), "--model.policy.replay_routing", "true"]) == 0
    assert replayed and all(same.numel() and same.all() for same in replayed)


class Watched(Callback):
    """Compares, before each update, the trainer's log-probabilities with the sampler's, routing replayed."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.turns: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        found = batch.experience
        assert isinstance(pl_module, QeRLModule) and found is not None and found.routing is not None
        recorded = found.routing[..., 0, 0] >= 0
        assert torch.equal(recorded.sum(1), found.lengths - 1)  # turns and the environment's answers between them
        policy = pl_module.policy.eval()
        with torch.no_grad():
            tokens = found.tokens, found.lengths, found.mask, found.temperature
            own, *_ = policy.token_values(*tokens, routing=found.routing)
        self.gaps.append((own - found.sampler_logprobs)[found.mask].abs().max().item())
        self.turns += [int(torch.diff(row.int(), prepend=torch.zeros(1)).eq(1).sum()) for row in found.mask]


@pytest.mark.parametrize("kind", ["transformers", *[pytest.param("vllm", marks=pytest.mark.vllm)] * RECORDS])
def test_the_routing_of_a_dialogue_is_that_of_all_its_tokens(base: Path, tmp_path: Path, kind: str) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"][end_token_ids(base)[0]] *= 8  # turns end often
    ending = copy_of(base, tmp_path / "base", tensors)
    watched, engine = Watched(), TransformersEngine() if kind == "transformers" else VLLMEngine(kv_cache_gib=0.25)
    rollout = RolloutCallback(
        {},
        engine,
        group_size=4,
        sampling=SamplingConfig(max_tokens=60),
        environment=EnvironmentConfig(factory=Echo, max_turns=3, max_turn_tokens=15),
    )
    trainer = trainer_of(tmp_path, watched, rollout=rollout, noise=False, max_steps=2, limit_val_batches=0)
    data = GuessingDataModule(
        GuessingGame(highest=7, turns=3), train_size=8, batch_size=2, val_size=2, max_prompt_tokens=130
    )
    policy = PolicyConfig(path=str(ending), dtype="float32", lora=LoraConfig(rank=4, alpha=8.0), replay_routing=True)
    trainer.fit(QeRLModule(policy, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)), datamodule=data)
    assert max(watched.gaps) < LOGPROB_BOUND and max(watched.turns) > 1


def test_a_model_without_experts_has_no_routing_to_replay(tmp_path: Path) -> None:
    source = write_checkpoint("qwen3", tmp_path / "dense")
    with pytest.raises(UserError, match="replay_routing needs a mixture of experts; .* is a qwen3"):
        PolicyConfig(path=str(source), replay_routing=True).base_folder()
