"""A decode step's linear on a GPU, beside vLLM's own Marlin."""

from typing import Any

import pytest
import torch
from qerl_kernels import MarlinRows, MarlinTensor, frozen_linear, select_backend, silu_product
from qerl_kernels.marlin import to_marlin
from qerl_kernels.reference import quantize_nvfp4
from torch import Tensor, nn

from qerl_pl.engines.vllm.linear_methods import FP4Method, add_lora, attach_all

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
ROWS, COLUMNS, GATES, RANK = 4608, 3584, 18944, 32
SLICES = [("a.q_proj", 0, 3584), ("a.k_proj", 3584, 4096), ("a.v_proj", 4096, 4608)]


class MarlinNvFp4LinearKernel:
    """Named as vLLM's kernel; the name is what decides."""


class Marlin:
    """What vLLM's method does."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

        weight = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        sizes = {"size_n": layer.output_size_per_partition, "size_k": COLUMNS}
        y: Tensor = apply_fp4_marlin_linear(x, *weight, layer.workspace, bias=bias, **sizes)
        return y


def linear(rows: int) -> Any:
    """A fused projection as vLLM holds it."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    torch.manual_seed(0)
    one: Any = nn.Module()
    held: MarlinTensor = to_marlin(quantize_nvfp4(torch.randn(rows, COLUMNS, device="cuda") * 0.02))
    for name, tensor in zip(("", "_scale", "_global_scale"), held, strict=True):
        setattr(one, f"weight{name}", nn.Parameter(tensor, requires_grad=False))
    one.workspace, one.bias = marlin_make_workspace_new(torch.device("cuda")), None
    one.input_size_per_partition, one.output_size_per_partition = COLUMNS, rows
    one.scheme = type("Scheme", (), {"kernel": MarlinNvFp4LinearKernel()})()
    one.quant_method = Marlin()
    return one


def attach(model: nn.Module, name: str, one: Any, slices: list[tuple[str, int, int]]) -> None:
    """With the decode GEMM, and random adapters on all slices."""
    targets = [piece.rpartition(".")[2] for piece, _, _ in slices]
    config = {"dense_above": 512, "decode_gemm_max_tokens": 128, "rank": RANK, "targets": targets}
    attached = attach_all(model, {name: (one, slices)}, config, torch.bfloat16)
    assert attached.decode_gemm == 1
    for pair in attached.lora.values():
        for factor in pair:
            factor.normal_(std=0.02)


@pytest.fixture(autouse=True)
def with_kernels() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    select_backend("triton")
    yield
    select_backend("torch")


@pytest.fixture
def layer() -> Any:
    one = linear(ROWS)
    attach(nn.Module(), "a.qkv_proj", one, SLICES)
    return one


@torch.inference_mode()
def test_all_three_ways_give_the_same_product(layer: Any) -> None:
    assert isinstance(layer.quant_method, FP4Method)
    x = torch.randn(600, COLUMNS, device="cuda").bfloat16()
    many = layer.quant_method.apply(layer, x)
    for tokens in (1, 8, 16, 33, 64, 65, 128, 129, 192, 512):
        some = layer.quant_method.apply(layer, x[:tokens])
        assert torch.equal(some, layer.quant_method.apply(layer, x[:tokens]))
        assert (some - many[:tokens]).float().norm() <= 4e-3 * many[:tokens].float().norm()


@torch.inference_mode()
def test_gates_and_ups_give_swiglu_in_all_three_ways() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    mlp: Any = nn.Module()
    mlp.gate_up_proj = one = linear(2 * GATES)
    with set_current_vllm_config(VllmConfig()):
        mlp.act_fn = SiluAndMul()
    slices = [("mlp.gate_proj", 0, GATES), ("mlp.up_proj", GATES, 2 * GATES)]
    attach(nn.ModuleDict({"mlp": mlp}), "mlp.gate_up_proj", one, slices)
    assert one.quant_method.gated and isinstance(mlp.act_fn, nn.Identity)
    x = torch.randn(600, COLUMNS, device="cuda").bfloat16()
    weight = MarlinRows(MarlinTensor(one.weight, one.weight_scale, one.weight_global_scale))
    product = add_lora(frozen_linear(x, weight), x, one.qerl_a, one.qerl_b)
    expected = silu_product(*product.chunk(2, dim=1))
    for tokens in (1, 8, 33, 64, 128, 129, 512, 600):
        y = one.quant_method.apply(one, x[:tokens])
        assert torch.equal(y, one.quant_method.apply(one, x[:tokens]))
        assert (y - expected[:tokens]).float().norm() <= 8e-3 * expected[:tokens].float().norm()


@torch.inference_mode()
def test_a_captured_graph_sees_an_adapter_that_is_written_in_place(layer: Any) -> None:
    x = torch.randn(8, COLUMNS, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.quant_method.apply(layer, x)
    layer.qerl_a.neg_()
    graph.replay()
    assert torch.equal(y, layer.quant_method.apply(layer, x))
