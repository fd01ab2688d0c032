"""Weights that are trained whole, written into vLLM's 16-bit model in place."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.engines.base import check_tensor
from qerl_pl.engines.vllm_parts import Part, vocabulary


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
