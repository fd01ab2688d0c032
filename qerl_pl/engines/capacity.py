"""Sizes of tensors, files and the key/value cache, and the checks of them before an engine starts."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from qerl_pl.errors import UserError

GIB = 2**30


def held_gib(tensors: Iterable[Tensor]) -> float:
    """GiB of tensors; views of the same memory (by its first address) count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.data_ptr()] = max(tensor.nbytes, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values()) / GIB


def files_gib(folder: Path) -> float:
    """GiB of a model folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB


def kv_cache_size(gib: float | None, memory_share: float | None, device: torch.device) -> float | None:
    """GiB of the key/value cache; None where vLLM computes it from its share of the memory."""
    if gib is None and memory_share is None:
        return 4.0 if device.type == "cuda" else 0.5
    return gib


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of key and value of a token in all layers."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * head_size * dtype.itemsize)


def check_length(length: int, needed: int, kv_gib: float | None, bytes_per_token: int) -> None:
    """Reject an engine whose cache could not hold a sequence.

    Args:
        length: Longest sequence that the engine prepares for, in tokens.
        needed: Longest sequence the run can ask for, in tokens.
        kv_gib: Size of the key/value cache; None when the engine chooses it.
        bytes_per_token: Of a token in the cache.

    Raises:
        UserError: The length or the cache is too small.
    """
    if length < needed:
        raise UserError(f"max_model_len must hold prompt and completion, {needed} tokens; got {length}: leave it out")
    if kv_gib is not None and kv_gib * GIB < bytes_per_token * length:
        raise UserError(
            f"the key/value cache must hold one sequence of {length} tokens, {bytes_per_token * length / GIB:.3g} GiB; "
            f"got kv_cache_gib {kv_gib:g}: raise it or shorten the sequences"
        )
