"""Permute and sign-flip a model's channels: the same function with different quantization blocks.

The quantization loss of one checkpoint is one sample of rounding errors; such copies show its spread.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.models.folder import ShardWriter, TensorFiles, copy_other_files, load_config, read_config
from qerl_pl.seeds import stream_seed

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of decoders with the layers that `_reordered` knows."""


class Channels(NamedTuple):
    """New channel i is old channel order[i] times signs[i]."""

    order: Tensor
    signs: Tensor

    @classmethod
    def drawn(cls, size: int, name: str, seed: int) -> "Channels":
        """Random channels; `name` selects the random stream."""
        generator = torch.Generator().manual_seed(stream_seed(seed, "channels", name))
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        return cls(torch.randperm(size, generator=generator), signs)

    def rows(self, tensor: Tensor) -> Tensor:
        """Permute the rows of a weight [size, ...] or bias [size]."""
        return tensor[self.order] * self.signs.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))

    def columns(self, tensor: Tensor) -> Tensor:
        """Permute the columns of a weight [N, size]."""
        return tensor[:, self.order] * self.signs.to(tensor.dtype)


def reorder_checkpoint(src: Path, dst: Path, seed: int) -> None:
    """Write a permuted copy of a 16-bit Llama or Qwen decoder to `dst`, an empty folder.

    The channels of the residual stream, the MLP and each head's values are permuted and sign-flipped. The copy computes
    the same function as `src` up to the order of sums.
    """
    config, tensors, writer = load_config(src), TensorFiles(src), ShardWriter(dst)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"channels can be permuted in {', '.join(FAMILIES)}; {src} is {config.model_type}: take another"
        )
    for name in tensors:
        writer.add(name, _reordered(name, tensors.read(name), config, seed))
    writer.finish()
    copy_other_files(src, dst, read_config(src))


def _reordered(name: str, tensor: Tensor, config: Any, seed: int) -> Tensor:
    layer, _, projection = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    hidden = Channels.drawn(config.hidden_size, "hidden", seed)
    match projection:
        case "embed_tokens" | "lm_head" | "q_proj" | "k_proj":
            return hidden.columns(tensor) if tensor.dim() == 2 else tensor  # a bias has no hidden channels
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
    """Channels of all heads' values, permuted within each head, and repeated as grouped-query attention does."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = [Channels.drawn(size, f"{layer}.{head}", seed) for head in range(config.num_key_value_heads)]
    heads = [head for head in heads for _ in range(repeated)]
    order = torch.cat([head.order + index * size for index, head in enumerate(heads)])
    return Channels(order, torch.cat([head.signs for head in heads]))
