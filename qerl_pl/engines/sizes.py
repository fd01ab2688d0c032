"""Sizes that follow from a model's config alone, checked before an engine spends minutes on starting."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from qerl_pl.errors import UserError

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that vLLM multiplies as one matrix."""


def linear_shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear of a causal language model by name, from its config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = model.named_modules()
    return {name: (m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)}


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of key and value that one token takes in all layers."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * head_size * dtype.itemsize)


def check_marlin_shapes(linears: dict[str, tuple[int, int]]) -> None:
    """Reject weights that Marlin's tiles do not cover.

    Args:
        linears: (out, in) of each quantized linear by name.

    Raises:
        UserError: A weight, q/k/v and gate/up taken together, divides into neither 64 x 128 nor 128 x 64.
    """
    for name, (rows, columns) in linears.items():
        stem, _, last = name.rpartition(".")
        group = next((group for group in FUSED if last in group), (last,))
        if last == "lm_head" or last != group[0]:
            continue
        rows = sum(linears.get(f"{stem}.{part}", (0, 0))[0] for part in group) if len(group) > 1 else rows
        if (rows % 64 or columns % 128) and (rows % 128 or columns % 64):
            raise UserError(
                f"Marlin takes weights that divide into 64 x 128 or 128 x 64; {'+'.join(group)} of {stem} is {rows} x "
                f"{columns}: set linear_backend to auto, which pads them"
            )
