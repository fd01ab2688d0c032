"""Qwen3.5's text models: gated delta nets whose packed sequences never mix, from quantizing to a run of RL."""

import importlib.util
import itertools
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from fit_helpers import configuration
from live_bytes import live_bytes_of_update
from model_copies import copy_of
from qerl_kernels import gated_delta_rule
from safetensors.torch import load_file
from test_families import (
    PROMPTS,
    changed,
    completions_of,
    every_linear,
    fixtures_of,
    policy_of,
    spec_of,
    test_a_run_is_killed_goes_on_bit_for_bit_and_exports,
    test_gradients_are_those_of_a_plain_model_without_dropout,
    test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do,
    test_noise_is_the_drawn_numbers_on_the_weights_of_the_norms_before_quantized_linears,
    test_trainer_and_engine_agree_with_an_adapter_on_every_linear_and_with_noise,
    test_what_is_recomputed_changes_no_bit_of_a_gradient,
    triton,
)
from tiny_families import write_checkpoint, write_wrapped_qwen
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.random_model import noisy_norms
from qerl_pl.algorithm import NormNoise
from qerl_pl.cli.main import main
from qerl_pl.cli.quantize import calibrate_checkpoint
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import weight_map
from qerl_pl.engines.vllm.startup import position_overrides
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import load_dense_model, write_dense_checkpoint
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.families import family_of
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.models.memory import GIB
from qerl_pl.models.memory_plan import MicroBatch, activation_bytes
from qerl_pl.models.shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.delta_net import PackedDeltaNet, use_packed_delta_nets
from qerl_pl.policy.lora import FrozenLinear
from qerl_pl.policy.packing import Packing
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.toy.policy import ToyConfig, teach
from qerl_pl.toy.tokenizer import build_tokenizer

__all__ = [  # of every family; the fixtures below give them this one
    "test_a_run_is_killed_goes_on_bit_for_bit_and_exports",
    "test_gradients_are_those_of_a_plain_model_without_dropout",
    "test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do",
    "test_noise_is_the_drawn_numbers_on_the_weights_of_the_norms_before_quantized_linears",
    "test_trainer_and_engine_agree_with_an_adapter_on_every_linear_and_with_noise",
    "test_what_is_recomputed_changes_no_bit_of_a_gradient",
    "triton",
]
KEPT = ("A_log", "dt_bias", "conv1d.weight", "norm.weight")
"""Tensors of a gated delta net that no format rounds."""


source, base, dense, sampled = fixtures_of(["qwen3.5"])  # vLLM's CPU build has no float32 for it


# The recurrence -------------------------------------------------------------------------------------------------------


def token_by_token(
    mixed: Tensor, weight: Tensor, log_decay: Tensor, beta: Tensor, key_heads: int, key_size: int
) -> Tensor:
    """The net of one sequence, by its definition: a head and a token at a time."""
    tokens, heads = log_decay.shape
    keys, width = key_heads * key_size, weight.shape[1]
    before = torch.cat((mixed.new_zeros(width - 1, mixed.shape[1]), mixed))
    convolved = torch.stack([(before[t : t + width] * weight.T).sum(0) for t in range(tokens)])
    convolved = convolved * convolved.sigmoid()
    results = []
    for head in range(heads):
        key_head = head // (heads // key_heads)
        part = slice(key_head * key_size, (key_head + 1) * key_size)
        q, k = convolved[:, :keys][:, part], convolved[:, keys : 2 * keys][:, part]
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        v = convolved[:, 2 * keys :].unflatten(1, (heads, -1))[:, head]
        state, out = mixed.new_zeros(key_size, v.shape[1]), []
        for t in range(tokens):
            state = log_decay[t, head].exp() * state
            state = state + beta[t, head] * torch.outer(k[t], v[t] - state.T @ k[t])
            out.append(state.T @ q[t] / key_size**0.5)
        results.append(torch.stack(out))
    return torch.stack(results, dim=1)


