"""LoRA on the experts of a mixture: PEFT's parameters, in the trainer, both engines, checkpoints and exports."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from qerl_kernels import DenseStack, experts
from qerl_kernels.experts import grouped_product
from safetensors.torch import load_file
from test_every_way import killed, process_state, written  # noqa: F401  (a fixture)
from test_families import LOGPROB_BOUND, NOISE, changed, completions_of, trainer_gap
from test_killed import in_a_fork
from test_replay import gap
from test_sft import data_of, module_of, plain_step, trainer_of
from tiny_families import EXPERTS, STORED, write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from qerl_pl.cli.main import main
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.memory_plan import MicroBatch, RunPlan, run_memory
from qerl_pl.model_shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.activation_checkpointing import _saves_all_products
from qerl_pl.modules.lora import LoraSpec

CPU = torch.device("cpu")
BOTH = ("mlp.experts.gate_up_proj", "experts.down_proj")
IDS = torch.randint(5, 500, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(40) > 0).expand(2, 40)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures in 4 bits, by family."""
    folder = tmp_path_factory.mktemp("experts")
    for name in EXPERTS:
        quantize_checkpoint(write_checkpoint(name, folder / f"{name}-16"), folder / name, STORED[name])  # type: ignore[arg-type]
    return {name: folder / name for name in EXPERTS}


def policy_of(base: Path, parameters: tuple[str, ...] | None = BOTH, seed: int = 1, **settings: Any) -> Policy:
    lora = LoraConfig(rank=4, alpha=8.0, target_parameters=parameters)
    config = PolicyConfig(**{"path": str(base), "dtype": "float32", "lora": lora} | settings)
    return Policy(base, config, CPU, seed=seed).eval()


def said_by(policy: Policy, reference: bool = False) -> Tensor:
    with torch.no_grad():
        return policy.token_logprobs(IDS, torch.tensor([40, 40]), MASK, 1.0, reference=reference)[0][:, 1:]


