"""The quantizer's checkpoints: what is in them, who can load them, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_copies import copy_of
from qerl_kernels import (
    nvfp4_global_scale,
    quantize_nvfp4,
    select_backend,
    selected_backend,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import iterate_dense, write_dense_checkpoint
from qerl_pl.formats.quantize import backend_for, quantize_checkpoint
from qerl_pl.models.folder import read_config, weight_map
from qerl_pl.policy.policy import PolicyConfig


@pytest.fixture(scope="module")
def quantized(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, folder)
    return folder


def changed(source: Path, target: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a checkpoint in which some tensors of both layers' MLPs are others, of another width if all are."""
    state = load_file(source / "model.safetensors")
    for layer in range(2):
        state.update({f"model.layers.{layer}.mlp.{name}.weight": tensor.clone() for name, tensor in tensors.items()})
    config = {"intermediate_size": len(tensors["gate_proj"])} if "gate_proj" in tensors else {}
    return copy_of(source, target, state, **config)


def of_width(width: int) -> dict[str, torch.Tensor]:
    return {"down_proj": torch.randn(128, width)} | dict.fromkeys(("gate_proj", "up_proj"), torch.randn(width, 128))


def test_every_projection_is_quantized_by_the_recipe_and_nothing_else(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl_pl.formats.quantize.CHUNK", 640)  # matrices of 64 or 128 columns, some with a rest
    assert main(["quantize", str(tiny_policy_dir), str(tmp_path / "out")]) == 0
    source = load_file(tiny_policy_dir / "model.safetensors")
    result = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in source.items():
        if "_proj.weight" not in name:
            assert torch.equal(result[name], weight)
            continue
        siblings = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}
        stem, _, projection = name.removesuffix("_proj.weight").rpartition(".")
        group = [source[f"{stem}.{member}_proj.weight"] for member in siblings.get(projection, (projection,))]
        shared = nvfp4_global_scale(*group)
        expected = quantize_nvfp4(weight, shared)
        assert torch.equal(result[f"{name}_packed"], expected.packed)
        assert torch.equal(result[f"{name}_scale"].view(torch.uint8), expected.scale.view(torch.uint8))
        assert torch.equal(result[f"{name}_global_scale"], expected.global_scale)
        assert name not in result


def test_an_exported_dense_copy_has_no_report(quantized: Path, tmp_path: Path) -> None:
    base = shutil.copytree(quantized, tmp_path / "base")
    (base / "hf_quant_config.json").write_text("{}")  # ModelOpt's, by which vLLM would take 16 bits for 4
    copy = write_dense_checkpoint(base, tmp_path / "dense", torch.bfloat16)
    left_out = {"quantization_report.json", "hf_quant_config.json"}
    assert {path.name for path in base.iterdir()} - {path.name for path in copy.iterdir()} == left_out


