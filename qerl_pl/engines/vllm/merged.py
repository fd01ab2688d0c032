"""Merged rollouts: 16-bit copies of vLLM's linears with the adapter in them, in memory that only sampling holds.

A copy is round(W + scaling B A), summed in float32. The base itself is never written.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from qerl_kernels import FrozenWeight
from torch import Tensor
from torch.nn import functional

from qerl_pl.engines.vllm.linear_methods import FP4Method, LoraBuffers, shared_rows
from qerl_pl.engines.vllm.weight_map import FusedSlice
from qerl_pl.errors import UserError

AdapterMode = Literal["fused", "merged", "auto"]

ALIGNED = 128
"""Elements at whose multiples a copy begins."""
FASTER_IN_4_BITS = 64
"""Most sequences at which NVFP4 with the adapter decodes faster than merged 16 bits: rollout_7b_adapter.md."""


def merged_above(mode: AdapterMode, quantized: bool, max_num_seqs: int) -> int | None:
    """Tokens of a forward pass above which 4-bit linears multiply by their merged copy; None for no copies.

    `auto` has none where every decode step is faster on 4 bits: only prefill would use what each rollout merges.

    Args:
        mode: The engine's `adapter`.
        quantized: Whether the engine's linears are in NVFP4 or MXFP4.
        max_num_seqs: Most running requests.
    """
    if mode == "auto" and quantized and max_num_seqs <= FASTER_IN_4_BITS:
        return None
    return {"fused": None, "merged": 0, "auto": FASTER_IN_4_BITS}[mode]


class MergedMethod:
    """The `quant_method` of a vLLM linear that multiplies by its merged copy, whatever the number of tokens."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; `bias` is the layer's own, perhaps in an order of its kernel, or None."""
        return functional.linear(x, layer.qerl_merged, None if bias is None else layer.qerl_bias)


class MergedRows(NamedTuple):
    """A linear of the base model and its rows of a merged copy."""

    copy: Tensor
    """[N, K]."""
    weight: FrozenWeight
    adapter: tuple[Tensor, Tensor] | None
    """A [r, K] and scaling * B [N, r]; None for a linear without one."""


@torch.no_grad()
def attach_merged(
    linears: Mapping[str, tuple[Any, Sequence[FusedSlice]]],
    lora: LoraBuffers,
    above: int,
    dtype: torch.dtype,
    pool: AbstractContextManager[None],
) -> list[MergedRows]:
    """Give vLLM's linears room for merged copies, after `attach.attach_all` and before vLLM compiles them.

    A linear in 16 bits without an adapter needs none.

    Args:
        linears: vLLM's linears by name, each with all its slices.
        lora: The adapter's buffers.
        above: Tokens above which 4-bit linears in Marlin's layout multiply by the copy.
        dtype: Data type of activations.
        pool: In which the copies are allocated, and nothing else.

    Raises:
        UserError: A weight cannot be read.
    """
    merged = []
    for name, (linear, slices) in linears.items():
        rows = shared_rows(linear, slices)
        if rows is None:
            raise UserError(
                f"merged rollouts need weights that can be read; vLLM has {name} in another layout, or padded: set "
                "VLLMEngine.adapter to fused"
            )
        if any(one in lora or weight.alpha != 1.0 for one, weight in rows.items()):
            merged.append((linear, slices, rows))
    shapes = [(linear.output_size_per_partition, linear.input_size_per_partition) for linear, *_ in merged]
    sizes = [-(-rows * columns // ALIGNED) * ALIGNED for rows, columns in shapes]
    with pool:
        memory = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(merged[0][0].parameters())).device)
    found = []
    for (linear, slices, weights), (rows, columns), part in zip(merged, shapes, memory.split(sizes), strict=True):
        copy = part[: rows * columns].view(rows, columns)
        linear.register_buffer("qerl_merged", copy, False)
        if isinstance(linear.quant_method, FP4Method):
            linear.quant_method.merged_above = above
        else:
            # The product of zeros is the bias, in plain order.
            nothing = torch.zeros(1, columns, dtype=dtype, device=copy.device)
            bias = None if linear.bias is None else linear.quant_method.apply(linear, nothing, linear.bias)[0]
            linear.register_buffer("qerl_bias", bias, False)
            linear.quant_method = MergedMethod(linear.quant_method)
        found += [MergedRows(copy[start:stop], weights[one], lora.get(one)) for one, start, stop in slices]
    return found


@torch.inference_mode()
def merge(rows: Sequence[MergedRows]) -> None:
    """Write the merged copies."""
    for copy, weight, adapter in rows:
        total = weight.dense(copy.dtype).float() * weight.alpha
        if adapter is not None:
            a, scaled_b = adapter
            total.addmm_(scaled_b[: len(total)].float(), a.float())  # of keys that are values it has the rows twice
        copy.copy_(total)
