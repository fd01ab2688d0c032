"""Models of random weights in the shapes of real ones, to measure speed and memory."""

import json
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import nvfp4_global_scale, quantize_nvfp4
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_pl.formats.architecture import fused_group
from qerl_pl.formats.model_folder import ShardWriter
from qerl_pl.formats.nvfp4 import CONFIG
from qerl_pl.toy.tokenizer import build_tokenizer

SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "tiny": (256, 512, 2, 4, 2, 512),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "8b": (4096, 12288, 36, 32, 8, 151936),
    "14b": (5120, 13824, 48, 40, 8, 152064),
    "32b": (5120, 27648, 64, 40, 8, 152064),
    "72b": (8192, 29568, 80, 64, 8, 152064),
}
QWEN3 = ("8b",)
"""Shapes of Qwen3, which has norms of queries and keys; the others are Qwen2's."""


def config_of(shape: str, positions: int = 32768) -> dict[str, Any]:
    """config.json of a Qwen2 or Qwen3 of this shape; no token ends a completion, so that every one has its full length.

    Args:
        shape: Of `SHAPES`.
        positions: Longest sequence that it knows, in tokens.
    """
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    kind = "Qwen3" if shape in QWEN3 else "Qwen2"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        **({"head_dim": hidden // heads} if kind == "Qwen3" else {}),
    }


def write_model(folder: Path, shape: str, device: torch.device, nvfp4: bool = True, positions: int = 32768) -> None:
    """A checkpoint of random weights, quantized group by group on `device`, or in bfloat16; with the toy tokenizer."""
    folder.mkdir(parents=True)
    config = config_of(shape, positions)
    quantization = {"quantization_config": CONFIG} if nvfp4 else {}
    (folder / "config.json").write_text(json.dumps(config | quantization))
    build_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    writer = ShardWriter(folder)
    generator = torch.Generator(device).manual_seed(0)

    def random(name: str) -> torch.Tensor:
        values = torch.empty(sizes[name], dtype=torch.bfloat16, device=device)
        return values.fill_(1.0) if "norm" in name else values.normal_(std=0.02, generator=generator)

    done: set[str] = set()
    for name in sizes:
        if not nvfp4 or not name.endswith("_proj.weight"):
            writer.add(name, random(name))
            continue
        group = fused_group(name)
        if name in done:
            continue
        done.update(group)
        weights = {member: random(member) for member in group}
        scale = nvfp4_global_scale(*weights.values())
        for member, weight in weights.items():
            stem, packed = member.removesuffix(".weight"), quantize_nvfp4(weight, scale)
            writer.add(f"{stem}.weight_packed", packed.packed)
            writer.add(f"{stem}.weight_scale", packed.scale)
            writer.add(f"{stem}.weight_global_scale", packed.global_scale.clone())
    writer.finish()
