"""Where the base model's weights are in vLLM's model, which fuses linears on one input and pads the vocabulary."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.engines.base import check_tensor
from qerl_pl.engines.vllm.compat import look_up
from qerl_pl.formats.nf4 import NF4_BLOCK, NF4Weight

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


METHOD = "BitsAndBytesLinearMethod"

"""Class name of what multiplies, in vLLM 0.25."""


def is_nf4(linear: Any) -> bool:
    """Whether one of vLLM's linears has such a weight."""
    return look_up(linear, "weight.bnb_quant_state") is not None


def shared_rows(linear: Any, parts: Sequence[Part]) -> dict[str, NF4Weight] | None:
    """What one of vLLM's linears lends: a frozen weight for each of the base model's linears that it holds.

    vLLM undoes the double quantization when it loads; the weights are the same.

    Args:
        linear: vLLM's.
        parts: Those that it holds.

    Returns:
        None where it does not hold each part by itself in NF4's blocks.
    """
    weight, states = linear.weight, linear.weight.bnb_quant_state
    offsets = [int(offset) for offset in weight.bnb_shard_offsets]
    if len(states) != len(parts):
        return None
    shared: dict[str, NF4Weight] = {}
    for index, (name, start, stop) in enumerate(parts):
        state = states[index]
        shape = (stop - start, linear.input_size_per_partition)
        codes = weight.data.view(-1)[offsets[index] : offsets[index + 1]]
        known = tuple(state.shape) == shape and state.quant_type == "nf4" and state.blocksize == NF4_BLOCK
        if not known or state.nested or state.absmax.dtype != torch.float32 or 2 * len(codes) != shape[0] * shape[1]:
            return None
        shared[name] = NF4Weight(codes, state)
    return shared


class PlainMethod:
    """Stands in for the `quant_method` of a linear whose weight vLLM's CPU build has repacked out of reach.

    Args:
        base: What it stands for.
    """

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return F.linear(x, layer.weight, None if bias is None else bias.to(x.dtype))

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> [..., hidden]."""
        out: Tensor = self.base.embedding(layer, ids)
        return out


def make_writable(modules: Iterable[Any], dtype: torch.dtype) -> None:
    """Have linears and the layer to the vocabulary multiply by their `weight`, whatever is written there.

    Args:
        modules: vLLM's model's. Elsewhere than on a CPU they do so already.
        dtype: Of their weights.
    """
    for module in modules:
        if "cpu_linear" not in vars(module):
            continue
        if module.weight.numel() == 0:  # it comes with the first sync, which comes before the first token
            shape = module.output_size_per_partition, module.input_size_per_partition
            module.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        module.quant_method = PlainMethod(module.quant_method)


def write(
    tensors: Mapping[str, Tensor],
    linears: Iterable[tuple[Any, Sequence[Part]]],
    model: Any,
    norms: Collection[str],
) -> None:
    """Copy weights to their places, rounded to what those hold.

    Args:
        tensors: By checkpoint name.
        linears: vLLM's, each with the base model's that it holds.
        model: vLLM's.
        norms: Modules that are left out.

    Raises:
        UserError: vLLM's model has no such weight.
    """
    places = _places(linears, model)
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") not in norms:
            check_tensor(name, places.get(name), tensor).copy_(tensor)


def _places(linears: Iterable[tuple[Any, Sequence[Part]]], model: Any) -> dict[str, Tensor]:
    """Where each weight of the base model is in vLLM's, by checkpoint name."""
    found = vocabulary(model)
    for linear, parts in linears:
        for name, start, stop in parts:
            found[f"{name}.weight"] = linear.weight.data[start:stop]
            if linear.bias is not None:
                found[f"{name}.bias"] = linear.bias.data[start:stop]
    return found
