"""A tiny random checkpoint of each family, written by transformers, whose every part shows in the output."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qerl_pl.toy.tokenizer import build_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "attention_dropout": 0.1,  # of pretraining: a policy has none
    "rms_norm_eps": 0.01,  # so large that another one is seen
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + 0.3 * i for i in range(12)],
    "original_max_position_embeddings": 160,
    "partial_rotary_factor": 0.75,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama-3": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3": Qwen3Config,
    "phi-4": Phi3Config,
    "phi-4-mini": Phi3Config,
    "gemma-2": Gemma2Config,
    "gemma-3": Gemma3TextConfig,
    "gemma-4": Gemma4TextConfig,
    "qwen3-moe": Qwen3MoeConfig,
    "gpt-oss": GptOssConfig,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-3": {"rope_parameters": STRETCHED},
    "mistral": {"sliding_window": 24},
    "qwen3": {"tie_word_embeddings": True},
    "phi-4": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phi-4-mini": {
        "sliding_window": 24,
        "rope_parameters": LONG,
        "original_max_position_embeddings": 160,
        "tie_word_embeddings": True,
    },
    "gemma-2": {
        "query_pre_attn_scalar": 50,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 2.0,  # of the size of what they cap, or they would not show
        "final_logit_softcapping": 4.0,
    },
    "gemma-3": {
        "query_pre_attn_scalar": 50,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    },
    "gemma-4": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 4.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    },
    "qwen3-moe": {
        "rms_norm_eps": 1e-6,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        "rms_norm_eps": 1e-5,  # the one that vLLM computes
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 24,
        "rope_parameters": YARN,
    },
    "qwen3.5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
}
OPTIONS["qwen3.5-moe"] = OPTIONS["qwen3.5"] | {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
}
"""What each has besides SIZES; phi-4-mini stands for Phi-3 mini's window, too."""
MODELS = tuple(CONFIGS)
CONFIGS["qwen2"], OPTIONS["qwen2"] = Qwen2Config, {}  # the toy policy's family, which other tests run
# test_delta_nets.py and test_shared_experts.py run these: vLLM's CPU build does not in float32.
CONFIGS["qwen3.5"], CONFIGS["qwen3.5-moe"] = Qwen3_5TextConfig, Qwen3_5MoeTextConfig
STORED = {name: "mxfp4" if name == "gpt-oss" else "nvfp4" for name in CONFIGS}
"""The 4-bit format of each in tests: gpt-oss has one alone."""
EXPERTS = ("qwen3-moe", "gpt-oss")
"""Mixtures of experts, which are frozen."""


def _write_around(inner: Any, wrapped: Any, folder: Path, **options: Any) -> Path:
    """Write a model of text and images, with the weights of a text model and the toy policy's tokenizer."""
    wrapped.model.language_model.load_state_dict(inner.model.state_dict())
    wrapped.lm_head.load_state_dict(inner.lm_head.state_dict())
    wrapped.save_pretrained(folder, **options)
    build_tokenizer().save_pretrained(folder)
    return folder


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_wrapped(text_model: Path, folder: Path) -> Path:
    """Write a model of text and images around the weights of a Gemma 3 checkpoint."""
    inner = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    config = Gemma3Config(
        text_config=inner.config.to_dict(),
        vision_config=VISION | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **{key: getattr(inner.config, key) for key in ("pad_token_id", "bos_token_id")},
        eos_token_id=[inner.config.eos_token_id, 7],
        tie_word_embeddings=inner.config.tie_word_embeddings,
    )
    return _write_around(inner, Gemma3ForConditionalGeneration(config), folder)


def write_wrapped_gemma4(text_model: Path, folder: Path) -> Path:
    """Write a model of text and images around the weights of a Gemma 4 checkpoint."""
    inner = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    config = Gemma4Config(
        text_config=inner.config.to_dict(),
        vision_config=VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
        tie_word_embeddings=inner.config.tie_word_embeddings,
    )
    return _write_around(inner, Gemma4ForConditionalGeneration(config), folder)


def write_wrapped_qwen(text_model: Path, folder: Path) -> Path:
    """Write a model of text and images around a Qwen3.5 checkpoint, as published: with layers for speculation."""
    inner = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    moe = inner.config.model_type == "qwen3_5_moe_text"
    kind, model_class = (
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
        if moe
        else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    )
    config = kind(
        text_config=inner.config.to_dict(), vision_config=vision | {"out_hidden_size": inner.config.hidden_size}
    )
    config.tie_word_embeddings = inner.config.tie_word_embeddings
    _write_around(inner, model_class(config), folder, save_original_format=not moe)
    stored = load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in stored.items() if ".layers.1." in name}
    mtp = {name.replace("model.language_model.layers.1", "mtp.layers.0"): tensor for name, tensor in own.items()}
    save_file(stored | {name: t.clone() for name, t in mtp.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


PUBLISHED = {  # config.json of openai/gpt-oss-20b, but for its tokens and its layers' list
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64},
    **{"experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "hidden_size": 2880},
    **{"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24},
    **{"hidden_act": "silu", "swiglu_limit": 7.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False},
    **{"initial_context_length": 4096, "max_position_embeddings": 131072, "vocab_size": 201088},
    **{"sliding_window": 128, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "use_cache": True},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ],
    },
}


def write_published(source: Path, folder: Path) -> Path:
    """Write a tiny gpt-oss as the published ones are: experts in MXFP4, packed here by looking up the nearest value."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.bfloat16()
            continue
        blocks = tensor.transpose(1, 2).unflatten(-1, (-1, 32))  # [experts, rows, blocks, 32]
        exponent = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2  # 4 is the largest power of two of a code
        size = (blocks.abs() / 2**exponent).clamp(max=6)
        codes = (size[..., None] - values).abs().argmin(-1) + 8 * (blocks < 0)
        stored[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)  # the first code is low
        stored[f"{name}_scales"] = (exponent[..., 0] + 127).to(torch.uint8)
    shutil.copytree(source, folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    yarn = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": yarn.pop("rope_theta"), "rope_scaling": yarn, "dtype": "bfloat16"}
    config |= {"quantization_config": PUBLISHED["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_checkpoint(name: str, folder: Path, sizes: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint of one of CONFIGS, in float32, with the toy policy's tokenizer; `sizes` are other ones."""
    tokenizer = build_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = CONFIGS[name](**(SIZES | special | OPTIONS[name] | (sizes or {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("dt_bias"):
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
                else:
                    # Gemma multiplies embeddings by 11: larger ones would repeat the last token, whatever layers do.
                    small = "_proj" in parameter_name or name.startswith("gemma")
                    parameter.normal_(std=0.08 if small else 0.15)
                if parameter_name.endswith(("A_log", "conv1d.weight")):  # states that fade within tens of tokens
                    parameter.uniform_(-3.0, 0.0) if parameter_name.endswith("A_log") else parameter.mul_(4.0)
                if parameter_name.endswith("sinks"):  # of the size of scores, and as published ones in bfloat16
                    parameter.mul_(10.0).copy_(parameter.bfloat16())
                elif name == "gpt-oss" and parameter_name.endswith(
                    "gate_up_proj"
                ):  # gates and ups that are cut off, at 7
                    parameter.mul_(4.0)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("layer_scalar"):  # of Gemma 4: the checkpoint has it, though nothing trains it
                    buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, save_original_format=name != "qwen3.5-moe")  # whose experts are published in stacks
    tokenizer.save_pretrained(folder)
    return folder
