"""Sequences of different lengths in one forward pass without padding.

Every token of the batch stands in one row; each attends to its own sequence alone. Everything but attention works on
tokens one by one, so the result equals the padded one up to rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels import rotary, silu_product
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from qerl_pl.modules.lora import shared_input_linears
from qerl_pl.persistence.random_state import strictly_deterministic_gradient

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

MLP_CLASSES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")

"""MLPs that compute down(act(gate(x)) * up(x)). Others stay as they are."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        mlp: What it takes the place of, with its linears under their names.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj = mlp.get_submodule("gate_proj")
        self.up_proj = mlp.get_submodule("up_proj")
        self.down_proj = mlp.get_submodule("down_proj")

    @property
    def on_input(self) -> tuple[nn.Module, ...]:
        """The linears that its input goes to."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down_proj(silu_product(*shared_input_linears(self.on_input, x)))


def use_gated_mlps(model: nn.Module) -> None:
    """Replace the MLPs that `GatedMLP` computes."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in MLP_CLASSES and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            model.set_submodule(name, GatedMLP(module))


PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}

NORMS = {"q_norm", "k_norm"}

WINDOWS: Mapping[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda attention: None,
    "MistralAttention": lambda attention: attention.config.sliding_window,
    "Qwen2Attention": lambda attention: attention.sliding_window,
    "Qwen3Attention": lambda attention: attention.sliding_window,
}

"""Attentions that compute o(attend(rotate(norm(q(x))), rotate(norm(k(x))), v(x))), or without norms, with their sliding
window. Others stay as they are."""


class PackedAttention(nn.Module):
    """Attention as transformers calls it; what is packed goes through no transposed views.

    Without a packing it is what it takes the place of.

    Args:
        attention: What it takes the place of. Both hold the same layers under the same names: what is put in place of
            one, such as an adapter on it, is in place in both.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._modules = attention._modules
        self._plain = (attention,)  # a tuple, lest its layers are found twice
        self._normed = "q_norm" in self._modules
        self._size, self._scaling = attention.head_dim, attention.scaling
        self._dropout, self._window = attention.attention_dropout, WINDOWS[type(attention).__name__](attention)

    @property
    def on_input(self) -> tuple[nn.Module, ...]:
        """The linears that its input goes to."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        packing: Packing | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [1, S, hidden] of packed sequences -> the same shape; the rest is as transformers has it.

        Args:
            hidden_states: The tokens.
            position_embeddings: Cosines and sines [1, S, head size].
            attention_mask: Not used where there is a packing.
            packing: The sequences.
            **others: What transformers passes besides: a cache of keys and values, say, where there is no packing.
        """
        if packing is None:
            plain = self._plain[0]
            plain.training = self.training
            return plain(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **others
            )
        assert len(hidden_states) == 1 and not (self.training and self._dropout)
        tokens, (cos, sin) = hidden_states.view(hidden_states.shape[1:]), position_embeddings
        query, key, value = (
            projected.view(len(tokens), -1, self._size) for projected in shared_input_linears(self.on_input, tokens)
        )
        if self._normed:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary(query, key, cos.view(cos.shape[1:]), sin.view(sin.shape[1:]))
        attended = attention_of_rows(query, key, value, packing, self._scaling, self._window)
        return self.o_proj(attended.flatten(1)).view(hidden_states.shape), None


def use_packed_attention(model: nn.Module) -> None:
    """Replace the attentions that `PackedAttention` computes."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in WINDOWS and module._modules.keys() in (PROJECTIONS, PROJECTIONS | NORMS):
            model.set_submodule(name, PackedAttention(module))
