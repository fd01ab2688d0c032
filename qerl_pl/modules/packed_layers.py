"""Packed sequences: a forward pass without padding, with attention and MLP layers that run on fused ops.

The tokens of a batch are concatenated; attention is masked to each sequence. The result equals the padded one up to
rounding.
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
"""Name of `packed_attention` as a transformers attention implementation."""


@dataclass(frozen=True)
class Packing:
    """Layout of B sequences concatenated to S tokens."""

    mask: Tensor
    """bool [B, T]: real tokens of the padded batch; in row-major order the S packed ones."""
    positions: Tensor
    """Position of each token in its sequence, int64 [S]."""
    boundaries: Tensor
    """Cumulative sequence lengths, int32 [B + 1]."""
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> "Packing":
        """Packing of right-padded rows [B, width]; row i has `lengths[i]` real tokens."""
        index = torch.arange(width, device=lengths.device)
        mask = index < lengths[:, None]
        boundaries = functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(mask, index.expand(mask.shape)[mask], boundaries, int(lengths.max()))


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
    """`attention_of_rows` as a transformers attention function: query [1, heads, S, head size], and so on."""
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

    16-bit tensors on a GPU use PyTorch's variable-length flash attention; others are padded for SDPA.

    Args:
        query: [S, heads, head size].
        key: [S, key-value heads, head size].
        value: As `key`.
        packing: Layout of the sequences.
        scaling: Softmax scale; by default 1 / sqrt(head size).
        sliding_window: Tokens that each attends to, itself included; None for full causal attention.

    Returns:
        [S, heads, head size].
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return strictly_deterministic_gradient(_flash_attention(query, key, value, packing, scaling, sliding_window))
    query, key, value = (
        tensor.new_zeros(*packing.mask.shape, *tensor.shape[1:]).index_put((packing.mask,), tensor).transpose(1, 2)
        for tensor in (query, key, value)
    )
    visible: dict[str, Any] = {"is_causal": True}
    if sliding_window is not None and sliding_window < query.shape[2]:
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        visible = {"attn_mask": seen.triu(1 - sliding_window)}
    attended = functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True, **visible)
    return strictly_deterministic_gradient(attended).transpose(1, 2)[packing.mask]


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` by the ATen operation that it calls.

    Its gradient needs no Python, and it accepts fewer key-value heads (not documented for the function before 2.12).
    """
    bounds = (packing.boundaries, packing.boundaries, packing.longest, packing.longest)
    no_dropout, causal, no_debugging = 0.0, sliding_window is None, False
    left = -1 if sliding_window is None else sliding_window - 1
    options = {"scale": scaling, "window_size_left": left, "window_size_right": 0}
    rows = (tensor.contiguous() for tensor in (query, key, value))
    flash_attention = torch.ops.aten._flash_attention_forward
    out: Tensor = flash_attention(*rows, *bounds, no_dropout, causal, no_debugging, **options)[0]
    return out


AttentionInterface.register(ATTENTION, packed_attention)

MLP_CLASSES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""transformers' MLPs that compute down(act(gate(x)) * up(x)); others are not replaced."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with fused LoRA products and activation.

    The linears of the replaced transformers MLP become this module's, under the same names.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            if name.endswith("_proj"):
                self.add_module(name, child)

    @property
    def shared_input(self) -> tuple[nn.Module, ...]:
        """The linears on the block's input."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down_proj(silu_product(*shared_input_linears(self.shared_input, x)))


def use_gated_mlps(model: nn.Module) -> None:
    """Replace the MLPs of `MLP_CLASSES` by `GatedMLP`, in place."""
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
"""Sliding window of transformers' attentions that compute o(attend(rotary(norm(q(x))), rotary(norm(k(x))), v(x))), or
the same without norms; others are not replaced."""


class PackedAttention(nn.Module):
    """Attention over packed sequences, [S, heads, head size] throughout instead of transposed views.

    The layers of the replaced transformers attention become this module's, under the same names.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self._has_norms = "q_norm" in self._modules
        self._head_size, self._scaling = attention.head_dim, attention.scaling
        self._dropout, self._window = attention.attention_dropout, WINDOWS[type(attention).__name__](attention)

    @property
    def shared_input(self) -> tuple[nn.Module, ...]:
        """The linears on the block's input."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], packing: Packing, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, S, hidden], cosines and sines [1, S, head size] each -> ([1, S, hidden], None)."""
        assert len(hidden_states) == 1 and not (self.training and self._dropout)
        x, (cos, sin) = hidden_states.view(hidden_states.shape[1:]), position_embeddings
        query, key, value = (
            projected.view(len(x), -1, self._head_size) for projected in shared_input_linears(self.shared_input, x)
        )
        if self._has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary(query, key, cos.view(cos.shape[1:]), sin.view(sin.shape[1:]))
        attended = attention_of_rows(query, key, value, packing, self._scaling, self._window)
        return self.o_proj(attended.flatten(1)).view(hidden_states.shape), None


def use_packed_attention(model: nn.Module) -> None:
    """Replace the attentions of `WINDOWS` by `PackedAttention`, in place."""
    for name, module in list(model.named_modules()):
        children = dict(module.named_children()).keys()
        if type(module).__name__ in WINDOWS and children in (PROJECTIONS, PROJECTIONS | NORMS):
            model.set_submodule(name, PackedAttention(module))