@pytest.mark.parametrize(("format", "scales"), [("nvfp4", "torch.float8_e4m3fn"), ("mxfp4", "torch.uint8")])
def test_transformers_loads_the_checkpoint_with_the_same_weights(
    tiny_policy_dir: Path, tmp_path: Path, format: str, scales: str
) -> None:
    quantized = tmp_path / format
    assert main(["quantize", str(tiny_policy_dir), str(quantized), "--format", format, "--device", "cpu"]) == 0
    config = read_config(quantized)["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["scale_dtype"] == scales
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(torch.arange(12).reshape(1, 12)).logits.isfinite().all()
    loaded = dict(model.named_parameters())  # dequantized by the first forward pass
    dense = dict(iterate_dense(quantized, torch.float32))
    projections = [name for name in dense if "_proj.weight" in name]
    assert len(projections) == 14
    for name in projections:  # transformers dequantizes to 16 bits
        torch.testing.assert_close(loaded[name].float(), dense[name], rtol=2**-7, atol=0)


NOT_QUANTIZABLE = {
    "columns": ("nvfp4", of_width(24), "NVFP4 .* divisible by 16; got .*down_proj.weight with 24; set"),
    "columns of MXFP4": ("mxfp4", of_width(48), "MXFP4 .* divisible by 32; got .*with 48; use nvfp4, or none"),
    "vector": ("nvfp4", {"down_proj": torch.randn(24)}, r"describe the weights .*down_proj.weight is \(24,\) in"),
    "bytes": (
        "nvfp4",
        {"down_proj": torch.ones(128, 128, dtype=torch.uint8)},
        "16 or 32-bit .*down_proj.weight in torch.uint8",
    ),
    "infinite": (
        "nvfp4",
        {"down_proj": torch.full((128, 128), torch.inf)},
        "finite numbers; .*down_proj.weight has inf or nan",
    ),
}


@pytest.mark.parametrize("case", NOT_QUANTIZABLE)
def test_a_failure_says_why_and_leaves_no_folder_behind(tiny_policy_dir: Path, tmp_path: Path, case: str) -> None:
    file_format, tensors, message = NOT_QUANTIZABLE[case]
    source = changed(tiny_policy_dir, tmp_path / "odd", **tensors)
    with pytest.raises(UserError, match=message):
        quantize_checkpoint(source, tmp_path / "out", format=file_format)
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize("damage", ["cut short", "missing"])
def test_damaged_weights_are_named(tiny_policy_dir: Path, tmp_path: Path, damage: str) -> None:
    source = shutil.copytree(tiny_policy_dir, tmp_path / "source")
    weights = source / "model.safetensors"
    names = list(weight_map(source))
    if damage == "missing":
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"intact safetensors files; .*\.safetensors cannot be read"):
        quantize_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_cached_quantized_base_follows_the_files_that_it_copies(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    source = shutil.copytree(tiny_policy_dir, tmp_path / "source")
    config = PolicyConfig(path=str(source))
    first = config.base_folder()
    assert config.base_folder() == first
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    second = config.base_folder()
    assert second != first and json.loads((second / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_matrices_of_several_types_cannot_share_a_scale(tiny_policy_dir: Path, tmp_path: Path) -> None:
    source = changed(tiny_policy_dir, tmp_path / "mixed", gate_proj=torch.randn(128, 128, dtype=torch.float16))
    with pytest.raises(UserError, match=r"one data type; got .*gate_proj.weight in torch.float16, .*up_proj"):
        quantize_checkpoint(source, tmp_path / "out")


def test_refuses_a_model_without_projections(tiny_policy_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "other"
    shutil.copytree(tiny_policy_dir, source)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=512, hidden_size=16, num_hidden_layers=0)).save_pretrained(source)
    with pytest.raises(UserError, match=r"named model.layers.N.\*_proj.weight; .*other has none"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_gpu_that_is_not_there_is_refused(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda needs a GPU"):
        quantize_checkpoint(tiny_policy_dir, tmp_path / "out", device="cuda")
    quantize_checkpoint(tiny_policy_dir, tmp_path / "out", device="auto")
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_gpu_gets_triton_and_the_choice_before_comes_back() -> None:
    with backend_for(torch.device("cuda")):
        assert selected_backend() == "triton"
    assert selected_backend() == "torch"
    select_backend("triton")
    try:
        with pytest.raises(UserError), backend_for(torch.device("cpu")):
            assert selected_backend() == "torch"
            raise UserError("")
        assert selected_backend() == "triton"
    finally:
        select_backend("torch")


def test_threads_change_nothing(tiny_policy_dir: Path, quantized: Path, tmp_path: Path) -> None:
    torch.set_num_threads(3)
    try:
        quantize_checkpoint(tiny_policy_dir, tmp_path / "out", device="cpu")
        assert torch.get_num_threads() == 3  # the workers' setting is their own
    finally:
        torch.set_num_threads(1)
    for name in ("model.safetensors", "quantization_report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (quantized / name).read_bytes()


def test_refuses_what_it_would_overwrite(tiny_policy_dir: Path, quantized: Path) -> None:
    with pytest.raises(UserError, match="must not exist"):
        quantize_checkpoint(tiny_policy_dir, quantized)


def test_large_checkpoints_are_sharded_with_an_index(
    tiny_policy_dir: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl_pl.models.folder.SHARD_BYTES", 50_000)
    quantize_checkpoint(tiny_policy_dir, tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    one, many = (dict(iterate_dense(folder, torch.float32)) for folder in (quantized, tmp_path / "sharded"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
