"""Measures memory: of tensors, files and optimizers, and what a device has free; memory_plan.py estimates it."""

from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qerl_pl.errors import UserError

GIB = 2**30
MASTER = GRADIENT = 4
"""Bytes of a float32 master weight, and of its gradient."""
SPARE_TOKENS = 32
"""Tokens of vLLM's cache beyond its longest sequence: a block of 16 that it reserves, and one that may not be full.

In a cache that fits a sequence exactly, vLLM's scheduler would wait for the reserved block forever."""
SAMPLE = 512
"""Side of the matrices that an optimizer is measured on: 8-bit ones keep small ones in 32 bits, paged ones unpaged."""

BLOCK_BYTES = 32 * 2**20
"""Bytes of a pinned block, a power of two: PyTorch's allocator of pinned memory rounds up to one."""


def held_gib(tensors: Iterable[Tensor]) -> float:
    """GiB of tensors; views of the same memory (by its first address) count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.data_ptr()] = max(tensor.nbytes, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values()) / GIB


def files_gib(folder: Path) -> float:
    """GiB of a model folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a GPU has free, PyTorch's cache of unused blocks included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def free_cpu_bytes() -> int:
    """Bytes that this machine can give a process."""
    return int(psutil.virtual_memory().available)


def pinned_bytes(layers: int, hidden_size: int, tokens: int, dtype: torch.dtype) -> int:
    """Pinned memory for the inputs of a decoder's layers and of its last norm, each rounded up to blocks."""
    blocks = -(-hidden_size * tokens * dtype.itemsize // BLOCK_BYTES)
    return (layers + 1) * blocks * BLOCK_BYTES


# Keys and values ------------------------------------------------------------------------------------------------------


def kv_cache_size(requested: float | None, share: float | None, device: torch.device) -> float | None:
    """GiB of the key/value cache; None where vLLM computes it from its share of the memory."""
    if requested is None and share is None:
        return 4.0 if device.type == "cuda" else 0.5
    return requested


def check_length(length: int, needed: int, kv_gib: float | None, least_bytes: Callable[[int], int]) -> None:
    """Raise UserError for an engine that could not finish one sequence.

    Args:
        length: Longest sequence the engine prepares for, in tokens.
        needed: Longest sequence the run can request, in tokens.
        kv_gib: Size of the key/value cache; None where the engine chooses it.
        least_bytes: Of the keys and values of a sequence, by its tokens.
    """
    if length < needed:
        raise UserError(f"max_model_len must hold prompt and completion, {needed} tokens; got {length}: leave it out")
    needed_gib = least_bytes(length + SPARE_TOKENS) / GIB
    if kv_gib is not None and kv_gib < needed_gib:
        raise UserError(
            f"the key/value cache must hold one sequence of {length} tokens, at least {needed_gib:.4g} GiB; "
            f"got kv_cache_gib {kv_gib:g}: raise it or shorten the sequences"
        )


# Optimizer states -----------------------------------------------------------------------------------------------------


def optimizer_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device) -> float:
    """Memory of an optimizer's states per weight, measured by steps over small matrices.

    The difference of two measurements leaves out counters and tables.
    """
    return (_state_bytes(make, device, 2) - _state_bytes(make, device, 1)) / SAMPLE**2


def pending_state_bytes(
    optimizer: Optimizer, make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device
) -> float:
    """Bytes per weight that an optimizer, built by `make`, has still to allocate; 0 with a checkpoint's state."""
    return 0.0 if optimizer.state else optimizer_bytes(make, device)


def _state_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device, height: int) -> int:
    """Bytes held after a step over a matrix [height * SAMPLE, SAMPLE]."""
    weight = nn.Parameter(torch.zeros(height * SAMPLE, SAMPLE, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer, before = make([weight]), _requested_bytes(device)
    optimizer.step()
    if device.type == "cuda":
        return _requested_bytes(device) - before
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(value.nbytes for value in states)


def _requested_bytes(device: torch.device) -> int:
    """Bytes of PyTorch's tensors on a GPU, without the allocator's rounding."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"]) if device.type == "cuda" else 0
