"""Gemma 4's dense text models beside test_families.py: heads that differ between layers, and keys that are values."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import live_bytes_of_update
from qerl_kernels import DenseWeight
from safetensors.torch import load_file, save_file
from test_families import full_policy, policy_of
from test_vllm_adapter import Base
from tiny_families import write_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from qerl_pl.cli.main import main
from qerl_pl.engines.vllm import weight_map
from qerl_pl.engines.vllm.linear_methods import attach_adapter
from qerl_pl.engines.vllm.merged import MergedRows, merge
from qerl_pl.engines.vllm.worker import PolicyWorker
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models import memory_plan
from qerl_pl.models.families import family_of, linear_shapes
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.models.memory_plan import MicroBatch, activation_bytes
from qerl_pl.models.shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.packed_layers import PackedAttention, attention_of_rows
from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import deterministic

THREE = ["sliding_attention", "sliding_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "keys as values": {},
    "values of their own": {"attention_k_eq_v": False},
    "heads alike": {"global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": False},
    "keys as values in heads alike": {"global_head_dim": 32, "num_global_key_value_heads": 2},
    "full attention alone": {"layer_types": ["full_attention"] * 2},
    "larger heads than flash attention takes": {"global_head_dim": 320},
    "three layers, no cap": {"num_hidden_layers": 3, "layer_types": THREE, "final_logit_softcapping": None},
    "images attend both ways": {"use_bidirectional_attention": "vision"},
    "an output layer of its own": {"tie_word_embeddings": False},
}
LENGTHS = torch.tensor([40, 3, 27])


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_and_all_gradients_are_those_of_the_padded_model(tmp_path: Path, variant: str) -> None:
    policy = full_policy(write_checkpoint("gemma-4", tmp_path / "source", VARIANTS[variant]))
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    ids = torch.randint(5, 500, (3, 40), generator=torch.Generator().manual_seed(1))
    real = torch.arange(40) < LENGTHS[:, None]
    mask = real & (torch.arange(40) > 0)
    found = policy.token_values(ids, LENGTHS, mask, 1.0)[0]
    logits = plain(input_ids=ids, attention_mask=real.long()).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found[mask], expected[mask[:, 1:]], rtol=0, atol=2e-5)
    found[mask].sum().backward()
    expected[mask[:, 1:]].sum().backward()
    ours, theirs = dict(policy.base.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert parameter.grad is not None
        size = parameter.grad.abs().max().item()
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-3, atol=2e-4 * size, msg=name)
    assert all(isinstance(layer.self_attn, PackedAttention) for layer in policy.base.get_decoder().layers)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "full attention alone"])  # v names a target
def test_weights_adapters_keys_and_values_are_counted_as_the_model_has_them(tmp_path: Path, variant: str) -> None:
    source = write_checkpoint("gemma-4", tmp_path / "source", VARIANTS[variant])
    policy = policy_of(source, quantization="none")
    config, spec = policy.base.config, policy.config.lora_spec
    shape, linears = Shape.of(config), linear_shapes(config)
    assert spec is not None
    del linears["lm_head"]
    assert shape.linear_weights == sum(rows * columns for rows, columns in linears.values())
    assert shape.adapter_weights(8) == sum(tensor.numel() for tensor in policy.trained_state().values())
    some = ("v_proj", "0.self_attn.o_proj")
    one = Policy(source, replace(policy.config, lora=LoraConfig(rank=8, targets=some)), torch.device("cpu"), seed=1)
    assert shape.adapter_weights(8, some) == sum(t.numel() for t in one.trained_state().values())
    keys = [linears[f"model.layers.{layer}.self_attn.k_proj"][0] for layer in range(config.num_hidden_layers)]
    kinds = config.layer_types
    held = [min(100, 24 + 10) if kind == "sliding_attention" else 100 for kind in kinds]
    expected = sum(2 * 2 * size * tokens for size, tokens in zip(keys, held, strict=True))
    assert shape.sequence_kv_bytes(100, torch.bfloat16, 10) == expected


def published() -> dict[str, Any]:
    """Sizes of 31B, as its config.json has them."""
    return {
        **{"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504},
        **{"num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256},
        **{"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024},
        **{"hidden_size_per_layer_input": 0, "tie_word_embeddings": True, "use_bidirectional_attention": "vision"},
        **{"final_logit_softcapping": 30.0, "num_kv_shared_layers": 0, "enable_moe_block": False},
    }


def test_the_published_shape_is_counted_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape.of(Gemma4TextConfig(**published()))
    window = 5376 * (32 * 256 + 2 * 16 * 256) + 32 * 256 * 5376
    full = 5376 * (32 * 512 + 4 * 512) + 32 * 512 * 5376
    assert shape.attention_weights == 50 * window + 10 * full
    assert shape.mlp_weights == 60 * 3 * 5376 * 21504
    tokens = [shape.sequence_kv_bytes(length, torch.bfloat16) for length in (1024, 1025)]
    assert tokens[0] == 1024 * 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512) and tokens[1] - tokens[0] == 2 * 2 * 10 * 4 * 512
    # k's B has the rows of k and of v in the engine, which has both.
    engine = [shape.engine_adapter_weights(16, (name,)) for name in ("k_proj", "v_proj")]
    assert engine[0] - engine[1] == 10 * 16 * (32 * 512 + 2 * 4 * 512 + 5376)
    (tmp_path / "model").mkdir()
    config = published() | {"architectures": ["Gemma4ForCausalLM"], "eos_token_id": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--dry-run", "-c", "gsm8k", "--model.policy.path", str(tmp_path / "model")]) == 0
    assert f"{shape.base_bytes('nvfp4', torch.bfloat16) / 2**30:>9.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [True, "selective", False])
@pytest.mark.parametrize("size", [64, 320])
def test_an_update_needs_what_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, size: int
) -> None:
    monkeypatch.setattr(memory_plan, "SMS", 1)
    sizes = {"num_hidden_layers": 3, "layer_types": THREE, "global_head_dim": size}
    source = write_checkpoint("gemma-4", tmp_path / "source", sizes)
    policy = policy_of(source, quantization="none", gradient_checkpointing=mode).train()
    live = live_bytes_of_update(policy, 1, 256)
    shape, batch = Shape.of(policy.base.config), MicroBatch(256, 1, torch.float32, mode, rank=8)
    estimate = activation_bytes(shape, batch)
    # As in test_memory_plan.py: on a CPU the activation's result and what plain norms multiply are saved besides.
    more = (3 if mode is False else 1) * 4 * (192 + 12 * 128) * 256
    # Without checkpoints attention's tensors are counted as saved, and as recomputed in the last layer.
    assert estimate * (0.9 if size == 64 else 0.7) < live.peak < (estimate + more) * 1.2


REFUSED = {
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "use_bidirectional_attention": "all",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_e2b_e4b_and_the_mixture_have_is_refused_before_anything_is_made(tmp_path: Path, key: str) -> None:
    source = write_checkpoint("gemma-4", tmp_path / "source")
    PolicyConfig(path=str(source), quantization="none").base_folder()
    config = read_config(source) | {key: REFUSED[key]}
    (source / "config.json").write_text(json.dumps(config))
    message = rf"a gemma4_text model must have {key} .*; config.json of .*source has {REFUSED[key]}: take a model"
    for start in (
        PolicyConfig(path=str(source), quantization="none").base_folder,
        lambda: quantize_checkpoint(source, tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=message):
            start()
    (source / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": config}))
    with pytest.raises(UserError, match=message):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_text_model_of_a_published_one_is_taken_out_and_its_scalars_stay(tmp_path: Path) -> None:
    source = write_checkpoint("gemma-4", tmp_path / "source")
    wrapped = write_checkpoint("gemma-4", tmp_path / "wrapped")
    stored = load_file(source / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    others = {f"model.{name}": torch.ones(2, 2) for name in ("vision_tower.x.weight", "embed_vision.y_proj.weight")}
    save_file(renamed | others, wrapped / "model.safetensors", metadata={"format": "pt"})
    inner = {key: value for key, value in read_config(source).items() if key != "per_layer_config"}
    inner |= {"global_head_dim": 64, "num_global_key_value_heads": 1}  # as published, and read by old releases, too
    document = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": inner}
    (wrapped / "config.json").write_text(json.dumps(document))
    for folder in (source, wrapped):
        assert main(["quantize", str(folder), f"{folder}-nvfp4"]) == 0
    results = [load_file(Path(f"{folder}-nvfp4") / "model.safetensors") for folder in (source, wrapped)]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(a.view(torch.uint8), results[1][name].view(torch.uint8)) for name, a in results[0].items())
    scalars = {name: tensor for name, tensor in stored.items() if name.endswith("layer_scalar")}
    assert len(scalars) == 2 and all(torch.equal(results[1][name], tensor) for name, tensor in scalars.items())
    policy = policy_of(tmp_path / "wrapped-nvfp4")
    assert all(torch.equal(policy.base.get_buffer(name), tensor) for name, tensor in scalars.items())


def test_a_layer_without_v_shares_the_scale_of_q_and_k_alone(tmp_path: Path) -> None:
    source, folder = write_checkpoint("gemma-4", tmp_path / "source"), tmp_path / "nvfp4"
    quantize_checkpoint(source, folder)
    stored, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight_global_scale"
    assert torch.equal(stored[name], stored[name.replace("k_proj", "q_proj")])
    format_of(folder).check(TensorFiles(folder))
    save_file(stored | {name: 2 * stored[name]}, folder / "model.safetensors")
    with pytest.raises(UserError, match="must share one global scale; got model.layers.1.self_attn.q_proj.weight=.*k"):
        format_of(folder).check(TensorFiles(folder))


# vLLM's linears -------------------------------------------------------------------------------------------------------


def fused(rows: list[int]) -> Any:
    """q, k and k once more, of two inputs."""
    linear: Any = nn.Linear(2, sum(rows), bias=False)
    linear.weight.data.zero_()
    linear.input_size_per_partition, linear.output_size_per_partition = 2, sum(rows)
    linear.output_partition_sizes, linear.quant_method = rows, Base()
    return linear


def test_keys_reach_the_rows_of_keys_and_of_values() -> None:
    config = Gemma4TextConfig(**published() | {"num_hidden_layers": 6})
    layers = family_of("gemma4_text").layers_without_values(config)
    assert layers == {5} and not family_of("gemma3_text").layers_without_values(config)
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model, linear = SimpleNamespace(packed_modules_mapping=packed), fused([4, 2, 2])
    model.named_modules, model.config = lambda: [], config
    slices = {
        layer: weight_map.fused_slices(model, f"x.{layer}.qkv_proj", linear, {f"x.{index}" for index in layers})
        for layer in (4, 5)
    }
    assert slices[4] == [("x.4.q_proj", 0, 4), ("x.4.k_proj", 4, 6), ("x.4.v_proj", 6, 8)]
    assert slices[5] == [("x.5.q_proj", 0, 4), ("x.5.k_proj", 4, 6), ("x.5.k_proj", 6, 8)]
    keys = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight_map.write({"x.5.k_proj.weight": keys}, [(linear, slices[5])], model, ())
    assert torch.equal(linear.weight, torch.cat((torch.zeros(4, 2), keys, keys)))
    linear.weight.data.zero_()

    worker = object.__new__(PolicyWorker)
    lora = attach_adapter(linear, slices[5], 1, torch.float32)
    worker._qerl_attached = SimpleNamespace(lora=lora)
    assert lora.keys() == {"x.5.q_proj", "x.5.k_proj"} and linear.qerl_b.shape == (8, 2)
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0], [5.0]])
    worker.qerl_write_adapter({"x.5.k_proj": (a, b)}, 2.0)
    with torch.inference_mode():
        out: Tensor = linear.quant_method.apply(linear, torch.tensor([[1.0, 7.0]]))
    assert out.tolist() == [[0, 0, 0, 0, 6, 10, 6, 10]]
    copy = torch.zeros(8, 2)
    merge([MergedRows(copy[start:stop], DenseWeight(keys), lora[name]) for name, start, stop in slices[5][1:]])
    assert copy.tolist() == [[0, 0]] * 4 + [[7, 2], [13, 4]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "keys", "size"), [(32, 4, 512), (8, 8, 320)])
def test_a_gpus_attention_of_larger_heads_is_near_and_repeats(heads: int, keys: int, size: int) -> None:
    """bfloat16 against float32, and the same bits twice."""
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([700, 1, 1200], device="cuda"), 1200)
    inputs = [torch.randn(1901, count, size, device="cuda").bfloat16() for count in (heads, keys, keys)]
    direction = torch.randn(1901, heads, size, device="cuda").bfloat16()

    def results(dtype: torch.dtype) -> list[Tensor]:
        given = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        with deterministic():
            out = attention_of_rows(*given, packing, size**-0.5)
            return [out.detach(), *torch.autograd.grad(out, given, direction.to(dtype))]

    exact, found, again = results(torch.float32), results(torch.bfloat16), results(torch.bfloat16)
    for expected, one, other in zip(exact, found, again, strict=True):
        assert torch.equal(one, other) and (one - expected).norm() < 0.01 * expected.norm()