def inputs_of(tokens: int, key_heads: int, heads: int, key_size: int, value_size: int, width: int) -> list[Tensor]:
    """Random float64 arguments."""
    generator = torch.Generator().manual_seed(tokens)
    channels = 2 * key_heads * key_size + heads * value_size
    sizes = ((tokens, channels), (channels, width), (tokens, heads), (tokens, heads))
    mixed, weight, decay, beta = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes)
    return [mixed, weight, -decay.exp(), beta.sigmoid()]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([1], (1, 1, 4, 4, 4)),
        ([2, 1, 3], (2, 4, 4, 8, 4)),
        ([64, 65], (1, 2, 4, 2, 4)),
        ([5, 130, 63], (2, 2, 2, 4, 3)),
        ([7, 7], (2, 6, 4, 4, 2)),
    ],
)
def test_packed_sequences_and_their_gradients_are_those_of_each_token_by_token(
    lengths: list[int], sizes: tuple[int, int, int, int, int]
) -> None:
    key_heads, heads, key_size, value_size, width = sizes
    inputs = inputs_of(sum(lengths), key_heads, heads, key_size, value_size, width)
    found, expected = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    packing = Packing.of(torch.tensor(lengths), max(lengths) + 2)
    out = gated_delta_rule(*found, key_heads, key_size, packing.cu_seqlens, packing.max_seqlen)
    parts = zip(*(tensor.split(lengths) for tensor in (expected[0], *expected[2:])), strict=True)
    one_by_one = [token_by_token(mixed, expected[1], *rest, key_heads, key_size) for mixed, *rest in parts]
    torch.testing.assert_close(out, torch.cat(one_by_one), rtol=1e-9, atol=1e-11)
    for result in (out, torch.cat(one_by_one)):
        (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)


