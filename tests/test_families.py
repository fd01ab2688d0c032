"""Families of models: each is quantized, trained, resumed, evaluated, exported, and engines agree with the trainer."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from plain_ops import to_marlin
from qerl_kernels import FrozenWeight, MarlinRows, MarlinStack, MarlinTensor, NVFP4Tensor, StackedWeight, select_backend
from safetensors.torch import load_file
from test_every_way import learned_and_exported
from test_ops_experts import padded_stack
from tiny_families import EXPERTS, MODELS, STORED, write_checkpoint, write_wrapped
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoConfig, OlmoForCausalLM

from benchmarks.random_model import move_trained, noisy_norms
from qerl_pl.algorithm import NormNoise
from qerl_pl.cli.main import main
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.engines.base import SharedWeights
from qerl_pl.engines.vllm import weight_map
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.families import FAMILIES, family_of, fused_group
from qerl_pl.models.folder import end_token_ids, load_config, read_config
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.experts import PackedExperts
from qerl_pl.policy.lora import FrozenLinear
from qerl_pl.policy.packed_layers import GatedMLP, PackedAttention
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

CPU = torch.device("cpu")
LOGPROB_BOUND = 2e-5  # of float32, as in test_engines.py
NOISE = NormNoise(0.05, seed=3, version=1)
PROMPTS = [Prompt(str(i), tuple(range(20 + 9 * i, 23 + 40 * i)), "", "") for i in range(3)]  # of 3, 34 and 65 tokens
NOISY = dict.fromkeys(
    ("llama", "mistral", "qwen3", "phi3", "qwen3_moe", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text"),
    ("input_layernorm", "post_attention_layernorm"),
)
NOISY |= dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), ("input_layernorm", "pre_feedforward_layernorm"))
"""Norms before quantized linears, by `model_type`."""
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


EVERY_RUN = ("gemma-2", "qwen3-moe")
"""Families of `make test`, beside the toy policy's: one with an offset in its norms, a mixture; others run nightly."""


