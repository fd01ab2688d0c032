"""Sequences of different lengths in one forward pass without padding.

Every token of the batch stands in one row; each attends to its own sequence alone. Everything but attention works on
tokens one by one, so the result equals the padded one up to rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from qerl_pl.run.random_state import strictly_deterministic_gradient

ATTENTION = "qerl_packed"
"""Name under which transformers finds `packed_attention`."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of B sequences stand in one row of S tokens."""

    kept: Tensor
    """bool [B, T]: the real tokens of the padded batch, row by row the S packed ones."""
    positions: Tensor
    """Position of each token in its sequence, int64 [S]."""
    boundaries: Tensor
    """Cumulative lengths, int32 [B + 1]."""
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> "Packing":
        """Packing of right-padded rows [B, width] of which row i has `lengths[i]` real tokens."""
        index = torch.arange(width, device=lengths.device)
        kept = index < lengths[:, None]
        boundaries = functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(kept, index.expand(kept.shape)[kept], boundaries, int(lengths.max()))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, as transformers calls it.

    Args:
        module: The attention layer.
        query: [1, heads, S, head size].
        key: [1, key-value heads, S, head size].
        value: As `key`.
        attention_mask: Not used; causality and the sequences' borders are in `packing`.
        scaling: Factor of the products; by default 1 / sqrt(head size).
        dropout: Not supported.
        sliding_window: How many tokens each attends to, itself included; None: all before it.
        packing: The sequences; required.

    Returns:
        ([1, S, heads, head size], None).
    """
    assert packing is not None and dropout == 0.0
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_of_rows(q, k, v, packing, scaling, sliding_window).unsqueeze(0), None


def attention_of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention within each packed sequence.

    16-bit tensors on a GPU take PyTorch's variable-length attention; others are padded for this one operation.

    Args:
        query: [S, heads, head size].
        key: [S, key-value heads, head size].
        value: As `key`.
        packing: The sequences.
        scaling: Factor of the products; by default 1 / sqrt(head size).
        sliding_window: How many tokens each attends to, itself included; None: all before it.

    Returns:
        [S, heads, head size].
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return strictly_deterministic_gradient(_on_a_gpu(query, key, value, packing, scaling, sliding_window))
    query, key, value = (
        tensor.new_zeros(*packing.kept.shape, *tensor.shape[1:]).index_put((packing.kept,), tensor).transpose(1, 2)
        for tensor in (query, key, value)
    )
    visible: dict[str, Any] = {"is_causal": True}
    if sliding_window is not None and sliding_window < query.shape[2]:
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        visible = {"attn_mask": seen.triu(1 - sliding_window)}
    attended = functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True, **visible)
    return strictly_deterministic_gradient(attended).transpose(1, 2)[packing.kept]


def _on_a_gpu(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` computes, by the operation that it calls.

    That one's gradient needs no Python, while the function adds layers of it each way; and it takes fewer key-value
    heads than query heads, which the function does not say of itself before PyTorch 2.12.
    """
    tokens = (packing.boundaries, packing.boundaries, packing.longest, packing.longest)
    no_dropout, causal, no_debugging = 0.0, sliding_window is None, False
    left = -1 if sliding_window is None else sliding_window - 1
    options = {"scale": scaling, "window_size_left": left, "window_size_right": 0}
    rows = (tensor.contiguous() for tensor in (query, key, value))
    flash_attention = torch.ops.aten._flash_attention_forward
    out: Tensor = flash_attention(*rows, *tokens, no_dropout, causal, no_debugging, **options)[0]
    return out


AttentionInterface.register(ATTENTION, packed_attention)
