"""The same model with its channels in another order and under other signs: the same function, other blocks to round.

What a format costs one checkpoint is one draw of its rounding errors; that of such copies says how much is the draw's.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.formats.model_folder import ShardWriter, TensorFiles, copy_other_files, load_config, read_config
from qerl_pl.persistence.random_state import stream_seed


class Channels(NamedTuple):
    """New channel i is old channel order[i] times signs[i]."""

    order: Tensor
    signs: Tensor

    @classmethod
    def drawn(cls, size: int, name: str, seed: int) -> "Channels":
        """Those of one place of the model; `name` tells its stream from the others'."""
        generator = torch.Generator().manual_seed(stream_seed(seed, "channels", name))
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        return cls(torch.randperm(size, generator=generator), signs)

    def rows(self, tensor: Tensor) -> Tensor:
        """Of [size, ...], or of a bias."""
        return tensor[self.order] * self.signs.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))

    def columns(self, tensor: Tensor) -> Tensor:
        """Of [N, size]."""
        return tensor[:, self.order] * self.signs.to(tensor.dtype)


def reorder_checkpoint(src: Path, dst: Path, seed: int) -> None:
    """Write a 16-bit decoder of Llama's or Qwen's kind to `dst`, an empty folder.

    The residual stream, what a gated layer multiplies and the values of each head change order and signs. Only the
    order of sums tells it from `src`.
    """
    config, tensors, writer = load_config(src), TensorFiles(src), ShardWriter(dst)
    for name in tensors:
        writer.add(name, _reordered(name, tensors.read(name), config, seed))
    writer.finish()
    copy_other_files(src, dst, read_config(src))


def _reordered(name: str, tensor: Tensor, config: Any, seed: int) -> Tensor:
    layer, _, projection = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    hidden = Channels.drawn(config.hidden_size, "hidden", seed)
    match projection:
        case "embed_tokens" | "lm_head" | "q_proj" | "k_proj":
            return hidden.columns(tensor) if tensor.dim() == 2 else tensor  # a bias is the heads' own
        case "input_layernorm" | "post_attention_layernorm" | "norm":
            return tensor[hidden.order]
        case "v_proj":
            values = _values(layer, config, seed, repeated=1).rows(tensor)
            return hidden.columns(values) if tensor.dim() == 2 else values
        case "o_proj":
            repeated = config.num_attention_heads // config.num_key_value_heads
            return hidden.rows(_values(layer, config, seed, repeated).columns(tensor))
        case "gate_proj" | "up_proj":
            inner = Channels.drawn(config.intermediate_size, layer, seed)
            rows = inner.rows(tensor) if projection == "up_proj" else tensor[inner.order]
            return hidden.columns(rows)
        case "down_proj":
            return hidden.rows(Channels.drawn(config.intermediate_size, layer, seed).columns(tensor))
    return tensor


def _values(layer: str, config: Any, seed: int, repeated: int) -> Channels:
    """Those of all heads' values, each head's among themselves, `repeated` times as attention repeats them."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = [Channels.drawn(size, f"{layer}.{head}", seed) for head in range(config.num_key_value_heads)]
    heads = [head for head in heads for _ in range(repeated)]
    order = torch.cat([head.order + place * size for place, head in enumerate(heads)])
    return Channels(order, torch.cat([head.signs for head in heads]))
