"""The policy: four-bit base, adapter, log-probabilities, export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_copies import copy_of
from safetensors.torch import load_file
from test_families import lent
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.random_model import move_trained
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import read_config
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.lora import PROJECTIONS, FrozenLinear
from qerl_pl.policy.lora_adapter import LoraAdapter
from qerl_pl.policy.policy import mark_trained

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, folder)
    return folder


@pytest.fixture(scope="module")
def dense(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense_checkpoint(base, tmp_path_factory.mktemp("policy") / "dense", torch.float32)


def make(base: Path, **settings: object) -> Policy:
    config = PolicyConfig(path=str(base), dtype="float32", **settings)  # type: ignore[arg-type]
    return Policy(base, config, CPU, seed=1).eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three right-padded rows of 12, 9 and 7 tokens, the last 5 of each sampled."""
    tokens = torch.randint(5, 300, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(3, 12, dtype=torch.bool)
    for row, end in enumerate((12, 9, 7)):
        mask[row, end - 5 : end] = True
        tokens[row, end:] = 0
    return tokens, torch.tensor([12, 9, 7]), mask


def plain_logprobs(model: torch.nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by a plain model, one unpadded row at a time."""
    tokens, _, mask = batch()
    logprobs, entropies = torch.zeros(3, 12), torch.zeros(3, 12)
    for row, end in enumerate((12, 9, 7)):
        with torch.no_grad():
            logits = model(tokens[row : row + 1, :end]).logits[0] / temperature
        distribution = torch.distributions.Categorical(logits=logits[:-1])
        logprobs[row, 1:end] = distribution.log_prob(tokens[row, 1:end])
        entropies[row, 1:end] = distribution.entropy()
    return logprobs * mask, entropies * mask


@pytest.mark.parametrize("train_norms", [False, True])
def test_exported_adapter_gives_the_same_logprobs_in_plain_peft(
    base: Path, dense: Path, tmp_path: Path, train_norms: bool
) -> None:
    policy = make(base, train_norms=train_norms)
    move_trained(policy, 0.1)
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    tokens, lengths, mask = batch()
    with torch.no_grad():
        result = policy.token_values(tokens, lengths, mask, temperature=0.7)
    for ours, theirs in zip(result[:2], plain_logprobs(plain, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train_norms", [False, True])
def test_reference_is_the_base_whatever_was_trained(base: Path, dense: Path, train_norms: bool) -> None:
    policy = make(base, train_norms=train_norms)
    move_trained(policy, 0.1)
    tokens, lengths, mask = batch()
    with torch.no_grad():
        reference = policy.token_values(tokens, lengths, mask, 1.0, reference=True)[0]
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval(), 1.0)[0]
    torch.testing.assert_close(reference, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert (policy.token_values(tokens, lengths, mask, 1.0)[0] - expected).abs().max() > 0.01


def test_base_stays_in_four_bits_and_only_adapter_and_norms_train(base: Path) -> None:
    policy = make(base, train_norms=True)
    quantized = [module for module in policy.modules() if isinstance(module, FrozenLinear)]
    assert len(quantized) == 2 * 7
    assert all(module.weight_packed.dtype == torch.uint8 for module in quantized)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name or "modules_to_save" in name for name in trained)


def test_an_own_copy_has_the_names_and_bits_of_its_folder_and_follows_what_is_loaded(base: Path) -> None:
    policy, tokens = make(base), batch()
    held = {name.replace(".base_layer", ""): tensor for name, tensor in policy.base.state_dict().items()}
    stored = {name: t for name, t in load_file(base / "model.safetensors").items() if "_proj.weight" in name}
    assert len(stored) == 3 * 14
    for name, tensor in stored.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
    before = policy.token_values(*tokens, 1.0)[0]
    state = policy.base.state_dict()
    scales = {name: tensor.flip(0) for name, tensor in state.items() if name.endswith("o_proj.base_layer.weight_scale")}
    policy.base.load_state_dict(state | scales)
    assert (policy.token_values(*tokens, 1.0)[0] - before).abs().max() > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "up_proj")])
@pytest.mark.parametrize("quantization", ["nvfp4", "none"])
def test_what_is_recomputed_changes_no_bit_of_a_gradient(
    base: Path, dense: Path, quantization: str, targets: tuple[str, ...], dropout: float
) -> None:
    tokens, lengths, mask = batch()
    lora = LoraConfig(rank=4, dropout=dropout, targets=targets)
    folder = base if quantization == "nvfp4" else dense
    gradients = []
    for checkpointing in (False, True, "selective", "offload"):
        settings = {"gradient_checkpointing": checkpointing, "lora": lora, "train_norms": True}
        policy = make(folder, quantization=quantization, **settings).train()
        move_trained(policy, 0.1)
        torch.manual_seed(5)
        for _ in range(2):
            policy.token_values(tokens, lengths, mask, 1.0)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(gradient is not None and gradient.any() for gradient in gradients[0])
    for other in gradients[1:]:
        for ours, theirs in zip(gradients[0], other, strict=True):
            assert torch.equal(ours, theirs)


def test_adapter_starts_at_zero_and_depends_on_the_seed_alone(base: Path) -> None:
    config = PolicyConfig(path=str(base), dtype="float32")
    states = []
    for seed, noise in ((1, 10), (1, 11), (2, 10)):
        torch.manual_seed(noise)
        states.append(Policy(base, config, CPU, seed).trained_state())
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(states[0][name], states[1][name]) and not torch.equal(states[0][name], states[2][name])
    assert not states[0][name.replace("lora_A", "lora_B")].any()


def test_weights_for_the_engine_name_modules_of_the_base_model(base: Path, dense: Path) -> None:
    policy = make(base, train_norms=True)
    weights = policy.weights(version=3)
    modules = dict(AutoModelForCausalLM.from_pretrained(dense).named_modules())
    assert weights.version == 3 and weights.adapter is not None
    assert len(weights.adapter) == 14 and set(weights.adapter) <= set(modules)
    assert set(weights.tensors) == {f"{name}.weight" for name in modules if name.endswith("layernorm")}
    reference = policy.weights(version=3, reference=True)
    assert reference.adapter is None and reference.tensors == {}  # the engine's norms are then the base's


@pytest.mark.parametrize("path", ["~/nvfp4", "nvfp4", "somebody/model"])
def test_an_adapter_names_a_base_that_plain_peft_finds_from_anywhere(
    base: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    monkeypatch.chdir(base.parent)
    config = PolicyConfig(path=path, dtype="float32")
    policy = Policy(base if "model" in path else Path(path).expanduser(), config, CPU, seed=1)
    assert isinstance(policy.trained, LoraAdapter)
    named = policy.trained.model.peft_config["default"].base_model_name_or_path
    assert named == (path if "model" in path else str(base))  # a name on the hub stays one


def test_refuses_a_target_that_matches_nothing(base: Path) -> None:
    with pytest.raises(UserError, match="'query' matches none; choose .* among .*q_proj"):
        make(base, lora=LoraConfig(targets=("q_proj", "query")))


def unequal_scales(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2


def no_last_norm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def another_bias(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(128)


def no_output_layer(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unequal_scales, "share one global scale; got .*k_proj"),
        (no_last_norm, "lacks .*model.norm.weight"),
        (another_bias, "and has .*o_proj.bias.* besides"),
        (no_output_layer, "lacks .*lm_head.weight"),
    ],
)
def test_refuses_a_folder_that_engine_and_trainer_would_read_differently(
    base: Path, tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None], message: str
) -> None:
    tensors, config = load_file(base / "model.safetensors"), read_config(base)
    change(tensors, config)
    with pytest.raises(UserError, match=message):
        make(copy_of(base, tmp_path, tensors, **config))


def test_refuses_an_output_layer_that_config_json_ties_to_other_embeddings(base: Path, tmp_path: Path) -> None:
    """vLLM ties them whatever is stored, transformers does not where the two differ."""
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    make(copy_of(base, tmp_path / "tied", tensors, tie_word_embeddings=True))
    tensors["lm_head.weight"][3, 5] += 1
    other = copy_of(base, tmp_path / "other", tensors, tie_word_embeddings=True)
    with pytest.raises(UserError, match=f"tie_word_embeddings .* {other} stores .*: set it to false, or delete lm_he"):
        make(other)


@pytest.mark.parametrize("trained", [False, True])
def test_a_probe_changes_what_the_policy_says_and_leaves_no_trace(base: Path, trained: bool) -> None:
    policy = make(base, lora=LoraConfig(rank=4, alpha=16.0))
    if trained:
        move_trained(policy, 0.1)
    before = {name: tensor.clone() for name, tensor in policy.trained_state().items()}
    random = torch.get_rng_state()
    said = [policy.token_values(*batch(), 1.0)[0]]
    for seed in (1, 2):
        with policy.perturbed(seed):
            said.append(policy.token_values(*batch(), 1.0)[0])
            factors = policy.weights(0).adapter
            assert factors is not None
            spreads = [b.std().item() for _, b in factors.values()]
            assert spreads == pytest.approx([1 / (4.0 * 2.0)] * len(spreads), rel=0.2)  # 1 / (scaling * sqrt(rank))
    for first, second in ((0, 1), (0, 2), (1, 2)):  # no probe is another's, or the policy's own
        assert (said[first] - said[second]).abs().mean() > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.trained_state().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_saving_asks_nobody_about_the_base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", pytest.fail)
    policy = make(base)
    policy.trained.model.peft_config["default"].base_model_name_or_path = "somebody/model"
    policy.load_trained_state(policy.trained_state())
    policy.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_refuses_the_state_of_another_policy(base: Path) -> None:
    other = make(base, lora=LoraConfig(rank=4))
    with pytest.raises(UserError, match="this policy's adapter; .* set model.policy.lora and train_norms as in"):
        make(base).load_trained_state(other.trained_state())


def test_bfloat16_policy_keeps_float32_masters(base: Path) -> None:
    policy = Policy(base, PolicyConfig(path=str(base), dtype="bfloat16", train_norms=True), CPU, seed=0)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    tokens, lengths, mask = batch()
    logprobs, entropies, _ = policy.token_values(tokens, lengths, mask, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32 and logprobs.isfinite().all()
    assert AutoConfig.from_pretrained(base).vocab_size > entropies.max().exp() > 1


def test_packing_computes_no_padding_and_no_row_that_selects_nothing(base: Path) -> None:
    policy = make(base)
    move_trained(policy, 0.1)
    tokens, lengths, mask = batch()
    sizes: list[int] = []
    policy.base.get_decoder().layers[0].register_forward_hook(  # type: ignore[operator]
        lambda module, args, output: sizes.append(args[0].shape[1])
    )
    with torch.no_grad():
        everything = policy.token_values(tokens, lengths, mask, 1.0)[0]
        mask[1] = False
        without = policy.token_values(tokens, lengths, mask, 1.0)[0]
        nothing = policy.token_values(tokens, lengths, torch.zeros_like(mask), 1.0)[0]
    assert sizes == [12 + 9 + 7, 12 + 7]
    torch.testing.assert_close(without[[0, 2]], everything[[0, 2]], rtol=1e-5, atol=1e-6)
    assert not without[1].any() and not nothing.any()


ROPE = {
    "Llama 3.1": (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
    "Qwen2.5 with YaRN": (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    "YaRN counted already": (
        131072,
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        131072,
    ),
    "linear": (4096, {"type": "linear", "factor": 2.0}, 8192),
    "dynamic": (4096, {"type": "dynamic", "factor": 2.0}, 4096),
    "Gemma 3": (131072, {"rope_type": "linear", "factor": 8.0}, 131072),
    "no scaling": (32768, None, 32768),
}
"""`max_position_embeddings`, the scaling of rotary positions, and the longest sequence that the model card names; of
dynamic scaling, the longest whose frequencies do not depend on the batch."""


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ROPE)
def test_positions_are_those_of_the_model_card(tmp_path: Path, name: str, key: str) -> None:
    known, rope, positions = ROPE[name]
    model_type = "gemma3_text" if name == "Gemma 3" else "llama"
    config = {"model_type": model_type, "max_position_embeddings": known, key: rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert PolicyConfig(path=str(tmp_path)).positions() == positions


def test_borrowed_marlin_weights_give_the_bits_of_an_own_copy(base: Path) -> None:
    tokens, lengths, mask = batch()
    config = PolicyConfig(path=str(base), dtype="float32")
    shared = lent(base)
    results = []
    for lender in (None, shared):
        policy = Policy(base, config, CPU, seed=1, shared=lender)
        move_trained(policy, 0.1)
        logprobs, *_ = policy.token_values(tokens, lengths, mask, 1.0)
        logprobs.sum().backward()
        results.append((policy, logprobs.detach(), [p.grad for p in policy.parameters() if p.requires_grad]))
    (own, logprobs, gradients), (borrowed, borrowed_logprobs, borrowed_gradients) = results
    assert torch.equal(logprobs, borrowed_logprobs)
    for ours, theirs in zip(gradients, borrowed_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not any("weight_packed" in name for name, _ in borrowed.named_parameters())
    assert sum(isinstance(module, FrozenLinear) for module in borrowed.modules()) == len(shared.linears) == 14
    assert borrowed.base.get_input_embeddings().weight.data_ptr() == (  # type: ignore[operator]
        shared.tensors["model.embed_tokens.weight"].data_ptr()
    )
    assert own.trained_state().keys() == borrowed.trained_state().keys()


@pytest.mark.parametrize("quantization", ["nvfp4", "mxfp4", "nf4", "none"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_trained_model_that_is_quantized_again_is_told(
    quantization: str, marked: bool, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    trained = shutil.copytree(dense, tmp_path / "trained")
    if marked:
        mark_trained(trained)
    caplog.set_level("WARNING")
    held = PolicyConfig(path=str(trained), quantization=quantization).base_folder()  # type: ignore[arg-type]
    warned = (
        f"{trained} is a trained model in 16 bits, which is quantized again: to evaluate what was trained, set model."
    )
    assert (warned in caplog.text) == (marked and quantization != "none")
    caplog.clear()
    PolicyConfig(path=str(held), quantization=quantization).base_folder()  # type: ignore[arg-type]
    assert "quantized again" not in caplog.text or held == trained
