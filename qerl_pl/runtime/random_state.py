"""States of the global generators, and deterministic algorithms."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """States of all global generators, of types that `torch.load(weights_only=True)` reads."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a `random_state`; CUDA states only if the number of devices is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


CUBLAS_CONFIG = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Environment variable that PyTorch requires for deterministic products, and its default value: eight times 4 MiB."""
_SAME_BY_DEFAULT = (9, 10, 12)
"""Major compute capabilities of GPUs with the same workspace without the variable."""


def set_cublas_config() -> None:
    """Set cuBLAS's workspace as deterministic algorithms require, unless the user has."""
    os.environ.setdefault(*CUBLAS_CONFIG)


def forget_cublas_config(device: torch.device) -> None:
    """Let PyTorch check the variable of `set_cublas_config`, which it does once, and delete it.

    PyTorch 2.11 parses it again in every product, which takes the host 57 microseconds. Nothing is deleted where the
    workspace would be another without it: on older GPUs, or with a user's own value.
    """
    name, value = CUBLAS_CONFIG
    if device.type != "cuda" or os.environ.get(name) != value:
        return
    if torch.cuda.get_device_capability(device)[0] in _SAME_BY_DEFAULT:
        some = torch.ones(8, 8, device=device)
        with deterministic():
            some @ some
        del os.environ[name]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use PyTorch's deterministic algorithms in the block; an operation without one warns.

    Attention has one, but warns too and does not use it: see `strictly_deterministic_gradient`.
    """
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warning or not enabled)
    settings.fill_uninitialized_memory = enabled and filled  # costs time and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warning)
        settings.fill_uninitialized_memory = filled


def strictly_deterministic_gradient(out: Tensor) -> Tensor:
    """Raise instead of warn, inside `deterministic`, while the gradient of the operation that made `out` is computed.

    On a GPU attention's backward pass sums in the order in which blocks finish, unless nondeterminism is an error
    (PyTorch 2.11). An error for the whole update would stop at other operations of a run.

    Args:
        out: The operation's result, not a view of it.

    Returns:
        `out`.
    """
    switched = False

    def before(grads: object) -> None:
        nonlocal switched
        enabled = torch.are_deterministic_algorithms_enabled()
        switched = enabled and torch.is_deterministic_algorithms_warn_only_enabled()
        if switched:
            torch.use_deterministic_algorithms(True)

    def after(grads: object, grad_outputs: object) -> None:
        if switched:
            torch.use_deterministic_algorithms(True, warn_only=True)

    if out.grad_fn is not None:
        out.grad_fn.register_prehook(before)
        out.grad_fn.register_hook(after)
    return out
