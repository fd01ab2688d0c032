"""The adapter inside vLLM's linears, as two plain matrix products.

vLLM's own LoRA kernels serve many adapters at once and sum with atomics, so that no rollout can be repeated bit for
bit. A single adapter takes two plain products, which repeat and round as the trainer does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qerl_pl.engines.vllm_parts import Part

Slots = dict[str, tuple[Tensor, Tensor]]
"""Views of A [r, in] and B [out, r] by the base model's name of a linear, to be written in place."""


def add_products(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [tokens, out] += (x [tokens, in] a^T) b^T for a [r, in] and b [out, r], in place; y, for use in operators."""
    return y.addmm_(x @ a.T, b.T)


@torch.library.custom_op("qerl::add_adapter", mutates_args={"y"})
def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """`add_products` as an operator, which may not return what it was given.

    An operator, for PyTorch's compiler turns a plain `addmm_` into a copy and a sum beside it: one more pass over the
    output, and a large tensor while prompts are read.
    """
    add_products(y, x, a, b)


class AdaptedMethod:
    """Stands in for the `quant_method` of one of vLLM's linears: its product, and the adapter's.

    Always at work, also while the adapter is off: then A and B are zero, and the output is the base's.
    """

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; the delta is added to the base's rounded output, as in the trainer."""
        y: Tensor = self.base.apply(layer, x, bias)
        add_adapter(y, x, layer.qerl_a, layer.qerl_b)
        return y


def attach_adapter(linear: Any, parts: Sequence[Part], rank: int, dtype: torch.dtype) -> Slots:
    """Give a linear of vLLM an adapter of zeros, before vLLM compiles it.

    One product with all A, one below the other, and one with all B, each in the block of its rows and ranks: a fused
    projection takes two kernels too.

    Args:
        linear: vLLM's, which may hold several of the base model's.
        parts: Those adapted.
        rank: Of the adapter.
        dtype: Of activations.

    Returns:
        What an adapter is written into.
    """
    device = next(linear.parameters()).device
    columns, rows = linear.input_size_per_partition, linear.output_size_per_partition
    # As buffers of the module they are inputs of vLLM's compiled graphs, which therefore see what is written.
    linear.register_buffer("qerl_a", torch.zeros(len(parts) * rank, columns, dtype=dtype, device=device), False)
    linear.register_buffer("qerl_b", torch.zeros(rows, len(parts) * rank, dtype=dtype, device=device), False)
    linear.quant_method = AdaptedMethod(linear.quant_method)
    slots = {}
    for index, (part, start, stop) in enumerate(parts):
        ranks = slice(index * rank, (index + 1) * rank)
        slots[part] = (linear.qerl_a[ranks], linear.qerl_b[start:stop, ranks])
    return slots
