"""CUDA graphs that outlive what Lightning clears: cuBLAS's workspaces belong to the graphs that use them.

PyTorch gives every stream a workspace for cuBLAS and keeps it. Lightning frees all of them when a run starts and when
it ends, and what products inside a captured graph write to is then no memory any more. A workspace that is allocated
while a graph is captured lies in the graphs' own memory, which stays as long as they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def workspaces_in_graphs() -> Iterator[None]:
    """Inside the block every captured graph brings its own workspaces for cuBLAS.

    Without it a graph takes those that the warm-up before it has left, which are anybody's to free.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin = graph.capture_begin

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        begin(self, *args, **kwargs)

    graph.capture_begin = capture_begin
    try:
        yield
    finally:
        graph.capture_begin = begin