def said_by_transformers(model: torch.nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("parameters", [BOTH, ("experts.gate_up_proj",)])
def test_peft_and_transformers_load_the_saved_adapter_with_the_same_results_and_gradients(
    bases: dict[str, Path], tmp_path: Path, name: str, parameters: tuple[str, ...]
) -> None:
    policy = changed(policy_of(bases[name], parameters)).train()
    policy.save(tmp_path / "adapter")
    assert set(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_parameters"]) == set(
        parameters
    )
    dense = write_dense_checkpoint(bases[name], tmp_path / "dense", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        before = said_by_transformers(plain)
    torch.testing.assert_close(said_by(policy, reference=True), before, rtol=0, atol=LOGPROB_BOUND)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    expected = said_by_transformers(model)
    torch.testing.assert_close(said_by(policy), expected.detach(), rtol=0, atol=LOGPROB_BOUND)
    assert (expected - before).abs().mean() > 0.5
    expected.sum().backward()
    policy.token_logprobs(IDS, torch.tensor([40, 40]), MASK, 1.0)[0].sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {f"base_model.model.{n}": p.grad for n, p in policy.base.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 * (4 + len(parameters))
    for key, gradient in theirs.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-3, atol=2e-4 * gradient.abs().max().item())


def test_a_policy_starts_from_the_saved_adapter_and_returns_to_it(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["qwen3-moe"]
    policy = changed(policy_of(base))
    policy.save(tmp_path / "adapter")
    settings = {"adapter": str(tmp_path / "adapter"), "lora": LoraConfig()}
    config = PolicyConfig(path=str(base), dtype="float32", **settings)  # type: ignore[arg-type]
    assert config.lora_spec == LoraSpec(4, 8.0, ("k_proj", "o_proj", "q_proj", "v_proj"), target_parameters=(
        "experts.down_proj", "mlp.experts.gate_up_proj",
    ))  # fmt: skip
    config.base_folder()
    started = policy_of(base, **settings)
    assert torch.equal(said_by(started), said_by(policy))
    changed(started)
    moved = said_by(started)
    assert (moved - said_by(policy)).abs().max() > 0.1
    assert torch.equal(said_by(started, reference=True), said_by(policy)) and torch.equal(said_by(started), moved)
    with started.perturbed(seed=3):
        assert (said_by(started) - moved).abs().max() > 0.1
    assert torch.equal(said_by(started), moved)
    with pytest.raises(UserError, match="has target_parameters experts.down_proj, .* is experts.down_proj; leave it"):
        other = LoraConfig(target_parameters=("experts.down_proj",))
        assert PolicyConfig(path=str(base), adapter=str(tmp_path / "adapter"), lora=other).lora_spec


def test_a_step_of_supervised_fine_tuning_is_that_of_peft(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["qwen3-moe"]
    changed(policy_of(base)).save(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    policy = PolicyConfig(path=str(base), dtype="float32", adapter=str(tmp_path / "start"))
    module, trainer = module_of(base, policy=policy), trainer_of(tmp_path)
    trainer.fit(module, datamodule=data_of(max_length=200))
    dense = write_dense_checkpoint(base, tmp_path / "dense", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "start", is_trainable=True).eval()
    loss = plain_step(theirs, base)
    assert float(trainer.callback_metrics["optim/loss"]) == pytest.approx(loss, rel=1e-5)
    expected, found = peft.get_peft_model_state_dict(theirs), module.policy.trained_state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name] - start[name], tensor - start[name], rtol=1e-3, atol=1e-6)
    assert any((found[name] - start[name]).abs().max() > 1e-3 for name in found if ".experts." in name)


def test_a_new_adapter_changes_nothing_and_leaves_the_others_draws_alone(bases: dict[str, Path]) -> None:
    alone, both = policy_of(bases["qwen3-moe"], None), policy_of(bases["qwen3-moe"])
    torch.testing.assert_close(said_by(alone), said_by(both), rtol=0, atol=LOGPROB_BOUND)
    plain, state = alone.trained_state(), both.trained_state()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())
    factors = {name: tensor for name, tensor in state.items() if name not in plain}
    assert {name.rsplit(".", 2)[1] for name in factors} == {"lora_A", "lora_B"} and len(factors) == 8
    for name, tensor in factors.items():  # as PEFT draws them: uniform, by the number of inputs
        assert not tensor.any() if "lora_B" in name else 0.9 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_changes_no_bit_of_the_gradients(bases: dict[str, Path], dtype: str) -> None:
    routing = torch.rand(2, 40, 2, 6, generator=torch.Generator().manual_seed(3)).topk(2, dim=-1).indices.short()
    found: dict[object, list[Tensor | None]] = {}
    for checkpointing in (False, True, "selective", "offload"):
        policy = changed(policy_of(bases["qwen3-moe"], dtype=dtype, gradient_checkpointing=checkpointing)).train()
        loss = policy.token_logprobs(IDS, torch.tensor([40, 40]), MASK, 1.0, routing=routing)[0].sum()
        loss.backward()
        assert _saves_all_products(policy.base)
        found[checkpointing] = [p.grad for p in policy.parameters() if p.requires_grad]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in found[checkpointing])
        assert not any(module.low_precision_factors for module in policy.trained._mixtures.values())  # type: ignore[union-attr]
    for other in (True, "selective", "offload"):
        assert all(map(torch.equal, found[False], found[other]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "adapted"), [("qwen3-moe", None), ("qwen3-moe", BOTH), ("gpt-oss", None)])
def test_a_recomputation_leaves_out_the_product_that_is_only_added(
    bases: dict[str, Path], name: str, adapted: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[str] = []

    def noted(rows: Tensor, stops: Tensor, bounds: Any, weight: Any, back: bool, **factor: Any) -> Tensor:
        if not isinstance(weight, DenseStack):  # an adapter's
            kind = "gate_up" if weight.shape[2] == policy.base.config.hidden_size else "down"
            products.append(f"{kind} backward" if back else kind)
        return grouped_product(rows, stops, bounds, weight, back, **factor)

    monkeypatch.setattr(experts, "grouped_product", noted)
    backward = ["down backward", "gate_up backward"]
    for recomputed, layer in ((False, backward), (True, ["gate_up", *backward])):
        products.clear()
        policy = policy_of(bases[name], adapted, gradient_checkpointing=recomputed).train()
        policy.token_logprobs(IDS, torch.tensor([40, 40]), MASK, 1.0)[0].sum().backward()
        assert products == ["gate_up", "down"] * 2 + layer * 2
        assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters() if p.requires_grad)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, name), marks=[pytest.mark.vllm] if kind == "vllm" else [], id=f"{kind}-{name}")
        for kind in ("transformers", "vllm")
        for name in EXPERTS
    ],
)
def sampled(request: pytest.FixtureRequest, bases: dict[str, Path]) -> Iterator[tuple[Policy, RolloutEngine]]:
    """A policy with random adapters, and an engine that records its routing."""
    kind, name = request.param
    policy = changed(policy_of(bases[name], replay_routing=True))
    engine = TransformersEngine() if kind == "transformers" else VLLMEngine(kv_cache_gib=0.25, max_num_seqs=16)
    spec = EngineSpec(bases[name], torch.float32, CPU, 4, policy.config.lora_spec.targets, 96, record_routing=True)  # type: ignore[union-attr]
    engine.launch(replace(spec, lora_target_parameters=BOTH))
    yield policy, engine
    engine.close()


