"""NVFP4, alone and beside FP8, a 4-bit lm_head and scales of keys and values, as ModelOpt 0.47 and llm-compressor 0.14
write it: names, data types, shapes and settings of their files."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_copies import copy_of
from qerl_kernels import quantize_mxfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from tiny_families import write_checkpoint, write_wrapped_qwen
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.cli.dry_run import shape_of
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.fp4 import NVFP4Format
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.families import fused_group
from qerl_pl.models.folder import TensorFiles, load_config, read_config
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a linear by the end of their names, and the weight that they mean."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MLP = ("gate_proj", "up_proj", "down_proj")
DOWN = "model.layers.0.mlp.down_proj"
VALUE = "model.layers.0.self_attn.v_proj"


def in_fp8(weight: Tensor, stored: Tensor, factors: Tensor) -> Stored:
    codes = (weight / factors).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": stored}, codes.float() * factors


def by_matrix(weight: Tensor, modelopt: bool) -> Stored:
    scale = weight.abs().max() / 448
    scale, inputs = (scale, torch.tensor(0.01)) if modelopt else (scale.bfloat16().reshape(1), torch.ones(1).bfloat16())
    tensors, dense = in_fp8(weight, scale, scale.float().reshape(1, 1))
    return tensors | {"input_scale": inputs}, dense


def by_row(weight: Tensor, modelopt: bool) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    scale = scale if modelopt else scale.bfloat16()
    return in_fp8(weight, scale[:, 0] if modelopt else scale, scale.float())


def by_block(weight: Tensor, modelopt: bool) -> Stored:
    """Of 128 by 128 weights; ModelOpt stores a number where there is one block, else four dimensions."""
    grid = torch.zeros(math.ceil(len(weight) / 128), math.ceil(weight.shape[1] / 128))
    factors = torch.zeros_like(weight)
    for i in range(len(grid)):
        for j in range(grid.shape[1]):
            part = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scale = weight[part].abs().max() / 448
            grid[i, j] = factors[part] = scale if modelopt else scale.bfloat16().float()
    stored = (grid.reshape(()) if grid.numel() == 1 else grid[:, None, :, None]) if modelopt else grid.bfloat16()
    return in_fp8(weight, stored, factors)


def in_4_bits(weight: Tensor, of_group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, block scales, the divisor that a group shares, and what they mean."""
    packed, scale, divisor = quantize_nvfp4(weight, 2688 / of_group.abs().max().reshape(1))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return packed, scale, divisor, FLOAT4[codes.int()] * (scale.float() / divisor).repeat_interleave(16, 1)


def in_nvfp4(weight: Tensor, modelopt: bool, group: Tensor, inputs: bool) -> Stored:
    packed, scale, divisor, dense = in_4_bits(weight, group)
    if modelopt:
        stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": (1 / divisor).reshape(())}
        return stored | ({"input_scale": torch.tensor(0.01)} if inputs else {}), dense
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    return stored | ({"input_global_scale": torch.tensor([100.0])} if inputs else {}), dense


Fp8 = Callable[[Tensor, bool], Stored]
ALGORITHMS: dict[Fp8, str] = {by_matrix: "FP8", by_row: "FP8_PER_CHANNEL_PER_TOKEN", by_block: "fp8_pb_wo"}
"""ModelOpt's names of layers, the last in small letters as it writes them."""
CACHES = ("FP8", "NVFP4_AFFINE")