def logprobs_of(policy: Policy, rows: list[list[int]]) -> list[Tensor]:
    """Log-probabilities of the tokens of packed sequences, but of the first."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = (torch.arange(ids.shape[1]) > 0) & (torch.arange(ids.shape[1]) < lengths[:, None])
    values = policy.token_values(ids, lengths, mask, 1.0)[0].detach()
    return [value[keep] for value, keep in zip(values, mask, strict=True)]


ROWS = [[(7 * i + 3 * i * i + seed) % 500 + 5 for i in range(size)] for seed, size in ((1, 70), (2, 3), (3, 40))]


def test_transformers_mixes_sequences_that_position_ids_alone_separate(source: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor([list(itertools.chain(*ROWS))])
    positions = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
    with torch.no_grad():
        packed = plain(input_ids=ids, position_ids=positions).logits[0]
        alone = plain(input_ids=torch.tensor([ROWS[-1]])).logits[0]
        assert (packed[-len(ROWS[-1]) :] - alone).abs().max() > 0.1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 0, 1), (1, 2)])
def test_a_policy_keeps_packed_sequences_apart_in_any_order(source: Path, order: tuple[int, ...]) -> None:
    policy = changed(policy_of(source, quantization="none"))
    alone = [logprobs_of(policy, [row])[0] for row in ROWS]
    for index, found in zip(order, logprobs_of(policy, [ROWS[i] for i in order]), strict=True):
        torch.testing.assert_close(found, alone[index], rtol=0, atol=2e-5)


def test_a_model_whose_delta_nets_have_no_packed_path_is_refused(source: Path) -> None:
    config = Qwen3_5TextConfig(**read_config(source))
    model, family = AutoModelForCausalLM.from_config(config), family_of("qwen3_5_text")
    with pytest.raises(UserError, match="keep packed sequences apart; 1 layers of the qwen3_5_text are linear_att"):
        use_packed_delta_nets(model, config, replace(family, delta_net=None))
    use_packed_delta_nets(model, config, family)
    assert sum(isinstance(module, PackedDeltaNet) for module in model.modules()) == 1


@pytest.mark.parametrize("std", [0.01, 0.03, 0.05])
def test_noise_reaches_the_decay_in_its_own_size(tmp_path: Path, std: float) -> None:
    sizes = {"hidden_size": 1024, "linear_num_value_heads": 16, "linear_num_key_heads": 8}
    policy = policy_of(write_checkpoint("qwen3.5", tmp_path, sizes), quantization="none")
    net, inputs = policy.base.get_submodule("model.layers.0.linear_attn"), list[Tensor]()
    net.register_forward_pre_hook(lambda _, args, given: inputs.append(given["hidden_states"][0]), with_kwargs=True)
    for noise in (None, NormNoise(std, seed=3, version=1)):
        with noisy_norms(policy, noise):
            logprobs_of(policy, ROWS)
    weight, softplus = net.get_parameter("in_proj_a.base_layer.weight"), torch.nn.functional.softplus
    clean, noisy = (net.A_log.exp() * softplus(x @ weight.T + net.dt_bias) for x in inputs)
    assert 0.5 * std < ((noisy - clean).abs() / clean).median() < 1.2 * std


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_four_bits_are_those_of_every_large_linear_and_the_rest_is_as_stored(source: Path, base: Path) -> None:
    before, after = load_file(source / "model.safetensors"), load_file(base / "model.safetensors")
    packed = {name.removesuffix(".weight_packed") for name in after if name.endswith("_packed")}
    narrow = {name for name in every_linear(source) if name.endswith(("in_proj_a", "in_proj_b"))}
    assert len(narrow) == 2 and packed == every_linear(source) - narrow
    net = "model.layers.0.linear_attn"
    for name in (*(f"{net}.{kept}" for kept in KEPT), f"{net}.in_proj_a.weight"):
        assert torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
    scales = {name: after[f"{net}.{name}.weight_global_scale"].item() for name in ("in_proj_qkv", "in_proj_z")}
    assert len(set(scales.values())) == 1
    alone = {f"{net}.{name}": 2688 / before[f"{net}.{name}.weight"].abs().max().item() for name in scales}
    assert len(set(alone.values())) == 2 and min(alone.values()) == pytest.approx(scales["in_proj_z"])
    ignored = read_config(base)["quantization_config"]["ignore"]
    assert ignored == ["lm_head", r"re:.*linear_attn\.in_proj_b$", r"re:.*linear_attn\.in_proj_a$"]
    policy = policy_of(base)
    assert sum(isinstance(module, FrozenLinear) for module in policy.modules()) == len(packed)
    assert set(policy.weights(0).adapter or {}) == every_linear(base)
    assert sum(isinstance(module, Float32RMSNorm) for module in policy.modules()) == 7


def test_scales_of_the_fused_pair_that_differ_are_refused(base: Path, tmp_path: Path) -> None:
    stored, name = load_file(base / "model.safetensors"), "model.layers.0.linear_attn.in_proj_z.weight_global_scale"
    with pytest.raises(UserError, match=r"share one global scale; got .*in_proj_qkv.*in_proj_z"):
        policy_of(copy_of(base, tmp_path, stored | {name: 2 * stored[name]}))


@pytest.mark.parametrize("format", ["mxfp4", "nf4"])
def test_other_formats_train_too(source: Path, tmp_path: Path, format: str) -> None:
    quantize_checkpoint(source, tmp_path / "base", format)  # type: ignore[arg-type]
    policy = policy_of(tmp_path / "base", quantization=format)
    assert sum(isinstance(module, FrozenLinear) for module in policy.modules()) == 13
    rounded = logprobs_of(policy, ROWS)
    exact = logprobs_of(policy_of(source, quantization="none"), ROWS)
    assert all(0 < (a - b).abs().mean() < 2 for a, b in zip(rounded, exact, strict=True))


def stored_as(source: Path, folder: Path, kind: str, layer_part: str = "mlp.gate_proj.weight") -> Path:
    """The checkpoint as others store it: with image encoder, under its names, with a layer's part for speculation."""
    if kind == "wrapped":
        return write_wrapped_qwen(source, folder)
    tensors = load_file(source / "model.safetensors")
    if kind == "names of the wrapped":
        tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    else:
        part = tensors[f"model.layers.1.{layer_part}"]
        tensors |= {f"mtp.layers.0.{layer_part}": part.clone(), "mtp.norm.weight": torch.zeros(128)}
    return copy_of(source, folder, tensors)


def assert_the_same_text_model(folder: Path, source: Path, base: Path, out: Path) -> None:
    """Quantize what is stored otherwise than `source`, whose 4-bit checkpoint is `base`, and compute with both."""
    quantize_checkpoint(folder, out)
    expected, found = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert read_config(out)["model_type"] == read_config(source)["model_type"]
    if "text_config" not in read_config(folder):  # which 16 bits refuse
        found, expected = (logprobs_of(policy_of(one, quantization="none"), ROWS) for one in (folder, source))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        ("wrapped", r"left out \d+ tensors that are no part of the text model: model\.visual, mtp$"),
        ("names of the wrapped", None),
        ("with speculation", r"left out 2 tensors that are no part of the text model: mtp$"),
    ],
)
def test_the_text_model_is_the_same_however_it_is_stored(
    source: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, skipped: str | None
) -> None:
    folder = stored_as(source, tmp_path / "stored", kind)
    with caplog.at_level(logging.INFO, "qerl_pl.formats.quantize"):
        assert_the_same_text_model(folder, source, base, tmp_path / "base")
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == (skipped is not None)
    assert skipped is None or re.search(skipped, lines[0])


