"""Sizes of a model, of its weights and of its keys and values, from config.json alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig

from qerl_pl.errors import UserError
from qerl_pl.models.families import DELTA_NET, PROJECTIONS, family_of, names_match

BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
"""Bits of a weight of the layers' linears in a 4-bit format, scales included; vLLM undoes NF4's double quantization."""

_LINEARS = {
    **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:4]},
    **{f"mlp.{name}": (name,) for name in PROJECTIONS[4:]},
    "self_attn.qkv_proj": PROJECTIONS[:3],
    "mlp.gate_up_proj": PROJECTIONS[4:6],
}
_DELTA_LINEARS = {f"linear_attn.{name}": (name,) for name in DELTA_NET}
"""Linears of a layer, by their names within it: the projections that they are."""


@dataclass(frozen=True)
class DeltaNets:
    """Sizes of a model's gated delta nets."""

    layers: tuple[int, ...]
    """Indices of layers with a gated delta net in place of attention."""
    keys: int
    """Elements of a token's queries, or keys."""
    values: int
    heads: int
    """Heads of the values."""
    key_size: int
    """Elements of a head of the keys."""
    width: int
    """Tokens of the convolution."""

    @property
    def mixed(self) -> int:
        """Elements of a token's queries, keys and values."""
        return 2 * self.keys + self.values

    @classmethod
    def of(cls, config: PretrainedConfig) -> "DeltaNets":
        """Sizes of the gated delta nets of a config.json."""
        heads, key_size = config.linear_num_value_heads, config.linear_key_head_dim
        return cls(
            tuple(i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"),
            config.linear_num_key_heads * key_size,
            heads * config.linear_value_head_dim,
            heads,
            key_size,
            config.linear_conv_kernel_dim,
        )

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state in one layer: float32, and the convolution's last tokens."""
        return 4 * self.values * self.key_size + (self.width - 1) * self.mixed * dtype.itemsize


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model."""

    hidden: int
    intermediate_size: int
    """Elements of a token's gates (or ups) in a layer: of a mixture, of the experts that it is given to, together, and
    of the shared expert."""
    layers: int
    heads: int
    q_dim: int
    """Elements of a token's queries in a layer."""
    kv_dim: int
    """Elements of a token's keys, or values, in a layer."""
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    head_norms: bool
    """Whether queries and keys have norms."""
    experts: int = 0
    """Experts of a layer; 0 for a dense MLP."""
    top_k: int = 0
    """Experts that a token is given to; 0 for a dense MLP."""
    dense_attention: bool = False
    """Whether attention's linears have 16 bits beside 4-bit experts."""
    dense_weights: int = 0
    """Weights of the layers' linears that a checkpoint with 4-bit ones has in 16 bits."""
    soft_capped: bool = False
    """Whether attention's scores have a soft cap: they are in memory then, as flash attention has none."""
    normed_outputs: bool = False
    """Whether norms follow attention and MLP, too, which save the results of their last linears."""
    window: int = 0
    """Tokens that layers with sliding-window attention attend to; 0 where there are none."""
    window_layers: int = 0
    gated: bool = False
    """Whether q has a gate for each query."""
    value_norm: bool = False
    """Whether values have a norm."""
    has_v: bool = True
    """Whether attention has a linear v; otherwise its values are its keys."""
    delta: DeltaNets | None = None
    full: "Shape | None" = None
    """Shape of the layers with full attention, if their heads differ from the others'; None otherwise."""
    full_layers: tuple[int, ...] = ()
    """Indices of these layers."""
    shared_size: int = 0
    """Elements of a token's gates (or ups) in the shared expert of a mixture; 0 where there is none."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """Shape of a config.json."""
        family = family_of(config.model_type)
        if family.keys_as_values is None:
            return cls._of_heads(config, config)
        # Heads differ between layers with a window and with full attention, of which the last layer is always one.
        layers = tuple(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
        window = min(set(range(config.num_hidden_layers)) - set(layers), default=0)
        shape = cls._of_heads(config, config.per_layer_config[window])
        full = replace(
            cls._of_heads(config, config.per_layer_config[layers[0]]),
            has_v=not family.layers_without_values(config),
            layers=len(layers),
            window_layers=0,
        )
        return replace(shape, full=full, full_layers=layers)

    @classmethod
    def _of_heads(cls, config: PretrainedConfig, layer: Any) -> "Shape":
        """Shape of a model whose heads are those of one layer's config."""
        heads, family = config.num_attention_heads, family_of(config.model_type)
        size = getattr(layer, "head_dim", None) or config.hidden_size // heads
        intermediate_size, top_k = family.mlp_widths(config)
        experts, shared_size = family.experts, 0
        if experts is not None and experts.shared is not None:
            shared_size = getattr(config, f"{experts.shared}_intermediate_size")
        window, kinds = getattr(config, "sliding_window", None) or 0, getattr(config, "layer_types", None)
        window_layers = config.num_hidden_layers if kinds is None else kinds.count("sliding_attention")
        return cls(
            hidden=config.hidden_size,
            intermediate_size=intermediate_size + shared_size,
            layers=config.num_hidden_layers,
            heads=heads,
            q_dim=heads * size,
            kv_dim=(getattr(layer, "num_key_value_heads", None) or heads) * size,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            head_norms=family.head_norms,
            experts=0 if experts is None else getattr(config, experts.count),
            top_k=top_k,
            dense_attention=experts is not None and experts.stored_in_stacks,
            soft_capped=family.score_cap is not None and getattr(config, family.score_cap) is not None,
            normed_outputs=family.normed_outputs,
            window=window,
            window_layers=window_layers if window else 0,
            gated=family.gated_attention,
            value_norm=family.value_norm,
            delta=None if family.delta_net is None else DeltaNets.of(config),
            shared_size=shared_size,
        )

    @property
    def kinds(self) -> tuple["Shape", ...]:
        """Shapes of the groups of layers with equal heads: one, or two if full attention has its own."""
        if self.full is None:
            return (self,)
        others = replace(self, full=None, full_layers=(), layers=self.layers - self.full.layers)
        return (others, self.full) if others.layers else (self.full,)

    def of_layer(self, index: int) -> "Shape":
        """Shape of one layer."""
        return self.full if self.full is not None and index in self.full_layers else self

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's projections; fused ones as their parts, of a mixture those of the shared expert or, if
        it has none, the chosen experts' as one of their width."""
        queries, keys = ((1 + self.gated) * self.q_dim, self.hidden), (self.kv_dim, self.hidden)
        width = self.shared_size or self.intermediate_size
        mlp = (width, self.hidden)
        sizes = (queries, keys, keys, (self.hidden, self.q_dim), mlp, mlp, (self.hidden, width))
        linears = dict(zip(PROJECTIONS, sizes, strict=True))
        if not self.has_v:
            del linears["v_proj"]
        if self.delta is not None:
            rows = (self.delta.mixed, self.delta.values, self.delta.heads, self.delta.heads)
            linears |= {name: (size, self.hidden) for name, size in zip(DELTA_NET, rows, strict=False)}
            linears[DELTA_NET[-1]] = (self.hidden, self.delta.values)
        return linears

    @property
    def delta_layers(self) -> int:
        """Layers with a gated delta net in place of attention."""
        return 0 if self.delta is None else len(self.delta.layers)

    @property
    def linear_weights(self) -> int:
        """Weights of the linears of all layers, with all experts."""
        return self.attention_weights + self.mlp_weights

    @property
    def attention_weights(self) -> int:
        """Weights of the linears of all layers' attention, or gated delta net."""
        attention = sum((kind.layers - kind.delta_layers) * kind._weights(PROJECTIONS[:4]) for kind in self.kinds)
        return attention + self.delta_layers * self._weights(DELTA_NET)

    def _weights(self, names: Sequence[str]) -> int:
        sizes = self.linears
        return sum(sizes[name][0] * sizes[name][1] for name in names if name in sizes)

    @property
    def mlp_weights(self) -> int:
        """Weights of all layers' MLPs, or of all experts."""
        routed = self.intermediate_size - self.shared_size
        width = self.shared_size + (routed // self.top_k * self.experts if self.experts else routed)
        return self.layers * 3 * self.hidden * width

    def base_bytes(self, quantization: str, dtype: torch.dtype) -> float:
        """Bytes of a base in a format, embeddings and what stays in 16 bits as `dtype`."""
        packed = self.mlp_weights if self.dense_attention else self.linear_weights
        packed -= self.delta_layers * self._weights(DELTA_NET[2:4]) + self.dense_weights
        dense = self.linear_weights - packed + self.embedding_weights
        bits = BITS.get(quantization, 8 * dtype.itemsize)
        return packed * bits / 8 + dtype.itemsize * dense

    def unshared_bytes(self) -> float:
        """Bytes of vLLM's base that are no part of the trainer's, where both share weights: Marlin pads experts."""
        if not self.dense_attention:
            return 0.0
        width = self.intermediate_size // self.top_k
        padded = (-(-self.hidden // 256) * 256) * (-(-width // 128) * 128) / (self.hidden * width)
        return (padded - 1) * self.mlp_weights * BITS["mxfp4"] / 8

    @property
    def embedding_weights(self) -> int:
        """Embedding and output layer."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    def sequence_kv_bytes(self, tokens: int, dtype: torch.dtype, under_way: int = 0) -> int:
        """Bytes of a sequence's keys and values, of which layers with a window hold no more than that, and its states.

        Beside states vLLM (0.30) allocates keys and values in blocks of their size.

        Args:
            tokens: Tokens of the sequence.
            dtype: Data type of keys and values.
            under_way: Tokens of the engine's forward passes, which vLLM (0.30, `SlidingWindowSpec`) holds beside the
                window, and counts when it starts.
        """
        if self.full is not None:
            return sum(kind.sequence_kv_bytes(tokens, dtype, under_way) for kind in self.kinds)
        outside = max(tokens - self.window - under_way, 0) * self.window_layers
        token = 2 * self.kv_dim * dtype.itemsize
        if self.delta is not None:
            block = -(-self.delta.state_bytes(dtype) // (16 * token)) * 16
            tokens = -(-tokens // block) * block
        return ((self.layers - self.delta_layers) * tokens - outside) * token + self.state_bytes(dtype)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's states in all gated delta nets, of any length."""
        return 0 if self.delta is None else self.delta_layers * self.delta.state_bytes(dtype)

    def adapter_weights(self, rank: int, targets: Sequence[str] = PROJECTIONS) -> int:
        """Weights of A and B on the linears that these targets name."""
        count = 0
        for index, linears in enumerate(self._adapted(targets)):
            sizes = self.of_layer(index).linears
            count += sum(sum(sizes[part][0] for part in parts) + sizes[parts[0]][1] for parts in linears)
        return rank * count

    def engine_adapter_weights(self, rank: int, targets: Sequence[str] = PROJECTIONS) -> int:
        """Weights of A and B in the vLLM engine, where each B of a fused projection has all of its ranks."""
        return sum(rank * count * (rows + columns) for count, rows, columns in self._fused(targets))

    def merged_weights(self, targets: Sequence[str]) -> int:
        """Weights of the fused projections that an adapter changes."""
        return sum(rows * columns for count, rows, columns in self._fused(targets) if count)

    def _fused(self, targets: Sequence[str]) -> Iterator[tuple[int, int, int]]:
        """For each fused projection, the number of adapted parts, its rows and its columns."""
        groups = [PROJECTIONS[:3], PROJECTIONS[3:4], PROJECTIONS[4:6], PROJECTIONS[6:]]
        groups += [] if self.delta is None else [DELTA_NET[:2], DELTA_NET[2:4], DELTA_NET[4:]]
        for index, adapted in enumerate(self._adapted(targets)):
            linears, names = self.of_layer(index).linears, {part for parts in adapted for part in parts}
            for group in groups:
                rows = sum(linears.get(name, linears["k_proj"])[0] for name in group)  # the engine has keys as v, too
                yield len(names.intersection(group)), rows, linears[group[0]][1]

    def _adapted(self, targets: Sequence[str]) -> tuple[frozenset[tuple[str, ...]], ...]:
        if self.shared_size:  # its linears stand for the MLP's
            targets = [target.replace("shared_expert.", "") for target in targets]
        without_v = () if self.full is None or self.full.has_v else self.full_layers
        return _adapted(self.layers, tuple(targets), () if self.delta is None else self.delta.layers, without_v)


@cache
def _adapted(
    layers: int, targets: tuple[str, ...], delta: tuple[int, ...], without_v: tuple[int, ...]
) -> tuple[frozenset[tuple[str, ...]], ...]:
    """The projections that each adapted linear of a layer is, by their names in Llama; a fused one is several."""
    adapted, unknown = [], set(targets)
    for index in range(layers):
        names: set[tuple[str, ...]] = set()
        mlp = {name: parts for name, parts in _LINEARS.items() if name.startswith("mlp.")}
        for linear, parts in (_DELTA_LINEARS | mlp if index in delta else _LINEARS).items():
            if index in without_v and parts == ("v_proj",):
                continue
            matching = {target for target in targets if names_match(f"model.layers.{index}.{linear}", [target])}
            names.update([parts] if matching else ())
            unknown -= matching
        adapted.append(frozenset(names))
    if unknown:
        raise UserError(
            f"memory is estimated for adapters on {', '.join(PROJECTIONS)}, also with their path, as in "
            f"self_attn.q_proj; model.policy.lora.targets names {min(unknown)}: leave it out of them to see an estimate"
        )
    return tuple(adapted)
