"""NF4 linears of vLLM, which multiplies by them through bitsandbytes: what they hold, and how it is lent."""

from collections.abc import Sequence
from typing import Any

import torch
from qerl_kernels import NF4Tensor, NF4Weight
from qerl_kernels.nf4 import NF4_BLOCK

from qerl_pl.engines.vllm_names import look_up
from qerl_pl.engines.vllm_parts import Part

METHOD = "BitsAndBytesLinearMethod"
"""Class name of what multiplies, in vLLM 0.25."""


def is_nf4(linear: Any) -> bool:
    """Whether one of vLLM's linears has such a weight."""
    return look_up(linear, "weight.bnb_quant_state") is not None


def lent_rows(linear: Any, parts: Sequence[Part]) -> dict[str, NF4Weight] | None:
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
    lent: dict[str, NF4Weight] = {}
    for index, (name, start, stop) in enumerate(parts):
        state = states[index]
        shape = (stop - start, linear.input_size_per_partition)
        codes = weight.data.view(-1)[offsets[index] : offsets[index + 1]]
        known = tuple(state.shape) == shape and state.quant_type == "nf4" and state.blocksize == NF4_BLOCK
        if not known or state.nested or state.absmax.dtype != torch.float32 or 2 * len(codes) != shape[0] * shape[1]:
            return None
        lent[name] = NF4Weight(NF4Tensor(codes, state.absmax, state.absmax[:0], 0.0), shape)
    return lent
