"""Random checkpoints of dense families: a few layers in the shapes of models of 3 to 8 billion weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_pl.models.families import family_of
from qerl_pl.models.folder import ShardWriter
from qerl_pl.toy.tokenizer import build_tokenizer
from qerl_pl.types import Prompt

LLAMA_3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def long_rope(pairs: int, original: int = 4096) -> dict[str, Any]:
    """Phi-4 mini's kind, with factors of this size for so many pairs of channels."""
    factors: dict[str, Any] = {
        "short_factor": [1 + 0.01 * i for i in range(pairs)],
        "long_factor": [1 + i for i in range(pairs)],
    }
    rest = {"original_max_position_embeddings": original, "partial_rotary_factor": 0.75}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **rest}


def layers_of(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


TINY = {**layers_of(256, 512, 2, 4, 2, 64), "vocab_size": 512, "max_position_embeddings": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama-3.1-8B",
        {
            **layers_of(4096, 14336, 4, 32, 8, 128),
            "rope_parameters": LLAMA_3 | {"rope_theta": 5e5, "original_max_position_embeddings": 4096},
        },
    ),
    "mistral": (
        "Mistral-7B-v0.1",
        {**layers_of(4096, 14336, 4, 32, 8, 128), "sliding_window": 4096, "rope_parameters": plain_rope(1e4)},
    ),
    "qwen2": ("Qwen2.5-7B", {**layers_of(3584, 18944, 4, 28, 4, 128), "rope_parameters": plain_rope(1e6)}),
    "qwen3": ("Qwen3-8B", {**layers_of(4096, 12288, 4, 32, 8, 128), "rope_parameters": plain_rope(1e6)}),
    "phi3": (
        "Phi-4-mini",
        {
            **layers_of(3072, 8192, 4, 24, 8, 128),
            "sliding_window": 262144,
            "original_max_position_embeddings": 4096,
            "rope_parameters": long_rope(48),
            "tie_word_embeddings": True,
        },
    ),
    "phi3_mini": (
        "Phi-3-mini-4k",
        {**layers_of(3072, 8192, 4, 32, 32, 96), "sliding_window": 2047, "rope_parameters": plain_rope(1e4)},
    ),
    "gemma2": (
        "Gemma-2-2B",
        {
            **layers_of(2304, 9216, 4, 8, 4, 256),
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
            "rope_parameters": plain_rope(1e4),
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma-3-4B",
        {
            **layers_of(2560, 10240, 6, 8, 4, 256),
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
            "rope_parameters": {
                "sliding_attention": plain_rope(1e4),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
}
"""By family, the model whose layers they are and config.json.

phi3_mini has heads of 96 channels and a window. gemma2's window is a quarter of the real one, and its soft caps are of
the size of random scores and logits.
"""


def config_of(name: str, shape: str) -> dict[str, Any]:
    """config.json; no token ends a completion, so that every one has its full length."""
    config: dict[str, Any] = {
        "vocab_size": 32768,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "attention_dropout": 0.0,
    }
    config |= {"tie_word_embeddings": False} | MODELS[name][1]
    if shape == "tiny":
        config |= TINY | ({"sliding_window": 24} if "sliding_window" in config else {})
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][-2:]
        if "original_max_position_embeddings" in config:
            config |= {"rope_parameters": long_rope(24, 128), "original_max_position_embeddings": 128}
    model_type = "phi3" if name.startswith("phi3") else name
    config |= {"model_type": model_type, "architectures": [f"{family_of(model_type).classes}ForCausalLM"]}
    return config | {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def write_source(folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """A 16-bit checkpoint of random weights, whose norms and biases show, with the toy tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    writer, family = ShardWriter(folder), family_of(config["model_type"])
    generator = torch.Generator(device).manual_seed(0)
    # Scaled embeddings that are the output layer, too, repeat the last token unless they are small beside the layers.
    scaled = family.embedding_scale is not None
    queries_and_keys = (config["num_attention_heads"] + config["num_key_value_heads"]) * config["head_dim"]
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if "norm" in name:
            middle = 5.0 if scaled and name == "model.norm.weight" else 1.0  # multiplies the logits
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                middle = 2.0
            values.uniform_(middle - 0.25, middle + 0.25, generator=generator).sub_(family.norm_offset)
        else:
            values.normal_(std=0.004 if scaled and "embed" in name else 0.02, generator=generator)
        # Scores with a deviation of 4: nearly all attention is on a few tokens, so that a wrong window shows.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values.mul_(100 / config["hidden_size"] ** 0.5)
        elif name.endswith("qkv_proj.weight"):
            values[:queries_and_keys].mul_(100 / config["hidden_size"] ** 0.5)
        writer.add(name, values)
    writer.finish()


def prompts_of(config: Mapping[str, Any], count: int) -> list[Prompt]:
    """Random prompts of 16 to 256 tokens (a tenth of it in the tiny shape), the last one twice the window."""
    vocabulary, known = config["vocab_size"], config["max_position_embeddings"]
    generator = torch.Generator().manual_seed(1)
    longest = 256 if known > 256 else 26
    window = config.get("sliding_window") or known
    lengths = torch.randint(longest // 16, longest + 1, (count,), generator=generator).tolist()
    lengths[-1] = 2 * window if window < known else 3 * longest
    return [
        Prompt(str(index), tuple(torch.randint(10, vocabulary, (length,), generator=generator).tolist()), "", "")
        for index, length in enumerate(lengths)
    ]
