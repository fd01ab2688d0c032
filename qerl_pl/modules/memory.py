"""Whether full fine-tuning fits into the device's memory, worked out before anything is loaded."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qerl_pl.engines.capacity import GIB
from qerl_pl.errors import UserError
from qerl_pl.formats.model_files import TensorFiles
from qerl_pl.modules.policy import PolicyConfig

log = logging.getLogger(__name__)

MASTER = GRADIENT = 4
"""Bytes of a weight that trains, and of its gradient."""
SAMPLE = 256
"""Side of the matrix that an optimizer's state is measured on: 8-bit ones keep small ones in 32 bits."""


def require_memory(
    folder: Path,
    config: PolicyConfig,
    make: Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
    with_reference: bool,
) -> None:
    """Log what full fine-tuning of a model will hold on its device beside the engine, and refuse what cannot fit.

    Args:
        folder: The model's.
        config: Of the policy; with an adapter nothing is asked.
        make: Builds the optimizer.
        device: Where all of it goes. On a CPU what other programs could give back counts as free.
        with_reference: Whether the reference policy is loaded.

    Raises:
        UserError: It does not fit, activations not counted.
    """
    if config.adapter is not None:
        return
    weights = sum(torch.Size(shape).numel() for shape in TensorFiles(folder).shapes().values())
    sizes = {
        "weights": MASTER,
        "gradients": GRADIENT,
        "optimizer": state_bytes(make, device),
        "reference policy": config.torch_dtype.itemsize if with_reference else 0,
    }
    parts = ", ".join(f"{name} {size * weights / GIB:.3g}" for name, size in sizes.items() if size)
    needed, free = sum(sizes.values()) * weights, _free_bytes(device)
    log.info("full fine-tuning holds %.3g GiB: %s; %s has %.3g free", needed / GIB, parts, device, free / GIB)
    if needed > free:
        raise UserError(
            f"full fine-tuning of {weights / 1e9:.3g} billion weights needs {needed / GIB:.3g} GiB ({parts}); {device} "
            f"has {free / GIB:.3g} free beside the engine; use an optimizer with states in 8 bits, such as "
            "bitsandbytes.optim.AdamW8bit, or set model.policy.finetune to lora"
        )


def state_bytes(make: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device) -> float:
    """Bytes that an optimizer keeps a weight, measured on a small one."""
    weight = nn.Parameter(torch.zeros(SAMPLE, SAMPLE, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer = make([weight])
    optimizer.step()
    held = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(value.nbytes for value in held if value.numel() > SAMPLE) / weight.numel()  # not counters and tables


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)