def test_trainer_and_engine_agree_with_adapters_of_experts_and_with_noise(
    sampled: tuple[Policy, RolloutEngine],
) -> None:
    policy, engine = sampled
    engine.sync(policy.weights(0))
    assert trainer_gap(policy, completions_of(engine), None) < LOGPROB_BOUND
    engine.sync(policy.weights(0, NOISE))
    noisy = completions_of(engine)
    assert trainer_gap(policy, noisy, NOISE) < LOGPROB_BOUND
    assert gap(policy, noisy, replay=True, trainer=NOISE) < LOGPROB_BOUND
    weights = policy.weights(0)
    experts = {name for name in weights.adapter or {} if ".experts." in name}
    assert len(experts) == 4
    for left_out in (experts, {name for name in experts if name.endswith("down_proj")}):
        adapter = {name: pair for name, pair in (weights.adapter or {}).items() if name not in left_out}
        engine.sync(replace(weights, adapter=adapter))
        assert trainer_gap(policy, completions_of(engine), None) > 0.1
    engine.sync(policy.weights(0, reference=True))
    base = policy_of(policy.folder, None)
    assert trainer_gap(base, completions_of(engine), None) < LOGPROB_BOUND
    wrong = {name: (a[1:], b) for name, (a, b) in (weights.adapter or {}).items() if name in experts}
    with pytest.raises(UserError, match=r"must have shapes \(6, 4, .* got \(5, 4, "):
        engine.sync(replace(weights, adapter=wrong))


