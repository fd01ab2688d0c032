"""Map of the base model's weights into vLLM's model, which fuses shared-input linears and pads the vocabulary."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.engines.base import check_tensor
from qerl_pl.errors import UserError
from qerl_pl.formats.nf4 import NF4_BLOCK, NF4Weight
from qerl_pl.models.families import Family, family_of
from qerl_pl.models.folder import TensorFiles

FusedSlice = tuple[str, int, int]
"""A linear of the base model in one of vLLM's: its name, rows [start, stop)."""


_PARTS = {"in_proj_qkv": 3}
"""Linears of the base model of which vLLM has several sizes, with their number: queries, keys and values."""


def fused_slices(model: Any, name: str, linear: Any, without_v: Collection[str] = ()) -> list[FusedSlice]:
    """The base model's linears that are fused into a linear of vLLM's model.

    Args:
        model: vLLM's.
        name: Of the linear, with the base model's name of its parent.
        linear: vLLM's.
        without_v: Attentions of the base model whose values are their keys: vLLM has k twice, once in place of v.
    """
    stem, _, last = name.rpartition(".")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    members = packed.get(last, [last])  # a single one where the base model's linear is fused, too
    parts = iter(linear.output_partition_sizes if len(members) > 1 else [linear.output_size_per_partition])
    sizes = [sum(itertools.islice(parts, _PARTS.get(member, 1))) for member in members]
    stops = list(itertools.accumulate(sizes))
    names = [f"{stem}.{'k_proj' if member == 'v_proj' and stem in without_v else member}" for member in members]
    return [(member, stop - size, stop) for member, size, stop in zip(names, sizes, stops, strict=True)]


def check_fixed(config: Any, family: Family) -> None:
    """Reject a model that vLLM would compute otherwise than its config says.

    Raises:
        UserError: A setting differs from what vLLM assumes.
    """
    for key, value in family.fixed_in_vllm(config).items():
        actual = getattr(config, key, value)  # releases that lack a setting have vLLM's value in their code
        if actual != value:
            raise UserError(
                f"vLLM computes every {family.model_type} with {key} {value}; config.json has {actual}: use "
                "TransformersEngine"
            )


def vocabulary(model: Any) -> dict[str, Tensor]:
    """Embeddings and lm_head by checkpoint name, without vLLM's padding rows."""
    base_name = family_of(model.config.model_type).name_in_base
    found = {base_name(name): getattr(module, "weight", None) for name, module in model.named_modules()}
    tables = ((name, found.get(name)) for name in ("model.embed_tokens", "lm_head"))
    return {f"{name}.weight": w.data[: model.config.vocab_size] for name, w in tables if isinstance(w, Tensor)}


METHOD = "BitsAndBytesLinearMethod"
"""vLLM's class of linears with bitsandbytes' weights, in 0.25."""


def is_nf4(linear: Any) -> bool:
    """Whether a vLLM linear has an NF4 weight."""
    return getattr(getattr(linear, "weight", None), "bnb_quant_state", None) is not None


def shared_rows(linear: Any, slices: Sequence[FusedSlice]) -> dict[str, NF4Weight] | None:
    """Frozen NF4 weights that the trainer can share, one for each slice of a vLLM linear.

    vLLM dequantizes the blocks' magnitudes when it loads; the weights are the same.

    Returns:
        None where a slice is not stored by itself, in NF4's blocks.
    """
    weight, states = linear.weight, linear.weight.bnb_quant_state
    offsets = [int(offset) for offset in weight.bnb_shard_offsets]
    if len(states) != len(slices):
        return None
    shared: dict[str, NF4Weight] = {}
    for index, (name, start, stop) in enumerate(slices):
        state = states[index]
        shape = (stop - start, linear.input_size_per_partition)
        codes = weight.data.view(-1)[offsets[index] : offsets[index + 1]]
        known = tuple(state.shape) == shape and state.quant_type == "nf4" and state.blocksize == NF4_BLOCK
        if not known or state.nested or state.absmax.dtype != torch.float32 or 2 * len(codes) != shape[0] * shape[1]:
            return None
        shared[name] = NF4Weight(codes, state)
    return shared


class PlainMethod:
    """The `quant_method` of a linear whose weight vLLM's CPU build has repacked: a plain product by `weight`."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return F.linear(x, layer.weight, None if bias is None else bias.to(x.dtype))

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> [..., hidden]."""
        out: Tensor = self.base.embedding(layer, ids)
        return out


def make_writable(modules: Iterable[Any], dtype: torch.dtype) -> None:
    """Have linears and lm_head of the CPU build multiply by their `weight`, which `write` changes, as GPU builds do."""
    for module in modules:
        if "cpu_linear" not in vars(module):
            continue
        if module.weight.numel() == 0:  # the first sync, which comes before the first token, fills it
            shape = module.output_size_per_partition, module.input_size_per_partition
            module.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        module.quant_method = PlainMethod(module.quant_method)


def fill(linears: Iterable[tuple[Any, Sequence[FusedSlice]]], folder: Path) -> None:
    """Read the weights of linears after `make_writable` from the checkpoint that vLLM has loaded."""
    tensors = TensorFiles(folder)
    for linear, slices in linears:
        for name, start, stop in slices if linear.weight.dim() == 2 else ():  # a convolution has three
            linear.weight.data[start:stop] = tensors.read(f"{name}.weight")


def round_sinks(modules: Iterable[Any]) -> None:
    """Round attention sinks to bfloat16: vLLM's CPU kernel reads them so, whatever the other tensors' data type."""
    from vllm.model_executor.layers.attention import Attention

    for module in modules:
        if isinstance(module, Attention) and module.impl.sinks is not None:
            module.impl.sinks = module.impl.sinks.bfloat16()


def write(
    tensors: Mapping[str, Tensor],
    linears: Iterable[tuple[Any, Sequence[FusedSlice]]],
    model: Any,
    norms: Collection[str],
) -> None:
    """Copy trained weights into vLLM's model, rounded to its data types.

    Raises:
        UserError: vLLM's model has no such weight.
    """
    targets = {name: [tensor] for name, tensor in vocabulary(model).items()}
    for linear, slices in linears:
        for name, start, stop in slices:
            targets.setdefault(f"{name}.weight", []).append(linear.weight.data[start:stop])
            if linear.bias is not None:
                targets.setdefault(f"{name}.bias", []).append(linear.bias.data[start:stop])
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") not in norms:
            for target in targets.get(name, [None]):
                check_tensor(name, target, tensor).copy_(tensor)
