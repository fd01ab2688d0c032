"""Where the base model's weights are in vLLM's model, which fuses linears on one input and pads the vocabulary."""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qerl_pl.engines.vllm_names import look_up

Part = tuple[str, int, int]
"""One of the base model's linears in one of vLLM's: its name, rows [start, stop)."""
_VOCABULARY = ("model.embed_tokens", "lm_head")


def parts_of(model: Any, name: str, linear: Any) -> list[Part]:
    """The base model's linears that are fused into the linear `name` of vLLM's model."""
    stem, _, last = name.rpartition(".")
    packed: Mapping[str, list[str]] = look_up(model, "packed_modules_mapping") or {}
    sizes = linear.output_partition_sizes if last in packed else [linear.output_size_per_partition]
    stops = list(itertools.accumulate(sizes))
    names = [f"{stem}.{part}" for part in packed.get(last, [last])]
    return [(part, stop - size, stop) for part, size, stop in zip(names, sizes, stops, strict=True)]


def vocabulary(model: Any) -> dict[str, Tensor]:
    """Weights with a row for every token of the base model, by checkpoint name: embeddings and lm_head."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name in _VOCABULARY and isinstance(look_up(module, "weight"), Tensor):
            found[f"{name}.weight"] = module.weight.data[: model.config.vocab_size]
    return found