def families(names: Sequence[str]) -> list[Any]:
    """Parameters that run nightly, but for those of every run."""
    return [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def fixtures_of(names: Sequence[Any], engines: Sequence[Any] = ("transformers",)) -> tuple[Any, Any, Any, Any]:
    """The fixtures `source`, `base`, `dense` and `sampled` of some families, for a module with tests of them."""

    @pytest.fixture(scope="module", params=names)
    def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A 16-bit checkpoint with a layer of each kind."""
        return write_checkpoint(request.param, tmp_path_factory.mktemp("family") / request.param)

    @pytest.fixture(scope="module")
    def base(source: Path) -> Path:
        """The same in 4 bits."""
        folder = source.with_name(f"{source.name}-nvfp4")
        quantize_checkpoint(source, folder, STORED[source.name])  # type: ignore[arg-type]
        return folder

    @pytest.fixture(scope="module")
    def dense(base: Path) -> Path:
        """What 4 bits left, in float32."""
        return write_dense_checkpoint(base, base.with_name(f"{base.name}-dense"), torch.float32)

    @pytest.fixture(scope="module", params=engines)
    def sampled(request: pytest.FixtureRequest, base: Path) -> Iterator[tuple[Policy, RolloutEngine]]:
        """A policy with a random adapter and changed norms, and an engine of its base."""
        policy, engine = changed(policy_of(base, train_norms=True)), engine_of(request.param)
        engine.launch(spec_of(policy))
        yield policy, engine
        engine.close()

    return source, base, dense, sampled


source, base, dense, sampled = fixtures_of(families(MODELS), ENGINES)


def engine_of(kind: str) -> RolloutEngine:
    return TransformersEngine() if kind == "transformers" else VLLMEngine(kv_cache_gib=0.25, max_num_seqs=16)


def policy_of(base: Path, **settings: Any) -> Policy:
    config = PolicyConfig(path=str(base), dtype="float32", lora=LoraConfig(rank=8, alpha=16.0), **settings)
    return Policy(base, config, CPU, seed=1).eval()


def changed(policy: Policy) -> Policy:
    """The policy with a random adapter, and with norms that are not the base's if they train."""
    return move_trained(policy, 0.05)


def spec_of(policy: Policy) -> EngineSpec:
    lora = policy.config.lora_spec
    assert lora is not None
    return EngineSpec(policy.folder, torch.float32, CPU, lora.rank, lora.targets, 96)


def every_linear(folder: Path) -> set[str]:
    """Names of the layers' linears but those of experts, by the files alone."""
    names = (name.removesuffix("_packed").removesuffix(".weight") for name in load_file(folder / "model.safetensors"))
    return {name for name in names if "_proj" in name.rpartition(".")[2] and ".experts." not in name}


def test_every_linear_is_packed_adapted_and_four_bits_and_norms_before_them_train(base: Path) -> None:
    policy = policy_of(base)
    linears = every_linear(base)
    layers = read_config(base)["num_hidden_layers"]
    per_layer = len(family_of(read_config(base)["model_type"]).projections)
    expected = layers * per_layer - (base.name == "gemma-4-nvfp4")  # whose second layer has no v
    assert set(policy.weights(0).adapter or {}) == linears and len(linears) == expected
    packed = 0 if base.name.startswith("gpt-oss") else len(linears)  # which has experts alone in 4 bits
    assert sum(isinstance(module, FrozenLinear) for module in policy.modules()) == packed
    norms = [
        f"model.layers.{layer}.{norm}" for layer in range(layers) for norm in NOISY[read_config(base)["model_type"]]
    ]
    policy = policy_of(base, train_norms=True)
    assert set(policy.weights(0).tensors) == {f"{name}.weight" for name in norms}
    assert list(policy.trained.norms()) == norms
    float32 = sum(isinstance(module, Float32RMSNorm) for module in policy_of(base).modules())
    # Of Gemma all: four a layer, two of queries and keys from Gemma 3 on, and the last.
    assert float32 == {"gemma-2-nvfp4": 9, "gemma-3-nvfp4": 13, "gemma-4-nvfp4": 13}.get(base.name, 4)
    experts = base.name.removesuffix("-nvfp4") in EXPERTS
    for kind in (PackedAttention, PackedExperts if experts else GatedMLP):
        assert sum(isinstance(module, kind) for module in policy.modules()) == layers


def completions_of(engine: RolloutEngine) -> list[list[Completion]]:
    requests = [RolloutRequest(prompt.token_ids, (index, index + 9)) for index, prompt in enumerate(PROMPTS)]
    return engine.generate(requests, SamplingConfig(max_tokens=24))


def trainer_gap(policy: Policy, completions: list[list[Completion]], noise: NormNoise | None) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's, nats."""
    tokens, lengths, mask, said = pad_completions(PROMPTS, completions, 0)
    with noisy_norms(policy, noise):
        found = policy.token_values(tokens, lengths, mask, 1.0)[0]
    return (found - said)[mask].abs().max().item()


@pytest.mark.parametrize("noise", [None, NOISE, replace(NOISE, relative=True)])
def test_trainer_and_engine_agree_with_an_adapter_on_every_linear_and_with_noise(
    sampled: tuple[Policy, RolloutEngine], noise: NormNoise | None
) -> None:
    policy, engine = sampled
    engine.sync(policy.weights(0, noise))
    completions = completions_of(engine)
    assert trainer_gap(policy, completions, noise) < LOGPROB_BOUND
    if noise is not None:
        assert trainer_gap(policy, completions, None) > 1e-3, "the noise must matter, or this test shows nothing"
    else:
        engine.sync(replace(policy.weights(0), adapter=None))
        assert trainer_gap(policy, completions_of(engine), None) > 0.1, "and so must the adapter"
        if isinstance(engine, VLLMEngine):  # on a GPU the trainer shares the embedding
            (held,) = engine._llm.collective_rpc(lambda worker: weight_map.vocabulary(worker.get_model()))
            name = "model.embed_tokens.weight"
            assert torch.equal(held[name], policy.base.get_input_embeddings().get_parameter("weight"))


def plain_gap(model: torch.nn.Module, completions: list[list[Completion]]) -> float:
    """As `trainer_gap`, with a plain model of transformers, one sequence at a time."""
    gaps = []
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for completion in group:
            ids = torch.tensor([prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                logits: Tensor = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
            found = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gaps.append((found - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)


def test_noise_is_the_drawn_numbers_on_the_weights_of_the_norms_before_quantized_linears(
    sampled: tuple[Policy, RolloutEngine], dense: Path, tmp_path: Path
) -> None:
    """A plain model whose stored norm weights have the drawn numbers added says what the engine says."""
    policy, engine = sampled
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    noise_std = engine.sync(policy.weights(0, NOISE))
    completions = completions_of(engine)
    assert plain_gap(model, completions) > 1e-3
    parameters = {
        name.replace("base_model.model.", "").replace(".modules_to_save.default", ""): parameter
        for name, parameter in model.named_parameters()
    }
    before_quantized = NOISY[read_config(dense)["model_type"]]
    drawn = [NOISE.draw(f"model.layers.{layer}.{norm}", 128) for layer in range(2) for norm in before_quantized]
    with torch.no_grad():
        for layer in range(2):
            for norm in before_quantized:
                name = f"model.layers.{layer}.{norm}"
                parameters[f"{name}.weight"] += NOISE.draw(name, 128)
    assert plain_gap(model, completions) < LOGPROB_BOUND
    assert noise_std == pytest.approx(torch.cat(drawn).std(correction=0).item(), rel=1e-4)


def test_gradients_are_those_of_a_plain_model_without_dropout(base: Path, dense: Path, tmp_path: Path) -> None:
    policy = changed(policy_of(base, train_norms=True)).train()
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, tmp_path, is_trainable=True).eval()
    ids = torch.randint(5, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    policy.token_values(ids, torch.tensor([40, 40]), mask, 1.0)[0].sum().backward()
    model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {f"base_model.model.{n}": p.grad for n, p in policy.base.named_parameters() if p.requires_grad}
    assert expected.keys() == found.keys() and len(found) == 2 * len(every_linear(base)) + 4
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-4 * gradient.abs().max().item())


@pytest.fixture
def triton() -> Iterator[None]:
    """Triton's interpreter where there is no GPU."""
    select_backend("triton")
    yield
    select_backend("torch")


def lent(base: Path) -> SharedWeights:
    """What vLLM lends on a GPU: linears and experts in Marlin's layout; tied matrices by one name or by both."""
    tensors = load_file(base / "model.safetensors")
    linears: dict[str, FrozenWeight] = {}
    names = every_linear(base)
    for name in sorted(names):
        members = [member for weight in fused_group(name) if (member := weight.removesuffix(".weight")) in names]
        if name != members[0] or f"{name}.weight" in tensors:  # second, or in 16 bits
            continue
        packed, scale = (torch.cat([tensors[f"{n}.weight_{kind}"] for n in members]) for kind in ("packed", "scale"))
        weight = to_marlin(NVFP4Tensor(packed, scale, tensors[f"{name}.weight_global_scale"]))
        rows = [0, *itertools.accumulate(len(tensors[f"{member}.weight_packed"]) for member in members)]
        linears |= {n: MarlinRows(weight, *bounds) for n, bounds in zip(members, itertools.pairwise(rows), strict=True)}
    config = load_config(base)
    experts: dict[str, StackedWeight] = {}
    for layer in range(config.num_hidden_layers if "moe" in base.name else 0):
        name = f"model.layers.{layer}.mlp.experts"
        for matrix, members in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            held = []
            for expert in range(config.num_experts):
                names = [f"{name}.{expert}.{member}.weight" for member in members]
                packed, scale = (torch.cat([tensors[f"{n}_{kind}"] for n in names]) for kind in ("packed", "scale"))
                held.append(to_marlin(NVFP4Tensor(packed, scale, tensors[f"{names[0]}_global_scale"])))
            stacked = [torch.stack([getattr(one, field) for one in held]) for field in MarlinTensor._fields]
            experts[f"{name}.{matrix}"] = MarlinStack(MarlinTensor(*stacked))
    embeddings = tensors["model.embed_tokens.weight"]
    head = {"lm_head.weight": tensors.get("lm_head.weight", embeddings)}
    by_both_names = "lm_head.weight" in tensors or "gemma" in base.name
    return SharedWeights(linears, {"model.embed_tokens.weight": embeddings} | (head if by_both_names else {}), experts)


def lent_by_gpt_oss(base: Path) -> SharedWeights:
    """What vLLM lends of gpt-oss: experts in Marlin's layout, with sizes rounded up to 256 and 128, and vocabulary."""
    tensors = load_file(base / "model.safetensors")
    experts: dict[str, StackedWeight] = {}
    for name in sorted(name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")):
        packed, scale = tensors[f"{name}_blocks"].flatten(-2), tensors[f"{name}_scales"]
        padding = (2 * 64, 128) if name.endswith("gate_up_proj") else (128, 64)
        experts[name] = padded_stack(packed, scale, *padding)
    assert len(experts) == 2 * load_config(base).num_hidden_layers
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return SharedWeights({}, {name: tensors[name] for name in names}, experts)


def results_of(policy: Policy) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of two packed sequences, one longer than the windows, and the adapter's gradients."""
    ids = torch.randint(5, 500, (2, 30), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([30, 7])
    mask = (torch.arange(30) > 0) & (torch.arange(30) < lengths[:, None])
    logprobs = policy.token_values(ids, lengths, mask, 1.0)[0][mask]
    logprobs.sum().backward()
    return logprobs.detach(), [p.grad for p in policy.parameters() if p.requires_grad and p.grad is not None]


def test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do(base: Path, triton: None) -> None:
    config = PolicyConfig(path=str(base), dtype="float32", lora=LoraConfig(rank=8, alpha=16.0))
    shared = lent_by_gpt_oss(base) if base.name.startswith("gpt-oss") else lent(base)
    borrowed = changed(Policy(base, config, CPU, seed=1, shared=shared).eval())
    logprobs, gradients = results_of(borrowed)
    assert not any("weight_packed" in name for name, _ in borrowed.named_parameters())
    select_backend("torch")
    expected, expected_gradients = results_of(changed(policy_of(base)))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=LOGPROB_BOUND)
    assert len(gradients) == len(expected_gradients) == 2 * len(every_linear(base))
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=2e-4 * other.abs().max().item())


def test_what_is_recomputed_changes_no_bit_of_a_gradient(base: Path) -> None:
    ids, mask = torch.arange(60)[None] + 20, (torch.arange(60) > 0)[None]
    gradients = []
    for checkpointing in (False, True, "selective"):
        policy = changed(policy_of(base, train_norms=True, gradient_checkpointing=checkpointing)).train()
        policy.token_values(ids, torch.tensor([60]), mask, 1.0)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(gradient is not None and gradient.any() for gradient in gradients[0])
    for other in gradients[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients[0], other, strict=True))


@pytest.fixture(scope="module", params=families([name for name in MODELS if name not in EXPERTS]))
def dense_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 16-bit checkpoint whose every weight can train: experts are frozen."""
    return write_checkpoint(request.param, tmp_path_factory.mktemp("dense") / request.param)


def full_policy(source: Path) -> Policy:
    """A policy whose every weight trains, and differs from the base's."""
    config = PolicyConfig(path=str(source), dtype="float32", quantization="none", finetune="full")
    return move_trained(Policy(source, config, CPU, seed=1).eval(), 0.02)


def test_full_fine_tuning_has_the_gradients_of_a_plain_model_and_saves_one(dense_source: Path, tmp_path: Path) -> None:
    policy = full_policy(dense_source)
    policy.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(5, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    policy.token_values(ids, torch.tensor([40, 40]), mask, 1.0)[0].sum().backward()
    model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
    expected, found = dict(model.named_parameters()), dict(policy.base.named_parameters())
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        gradient = parameter.grad
        assert gradient is not None
        torch.testing.assert_close(found[name].grad, gradient, rtol=1e-3, atol=2e-4 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", ENGINES)
def test_every_weight_of_full_fine_tuning_reaches_the_engine_with_its_noise(dense_source: Path, kind: str) -> None:
    source, policy, engine = dense_source, full_policy(dense_source), engine_of(kind)
    engine.launch(EngineSpec(source, torch.float32, CPU, 0, (), 96, full_finetuning=True))
    engine.sync(policy.weights(0, NOISE))
    completions = completions_of(engine)
    engine.close()
    assert trainer_gap(policy, completions, NOISE) < LOGPROB_BOUND
    assert trainer_gap(policy, completions, None) > 1e-3
    config = PolicyConfig(path=str(source), dtype="float32", quantization="none", lora=LoraConfig(rank=1))
    assert trainer_gap(Policy(source, config, CPU, seed=1).eval(), completions, NOISE) > 0.1  # the base's weights


@pytest.mark.usefixtures("process_state")
def test_a_run_is_killed_goes_on_bit_for_bit_and_exports(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    learned = learned_and_exported(source, tmp_path, STORED[source.name], capfd)
    assert all(tensor.any() for tensor in learned.values())  # B, too: everything has moved
    base = PolicyConfig(path=str(source), quantization=STORED[source.name]).base_folder()  # type: ignore[arg-type]
    dense = write_dense_checkpoint(base, tmp_path / "dense", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    ids = torch.arange(40, 90)[None]
    with torch.no_grad():
        before = plain(ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "exported").eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (adapted - before).abs().max() > 0.05
    # Merged weights are bfloat16, by which a token of a mixture may go to another expert: the mean, not the largest.
    assert (merged - adapted).abs().mean() < 0.3 * (adapted - before).abs().mean()


def test_an_unknown_family_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source = write_checkpoint("mistral", tmp_path / "source")
    config = OlmoConfig(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    OlmoForCausalLM(config).save_pretrained(source)
    message = (
        rf"known family; model_type in config.json of {source} is 'olmo', none of llama, .*: add it as "
        r"docs/adding-a-family.md shows"
    )
    with pytest.raises(UserError, match=message):
        PolicyConfig(path=str(source), quantization="none").base_folder()
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


LACKS = {"qwen3_next": "gated delta nets whose linears are fused otherwise than Qwen3.5's"}


@pytest.mark.parametrize("model_type", LACKS)
def test_a_family_that_needs_more_than_an_entry_is_refused_by_what_it_has(tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    message = rf"trains; model_type in config.json of {folder} is '{model_type}', which has {LACKS[model_type]}.*; take"
    for quantization in ("nvfp4", "mxfp4", "none"):
        with pytest.raises(UserError, match=f"{message} one of docs/your-own-model.md"):
            PolicyConfig(path=str(folder), quantization=quantization).base_folder()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        quantize_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_text_model_of_a_model_with_images_is_taken_out_by_quantizing(tmp_path: Path) -> None:
    source = write_checkpoint("gemma-3", tmp_path / "gemma")
    wrapped = write_wrapped(source, tmp_path / "wrapped")
    (wrapped / "generation_config.json").unlink()  # it has the end tokens, too
    stored = load_file(wrapped / "model.safetensors")
    assert "language_model.model.layers.1.self_attn.q_proj.weight" in stored and any(
        "vision" in name for name in stored
    )
    with pytest.raises(UserError, match=rf"of text alone; {wrapped} has a gemma3_text in a gemma3: .*`qerl quantize`"):
        PolicyConfig(path=str(wrapped), quantization="nvfp4").base_folder()
    folders = {"text": source, "text of wrapped": wrapped}
    for name, folder in folders.items():
        assert main(["quantize", str(folder), str(tmp_path / name)]) == 0
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in folders)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert end_token_ids(tmp_path / "text of wrapped") == tuple(sorted({7, *end_token_ids(source)}))
    policies = [policy_of(tmp_path / name) for name in folders]
    ids, mask = torch.arange(40, 80)[None], (torch.arange(40) > 0)[None]
    results = [policy.token_values(ids, torch.tensor([40]), mask, 1.0)[0] for policy in policies]
    assert torch.equal(*results)
    PolicyConfig(path=str(tmp_path / "text of wrapped")).base_folder()


UNSUPPORTED = {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0, "use_bidirectional_attention": True}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_a_policy_does_not_compute_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    folder, value = write_checkpoint("gemma-3", tmp_path / "gemma"), UNSUPPORTED[key]
    PolicyConfig(path=str(folder), quantization="none").base_folder()
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {key: value}))
    with pytest.raises(
        UserError, match=rf"gemma3_text model must have {key} null or false; .* {folder} has {value}: take"
    ):
        PolicyConfig(path=str(folder), quantization="none").base_folder()


@pytest.mark.vllm
def test_a_mixture_of_experts_starts_beside_a_dense_model_that_samples_on(tmp_path: Path) -> None:
    """vLLM's process groups are the process's, and those of a dense model lack the group of experts."""
    engines, said = [], []
    for name in ("qwen2", "qwen3-moe"):
        policy = changed(policy_of(write_checkpoint(name, tmp_path / name), quantization="none"))
        engines.append(engine_of("vllm"))
        engines[-1].launch(spec_of(policy))
        engines[-1].sync(policy.weights(0))
        said.append(completions_of(engines[-1]))
        assert trainer_gap(policy, said[-1], None) < LOGPROB_BOUND
    assert [completions_of(engine) for engine in engines] == said
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_yarn_added_to_config_json_has_the_same_positions_in_trainer_engine_and_transformers(
    tmp_path: Path, kind: str
) -> None:
    """As the cards of Qwen2.5 prescribe it: `max_position_embeddings` stays, and is exceeded."""
    folder = write_checkpoint("qwen2", tmp_path / "qwen2")
    stored = read_config(folder)
    theta = stored.pop("rope_parameters")["rope_theta"]
    stored |= {"max_position_embeddings": 32, "rope_theta": theta}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(stored | {"rope_scaling": yarn}))
    policy = changed(policy_of(folder, quantization="none"))
    assert spec_of(policy).max_tokens == 96 < PolicyConfig(path=str(folder)).positions() == 128
    engine = engine_of(kind)
    engine.launch(spec_of(policy))
    engine.sync(policy.weights(0))
    completions = completions_of(engine)
    engine.close()
    lengths = [len(prompt.token_ids) + 24 for prompt in PROMPTS]
    assert min(lengths) < 32 < 64 < max(lengths), "below and beyond the original positions"
    assert trainer_gap(policy, completions, None) < LOGPROB_BOUND
    policy.save(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert plain_gap(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval(), completions) < LOGPROB_BOUND
    (folder / "config.json").write_text(json.dumps(stored | {"max_position_embeddings": 128}))
    without = changed(policy_of(folder, quantization="none"))
    assert trainer_gap(without, completions, None) > 0.1, "YaRN must matter, or this test shows nothing"


def test_the_longest_sequence_of_a_longrope_model_is_that_of_its_short_frequencies(tmp_path: Path) -> None:
    folder = write_checkpoint("phi-4-mini", tmp_path / "mini")
    assert PolicyConfig(path=str(folder)).positions() == 160
    old = read_config(folder)
    rope = {"type": "longrope"} | {key: old["rope_parameters"][key] for key in ("short_factor", "long_factor")}
    del old["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(old | {"rope_scaling": rope}))
    assert PolicyConfig(path=str(folder)).positions() == 160
