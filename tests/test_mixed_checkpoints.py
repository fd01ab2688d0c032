"""NVFP4 beside FP8, a 4-bit lm_head and scales of keys and values, in the layouts of ModelOpt and llm-compressor."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qerl_kernels import quantize_mxfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from tiny_families import write_checkpoint, write_wrapped_qwen
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.cli.dry_run import shape_of
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import TensorFiles, load_config, read_config
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig

FP8 = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
NVFP4 = ("gate_proj", "up_proj", "down_proj", "lm_head")
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = {"hidden_size": 160, "num_hidden_layers": 2}  # columns that are not whole blocks of 128


def in_8_bits(weight: Tensor, scales: str) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 codes, factors as a writer stores them, and what they mean, worked out element by element."""
    rows, columns = weight.shape
    if scales.startswith("block"):
        grid = torch.zeros(math.ceil(rows / 128), math.ceil(columns / 128))
        wide = torch.zeros_like(weight)
        for i in range(len(grid)):
            for j in range(grid.shape[1]):
                part = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                grid[i, j] = weight[part].abs().max() / 448
                wide[part] = grid[i, j]
        stored = grid[:, None, :, None] if scales == "block of four dimensions" else grid
    elif scales == "row":
        stored = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        wide = stored.float().expand(rows, columns)
    else:
        stored = (weight.abs().max() / 448).reshape(() if scales == "matrix" else (1,))
        wide = stored.reshape(1, 1).expand(rows, columns)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, stored, codes.float() * wide


