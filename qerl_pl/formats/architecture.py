"""Names of norms and projections in a decoder, and shapes of its linears: what this package needs of a model."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines run as one matrix; in NVFP4 they share one global scale."""
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of each layer, before q, k, v and before gate, up: AQN perturbs them, and `train_norms` trains them. The final
norm and the q/k norms of Qwen3 feed no quantized linear."""
_LAYER_NORM = re.compile(rf"(^|\.)layers\.\d+\.({'|'.join(LAYER_NORMS)})$")


def noisy_norm_names(names: Iterable[str]) -> list[str]:
    """The module names that AQN perturbs, in the order of `names`."""
    return [name for name in names if _LAYER_NORM.search(name)]


def fused_group(name: str) -> tuple[str, ...]:
    """The weights that run fused with weight `name` ("….q_proj.weight" -> q, k and v), itself included."""
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    for group in FUSED:
        if projection in group:
            return tuple(f"{module}.{member}.weight" for member in group)
    return (name,)


def linear_shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear of a causal language model by name, from its config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = model.named_modules()
    return {name: (m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)}