def write_as(
    writer: str, folder: Path, family: str = "qwen3", fp8: Fp8 | None = None, inputs: bool = True,
    head: bool = False, tied: bool = False, cache: str | None = None, hidden: int = 128,
) -> dict[str, Tensor]:  # fmt: skip
    """Write a tiny checkpoint, or change the one that is there; returns the dense tensors that it means.

    Args:
        writer: "ModelOpt" or "llm-compressor".
        folder: To write.
        family: Of the model.
        fp8: Of attention and delta nets; None for NVFP4 in them, too.
        inputs: Whether NVFP4 has scales of activations.
        head: Whether lm_head is in NVFP4.
        tied: Whether it is the embeddings.
        cache: Format of keys and values; of "FP8 cast" no scale is stored.
        hidden: Hidden size.
    """
    if not folder.exists():
        write_checkpoint(family, folder, {"tie_word_embeddings": tied, "hidden_size": hidden})
    modelopt, stored, dense = writer == "ModelOpt", dict[str, Tensor](), dict[str, Tensor]()
    four = "NVFP4" if inputs else "W4A16_NVFP4"
    layers: dict[str, dict[str, Any]] = {}
    before = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    if tied and head:
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    for name, tensor in before.items():
        linear, kind = name.removesuffix(".weight"), name.removesuffix(".weight").rpartition(".")[2]
        if kind in ATTENTION and fp8 is not None:
            tensors, dense[name] = fp8(tensor.float(), modelopt)
            layers[linear] = {"quant_algo": ALGORITHMS[fp8]}
        elif kind in (*ATTENTION, *MLP) or (kind == "lm_head" and head):
            group = torch.cat([before[one].float() for one in fused_group(name)])
            tensors, dense[name] = in_nvfp4(tensor.float(), modelopt, group, inputs)
            layers[linear] = {"quant_algo": four, "group_size": 16}
        else:
            stored[name], dense[name], tensors = tensor, tensor.float(), {}
        stored |= {f"{linear}.{end}": value for end, value in tensors.items()}
        if cache in CACHES and kind in ("k_proj", "v_proj"):
            owner, scale = (linear, torch.tensor(0.02)) if modelopt else (linear[:-7], torch.ones(1).bfloat16())
            stored[f"{owner}.{kind[0]}_scale"] = scale
            if cache == "NVFP4_AFFINE":
                stored[f"{owner}.{kind[0]}_bias"] = torch.ones(1, 2, 1, 32).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    if modelopt:
        config["quantization_config"], document = modelopt_settings(layers, four, cache)
        (folder / "hf_quant_config.json").write_text(json.dumps(document))
    else:
        config["quantization_config"] = compressor_settings(fp8, inputs, head, cache)
    (folder / "config.json").write_text(json.dumps(config))
    if tied:
        dense.pop("lm_head.weight", None)
    return dense