def in_4_bits(weight: Tensor, of_group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, block scales, the divisor that a group shares, and what they mean."""
    packed, scale, divisor = quantize_nvfp4(weight, 2688 / of_group.abs().max().reshape(1))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return packed, scale, divisor, FLOAT4[codes.int()] * (scale.float() / divisor).repeat_interleave(16, 1)


def write_mixed(source: Path, layout: str, scales: str = "matrix", cache: bool = True) -> dict[str, Tensor]:
    """Change a 16-bit checkpoint into a mixed one, in place; returns the dense tensors that it means."""
    modelopt = layout.startswith("ModelOpt")
    stored, dense, layers = {}, {}, dict[str, dict[str, Any]]()
    before = load_file(source / "model.safetensors")
    for name, tensor in before.items():
        linear, kind = name.removesuffix(".weight"), name.removesuffix(".weight").rpartition(".")[2]
        dense[name] = tensor
        if kind in FP8:
            codes, scale, dense[name] = in_8_bits(tensor, scales)
            stored |= {name: codes, f"{name}_scale": scale, f"{linear}.input_scale": torch.tensor(0.01)}
            layers[linear] = {"quant_algo": "FP8"}
        elif kind in NVFP4:
            pair = [name.replace(kind, one) for one in ("gate_proj", "up_proj")] if kind != "lm_head" else [name]
            group = torch.cat([before[one] for one in pair]) if kind in ("gate_proj", "up_proj") else tensor
            packed, scale, divisor, dense[name] = in_4_bits(tensor, group)
            layers[linear] = {"quant_algo": "NVFP4", "group_size": 16}
            if modelopt:
                factor, inputs = (1 / divisor).reshape(()), torch.tensor(0.01)
                stored |= {f"{linear}.weight_scale_2": factor, f"{linear}.input_scale": inputs}
            else:
                stored |= {f"{name}_global_scale": divisor, f"{linear}.input_global_scale": torch.tensor([100.0])}
            stored |= {name if modelopt else f"{name}_packed": packed, f"{name}_scale": scale}
        else:
            stored[name] = tensor
        if cache and kind in ("k_proj", "v_proj"):
            owner = linear if modelopt else linear.rpartition(".")[0]
            stored[f"{owner}.{kind[0]}_scale"] = torch.tensor([0.02])
    names = sorted(stored)
    half = len(names) // 2  # scales and weights in different files
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, held in files.items():
        save_file({name: stored[name].contiguous() for name in held}, source / file, metadata={"format": "pt"})
    index = {name: file for file, held in files.items() for name in held}
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    settings = quantization(layout, scales, layers, cache)
    config = read_config(source)
    if layout == "ModelOpt, its own file":
        document = {"producer": {"name": "modelopt"}, "quantization": settings}
        (source / "hf_quant_config.json").write_text(json.dumps(document))
    else:
        config["quantization_config"] = settings
    (source / "config.json").write_text(json.dumps(config))
    return dense


def quantization(layout: str, scales: str, layers: dict[str, Any], cache: bool) -> dict[str, Any]:
    """What the writer says of it."""
    eight, four = {"dynamic": False, "num_bits": 8, "type": "float"}, {"dynamic": False, "num_bits": 4, "type": "float"}
    names = {bits: [n for n, layer in layers.items() if layer["quant_algo"] == bits] for bits in ("FP8", "NVFP4")}
    if layout == "ModelOpt, its own file":
        return {
            **{"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8" if cache else None},
            **{"quantized_layers": layers, "exclude_modules": ["model.embed_tokens"]},
        }
    if layout == "ModelOpt":
        groups = {
            "group_0": {"weights": eight, "input_activations": eight, "targets": names["FP8"]},
            "group_1": {
                **{"weights": four | {"group_size": 16}, "input_activations": four | {"group_size": 16}},
                "targets": names["NVFP4"],
            },
        }
        found = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": groups, "ignore": []}
        return found | {"quantized_layers": layers} | ({"kv_cache_scheme": eight} if cache else {})
    strategy = {"matrix": "tensor", "matrix of one": "tensor", "row": "channel"}.get(scales, "block")
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    inputs = eight | {"dynamic": strategy != "tensor", "strategy": "token" if strategy == "channel" else "tensor"}
    groups = {
        "group_0": {
            **{"format": "float-quantized", "targets": names["FP8"], "output_activations": None},
            **{"weights": eight | {"strategy": strategy, "symmetric": True} | block, "input_activations": inputs},
        },
        "group_1": {
            **{"format": "nvfp4-pack-quantized", "targets": names["NVFP4"], "output_activations": None},
            "weights": four | {"strategy": "tensor_group", "group_size": 16, "symmetric": True},
            "input_activations": four | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        },
    }
    found = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}
    return found | {"kv_cache_scheme": eight | {"strategy": "tensor"} if cache else None}


LAYOUTS = [
    ("ModelOpt", "matrix", True),
    ("ModelOpt, its own file", "matrix", True),
    ("ModelOpt", "row", False),
    ("ModelOpt", "block of four dimensions", True),
    ("compressed-tensors", "matrix of one", True),
    ("compressed-tensors", "row", False),
    ("compressed-tensors", "block", True),
]


def policy_of(folder: Path, **settings: Any) -> Policy:
    config = PolicyConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=2), **settings)
    return Policy(folder, config, torch.device("cpu"), seed=0).eval()


def logprobs_of(policy: Policy) -> Tensor:
    ids = torch.arange(24)[None] * 7 + 30
    with torch.no_grad():
        return policy.token_values(ids, torch.tensor([24]), torch.arange(24)[None] > 0, 1.0)[0]


@pytest.mark.parametrize(("layout", "scales", "cache"), LAYOUTS)
def test_a_mixed_checkpoint_is_read_by_its_values_and_copied_once_without_fp8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, scales: str, cache: bool
) -> None:
    folder = write_checkpoint("qwen3", tmp_path / "model", SIZES | {"tie_word_embeddings": False})
    expected = write_mixed(folder, layout, scales, cache)
    tensors, base_format = TensorFiles(folder), format_of(folder)
    assert base_format.name == "nvfp4" and len(tensors.fp8) == 8 and not tensors.skipped
    dense = dict(base_format.iterate_dense(tensors, torch.float32))
    assert dense.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(dense[name], tensor, rtol=1e-6, atol=0, msg=name)
    first = tensors.first_rows(64).read("model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(first, dense["model.layers.0.self_attn.o_proj.weight"][:64])

    config = PolicyConfig(path=str(folder), dtype="float32")
    with caplog.at_level(logging.INFO, "qerl_pl"):
        copy = config.base_folder()
    said = [record.getMessage() for record in caplog.records]
    assert said.count("8 linears in FP8 are read in 16 bits, as their activations are") == 1
    assert said.count("the scales that the base has for keys and values in 8 bits are not used") == cache
    assert copy != folder and copy == config.base_folder() == PolicyConfig(path=str(copy)).base_folder()
    held, settings = load_file(copy / "model.safetensors"), read_config(copy)["quantization_config"]
    assert settings["format"] == "nvfp4-pack-quantized" and "kv_cache_scheme" not in settings
    attention = [f"model.layers.{layer}.self_attn.{one}" for layer in range(2) for one in FP8[:4]]
    assert settings["ignore"] == [*attention, "lm_head"]
    scale_names = [name for name in held if "scale" in name]
    assert len(scale_names) == 2 * 2 * 3 and all(".mlp." in name for name in scale_names)
    for name in settings["ignore"]:
        torch.testing.assert_close(held[f"{name}.weight"], expected[f"{name}.weight"], rtol=1e-6, atol=0)
    original = TensorFiles(folder)
    packed = [name for name in held if name.endswith(("packed", "_scale"))]
    assert all(torch.equal(held[n].view(torch.uint8), original.read(n).view(torch.uint8)) for n in packed)

    # Dry run and start count the same weights; both readings give the same policy.
    shape = shape_of(config)
    sixteen = sum(held[f"{name}.weight"].numel() for name in attention)
    assert shape.dense_weights == sixteen == shape_of(PolicyConfig(path=str(copy))).dense_weights
    four_bits = 4.5 / 8 * (shape.linear_weights - sixteen)
    assert shape.base_bytes("nvfp4", torch.bfloat16) == four_bits + 2 * (sixteen + shape.embedding_weights)
    results = [logprobs_of(policy_of(each)) for each in (folder, copy)]
    assert torch.equal(*results)
    model = AutoModelForCausalLM.from_config(load_config(copy), dtype=torch.float32).eval()
    model.load_state_dict(expected)
    ids = torch.arange(24)[None] * 7 + 30
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(results[0][0, 1:], logits.gather(1, ids[0, 1:, None])[:, 0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", [False, True])
def test_a_4_bit_lm_head_alone_and_scales_of_the_cache_alone_are_left_out(tmp_path: Path, cache: bool) -> None:
    source = write_checkpoint("qwen3", tmp_path / "source", {"tie_word_embeddings": False})
    folder = tmp_path / "model"
    quantize_checkpoint(source, folder)
    stored, config = load_file(folder / "model.safetensors"), read_config(folder)
    if cache:
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
        stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    else:
        *head, divisor, expected = in_4_bits(stored.pop("lm_head.weight"), torch.tensor([1.0]))
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        stored |= {f"lm_head.{name}": tensor for name, tensor in zip(names, (*head, divisor), strict=True)}
        config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert shape_of(PolicyConfig(path=str(folder))).dense_weights == 0
    copy = PolicyConfig(path=str(folder)).base_folder()
    held = load_file(copy / "model.safetensors")
    assert read_config(copy)["quantization_config"]["ignore"] == ["lm_head"] and not any("k_scale" in n for n in held)
    assert torch.equal(logprobs_of(policy_of(folder)), logprobs_of(policy_of(copy)))
    if not cache:
        torch.testing.assert_close(held["lm_head.weight"], expected, rtol=1e-6, atol=0)


def test_a_4_bit_lm_head_of_another_format_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint("qwen3", tmp_path / "source", {"tie_word_embeddings": False})
    quantize_checkpoint(source, tmp_path / "model", "mxfp4")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    packed, scale = quantize_mxfp4(stored.pop("lm_head.weight"))
    head = {"lm_head.weight_packed": packed, "lm_head.weight_scale": scale}
    save_file(stored | head, tmp_path / "model" / "model.safetensors")
    config = PolicyConfig(path=str(tmp_path / "model"), quantization="mxfp4")
    for start in (lambda: shape_of(config), config.base_folder, lambda: policy_of(config.source_folder())):
        with pytest.raises(UserError, match="lm_head must be in 16 bits; it is in MXFP4: .*ignore"):
            start()


@pytest.mark.parametrize(("layout", "nested"), [("ModelOpt", False), ("compressed-tensors", True)])
def test_a_published_model_of_text_and_images_is_taken_out_by_quantize(
    tmp_path: Path, layout: str, nested: bool
) -> None:
    """As Qwen's own: FP8 in attention and delta nets, NVFP4 in MLPs and lm_head, layers for speculative decoding.

    The settings may be in `text_config`, where vLLM finds them, too.
    """
    text = write_checkpoint("qwen3.5", tmp_path / "text", {"tie_word_embeddings": False})
    wrapped = write_wrapped_qwen(text, tmp_path / "wrapped")
    write_mixed(wrapped, layout)
    if nested:
        config = read_config(wrapped)
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (wrapped / "config.json").write_text(json.dumps(config))
    expected = write_mixed(text, layout)
    with pytest.raises(UserError, match="must be of text alone; .*take the text model out by `qerl quantize`"):
        PolicyConfig(path=str(wrapped)).base_folder()
    assert main(["quantize", str(wrapped), str(tmp_path / "out")]) == 0
    copy = PolicyConfig(path=str(text)).base_folder()
    found, held = (load_file(each / "model.safetensors") for each in (tmp_path / "out", copy))
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name].view(torch.uint8), held[name].view(torch.uint8)) for name in held)
    narrow = "model.layers.0.linear_attn.in_proj_a"
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert narrow in ignored and "model.layers.0.linear_attn.in_proj_qkv" in ignored
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert torch.equal(found[name], expected[name])
    assert PolicyConfig(path=str(tmp_path / "out")).base_folder() == tmp_path / "out"
    assert logprobs_of(policy_of(tmp_path / "out")).isfinite().all()


def in_groups(**weights: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(weights)


def without_fp8(config: dict[str, Any]) -> None:
    del config["config_groups"]["group_1"]


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "MXFP8 layers": (
        "ModelOpt",
        lambda config: config["quantized_layers"].update(x={"quant_algo": "MXFP8"}),
        "modelopt with quantized_layers",
    ),
    "layers by another name": ("ModelOpt", lambda config: config.update(quantized_layers=["x"]), "quantized_layers"),
    "8-bit integers of ModelOpt": ("ModelOpt", in_groups(type="int"), "modelopt with weights"),
    "FP8 alone of ModelOpt": ("ModelOpt", lambda config: config.update(quant_algo="FP8"), "modelopt"),
    "smoothed": ("ModelOpt", lambda config: config.update(pre_quant_scale=True), "modelopt with pre_quant_scale"),
    "8-bit integers": ("compressed-tensors", in_groups(type="int"), "mixed-precision with float-quantized weights"),
    "asymmetric": ("compressed-tensors", in_groups(symmetric=False), "with float-quantized weights"),
    "dynamic": ("compressed-tensors", in_groups(dynamic=True), "with float-quantized weights"),
    "other blocks": (
        "compressed-tensors",
        in_groups(strategy="block", block_structure=[64, 64]),
        "with float-quantized weights",
    ),
    "4-bit integers": (
        "compressed-tensors",
        lambda config: config["config_groups"]["group_0"].update(format="pack-quantized"),
        "with pack-quantized weights",
    ),
    "FP8 alone": ("compressed-tensors", without_fp8, "mixed-precision"),
    "rotations": (
        "compressed-tensors",
        lambda config: config.update(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "with transform_config",
    ),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each layout."""
    folders = {}
    for layout in ("ModelOpt", "compressed-tensors"):
        folder = tmp_path_factory.mktemp("mixed") / "model"
        write_mixed(write_checkpoint("qwen3", folder, {"tie_word_embeddings": False}), layout)
        folders[layout] = folder
    return folders


@pytest.mark.parametrize("case", REFUSED)
def test_other_mixtures_are_refused_at_dry_run_and_start(mixed: dict[str, Path], tmp_path: Path, case: str) -> None:
    layout, change, message = REFUSED[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for path in mixed[layout].iterdir():
        (folder / path.name).symlink_to(path)
    config = read_config(folder)
    change(config["quantization_config"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    policy = PolicyConfig(path=str(folder))
    for start in (policy.base_folder, lambda: shape_of(policy)):
        with pytest.raises(UserError, match=rf"16-bit activations; .*model has .*{message}.*: quantize the 16-bit"):
            start()


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.int8, torch.ones(1)),
        (torch.float8_e5m2, torch.ones(1)),
        (torch.float8_e4m3fn, torch.ones(64)),
        (torch.float8_e4m3fn, torch.ones(128, 4)),
        (torch.float8_e4m3fn, torch.ones(2, 1)),
        (torch.float8_e4m3fn, torch.ones(1, dtype=torch.int32)),
        (torch.float8_e4m3fn, torch.tensor(-0.1)),
        (torch.float8_e4m3fn, torch.tensor(torch.nan)),
        (torch.float8_e4m3fn, torch.full((128, 1), torch.inf)),
    ],
)
def test_8_bits_of_another_kind_are_refused_by_the_tensors_name(
    mixed: dict[str, Path], tmp_path: Path, codes: torch.dtype, scales: Tensor
) -> None:
    folder, name = tmp_path / "model", "model.layers.1.self_attn.q_proj.weight"
    folder.mkdir()
    (folder / "config.json").write_bytes((mixed["ModelOpt"] / "config.json").read_bytes())
    stored = {name: torch.zeros(128, 128).to(codes), f"{name}_scale": scales}
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"E4M3 floats with a scale for a matrix, a row or a block .*; {name} is"):
        TensorFiles(folder).read(name)