def test_decays_and_gated_norms_stay_in_float32(source: Path, tmp_path: Path) -> None:
    """As Qwen3.5 stores them in a checkpoint of 16 bits: trainer, engine and dense copies compute with them."""
    tensors = load_file(source / "model.safetensors")
    wide = {name: t for name, t in tensors.items() if name.endswith(KEPT[::3]) and "linear_attn" in name}
    low = {name: tensor if name in wide else tensor.bfloat16() for name, tensor in tensors.items()}
    copy_of(source, tmp_path, low)
    assert len(wide) == 2 and all((tensor.bfloat16() != tensor).any() for tensor in wide.values())
    config = PolicyConfig(path=str(tmp_path), dtype="bfloat16", quantization="none", lora=LoraConfig(rank=4))
    trainer = Policy(tmp_path, config, torch.device("cpu"), seed=1)
    copy = write_dense_checkpoint(tmp_path, tmp_path / "copy", torch.bfloat16)
    engine = load_dense_model(tmp_path, torch.bfloat16)
    for name, tensor in wide.items():
        assert torch.equal(trainer.base.get_parameter(name), tensor), name
        assert torch.equal(TensorFiles(copy).read(name), tensor), name
        assert torch.equal(engine.get_parameter(name), tensor), name
    assert engine.get_parameter("model.layers.0.linear_attn.out_proj.weight").dtype == torch.bfloat16
    assert all(value.isfinite().all() for value in logprobs_of(trainer, ROWS))


ASSUMED = {
    "attn_output_gate": False,
    "output_gate_type": "sigmoid",
    "mamba_ssm_dtype": "bfloat16",
    "hidden_act": "gelu",
}


@pytest.mark.parametrize("key", ASSUMED)
def test_a_setting_that_the_policy_does_not_compute_is_refused(source: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(source) | {key: ASSUMED[key]}))
    with pytest.raises(
        UserError, match=rf"qwen3_5_text model must have {key} .*; config.json of .* has {ASSUMED[key]}"
    ):
        PolicyConfig(path=str(tmp_path), quantization="none").base_folder()