@pytest.mark.usefixtures("process_state")
@pytest.mark.parametrize("name", EXPERTS)
def test_a_run_with_adapters_of_experts_is_killed_goes_on_bit_for_bit_and_exports(
    bases: dict[str, Path], tmp_path: Path, name: str
) -> None:
    def configured(run: str) -> Path:
        path = written(bases[name], tmp_path / run, STORED[name])
        settings = yaml.safe_load(path.read_text())
        settings["model"]["policy"]["lora"] |= {"dropout": 0.0, "target_parameters": list(BOTH)}
        path.write_text(yaml.safe_dump(settings))
        return path

    whole = configured("whole")
    assert main(["fit", "-c", str(whole)]) == 0  # with the parity check of its engine
    learned = load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors")
    if name == "qwen3-moe":
        broken = configured("broken")
        assert in_a_fork(partial(killed, broken)) == -signal.SIGKILL
        assert main(["fit", "-c", str(broken), "--resume", "auto"]) == 0
        found = load_file(tmp_path / "broken" / "adapter" / "adapter_model.safetensors")
        assert found.keys() == learned.keys() and all(torch.equal(found[key], learned[key]) for key in learned)
    assert all(tensor.any() for tensor in learned.values())

    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "exported")]) == 0
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "merged"), "--merge", "true"]) == 0
    assert "experts.down_proj" in (tmp_path / "merged" / "README.md").read_text()
    dense = write_dense_checkpoint(bases[name], tmp_path / "dense", torch.float32)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        before = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "exported").merge_and_unload().state_dict()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    for key, tensor in adapted.items():
        assert (tensor - merged[key]).abs().max() <= 2**-8 * tensor.abs().max()  # merged weights are bfloat16
    stacks = [key for key in adapted if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    for key in stacks:
        change = adapted[key] - before[key]
        assert (merged[key] - before[key] - change).norm() < 0.5 * change.norm()


def test_adapters_that_do_not_fit_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    base = str(bases["qwen3-moe"])

    def refused(match: str, path: str = base, **lora: Any) -> None:
        with pytest.raises(UserError, match=match):
            PolicyConfig(path=path, lora=LoraConfig(**lora)).base_folder()

    refused("'experts.up_proj' matches none; choose among experts.down_proj, experts.gate_up_proj", target_parameters=(
        "experts.up_proj",
    ))  # fmt: skip
    big = {"rank": 65, "targets": (), "target_parameters": BOTH}
    refused("got rank 65 for model.layers.0.mlp.experts.down_proj with 64; .* leave experts.down_proj out", **big)
    refused(
        "experts has no dropout, as in PEFT; got model.policy.lora.dropout 0.1", dropout=0.1, target_parameters=BOTH
    )
    refused("needs linears to adapt; got no targets", targets=())
    dense = write_checkpoint("qwen3", tmp_path / "qwen3")
    refused("leave it out: the model has no experts", str(dense), target_parameters=BOTH)
    only = policy_of(bases["qwen3-moe"], lora=LoraConfig(rank=4, alpha=8.0, targets=(), target_parameters=BOTH))
    assert len(only.trained_state()) == 8


def test_memory_of_adapters_of_all_experts_is_that_of_1_26_billion_factors() -> None:
    config = Qwen3MoeConfig(
        **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128},
        num_experts_per_tok=8,
    )
    shape, attention = Shape.of(config), ("q_proj", "k_proj", "v_proj", "o_proj")
    count = 48 * 128 * 32 * (1536 + 2048 + 768 + 2048)
    assert shape.expert_adapter_weights(32, BOTH) == count == 1_258_291_200
    assert 25.75 < (4 + 4 + 8 + 2 + 2 + 2) * count / 2**30 < 25.85  # as the documentation says
    assert shape.expert_adapter_weights(32, ("experts.down_proj",)) == 48 * 128 * 32 * (768 + 2048)
    plan = RunPlan(shape, MicroBatch(8192, rank=32), targets=attention)
    adapted = replace(plan, batch=replace(plan.batch, adapts_experts=True), target_parameters=BOTH)
    before, after = run_memory(plan), run_memory(adapted)
    assert after.rollout["trained weights"] - before.rollout["trained weights"] == (4 + 2) * count
    assert after.update["optimizer states"] - before.update["optimizer states"] == 8 * count
    # Gradients, and their low-precision ones or the roots of second moments, at the optimizer's step.
    assert after.peak > plan.shape.base_bytes("nvfp4", torch.bfloat16) + (4 + 2 + 8 + 4 + 4) * count
