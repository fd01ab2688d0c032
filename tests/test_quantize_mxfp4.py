"""MXFP4 checkpoints: what compressed-tensors writes, and what transformers loads."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl_pl.cli.main import main
from qerl_pl.formats.dense_checkpoint import load_dense_state
from qerl_pl.models.folder import read_config


@pytest.fixture(scope="module")
def mxfp4(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "mxfp4"
    assert main(["quantize", str(tiny_policy_dir), str(folder), "--format", "mxfp4", "--device", "cpu"]) == 0
    return folder


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """An MXFP4 checkpoint's weights as compressed-tensors decompresses them by the scheme in its config.json."""
    scheme = QuantizationScheme(**read_config(folder)["quantization_config"]["config_groups"]["group_0"])
    state = load_file(folder / "model.safetensors")
    dense = {}
    for name in [name for name in state if name.endswith("_packed")]:
        stem = name.removesuffix("_packed")
        parts = {"weight_packed": state[name], "weight_scale": state[f"{stem}_scale"]}
        dense[stem] = MXFP4PackedCompressor.decompress(parts, scheme)["weight"]
    return dense


def test_mxfp4_is_what_compressed_tensors_writes(tiny_policy_dir: Path, mxfp4: Path) -> None:
    config = read_config(mxfp4)["quantization_config"]
    assert config["format"] == "mxfp4-pack-quantized"
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    source, result = load_file(tiny_policy_dir / "model.safetensors"), load_file(mxfp4 / "model.safetensors")
    assert not any(name.endswith("global_scale") for name in result)
    for name in [name for name in source if "_proj.weight" in name]:
        weight = source[name]
        blocks = weight.unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        assert name not in result
        assert torch.equal(result[f"{name}_scale"], theirs["weight_scale"])
        assert torch.equal(result[f"{name}_packed"], theirs["weight_packed"])


def test_transformers_loads_mxfp4(mxfp4: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mxfp4, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(torch.arange(12).reshape(1, 12)).logits.isfinite().all()
    loaded, dense = dict(model.named_parameters()), decompressed(mxfp4)
    assert len(dense) == 14
    ours = load_dense_state(mxfp4, torch.float32)
    for name, weight in dense.items():
        assert torch.equal(loaded[name], weight.bfloat16()) and torch.equal(ours[name], weight.float())
