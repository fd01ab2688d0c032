"""CUDA graphs: which batches have one, and that they own the cuBLAS workspaces of their GEMMs."""

import pytest
import torch
from torch import nn

from qerl_pl.engines.vllm.startup import graph_settings
from qerl_pl.engines.vllm.worker import graphs_own_cublas_workspaces


@pytest.mark.parametrize("max_num_seqs", [513, 576, 600, 1024, 2000])
def test_every_number_of_sequences_has_a_graph_that_is_little_larger(max_num_seqs: int) -> None:
    sizes = graph_settings(max_num_seqs)["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
    for decoded in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= decoded)
        assert size - decoded < (8 if decoded <= 256 else 16 if decoded <= 512 else 64)


def test_up_to_512_sequences_the_sizes_of_graphs_are_those_of_vllm() -> None:
    assert graph_settings(512) == {}


def test_workspaces_are_freed_before_each_forward_pass_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("freed"), raising=False)
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), graphs_own_cublas_workspaces(model):
        model(torch.zeros(1, 2))
        model(torch.zeros(1, 2))
        raise KeyError
    model(torch.zeros(1, 2))
    assert freed == ["freed", "freed"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_survives_that_all_workspaces_are_freed() -> None:
    """As Lightning frees them; the GEMM of a graph that uses the warm-up's workspace would write to unmapped memory."""
    torch.manual_seed(0)
    model = nn.Linear(8192, 256, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    expected, graph, stream = model(x), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with graphs_own_cublas_workspaces(model), torch.cuda.stream(stream):
        for _ in range(2):
            model(x)  # warm-up, on the stream of the capture
        with torch.cuda.graph(graph, stream=stream):
            y = model(x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, expected)
