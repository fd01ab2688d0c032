"""The quantizer's checkpoints: what is in them, who can load them, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from qerl_kernels import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_pl.checkpoints import load_dense_state, read_config
from qerl_pl.errors import UserError
from qerl_pl.quantize import quantize_checkpoint


@pytest.fixture(scope="module")
def quantized(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, folder)
    return folder


def test_every_projection_is_quantized_by_the_recipe_and_nothing_else(tiny_policy_dir: Path, quantized: Path) -> None:
    source = load_file(tiny_policy_dir / "model.safetensors")
    result = load_file(quantized / "model.safetensors")
    for name, weight in source.items():
        if "_proj.weight" not in name:
            assert torch.equal(result[name], weight)
            continue
        siblings = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}
        stem, _, projection = name.removesuffix("_proj.weight").rpartition(".")
        group = [source[f"{stem}.{member}_proj.weight"] for member in siblings.get(projection, (projection,))]
        expected = quantize_nvfp4(weight, nvfp4_global_scale(*group))
        assert torch.equal(result[f"{name}_packed"], expected.packed)
        assert torch.equal(result[f"{name}_scale"].view(torch.uint8), expected.scale.view(torch.uint8))
        assert torch.equal(result[f"{name}_global_scale"], expected.global_scale)
        assert name not in result


def test_dequantized_weights_are_close_to_the_source(tiny_policy_dir: Path, quantized: Path) -> None:
    source, dense = load_file(tiny_policy_dir / "model.safetensors"), load_dense_state(quantized, torch.float32)
    assert dense.keys() == source.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    error = (dense[name] - source[name]).norm() / source[name].norm()
    assert 0.05 < error < 0.12  # four bits on Gaussian weights lose about 9.5 % (squared: 9.0e-3)


def test_transformers_loads_the_checkpoint_with_the_same_weights(quantized: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(torch.arange(12).reshape(1, 12)).logits.isfinite().all()
    loaded = dict(model.named_parameters())  # dequantized by the first forward pass
    dense = load_dense_state(quantized, torch.float32)
    projections = [name for name in dense if "_proj.weight" in name]
    assert len(projections) == 14
    for name in projections:  # transformers dequantizes to 16 bits
        torch.testing.assert_close(loaded[name].float(), dense[name], rtol=2**-7, atol=0)


def test_search_lowers_the_error_in_the_same_format(tiny_policy_dir: Path, quantized: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_policy_dir, tmp_path / "search", scales="search")
    source = load_file(tiny_policy_dir / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    minmax, search = (load_dense_state(folder, torch.float32)[name] for folder in (quantized, tmp_path / "search"))
    ratio = (search - source[name]).square().sum() / (minmax - source[name]).square().sum()
    assert ratio < 0.85


def test_a_failure_leaves_no_folder_behind(tiny_policy_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "odd"
    shutil.copytree(tiny_policy_dir, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.randn(128, 24)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"divisible by 16; found model.layers.1.mlp.down_proj.weight with 24"):
        quantize_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_refuses_what_it_would_overwrite_or_quantize_twice(
    tiny_policy_dir: Path, quantized: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="must not exist"):
        quantize_checkpoint(tiny_policy_dir, quantized)
    with pytest.raises(UserError, match="NVFP4 already"):
        quantize_checkpoint(quantized, tmp_path / "again")


def test_refuses_another_quantized_format(tiny_policy_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "gptq"
    shutil.copytree(tiny_policy_dir, source)
    config = read_config(source) | {"quantization_config": {"quant_method": "gptq"}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="gptq"):
        quantize_checkpoint(source, tmp_path / "out")


def test_large_checkpoints_are_sharded_with_an_index(
    tiny_policy_dir: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl_pl.checkpoints.SHARD_BYTES", 50_000)
    quantize_checkpoint(tiny_policy_dir, tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    one, many = (load_dense_state(folder, torch.float32) for folder in (quantized, tmp_path / "sharded"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_dequantize_inverts_what_the_checkpoint_stores(quantized: Path) -> None:
    tensors = load_file(quantized / "model.safetensors")
    stem = "model.layers.0.self_attn.q_proj.weight"
    packed, scale, divisor = (tensors[f"{stem}_{part}"] for part in ("packed", "scale", "global_scale"))
    low = packed[3, 5] & 15  # even columns are low nibbles
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    by_hand = magnitudes[int(low) & 7] * (-1 if low & 8 else 1) * scale[3, 0].float() / divisor[0]
    assert dequantize_nvfp4(packed, scale, divisor, torch.float32)[3, 10] == by_hand