def modelopt_settings(
    layers: dict[str, dict[str, Any]], four: str, cache: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`quantization_config` of config.json, and hf_quant_config.json."""
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group_4 = ({"input_activations": weights} if four == "NVFP4" else {}) | {"weights": weights}
    groups_8: dict[str, dict[str, Any]] = {
        "FP8": {"input_activations": eight, "weights": eight},
        "FP8_PER_CHANNEL_PER_TOKEN": {"input_activations": eight, "weights": eight | {"strategy": "channel"}},
        "fp8_pb_wo": {"quant_algo": "fp8_pb_wo"},
    }
    cache = cache and cache.removesuffix(" cast")
    producer = {"name": "modelopt", "version": "0.47.0"}
    algorithms = {layer["quant_algo"] for layer in layers.values()}
    ignored = ["lm_head", "model.embed_tokens"]
    inner: dict[str, Any] = {"quant_algo": four, "kv_cache_quant_algo": cache}
    if len(algorithms) == 1:
        inner |= {"group_size": 16, "exclude_modules": ignored}
        settings: dict[str, Any] = {"config_groups": {"group_0": group_4 | {"targets": ["Linear"]}}, "ignore": ignored}
    else:
        inner |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        groups = {}
        for number, algorithm in enumerate(sorted(algorithms - {four}) + [four]):
            targets = sorted(name for name, layer in layers.items() if layer["quant_algo"] == algorithm)
            groups[f"group_{number}"] = groups_8.get(algorithm, group_4) | {"targets": targets}
        settings = {"config_groups": groups, "quantized_layers": layers, "ignore": []}
    settings |= {"quant_algo": inner["quant_algo"], "producer": producer, "quant_method": "modelopt"}
    settings |= {"kv_cache_scheme": eight if cache == "FP8" else cache} if cache else {}
    return settings, {"producer": producer, "quantization": inner}


def compressor_settings(fp8: Fp8 | None, inputs: bool, head: bool, cache: str | None) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    unset = dict.fromkeys(("actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"))
    eight = {**unset, "dynamic": False, "num_bits": 8, "observer_kwargs": {}, "symmetric": True, "type": "float"}
    four = eight | {"num_bits": 4, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group"}
    groups: list[dict[str, Any]] = []
    if fp8 is not None:
        strategy = {by_matrix: "tensor", by_row: "channel", by_block: "block"}[fp8]
        blocks = {"block_structure": [128, 128]} if fp8 is by_block else {}
        static = {"strategy": "tensor", "observer": "static_minmax"}
        activations = {by_matrix: static, by_row: {"strategy": "token", "dynamic": True}}.get(
            fp8, {"strategy": "group", "dynamic": True, "group_size": 128}
        )
        weights = eight | {"strategy": strategy, "observer": "memoryless_minmax"} | blocks
        groups.append({"format": "float-quantized", "weights": weights, "input_activations": eight | activations})
    activations_4 = four | {"dynamic": "local", "observer": "static_minmax"} if inputs else None
    weights = four | {"observer": "memoryless_minmax"}
    groups.append({"format": "nvfp4-pack-quantized", "weights": weights, "input_activations": activations_4})
    targets = [["Linear"]] if fp8 is None else [["re:.*self_attn.*_proj$"], ["re:.*mlp.*_proj$"]]
    return {
        "config_groups": {
            f"group_{number}": group | {"output_activations": None, "targets": target}
            for number, (group, target) in enumerate(zip(groups, targets, strict=True))
        },
        "format": "nvfp4-pack-quantized" if fp8 is None else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": [] if head else ["lm_head"],
        "kv_cache_scheme": eight | {"strategy": "tensor"} if cache else None,
        **{"quant_method": "compressed-tensors", "quantization_status": "compressed", "version": "0.19.0"},
        **{"sparsity_config": {}, "transform_config": {}},
    }


QWEN: dict[str, Any] = {"family": "qwen3.5", "fp8": by_matrix, "inputs": False, "head": True, "cache": "FP8 cast"}
WRITTEN: dict[str, dict[str, Any]] = {
    "ModelOpt NVFP4": {},
    "ModelOpt W4A16_NVFP4": {"inputs": False},
    "ModelOpt NVFP4, tied": {"tied": True},
    "ModelOpt NVFP4, FP8 cache": {"cache": "FP8"},
    "ModelOpt NVFP4, cache with biases": {"cache": "NVFP4_AFFINE"},
    "ModelOpt NVFP4 and FP8 by row": {"fp8": by_row},
    "ModelOpt NVFP4 and FP8 by block": {"fp8": by_block},
    "ModelOpt NVFP4 and FP8 by many blocks": {"fp8": by_block, "hidden": 160},
    "ModelOpt for Qwen3.5": QWEN,
    "ModelOpt for Qwen3.5, tied": QWEN | {"tied": True},
    "llm-compressor NVFP4": {},
    "llm-compressor NVFP4A16": {"inputs": False},
    "llm-compressor NVFP4, lm_head": {"head": True},
    "llm-compressor NVFP4, FP8 cache": {"cache": "FP8"},
    "llm-compressor NVFP4 and FP8 by row": {"fp8": by_row},
    "llm-compressor NVFP4A16 and FP8 by block": {"fp8": by_block, "inputs": False},
    "llm-compressor NVFP4 and FP8 by many blocks": {"fp8": by_block, "hidden": 160},
    "llm-compressor NVFP4 and FP8 by matrix, FP8 cache": {"fp8": by_matrix, "cache": "FP8"},
}
"""Settings of `write_as` by what a checkpoint is; the first word is its writer."""


def policy_of(folder: Path, **settings: Any) -> Policy:
    config = PolicyConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=2), **settings)
    return Policy(folder, config, torch.device("cpu"), seed=0).eval()


def logprobs_of(policy: Policy) -> Tensor:
    ids = torch.arange(24)[None] * 7 + 30
    with torch.no_grad():
        return policy.token_values(ids, torch.tensor([24]), torch.arange(24)[None] > 0, 1.0)[0]


@pytest.mark.parametrize("case", WRITTEN)
def test_every_weight_of_a_published_checkpoint_is_read_by_its_value_and_copied_once_without_fp8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    folder, settings = tmp_path / "model", WRITTEN[case]
    fp8, cached = settings.get("fp8"), settings.get("cache") in CACHES
    expected = write_as(case.split()[0], folder, **settings)
    original = TensorFiles(folder)
    attention = [name for name in expected if name.endswith(tuple(f"{kind}.weight" for kind in ATTENTION))]
    assert len(original.fp8) == (len(attention) if fp8 else 0) and not original.skipped
    config = PolicyConfig(path=str(folder), dtype="float32")
    shape = shape_of(config)
    with caplog.at_level(logging.INFO, "qerl_pl"):
        base = config.base_folder()
    said = [record.getMessage() for record in caplog.records]
    assert said.count(f"{len(attention)} linears in FP8 are read in 16 bits, as their activations are") == bool(fp8)
    assert said.count("the scales that the base has for keys and values in 8 bits are not used") == cached
    assert (base == folder) == (not {"fp8", "cache", "head"} & settings.keys())
    assert base == config.base_folder() == PolicyConfig(path=str(base)).base_folder()
    ids = torch.arange(24)[None] * 7 + 30
    for read in {base if settings.get("tied") else folder, base}:  # a policy starts from no second lm_head
        dense = dict(format_of(read).iterate_dense(TensorFiles(read), torch.float32))
        assert dense.keys() == expected.keys()
        for name, tensor in expected.items():  # FP8 and a 4-bit lm_head are rounded to the embeddings' bfloat16
            rounded = read != folder and name.rpartition(".")[0].endswith(("lm_head", *ATTENTION))
            torch.testing.assert_close(dense[name], tensor, rtol=2**-8 if rounded else 1e-6, atol=0, msg=name)
        if fp8:
            wide = "model.layers.1.self_attn.o_proj.weight"
            assert torch.equal(TensorFiles(read).first_rows(64).read(wide).float(), dense[wide][:64])
        model = AutoModelForCausalLM.from_config(load_config(base), dtype=torch.float32).eval()
        model.load_state_dict(dense, strict="lm_head.weight" in dense)
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        found = logprobs_of(policy_of(read))[0, 1:]
        torch.testing.assert_close(found, logits.gather(1, ids[0, 1:, None])[:, 0], rtol=1e-4, atol=2e-5)
    sixteen = sum(expected[name].numel() for name in attention) if fp8 else 0
    assert shape.dense_weights == sixteen == shape_of(PolicyConfig(path=str(base))).dense_weights
    held, quantized = load_file(base / "model.safetensors"), read_config(base)["quantization_config"]
    if base != folder:
        assert quantized["format"] == "nvfp4-pack-quantized" and "kv_cache_scheme" not in quantized
        assert {*quantized["ignore"]} >= {"lm_head", *(name.removesuffix(".weight") for name in attention if fp8)}
        assert not [name for name in held if name.endswith(("k_scale", "v_scale", "input_scale", "input_global_scale"))]
    packed = [name for name in held if name.endswith(("packed", "mlp.down_proj.weight_scale"))]
    assert all(torch.equal(held[n].view(torch.uint8), original.read(n).view(torch.uint8)) for n in packed)


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
"""Changes a checkpoint's tensors and its `quantization_config`."""


def put(end: str, change: Callable[[Tensor], Tensor], linear: str = DOWN) -> Change:
    return lambda tensors, _: tensors.update({f"{linear}.{end}": change(tensors[f"{linear}.{end}"])})


def every(end: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, _: tensors.update({n: change(t) for n, t in tensors.items() if n.endswith(end)})


def add(name: str, tensor: Tensor) -> Change:
    return lambda tensors, _: tensors.update({name: tensor})


def without(end: str, linear: str = DOWN) -> Change:
    return lambda tensors, _: tensors.pop(f"{linear}.{end}")


def asks(**settings: Any) -> Change:
    return lambda _, config: config.update(settings)


def in_layers(**settings: Any) -> Change:
    return lambda _, config: config["quantized_layers"][DOWN].update(settings)


def in_bfloat16(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    """One of q, k and v."""
    for end in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        tensors.pop(f"{VALUE}.{end}")
    tensors[f"{VALUE}.weight"] = torch.ones(64, 128).bfloat16()


def four_bit_embeddings(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    stored, _ = in_nvfp4(tensors.pop("model.embed_tokens.weight").float(), False, torch.ones(1), False)
    tensors |= {f"model.embed_tokens.{end}": tensor for end, tensor in stored.items()}


def in_groups(**weights: Any) -> Change:
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(weights)


MO, LC, MIXED, LC_MIXED = (
    "ModelOpt NVFP4",
    "llm-compressor NVFP4",
    "ModelOpt NVFP4 and FP8 by row",
    "llm-compressor NVFP4 and FP8 by row",
)
NO_FP8 = "mixed-precision with float-quantized weights"
ROTATIONS = {"config_groups": {"R1": {"type": "hadamard"}}}
REFUSED: dict[str, tuple[str, Change, str]] = {
    "no block scale": (LC, without("weight_scale"), "needs its scales; .*model lacks .*down_proj.weight_scale;"),
    "no divisor": (LC, without("weight_global_scale"), "needs its scales; .*model lacks .*weight_global_scale;"),
    "no factor": (MO, without("weight_scale_2"), "down_proj.weight of .* must be in F8_E4M3; it is in U8, or lacks"),
    "no codes": (LC, without("weight_packed"), "needs its scales; .*model lacks .*down_proj.weight_packed;"),
    "FP8 without scale": (MIXED, without("weight_scale", VALUE), "in BF16 or F16 or F32; it is in F8_E4M3, or lacks"),
    "FP8 of another kind": (MIXED, put("weight", lambda w: w.float().to(torch.float8_e5m2), VALUE), "is in F8_E5M2"),
    "two factors": (MO, put("weight_scale_2", lambda s: s.repeat(2)), r"one global scale; .* has \(2,\)"),
    "a factor of zero": (MO, put("weight_scale_2", torch.zeros_like), "must be positive numbers; got .*inf"),
    "a factor that is none": (MO, put("weight_scale_2", lambda s: s * torch.nan), "positive numbers; got .*nan"),
    "a negative divisor": (LC, put("weight_global_scale", torch.neg), "must be positive numbers; got .*-"),
    "bfloat16 block scales": (LC, put("weight_scale", Tensor.bfloat16), "must be in F8_E4M3; it is in BF16"),
    "block scales as bytes": (MO, put("weight_scale", lambda s: s.view(torch.uint8)), "in F8_E4M3; it is in U8"),
    "signed codes": (MO, put("weight", lambda w: w.view(torch.int8)), "must be in U8; it is in I8"),
    "codes in two bytes": (MO, put("weight", lambda w: w.repeat(1, 2)), "a scale for every 16 weights of a row"),
    "blocks of 32": (LC, put("weight_scale", lambda s: s[:, ::2]), "a scale for every 16 weights of a row"),
    "zero points": (LC, add(f"{DOWN}.weight_zero_point", torch.zeros(128, 12).byte()), "weight_zero_point of a base"),
    "smoothed inputs": (MO, add(f"{DOWN}.pre_quant_scale", torch.ones(192)), "has .*pre_quant_scale besides"),
    "a bias": (MO, add(f"{DOWN}.bias", torch.ones(128)), "must describe the weights .* has .*down_proj.bias besides"),
    "stored twice": (LC, add(f"{DOWN}.weight", torch.ones(128, 192)), "in one format, each stored once; .*down_proj"),
    "q, k and v differ": (MO, in_bfloat16, "must be in one format, .*: model.layers.0.self_attn.v_proj.weight;"),
    "4-bit embeddings": (LC, four_bit_embeddings, "model.embed_tokens must be in 16 bits; it is in NVFP4"),
    "AWQ": (MO, asks(quant_algo="NVFP4_AWQ", config_groups=None), "has modelopt NVFP4_AWQ: quantize"),
    "SVDQuant": (MO, asks(quant_algo="NVFP4_SVD"), "has modelopt NVFP4_SVD: quantize"),
    "an algorithm of tomorrow": (MO, asks(quant_algo=5), "has modelopt 5: quantize"),
    "AWQ of a layer": (MIXED, in_layers(pre_quant_scale=True), "with quantized_layers .*pre_quant_scale"),
    "blocks of 32 of a layer": (MIXED, in_layers(group_size=32), "with quantized_layers .*'group_size': 32"),
    "smoothed groups": (
        MO,
        lambda _, config: config["config_groups"]["group_0"].update(pre_quant_scale=True),
        "modelopt with pre_quant_scale True",
    ),
    "FP8 alone of ModelOpt": (MO, asks(quant_algo="FP8"), "has modelopt.*: quantize the 16-bit model"),
    "MXFP8 alone": (MO, asks(quant_algo="MXFP8"), "has modelopt.*: quantize the 16-bit model"),
    "groups of 32": (MO, asks(group_size=32), "has modelopt with group_size 32: quantize the 16-bit model"),
    "8 bits": (MO, asks(config_groups={"a": {"weights": {"num_bits": 8}}}), "with weights {'num_bits': 8}: quantize"),
    "named groups": (MO, asks(config_groups="NVFP4"), "has modelopt with weights None: quantize the 16-bit model"),
    "MXFP8 layers": (
        MIXED,
        lambda _, config: config["quantized_layers"].update(x={"quant_algo": "MXFP8"}),
        "has modelopt with quantized_layers .*: quantize",
    ),
    "layers by another name": (MIXED, asks(quantized_layers=["x"]), "with quantized_layers .*: quantize"),
    "8-bit integers of ModelOpt": (MIXED, in_groups(type="int"), "has modelopt with weights .*: quantize"),
    "smoothed": (MIXED, asks(pre_quant_scale=True), "has modelopt with pre_quant_scale True: quantize"),
    "8-bit integers": (LC_MIXED, in_groups(type="int"), f"has {NO_FP8}.*: quantize"),
    "asymmetric": (LC_MIXED, in_groups(symmetric=False), f"has {NO_FP8}.*: quantize"),
    "dynamic": (LC_MIXED, in_groups(dynamic=True), f"has {NO_FP8}.*: quantize"),
    "other blocks": (LC_MIXED, in_groups(strategy="block", block_structure=[64, 64]), f"has {NO_FP8}.*: quantize"),
    "4-bit integers": (
        LC_MIXED,
        lambda _, config: config["config_groups"]["group_0"].update(format="pack-quantized"),
        "with pack-quantized weights.*: quantize",
    ),
    "FP8 without NVFP4": (LC_MIXED, lambda _, config: config["config_groups"].pop("group_1"), "has mixed-precision.*:"),
    "rotations": (LC_MIXED, asks(transform_config=ROTATIONS), "with transform_config.*: quantize"),
    "2-bit integers": (LC, asks(format="pack-quantized"), "has pack-quantized: quantize the 16-bit model"),
    "FP8 alone": (LC, asks(format="float-quantized"), "has float-quantized: quantize the 16-bit model"),
}
SAME: dict[str, tuple[str, Change]] = {
    "factors in a row": (MO, every("weight_scale_2", lambda scale: scale.reshape(1))),
    "divisors without dimension": (LC, every("weight_global_scale", lambda scale: scale.reshape(()))),
    "no scales of activations": (
        MO,
        lambda tensors, _: [tensors.pop(n) for n in list(tensors) if n.endswith("input_scale")],
    ),
    "small letters": (MO, asks(quant_algo="nvfp4")),
    "zero points of the cache": (LC, add("model.layers.0.self_attn.k_zero_point", torch.zeros(1).byte())),
    "lm_head by a pattern": (LC, asks(ignore=["re:.*lm_head", "model.layers.0.self_attn.qkv_proj"])),
    "hf_quant_config.json alone": (MO, lambda _, config: config.clear()),
    "hf_quant_config.json alone, FP8 beside": (MIXED, lambda _, config: config.clear()),
    "config.json first": (MO, asks()),
    "scales in another file": (LC, asks()),
    "scales in another file, FP8 beside": (MIXED, asks()),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Folders and their dense tensors."""
    folders = {case: tmp_path_factory.mktemp("written") / "model" for case in (MO, LC, MIXED, LC_MIXED)}
    return {case: (folder, write_as(case.split()[0], folder, **WRITTEN[case])) for case, folder in folders.items()}


def changed(source: Path, folder: Path, change: Change) -> PolicyConfig:
    tensors, config = load_file(source / "model.safetensors"), read_config(source)
    change(tensors, config["quantization_config"])
    copy_of(source, folder, {name: tensor.contiguous() for name, tensor in tensors.items()}, **config)
    return PolicyConfig(path=str(folder), dtype="float32")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_right_is_refused_at_dry_run_and_start(
    written: dict[str, tuple[Path, dict[str, Tensor]]], tmp_path: Path, case: str
) -> None:
    source, change, message = REFUSED[case]
    config = changed(written[source][0], tmp_path / "model", change)
    for start in (config.base_folder, lambda: shape_of(config)):
        with pytest.raises(UserError, match=message) as error:
            start()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", SAME)
def test_other_ways_to_store_the_same_are_read_alike(
    written: dict[str, tuple[Path, dict[str, Tensor]]], tmp_path: Path, case: str
) -> None:
    source, change = SAME[case]
    config = changed(written[source][0], tmp_path / "model", change)
    if case == "config.json first":
        (tmp_path / "model" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    if case.startswith("scales in another file"):
        stored = load_file(tmp_path / "model" / "model.safetensors")
        files = {name: f"{'scale' in name}.safetensors" for name in stored}
        for file in set(files.values()):
            save_file(
                {name: tensor for name, tensor in stored.items() if files[name] == file}, config.path + "/" + file
            )
        (tmp_path / "model" / "model.safetensors").unlink()
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    shape_of(config)
    base = config.base_folder()
    for name, tensor in format_of(base).iterate_dense(TensorFiles(base), torch.float32):
        rtol = 2**-8 if source == MIXED else 1e-6  # FP8 is copied in bfloat16
        torch.testing.assert_close(tensor, written[source][1][name], rtol=rtol, atol=0, msg=name)


def test_the_linears_of_beta_and_decay_must_share_a_global_scale(tmp_path: Path) -> None:
    """vLLM runs them as one matrix; llm-compressor gives each its own."""
    stored = {}
    for linear, size in (("in_proj_a", 1.0), ("in_proj_b", 2.0)):
        tensors, _ = in_nvfp4(torch.ones(4, 32), False, torch.tensor([size]), False)
        stored |= {f"model.layers.0.linear_attn.{linear}.{end}": tensor for end, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    with pytest.raises(UserError, match=r"must share one global scale; got .*in_proj_b.weight=1344, .*in_proj_a"):
        NVFP4Format().check(TensorFiles(tmp_path))


def test_a_tied_4_bit_lm_head_that_is_not_the_embeddings_is_refused(tmp_path: Path) -> None:
    write_as("llm-compressor", tmp_path / "model", head=True)
    config = read_config(tmp_path / "model") | {"tie_word_embeddings": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lm_head must be the embeddings; those of .*model differ .*: set it to false"):
        PolicyConfig(path=str(tmp_path / "model")).base_folder()


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


def test_an_lm_head_in_nf4_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint("qwen3", tmp_path / "source", {"tie_word_embeddings": False})
    quantize_checkpoint(source, tmp_path / "model", "nf4")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj"
    head = {name.replace(query, "lm_head"): stored[name].clone() for name in stored if name.startswith(query)}
    save_file(stored | head, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match="lm_head must be in 16 bits; .*model has it in NF4: quantize"):
        policy_of(tmp_path / "model")


@pytest.mark.parametrize(("writer", "nested"), [("ModelOpt", False), ("llm-compressor", True)])
def test_a_published_model_of_text_and_images_is_taken_out_by_quantize(
    tmp_path: Path, writer: str, nested: bool
) -> None:
    """As Qwen's own: FP8 in attention and delta nets, NVFP4 in MLPs and lm_head, layers for speculative decoding.

    The settings may be in `text_config`, where vLLM finds them, too.
    """
    text = write_checkpoint("qwen3.5", tmp_path / "text", {"tie_word_embeddings": False})
    wrapped = write_wrapped_qwen(text, tmp_path / "wrapped")
    settings: dict[str, Any] = {"fp8": by_matrix, "head": True, "cache": "FP8"}
    write_as(writer, wrapped, **settings)
    if nested:
        config = read_config(wrapped)
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (wrapped / "config.json").write_text(json.dumps(config))
    expected = write_as(writer, text, **settings)
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
    assert torch.equal(found[name], expected[name].bfloat16())
    assert PolicyConfig(path=str(tmp_path / "out")).base_folder() == tmp_path / "out"
    assert logprobs_of(policy_of(tmp_path / "out")).isfinite().all()


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
    written: dict[str, tuple[Path, dict[str, Tensor]]], tmp_path: Path, codes: torch.dtype, scales: Tensor
) -> None:
    folder, name = tmp_path / "model", "model.layers.1.self_attn.q_proj.weight"
    folder.mkdir()
    (folder / "config.json").write_bytes((written[MIXED][0] / "config.json").read_bytes())
    stored = {name: torch.zeros(128, 128).to(codes), f"{name}_scale": scales}
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"E4M3 floats with a scale for a matrix, a row or a block .*; {name} is"):
        TensorFiles(folder).read(name)
