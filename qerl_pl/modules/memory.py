"""Whether full fine-tuning fits into the device's memory, worked out before anything is loaded."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qerl_pl.engines.capacity import GIB
from qerl_pl.errors import UserError
from qerl_pl.formats.model_folder import TensorFiles
from qerl_pl.modules.policy import PolicyConfig

log = logging.getLogger(__name__)

MASTER = GRADIENT = 4
"""Bytes of a weight that trains, and of its gradient."""
SAMPLE = 512
"""Side of the matrices that an optimizer is measured on: 8-bit ones keep small ones in 32 bits, paged ones unpaged."""


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs for each trained weight."""

    state: float
    """Held from its first step on."""
    step: float
    """More while it steps: on a GPU `torch.optim.AdamW` takes the roots of all second moments at once."""


def require_memory(
    folder: Path,
    config: PolicyConfig,
    make: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    device: torch.device,
    with_reference: bool,
    cache_gib: float,
) -> None:
    """Log what full fine-tuning of a model will hold on its device beside the engine, and refuse what cannot fit.

    Args:
        folder: The model's.
        config: Of the policy; with an adapter nothing is asked.
        make: Builds the optimizer; None where nothing trains.
        device: Where all of it goes. On a CPU what other programs could give back counts as free.
        with_reference: Whether the reference policy is loaded.
        cache_gib: What the engine gives back in an update, from whose end on no gradients are held.

    Raises:
        UserError: It does not fit, activations not counted.
    """
    if config.adapter is not None:
        return
    weights = sum(torch.Size(shape).numel() for shape in TensorFiles(folder).shapes().values())
    optimizer = OptimizerBytes(0, 0) if make is None else optimizer_bytes(make, device)
    free = _free_bytes(device)
    sizes = {
        "weights": MASTER,
        "gradients": 0 if make is None else GRADIENT,
        "optimizer": optimizer.state,
        "reference policy": config.torch_dtype.itemsize if with_reference else 0,
    }
    parts = ", ".join(f"{name} {size * weights / GIB:.3g}" for name, size in sizes.items() if size)
    held, sampling = sum(sizes.values()) * weights, (sum(sizes.values()) - sizes["gradients"]) * weights
    if stepping := optimizer.step * weights:
        parts += f", and while the optimizer steps {stepping / GIB:.3g}"
    asleep = free + cache_gib * GIB
    log.info("full fine-tuning holds %.3g GiB: %s; %s has %.3g free", held / GIB, parts, device, asleep / GIB)
    if sampling > free or held + stepping > asleep:
        raise UserError(
            f"full fine-tuning of {weights / 1e9:.3g} billion weights needs {held / GIB:.3g} GiB ({parts}); {device} "
            f"has {asleep / GIB:.3g} free in an update and {free / GIB:.3g} beside the engine's cache; use an "
            "optimizer with states in 8 bits such as bitsandbytes.optim.AdamW8bit, or set model.policy.finetune to lora"
        )


def state_to_come(
    optimizer: Optimizer, make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device
) -> float:
    """Bytes a weight that an optimizer will hold and does not yet: none where a checkpoint has brought its state.

    Args:
        optimizer: Of a run.
        make: Has built it.
        device: Where its parameters are.
    """
    return 0.0 if optimizer.state else optimizer_bytes(make, device).state


def optimizer_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device) -> OptimizerBytes:
    """What an optimizer needs for each weight, measured by its steps over few.

    Two measurements tell what grows with a matrix from counters and tables, and what is needed for all matrices at once
    from what is for one after the other.

    Args:
        make: Builds it.
        device: Where. On a CPU what a step needs is not measured: it goes matrix by matrix there.
    """
    (small, first), (large, _), (_, both) = (_measured(make, device, rows) for rows in ([1], [2], [1, 1]))
    return OptimizerBytes((large - small) / SAMPLE**2, (both - first) / SAMPLE**2)


def _measured(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device, heights: list[int]
) -> tuple[int, int]:
    """Bytes on the device that a step leaves, and what a second one needs on top, for matrices of so many samples."""
    weights = [nn.Parameter(torch.zeros(height * SAMPLE, SAMPLE, device=device)) for height in heights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer, before = make(weights), _requested_bytes(device, "current")
    optimizer.step()
    if device.type != "cuda":
        held = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(value.nbytes for value in held), 0
    kept = _requested_bytes(device, "current")
    torch.cuda.reset_peak_memory_stats(device)
    optimizer.step()
    return kept - before, _requested_bytes(device, "peak") - kept


def _requested_bytes(device: torch.device, when: str) -> int:
    """Of PyTorch's tensors on a GPU, without what its allocator rounds up."""
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"]) if device.type == "cuda" else 0


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)
