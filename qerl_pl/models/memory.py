"""Measures memory: of tensors, files and optimizers, and what a device has free; memory_plan.py estimates it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
"""Of vLLM's cache beside its longest sequence: a block of 16 that it reserves, and one that may not be full.

In a cache that fits a sequence exactly it would wait for the reserved block forever."""
SAMPLE = 512
"""Side of the matrices that an optimizer is measured on: 8-bit ones keep small ones in 32 bits, paged ones unpaged."""


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


# Keys and values ------------------------------------------------------------------------------------------------------


def kv_cache_size(requested: float | None, share: float | None, device: torch.device) -> float | None:
    """GiB of the key/value cache; None where vLLM computes it from its share of the memory."""
    if requested is None and share is None:
        return 4.0 if device.type == "cuda" else 0.5
    return requested


def check_length(length: int, needed: int, kv_gib: float | None, least_bytes: Callable[[int], int]) -> None:
    """Reject an engine that could not finish one sequence.

    Args:
        length: Longest sequence the engine prepares for, in tokens.
        needed: Longest sequence the run can request, in tokens.
        kv_gib: Size of the key/value cache; None where the engine chooses it.
        least_bytes: Of the keys and values of a sequence, by its tokens.

    Raises:
        UserError: The length or the cache is too small.
    """
    if length < needed:
        raise UserError(f"max_model_len must hold prompt and completion, {needed} tokens; got {length}: leave it out")
    needed_gib = least_bytes(length + SPARE_TOKENS) / GIB
    if kv_gib is not None and kv_gib < needed_gib:
        raise UserError(
            f"the key/value cache must hold one sequence of {length} tokens, at least {needed_gib:.4g} GiB; "
            f"got kv_cache_gib {kv_gib:g}: raise it or shorten the sequences"
        )


# Weights, gradients, optimizer states ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of an optimizer, in bytes per trained weight."""

    state: float
    """Held from the first step on."""
    step: float
    """In addition during a step: on a GPU `torch.optim.AdamW` takes the roots of all second moments at once."""


@dataclass(frozen=True)
class TeacherBytes:
    """Memory of a teacher's weights on the policy's device, in bytes."""

    held: float = 0
    """During the run."""
    computing: float = 0
    """In addition while the teacher computes: before an update, while there are no gradients and the engine sleeps."""


def training_bytes(
    weights: int, optimizer: OptimizerBytes | None, reference: torch.dtype | None, teacher: float = 0
) -> dict[str, float]:
    """Bytes that full fine-tuning holds between two steps, by purpose.

    Args:
        weights: Number of weights.
        optimizer: None where nothing trains.
        reference: Data type of the reference policy; None without one.
        teacher: Bytes of a teacher's weights.
    """
    sizes = {
        "weights": MASTER,
        "gradients": 0 if optimizer is None else GRADIENT,
        "optimizer": 0 if optimizer is None else optimizer.state,
        "reference policy": 0 if reference is None else reference.itemsize,
    }
    held = {name: size * weights for name, size in sizes.items()} | {"teacher": teacher}
    return {name: size for name, size in held.items() if size}


def optimizer_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device) -> OptimizerBytes:
    """Memory of an optimizer per weight, measured by steps over small matrices.

    Differences of two measurements leave out counters and tables, and what is needed for one matrix after the other.

    Args:
        make: Builds the optimizer.
        device: Where. On a CPU a step's additional memory is not measured: the step goes matrix by matrix.
    """
    (small, first), (large, _), (_, both) = (_measured(make, device, rows) for rows in ([1], [2], [1, 1]))
    return OptimizerBytes((large - small) / SAMPLE**2, (both - first) / SAMPLE**2)


def pending_state_bytes(
    optimizer: Optimizer, make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device
) -> float:
    """Bytes per weight that an optimizer, built by `make`, has still to allocate; 0 with a checkpoint's state."""
    return 0.0 if optimizer.state else optimizer_bytes(make, device).state


def _measured(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device, heights: list[int]
) -> tuple[int, int]:
    """Bytes held after a step, and the additional bytes of a second one, for matrices [height * SAMPLE, SAMPLE]."""
    weights = [nn.Parameter(torch.zeros(height * SAMPLE, SAMPLE, device=device)) for height in heights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer, before = make(weights), _requested_bytes(device, "current")
    optimizer.step()
    if device.type != "cuda":
        states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(value.nbytes for value in states), 0
    held = _requested_bytes(device, "current")
    torch.cuda.reset_peak_memory_stats(device)
    optimizer.step()
    return held - before, _requested_bytes(device, "peak") - held


def _requested_bytes(device: torch.device, when: str) -> int:
    """Of PyTorch's tensors on a GPU, without the allocator's rounding."""
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"]) if device.type == "cuda" else 0