def test_what_has_no_path_is_refused_in_one_line(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gated delta nets train an adapter; got model.policy.finetune full"):
        PolicyConfig(path=str(source), quantization="none", finetune="full").base_folder()
    with pytest.raises(UserError, match="in_proj_qkv and in_proj_z must share one global scale, which llm-compressor"):
        calibrate_checkpoint(source, tmp_path / "out", ["text"], build_tokenizer(), "nvfp4")


# The engine of a GPU: what a CPU can show -----------------------------------------------------------------------------


def test_four_sizes_of_a_fused_linear_are_slices_of_its_two_members() -> None:
    packed = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    model = SimpleNamespace(packed_modules_mapping=packed | {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    found = {
        name: weight_map.fused_slices(model, f"x.{name}", SimpleNamespace(output_partition_sizes=sizes))
        for name, sizes in (("in_proj_qkvz", [32, 32, 128, 128]), ("in_proj_ba", [4, 4]), ("qkv_proj", [8, 2, 2]))
    }
    assert found["in_proj_qkvz"] == [("x.in_proj_qkv", 0, 192), ("x.in_proj_z", 192, 320)]
    assert found["in_proj_ba"] == [("x.in_proj_b", 0, 4), ("x.in_proj_a", 4, 8)]
    assert found["qkv_proj"] == [("x.q_proj", 0, 8), ("x.k_proj", 8, 10), ("x.v_proj", 10, 12)]


def test_vllms_cpu_build_takes_no_float32(source: Path) -> None:
    with pytest.raises(
        UserError, match="CPU build computes gated delta nets in bfloat16 alone; the run is in torch.fl"
    ):
        VLLMEngine().launch(EngineSpec(source, torch.float32, torch.device("cpu"), 0, (), 96))


@pytest.mark.parametrize(
    "axes", [{}, {"mrope_section": [11, 11, 10]}, {"mrope_section": [3], "mrope_interleaved": True}]
)
def test_positions_in_text_have_one_axis(axes: dict[str, Any]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = {"model_type": "qwen3_5_text", "max_position_embeddings": 64, "rope_parameters": rope | axes}
    assert position_overrides(config) == ({"rope_parameters": rope} if axes else {})


@pytest.mark.parametrize("asked", [None, True, False])
def test_prefixes_are_cached_unless_the_model_has_delta_nets_or_a_user_decides(asked: bool | None) -> None:
    engine = VLLMEngine(prefix_caching=asked)
    found = [engine.caches_prefixes(has_delta_nets) for has_delta_nets in (False, True)]
    assert found == ([True, False] if asked is None else [asked, asked])


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_vllm_samples_in_bfloat16_as_the_trainer_computes_or_says_what_it_lacks(tmp_path: Path, name: str) -> None:
    """Of heads that its CPU build has; its class imports torchvision, which PyTorch's CPU wheels have."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    source = write_checkpoint(name, tmp_path / name, sizes)
    config = PolicyConfig(path=str(source), dtype="bfloat16", quantization="none", lora=LoraConfig(rank=8, alpha=16.0))
    policy, engine = changed(Policy(source, config, torch.device("cpu"), seed=1).eval()), VLLMEngine(kv_cache_gib=0.25)
    spec = replace(spec_of(policy), dtype=torch.bfloat16)
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(UserError, match="class of the model must be importable; it lacks torchvision: install"):
            engine.launch(spec)
        return
    engine.launch(spec)
    engine.sync(policy.weights(0))
    tokens, lengths, mask, said = pad_completions(PROMPTS, completions_of(engine), 0)
    engine.close()
    found = policy.token_values(tokens, lengths, mask, 1.0)[0]
    assert (found - said)[mask].abs().mean() < 0.05


def published(layers: int, hidden: int, inner: int, heads: int, kv: int, value_heads: int) -> Shape:
    """A dense model of the published ones."""
    config = Qwen3_5TextConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        linear_num_value_heads=value_heads,
    )
    return Shape.of(config)


@pytest.mark.parametrize(
    ("sizes", "state", "kv", "block"),
    [
        ((24, 1024, 3584, 8, 2, 16), 18.6, 12, 544),
        ((32, 2560, 9216, 16, 4, 32), 49.1, 32, 528),
        ((32, 4096, 12288, 16, 4, 32), 49.1, 32, 528),
        ((64, 5120, 17408, 24, 4, 48), 146.8, 64, 784),
    ],
)
def test_states_of_published_shapes_are_counted(sizes: Any, state: float, kv: int, block: int) -> None:
    shape = published(*sizes)
    assert round(shape.state_bytes(torch.bfloat16) / 2**20, 1) == state
    lengths = [shape.sequence_kv_bytes(tokens, torch.bfloat16) for tokens in (1, block, block + 1, 10 * block)]
    assert lengths[0] == lengths[1] == shape.state_bytes(torch.bfloat16) + block * kv * 1024
    assert lengths[2] - lengths[1] == block * kv * 1024 and lengths[3] - lengths[0] == 9 * block * kv * 1024
    if sizes[1] == 4096:
        assert 4 * GIB // shape.state_bytes(torch.bfloat16) == 83


def test_weights_and_adapters_are_counted_as_the_model_has_them(source: Path) -> None:
    policy, config = policy_of(source, quantization="none"), Qwen3_5TextConfig(**read_config(source))
    shape, spec = Shape.of(config), policy.config.lora_spec
    assert spec is not None and len(spec.targets) == 12
    adapter = sum(t.numel() for t in policy.trained_state().values())
    assert shape.adapter_weights(spec.rank, spec.targets) == adapter
    some = ("in_proj_z", "self_attn.q_proj", "mlp.up_proj")
    one = Policy(source, replace(policy.config, lora=LoraConfig(rank=8, targets=some)), torch.device("cpu"), seed=1)
    assert shape.adapter_weights(8, some) == sum(t.numel() for t in one.trained_state().values())
    linears = {name: len(t.flatten()) for name, t in load_file(source / "model.safetensors").items() if "_proj" in name}
    assert shape.linear_weights == sum(linears.values())
    narrow = sum(size for name, size in linears.items() if name.endswith(("in_proj_a.weight", "in_proj_b.weight")))
    four_bits = (shape.linear_weights - narrow) * 4.5 / 8
    assert shape.base_bytes("nvfp4", torch.bfloat16) == four_bits + 2 * (narrow + shape.embedding_weights)


@pytest.mark.parametrize("mode", [True, "selective", False])
@pytest.mark.parametrize("sequences", [1, 2])
def test_an_update_needs_what_is_estimated(tmp_path: Path, mode: Any, sequences: int) -> None:
    kinds, sizes = ["linear_attention", "linear_attention", "full_attention"], {"linear_num_value_heads": 8}
    source = write_checkpoint("qwen3.5", tmp_path / "net", sizes | {"num_hidden_layers": 3, "layer_types": kinds})
    policy = policy_of(source, quantization="none", gradient_checkpointing=mode).train()
    length = 256
    live = live_bytes_of_update(policy, sequences, length)
    batch = MicroBatch(length * sequences, sequences, torch.float32, mode, rank=8)
    estimate = activation_bytes(Shape.of(policy.base.config), batch)
    # As in test_memory_plan.py: on a CPU silu(gate) and what plain norms multiply are saved besides.
    more = (3 if mode is False else 1) * 4 * (192 + 8 * 128) * length * sequences
    assert estimate * 0.9 < live.peak < (estimate + more) * 1.2


def test_a_dry_run_says_how_many_states_a_cache_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], eos_token_id=2).to_dict()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--dry-run", "-c", "gsm8k", "--model.policy.path", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "a sequence has 49.1 MiB of states: the engine's cache holds at most 83 at once" in out


# Runs -----------------------------------------------------------------------------------------------------------------


def rewards_of(run: Path) -> list[float]:
    """Mean reward of each rollout."""
    records = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    versions = sorted({record["version"] for record in records})
    totals = [[record["rewards"]["total"] for record in records if record["version"] == each] for each in versions]
    return [sum(total) / len(total) for total in totals]


def learned(base: Path, run: Path, rewards: list[dict[str, Any]], changes: dict[str, Any]) -> list[float]:
    """Mean rewards of the rollouts of a run, in NVFP4 and with noise."""
    settings = configuration(base, run)
    settings["model"] |= {"update_epochs": 1, "minibatches": 1, "micro_batch_tokens": None, "warmup_ratio": 0.0}
    settings["model"]["optimizer"]["init_args"]["lr"] = changes["lr"]
    settings["model"]["policy"]["lora"] = {"rank": 8, "alpha": 16.0}
    settings["model"]["objective"]["init_args"]["beta"] = 0.0
    settings["data"]["init_args"] |= {"train_size": changes["rollouts"] * changes["prompts"], "val_size": 1}
    settings["data"]["init_args"]["batch_size"] = changes["prompts"]
    settings["trainer"] |= {"max_epochs": 1, "limit_val_batches": 0}
    kinds = ("RolloutCallback", "AdaptiveQuantizationNoise", "CompletionLog")
    settings["trainer"]["callbacks"] = [
        each for each in settings["trainer"]["callbacks"] if each["class_path"].endswith(kinds)
    ]
    rollout = settings["trainer"]["callbacks"][0]["init_args"]
    rollout |= {"group_size": 8, "sampling": {"max_tokens": changes["tokens"]}, "rewards": rewards}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    assert main(["fit", "-c", str(path)]) == 0
    return rewards_of(run)


@pytest.mark.usefixtures("process_state")
def test_a_random_checkpoint_learns_to_write_vowels(source: Path, tmp_path: Path) -> None:
    vowels = [{"class_path": "fit_helpers.Vowels"}]
    sizes = {"rollouts": 14, "prompts": 4, "tokens": 6, "lr": 0.03}
    rewards = learned(source, tmp_path / "run", vowels, sizes)
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


@pytest.mark.nightly
@pytest.mark.usefixtures("process_state")
def test_a_checkpoint_taught_the_toy_task_learns_it(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3.5", tmp_path / "taught")
    tokenizer, kinds = build_tokenizer(), ["linear_attention", "full_attention", "linear_attention"]
    changes = {"num_hidden_layers": 3, "layer_types": kinds, "initializer_range": 0.06, "tie_word_embeddings": True}
    config = Qwen3_5TextConfig(**read_config(folder) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    teach(model, ToyConfig(steps=700), tokenizer)
    model.save_pretrained(folder)
    rewards = [{"class_path": "qerl_pl.rewards.GSM8KAnswer"}]
    sizes = {"rollouts": 30, "prompts": 16, "tokens": 64, "lr": 0.002}
    accuracy = learned(folder, tmp_path / "run", rewards, sizes)
    assert sum(accuracy[-5:]) > sum(accuracy[:5]) + 0.5, accuracy
