"""CUDA graphs keep the workspaces of their products."""

from typing import Any

import pytest
import torch

from qerl_pl.engines.vllm.worker import workspaces_in_graphs


def test_a_capture_begins_without_the_workspaces_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("cleared"), raising=False)
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "capture_begin", lambda self, *args, **kwargs: done.append((args, kwargs))
    )
    before = torch.cuda.CUDAGraph.capture_begin
    graph: Any = object()
    with pytest.raises(KeyError), workspaces_in_graphs():
        torch.cuda.CUDAGraph.capture_begin(graph, 1, pool=2)
        raise KeyError
    assert done == ["cleared", ((1,), {"pool": 2})]
    assert torch.cuda.CUDAGraph.capture_begin is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_survives_that_all_workspaces_are_freed() -> None:
    """As Lightning frees them; what a product of a graph without its own would write to is unmapped then."""
    torch.manual_seed(0)
    x, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((64, 8192), (256, 8192)))
    expected, graph, stream = x @ weight.T, torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with workspaces_in_graphs(), torch.cuda.stream(stream):
        for _ in range(2):
            torch.mm(x, weight.T)  # warm-up, on the stream of the capture
        with torch.cuda.graph(graph, stream=stream):
            y = torch.mm(x, weight.T)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, expected)
