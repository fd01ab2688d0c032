"""Backend of the ops, selected once per process."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["torch", "triton"]

_selected: Backend = "torch"


def interpreting() -> bool:
    """Whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_available() -> bool:
    """Whether the Triton kernels can run here: Triton is installed, and there is a GPU or its interpreter is on."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or interpreting())


def select_backend(name: Backend) -> None:
    """Select the backend of every op of this process; "torch" by default.

    CPU tensors take the plain PyTorch reference in either case, except in Triton's interpreter.

    Args:
        name: "torch" is plain PyTorch, on any device; "triton" needs a GPU.

    Raises:
        RuntimeError: The backend cannot run here.
    """
    global _selected
    if name == "triton" and not triton_available():
        raise RuntimeError(
            "The backend 'triton' needs the package triton and a GPU (or TRITON_INTERPRET=1), got "
            f"triton {'installed' if importlib.util.find_spec('triton') else 'missing'} and "
            f"{torch.cuda.device_count()} GPUs; select the backend 'torch'."
        )
    _selected = name


def selected_backend() -> Backend:
    """The selected backend."""
    return _selected


def select_backend_of(device: torch.device) -> None:
    """Select Triton for a run on a GPU; on another device the selection stays.

    Raises:
        RuntimeError: As `select_backend`.
    """
    if device.type == "cuda":
        select_backend("triton")


@contextmanager
def backend_for(device: torch.device) -> Iterator[None]:
    """Inside the block ops run on Triton if `device` is a GPU and has it, else on plain PyTorch."""
    before = _selected
    select_backend("triton" if device.type == "cuda" and triton_available() else "torch")
    try:
        yield
    finally:
        select_backend(before)


def runs_triton(tensor: Tensor) -> bool:
    """Whether an op on `tensor` takes the Triton kernel."""
    return _selected == "triton" and (tensor.is_cuda or interpreting())
