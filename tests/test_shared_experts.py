"""Qwen3.5's mixture: experts published in stacks, a shared expert with its gate, delta nets; as test_delta_nets.py."""

import json
import re
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import test_delta_nets
import test_families
import torch
from live_bytes import live_bytes_of_update
from model_copies import copy_of
from qerl_kernels import nvfp4_global_scale, quantize_nvfp4
from qerl_kernels.experts import GROUP_BYTES
from safetensors.torch import load_file, save_file
from test_delta_nets import ROWS, assert_the_same_text_model, logprobs_of
from test_families import (
    every_linear,
    fixtures_of,
    policy_of,
    test_gradients_are_those_of_a_plain_model_without_dropout,
    test_noise_is_the_drawn_numbers_on_the_weights_of_the_norms_before_quantized_linears,
    test_trainer_and_engine_agree_with_an_adapter_on_every_linear_and_with_noise,
    test_what_is_recomputed_changes_no_bit_of_a_gradient,
    triton,
)
from tiny_families import write_checkpoint
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import read_config
from qerl_pl.models.memory_plan import MicroBatch, activation_bytes
from qerl_pl.models.shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.experts import PackedExperts, SharedExpert
from qerl_pl.policy.lora import FrozenLinear

__all__ = [  # of every family; the fixtures below give them this one
    "test_gradients_are_those_of_a_plain_model_without_dropout",
    "test_noise_is_the_drawn_numbers_on_the_weights_of_the_norms_before_quantized_linears",
    "test_trainer_and_engine_agree_with_an_adapter_on_every_linear_and_with_noise",
    "test_what_is_recomputed_changes_no_bit_of_a_gradient",
    "triton",
]
MLP = "model.layers.0.mlp"


@pytest.mark.nightly
@wraps(test_families.test_a_run_is_killed_goes_on_bit_for_bit_and_exports)
def test_a_run_is_killed_goes_on_bit_for_bit_and_exports(**given: Any) -> None:
    test_families.test_a_run_is_killed_goes_on_bit_for_bit_and_exports(**given)


@pytest.mark.nightly
@wraps(test_families.test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do)
def test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do(**given: Any) -> None:
    test_families.test_lent_weights_and_triton_kernels_compute_what_the_own_copy_and_pytorch_do(**given)


source, base, dense, sampled = fixtures_of(["qwen3.5-moe"])


@pytest.mark.parametrize("order", [(0,), (1, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1)])
def test_packed_sequences_are_those_that_transformers_pads(source: Path, order: tuple[int, ...]) -> None:
    rows = [ROWS[index] for index in order]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = plain(input_ids=ids, attention_mask=mask).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    for found, row, length in zip(
        logprobs_of(policy_of(source, quantization="none"), rows), expected, lengths, strict=True
    ):
        torch.testing.assert_close(found, row[: length - 1], rtol=0, atol=2e-5)


