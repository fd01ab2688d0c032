"""For tests of Triton's kernels: on a GPU, or on a CPU in Triton's interpreter.

Buffers start poisoned (deterministic mode fills them with NaN), so an element that no program writes is seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from qerl_kernels import select_backend


@pytest.fixture
def triton_on_poisoned_memory() -> Iterator[None]:
    """Named by `pytest.mark.usefixtures` in a file's `pytestmark`: the benchmarks run these files without conftest."""
    select_backend("triton")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    select_backend("torch")


@contextmanager
def in_pytorch() -> Iterator[None]:
    """Inside the block, what prepares a test or is compared with is PyTorch's: the interpreter is slow."""
    select_backend("triton" if torch.cuda.is_available() else "torch")
    yield
    select_backend("triton")
