"""Layers that run packed sequences on fused ops without padding; the result equals the padded one up to rounding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import (
    gelu_tanh_product,
    last_addend,
    leaves_out_last_addend,
    rms_norm,
    rotary,
    shared_prompt_attention,
    silu_product,
    varlen_attention,
    without_last_addend,
    without_saving_products,
)
from qerl_kernels.attention import MAX_HEAD_SIZE
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface

from qerl_pl.errors import UserError
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.families import Family, family_of_class
from qerl_pl.policy.lora import shared_input_linears
from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import strictly_deterministic_gradient

ATTENTION = "qerl_packed"
"""Name of `packed_attention` as a transformers attention implementation."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attention_of_rows` as a transformers attention function: query [1, heads, S, head size], and so on."""
    assert packing is not None and dropout == 0.0
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_of_rows(q, k, v, packing, scaling, sliding_window, softcap, s_aux).unsqueeze(0), None


def attention_of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each packed sequence.

    16-bit tensors on a GPU use `qerl_kernels.varlen_attention`; others, and heads of more than `MAX_HEAD_SIZE`
    elements, are padded for SDPA. Neither has soft caps, and SDPA has no sinks: with them, the scores of the padded
    sequences are in memory.

    Args:
        query: [S, heads, head size].
        key: [S, key-value heads, head size].
        value: As `key`.
        packing: Layout of the sequences.
        scaling: Softmax scale; by default 1 / sqrt(head size).
        sliding_window: Tokens that each attends to, itself included; None for full causal attention.
        soft_cap: Scores s become soft_cap * tanh(s / soft_cap); None leaves them.
        sinks: A score of each head [heads] that takes part in the softmax and has no value; frozen. None for none.

    Returns:
        [S, heads, head size].
    """
    fits, shared = query.shape[-1] <= MAX_HEAD_SIZE, packing.shared
    if soft_cap is None and fits and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        rows = (query, key, value, packing.cu_seqlens, packing.max_seqlen)
        if shared is None:
            return strictly_deterministic_gradient(varlen_attention(*rows, scaling, sliding_window, sinks))
        assert sliding_window is None and sinks is None
        return strictly_deterministic_gradient(shared_prompt_attention(*rows, shared, scaling))
    query, key, value = (packing.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
    visible: dict[str, Any] = {"is_causal": True}
    in_memory = soft_cap is not None or sinks is not None
    if in_memory or (sliding_window is not None and sliding_window < query.shape[2]):
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        visible = {"attn_mask": seen if sliding_window is None else seen.triu(1 - sliding_window)}
    if in_memory:
        attended = _plain_attention(query, key, value, scaling, visible["attn_mask"], soft_cap, sinks)
        return packing.pack(strictly_deterministic_gradient(attended).transpose(1, 2))
    if not fits:  # memory-efficient attention, which takes heads of any size, takes as many of keys as of queries
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True, **visible)
    return packing.pack(strictly_deterministic_gradient(attended).transpose(1, 2))


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    seen: Tensor,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks in plain PyTorch, of [B, heads, T, head size]; `seen` is bool [T, T]."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    precise = torch.promote_types(query.dtype, torch.float32)  # as flash attention's scores are
    scores = query.to(precise) @ key.to(precise).transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(precise)[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value


AttentionInterface.register(ATTENTION, packed_attention)

ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SiLU": silu_product,
    "SiLUActivation": silu_product,
    "GELUTanh": gelu_tanh_product,
}
"""act(gate) * up by class of the activation; MLPs with others are not replaced."""


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with fused LoRA products and activation; gate and up may be one linear.

    The linears of the replaced transformers MLP become this module's, under the same names.
    """

    down_proj: nn.Module

    def __init__(self, mlp: nn.Module, activation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        linears = {name: child for name, child in mlp.named_children() if name.endswith("_proj")}
        for name, child in linears.items():
            self.add_module(name, child)
        self._shared_input = tuple(name for name in linears if name != "down_proj")
        self._activation = activation
        self.tile_tokens: int | None = None
        """Most tokens computed at once; None for all of them."""

    @property
    def shared_input(self) -> tuple[nn.Module, ...]:
        """The linears on the block's input."""
        return tuple(getattr(self, name) for name in self._shared_input)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., tokens, hidden] -> the same shape."""
        if self.tile_tokens is None or x.shape[-2] <= self.tile_tokens:
            return self._at_once(x)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return tiled(self._at_once, x, self.tile_tokens, trained)

    def _at_once(self, x: Tensor) -> Tensor:
        outputs = shared_input_linears(self.shared_input, x)
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        with last_addend():
            result: Tensor = self.down_proj(self._activation(gate, up))
        return result


def tiled(run: Callable[[Tensor], Tensor], x: Tensor, tokens: int, parameters: Sequence[Tensor]) -> Tensor:
    """run(x), a function of each row of x [..., rows, hidden] by itself, in tiles of at most so many rows (`tokens`).

    `run` always has the same result. The parameters, which it uses and which require gradients, get theirs.
    """
    return _Tiled.apply(x, run, -(-x.shape[-2] // tokens), *parameters)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], tiles: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.run, ctx.tiles = run, tiles
        if leaves_out_last_addend():
            return x.new_full((), torch.nan).expand(x.shape)
        y = torch.empty_like(x)
        with without_saving_products():
            for out, tile in zip(y.tensor_split(tiles, -2), x.tensor_split(tiles, -2), strict=True):
                out.copy_(run(tile))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        trained = [parameter for parameter, needed in zip(parameters, ctx.needs_input_grad[3:], strict=True) if needed]
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        sums: list[Tensor] = []
        for index, (tile, dy) in enumerate(
            zip(x.tensor_split(ctx.tiles, -2), grad.tensor_split(ctx.tiles, -2), strict=True)
        ):
            with torch.enable_grad(), without_last_addend():
                piece = tile.detach().requires_grad_(dx is not None)
                y = ctx.run(piece)
            inputs = trained if dx is None else [piece, *trained]
            found = list(torch.autograd.grad(y, inputs, dy))
            if dx is not None:
                dx.tensor_split(ctx.tiles, -2)[index].copy_(found.pop(0))
            sums = [total.add_(one) for total, one in zip(sums, found, strict=True)] if sums else found
        totals = iter(sums)
        return dx, None, None, *(next(totals) if needed else None for needed in ctx.needs_input_grad[3:])


def use_gated_mlps(model: nn.Module) -> None:
    """Replace the MLPs of known families and `ACTIVATIONS` by `GatedMLP`, in place."""
    for name, module in list(model.named_modules()):
        if family_of_class(type(module).__name__, "MLP"):
            (activation,) = (child for child_name, child in module.named_children() if not child_name.endswith("_proj"))
            product = ACTIVATIONS.get(type(activation).__name__)
            if product is not None:
                model.set_submodule(name, GatedMLP(module, product))


def tile_mlps(model: nn.Module, tokens: int | None) -> None:
    """Have every `GatedMLP` compute in tiles of so many tokens, None for all at once; UserError if there is none."""
    mlps = [module for module in model.modules() if type(module) is GatedMLP]  # shared experts are another class
    if tokens is not None and not mlps:
        raise UserError(
            f"tiles need MLPs of gate, up and down; the model has none (its layers are mixtures of experts, or their "
            f"activation is unknown), and model.policy.mlp_tile_tokens is {tokens}; set it to null"
        )
    for mlp in mlps:
        mlp.tile_tokens = tokens


NORMS = ({"q_norm", "k_norm"}, {"q_norm", "k_norm", "v_norm"})


class PackedAttention(nn.Module):
    """Attention over packed sequences, [S, heads, head size] throughout instead of transposed views.

    o(attend(rotary(norm(q(x))), rotary(norm(k(x))), v(x))), or the same without norms, or with one of v(x), without a
    weight; q, k and v may be one linear, k(x) be the values where there is no v, and q have a gate for each head, whose
    sigmoid multiplies what it has attended to.
    The layers and sinks of the replaced transformers attention become this module's, under the same names.
    """

    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any, family: Family) -> None:
        super().__init__()
        children = dict(attention.named_children())
        for name, child in children.items():
            self.add_module(name, child)
        self._shared_input = tuple(name for name in family.projections if name in children and name != "o_proj")
        self._has_norms = "q_norm" in self._modules
        fused = self._has_norms and not family.float32_norms
        self._norm_eps = float(getattr(self.q_norm, family.norm_eps)) if fused else None
        self._head_size, self._scaling = attention.head_dim, attention.scaling
        self._dropout, self._window = attention.attention_dropout, family.window(attention)
        self._soft_cap = None if family.score_cap is None else getattr(attention, family.score_cap)
        self._sinks, self._half_angles, self._gated = family.sinks, family.half_angles, family.gated_attention
        if family.sinks is not None:
            self.register_parameter(family.sinks, attention.get_parameter(family.sinks))
        if "v_norm" in children:
            self.register_buffer("_ones", torch.ones(self._head_size), persistent=False)
            self._value_eps = float(getattr(attention.v_norm, family.norm_eps))
        q_dim = attention.config.num_attention_heads * self._head_size
        kv_dim = q_dim // attention.num_key_value_groups
        self._sizes = [q_dim, kv_dim, kv_dim]

    @property
    def shared_input(self) -> tuple[nn.Module, ...]:
        """The linears on the block's input."""
        return tuple(getattr(self, name) for name in self._shared_input)

    @property
    def is_full(self) -> bool:
        """Whether a token attends to all before it, by nothing but a softmax of scores."""
        return self._window is None and self._soft_cap is None and self._sinks is None

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], packing: Packing, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, S, hidden], cosines and sines [1, S, head size] each -> ([1, S, hidden], None)."""
        assert len(hidden_states) == 1 and not (self.training and self._dropout)
        x, (cos, sin) = hidden_states.view(hidden_states.shape[1:]), position_embeddings
        if self._half_angles:
            cos, sin = (torch.cat((angles, angles), dim=-1) for angles in (cos, sin))
        outputs = shared_input_linears(self.shared_input, x)
        projected = (*outputs, outputs[1])[:3] if len(outputs) > 1 else outputs[0].split(self._sizes, dim=-1)
        query, key, value = (part.view(len(x), -1, self._head_size) for part in projected)
        if self._gated:
            query, gate = query[:, ::2], query[:, 1::2]
        if self._has_norms:
            query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        if "_ones" in self._buffers:
            value = rms_norm(value, self.get_buffer("_ones"), self._value_eps)
        query, key = _rotated(query, key, cos.view(cos.shape[1:]), sin.view(sin.shape[1:]))
        sinks = None if self._sinks is None else self.get_parameter(self._sinks)
        attended = attention_of_rows(query, key, value, packing, self._scaling, self._window, self._soft_cap, sinks)
        if self._gated:
            attended = attended * gate.sigmoid()
        return self.o_proj(attended.flatten(1)).view(hidden_states.shape), None

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The norm of heads x [S, heads, head size]; transformers' norms without an offset by the fused kernel."""
        if self._norm_eps is None or isinstance(norm, Float32RMSNorm):
            return norm(x)
        return rms_norm(x, norm.get_parameter("weight"), self._norm_eps)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary` of the first channels of a head, as many as cos and sin [S, size] have."""
    size = cos.shape[-1]
    if size == query.shape[-1]:
        return rotary(query, key, cos, sin)
    rotated = rotary(query[..., :size], key[..., :size], cos, sin)
    query, key = (torch.cat((part, x[..., size:]), dim=-1) for part, x in zip(rotated, (query, key), strict=True))
    return query, key


def use_packed_attention(model: nn.Module) -> None:
    """Replace the attentions of known families by `PackedAttention`, in place."""
    for name, module in list(model.named_modules()):
        family = family_of_class(type(module).__name__, "Attention")
        if family is not None and _is_plain(module, family):
            model.set_submodule(name, PackedAttention(module, family))


def _is_plain(attention: nn.Module, family: Family) -> bool:
    """Whether an attention has nothing but the family's projections, and norms of queries and keys or none."""
    children = [name for name, _ in attention.named_children()]
    projections = {name for name in children if name in family.projections}
    return "o_proj" in projections and set(children) - projections in (set(), *NORMS)