def test_the_adapter_is_on_every_linear_and_the_shared_expert_is_no_tiled_mlp(base: Path) -> None:
    policy = policy_of(base)
    linears = every_linear(base)
    assert set(policy.weights(0).adapter or {}) == linears and len(linears) == 5 + 4 + 2 * 3
    narrow = {name for name in linears if name.endswith(("in_proj_a", "in_proj_b"))}
    assert sum(isinstance(module, FrozenLinear) for module in policy.modules()) == len(linears - narrow)
    for kind in (PackedExperts, SharedExpert):
        assert sum(isinstance(module, kind) for module in policy.modules()) == 2
    names = {name for name, _ in policy.base.named_parameters()}
    assert f"{MLP}.shared_expert_gate.weight" in names and f"{MLP}.gate.weight" in names
    with pytest.raises(UserError, match="tiles need MLPs of gate, up and down; the model has none"):
        policy_of(base, mlp_tile_tokens=8)
    some = replace(policy.config, lora=LoraConfig(rank=4, targets=("shared_expert.down_proj", "out_proj")))
    adapted = Policy(base, some, torch.device("cpu"), seed=1).weights(0).adapter or {}
    assert set(adapted) == {name for name in linears if name.endswith(("shared_expert.down_proj", "out_proj"))}


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_four_bits_are_those_of_every_expert_of_a_stack_and_the_rest_is_as_stored(source: Path, base: Path) -> None:
    before, after = load_file(source / "model.safetensors"), load_file(base / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        stacks = before[f"{mlp}.experts.gate_up_proj"], before[f"{mlp}.experts.down_proj"]
        groups = {
            f"{mlp}.shared_expert": [before[f"{mlp}.shared_expert.{x}_proj.weight"] for x in ("gate", "up", "down")]
        }
        for expert, (gate_up, down) in enumerate(zip(*stacks, strict=True)):
            groups[f"{mlp}.experts.{expert}"] = [gate_up[:64], gate_up[64:], down]
        for name, (gate, up, down) in groups.items():
            scales = nvfp4_global_scale(gate, up), nvfp4_global_scale(gate, up), nvfp4_global_scale(down)
            for member, weight, scale in zip(("gate", "up", "down"), (gate, up, down), scales, strict=True):
                packed = quantize_nvfp4(weight, scale)
                expected |= {f"{name}.{member}_proj.weight_{key}": t for key, t in packed._asdict().items()}
    found = {name: tensor for name, tensor in after.items() if ".mlp." in name}
    kept = {f"model.layers.{i}.mlp.{name}.weight" for i in range(2) for name in ("gate", "shared_expert_gate")}
    assert found.keys() == expected.keys() | kept and len(expected) == 2 * 7 * 9
    assert all(torch.equal(found[name].view(torch.uint8), t.view(torch.uint8)) for name, t in expected.items())
    assert all(torch.equal(found[name], before[name]) for name in kept)
    ignored = read_config(base)["quantization_config"]["ignore"]
    assert ignored[0] == "lm_head" and {r"re:.*mlp\.gate$", r"re:.*mlp\.shared_expert_gate$"} < set(ignored)


def stored_as(source: Path, folder: Path, kind: str) -> Path:
    """The checkpoint as others store it."""
    if kind not in ("one by one", "shards"):
        return test_delta_nets.stored_as(source, folder, kind, "mlp.experts.down_proj")
    copy_of(source, folder)
    if kind == "one by one":
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        again = AutoModelForCausalLM.from_config(loaded.config)
        again.load_state_dict(loaded.state_dict())
        again.save_pretrained(folder)
        assert f"{MLP}.experts.5.up_proj.weight" in load_file(folder / "model.safetensors")
        return folder
    tensors = load_file(source / "model.safetensors")  # a layer's stacks in two files
    parts = [{n: t for n, t in tensors.items() if ("down_proj" in n) == other} for other in (False, True)]
    files = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {tensor: name for name, part in files.items() for tensor in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["one by one", "shards", "names of the wrapped", "with speculation", "wrapped"])
def test_the_mixture_is_the_same_however_it_is_stored(source: Path, base: Path, tmp_path: Path, kind: str) -> None:
    assert_the_same_text_model(stored_as(source, tmp_path / "stored", kind), source, base, tmp_path / "base")


def broken(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Tensors with stacks that config.json does not describe."""
    stack = f"{MLP}.experts.gate_up_proj"
    if kind == "fewer experts":
        return tensors | {name: tensors[name][:5].clone() for name in (stack, f"{MLP}.experts.down_proj")}
    changed = {
        "transposed": tensors[stack][:, :, :96].transpose(1, 2).contiguous(),
        "flat": tensors[stack].flatten(0, 1),
    }
    return (
        {name: t for name, t in tensors.items() if name != stack}
        if kind == "none"
        else tensors | {stack: changed[kind]}
    )


@pytest.mark.parametrize("kind", ["fewer experts", "transposed", "flat", "none"])
def test_stacks_that_config_json_does_not_describe_are_refused(source: Path, tmp_path: Path, kind: str) -> None:
    folder = copy_of(source, tmp_path / "broken", broken(load_file(source / "model.safetensors"), kind))
    with pytest.raises(UserError, match=r"config.json must describe the weights beside it; .*mlp.experts"):
        quantize_checkpoint(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "none", "finetune": "full"}, "its experts are frozen; got model.policy.finetune full"),
        ({"quantization": "nf4"}, "NF4 holds no mixture of experts"),
        ({"lora": LoraConfig(targets=("experts.down_proj",))}, "matches none; .*; experts and router are frozen"),
        ({"lora": LoraConfig(targets=("mlp.gate",))}, "matches none; .*; experts and router are frozen"),
        ({"lora": LoraConfig(rank=200)}, "rank must not be above the smaller side of a weight; got rank 200"),
    ],
)
def test_what_has_no_path_is_refused_in_one_line(source: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PolicyConfig(path=str(source), **settings).base_folder()


def test_a_router_that_is_not_normalized_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(source) | {"norm_topk_prob": False}))
    with pytest.raises(
        UserError, match="qwen3_5_moe_text model must have norm_topk_prob True; config.json of .* False"
    ):
        PolicyConfig(path=str(tmp_path), quantization="none").base_folder()


# Memory ---------------------------------------------------------------------------------------------------------------


def test_published_sizes_are_counted() -> None:
    shape = Shape.of(Qwen3_5MoeTextConfig())  # whose defaults are 35B-A3B's
    assert round(shape.state_bytes(torch.bfloat16) / 2**20, 1) == 61.4
    lengths = [shape.sequence_kv_bytes(tokens, torch.bfloat16) for tokens in (1, 1056, 1057)]
    assert lengths[0] == lengths[1] and lengths[2] - lengths[1] == 1056 * 20 * 1024
    experts = 40 * 3 * 2048 * (256 * 512 + 512)
    assert shape.mlp_weights == experts and shape.intermediate_size == 9 * 512
    assert 34e9 < shape.linear_weights + shape.embedding_weights < 36e9
    assert shape.base_bytes("nvfp4", torch.bfloat16) / 2**30 == pytest.approx(19.8, abs=0.3)


def test_weights_and_adapters_are_counted_as_the_model_has_them(source: Path) -> None:
    policy, config = policy_of(source, quantization="none"), Qwen3_5MoeTextConfig(**read_config(source))
    shape, spec = Shape.of(config), policy.config.lora_spec
    assert spec is not None and len(spec.targets) == 12
    assert shape.adapter_weights(8, spec.targets) == sum(t.numel() for t in policy.trained_state().values())
    for some in (
        ("in_proj_z", "self_attn.q_proj"),
        ("shared_expert.up_proj",),
        ("mlp.shared_expert.gate_proj", "o_proj"),
    ):
        one = Policy(source, replace(policy.config, lora=LoraConfig(rank=8, targets=some)), torch.device("cpu"), seed=1)
        assert shape.adapter_weights(8, some) == sum(t.numel() for t in one.trained_state().values())
    stored = load_file(source / "model.safetensors")
    assert shape.linear_weights == sum(t.numel() for name, t in stored.items() if "_proj" in name)
    with pytest.raises(UserError, match="model.policy.lora.targets names shared_expert_gate"):
        shape.adapter_weights(8, ("shared_expert_gate",))


@pytest.mark.parametrize("mode", [True, "selective", False])
def test_an_update_needs_what_is_estimated(tmp_path: Path, mode: Any) -> None:
    kinds, sizes = ["linear_attention", "linear_attention", "full_attention"], {"linear_num_value_heads": 8}
    source = write_checkpoint("qwen3.5-moe", tmp_path / "net", sizes | {"num_hidden_layers": 3, "layer_types": kinds})
    policy, length = policy_of(source, quantization="none", gradient_checkpointing=mode).train(), 256
    live = live_bytes_of_update(policy, 2, length)
    batch = MicroBatch(length * 2, 2, torch.float32, mode, rank=8)
    dense = 6 * 3 * 64 * 128 * 4  # all experts, which are less than the group that is counted
    estimate = activation_bytes(Shape.of(policy.base.config), batch) - GROUP_BYTES + dense
    # As in test_delta_nets.py: on a CPU silu(gate) and what plain norms multiply are saved besides.
    more = (3 if mode is False else 1) * 4 * (256 + 8 * 128) * length * 2
    assert estimate * 0.9 < live.peak < (estimate + more) * 1.2


def test_a_dry_run_counts_states_and_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Qwen3_5MoeTextConfig(architectures=["Qwen3_5MoeForCausalLM"], eos_token_id=2).to_dict()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--dry-run", "-c", "gsm8k", "--model.policy.path", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"base model +19\.51 +19\.51", out)
    assert "a sequence has 61.4 MiB of states: the engine's cache holds at most 66 at once" in out
