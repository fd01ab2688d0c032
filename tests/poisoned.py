"""For tests of Triton's kernels: on a GPU, or on a CPU in Triton's interpreter.

Buffers start poisoned (deterministic mode fills them with NaN), so an element that no program writes is seen.
"""

from collections.abc import Iterable, Iterator
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


def ruled_out(hidden: torch.Tensor, head: torch.Tensor, tokens: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and an output layer with another column, by which the logits of these tokens are minus infinity."""
    index = torch.tensor([*tokens], device=head.device)
    column = head.new_zeros(len(head), 1).index_fill(0, index, -torch.inf)
    return torch.cat((hidden, hidden.new_ones(len(hidden), 1)), 1), torch.cat((head, column), 1)
