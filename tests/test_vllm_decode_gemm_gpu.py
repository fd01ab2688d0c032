"""A decode step's linear on a GPU, beside vLLM's own Marlin."""

from typing import Any

import pytest
import torch
from plain_ops import to_marlin
from qerl_kernels import MarlinTensor, decode_gemm_linear, select_backend
from qerl_kernels.reference import quantize_nvfp4
from torch import Tensor, nn

from qerl_pl.engines.vllm import linear_methods
from qerl_pl.engines.vllm.attach import attach_all, check_decode_gemm
from qerl_pl.engines.vllm.linear_methods import FP4Method
from qerl_pl.errors import UserError

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
ROWS, COLUMNS, RANK = 4608, 3584, 32
SLICES = [("a.q_proj", 0, 3584), ("a.k_proj", 3584, 4096), ("a.v_proj", 4096, 4608)]


class MarlinNvFp4LinearKernel:
    """Named as vLLM's kernel; the name is what decides."""


class Marlin:
    """What vLLM's method does."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

        weight = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        y: Tensor = apply_fp4_marlin_linear(x, *weight, layer.workspace, size_n=ROWS, size_k=COLUMNS, bias=bias)
        return y


@pytest.fixture
def layer() -> Any:
    """A fused projection as vLLM holds it; random adapters on all three slices."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    select_backend("triton")
    torch.manual_seed(0)
    one: Any = nn.Module()
    held: MarlinTensor = to_marlin(quantize_nvfp4(torch.randn(ROWS, COLUMNS, device="cuda") * 0.02))
    for name, tensor in zip(("", "_scale", "_global_scale"), held, strict=True):
        setattr(one, f"weight{name}", nn.Parameter(tensor, requires_grad=False))
    one.workspace, one.bias = marlin_make_workspace_new(torch.device("cuda")), None
    one.input_size_per_partition, one.output_size_per_partition = COLUMNS, ROWS
    one.scheme = type("Scheme", (), {"kernel": MarlinNvFp4LinearKernel()})()
    one.quant_method = Marlin()
    targets = ["q_proj", "k_proj", "v_proj"]
    config = {"dense_above": 512, "decode_gemm_max_tokens": 128, "rank": RANK, "targets": targets}
    attached = attach_all({"a.qkv_proj": (one, SLICES)}, config, torch.bfloat16)
    assert attached.decode_gemm == 1
    for pair in attached.lora.values():
        for factor in pair:
            factor.normal_(std=0.02)
    yield one
    select_backend("torch")


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
def test_a_captured_graph_sees_an_adapter_that_is_written_in_place(layer: Any) -> None:
    x = torch.randn(8, COLUMNS, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.quant_method.apply(layer, x)
    layer.qerl_a.neg_()
    graph.replay()
    assert torch.equal(y, layer.quant_method.apply(layer, x))


def test_a_negated_adapter_product_is_refused_and_the_right_one_is_not(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for factor in (layer.qerl_a, layer.qerl_b):
        factor.zero_()  # as at a start
    check_decode_gemm([layer])
    assert not layer.qerl_a.any() and not layer.qerl_b.any()

    def negated(x: Tensor, weight: MarlinTensor, bias: Tensor | None, *, a: Tensor, b: Tensor, starts: Any) -> Tensor:
        return decode_gemm_linear(x, weight, bias, a=a, b=-b, starts=starts)

    monkeypatch.setattr(linear_methods, "decode_gemm_linear", negated)
    with pytest.raises(UserError, match="the decode GEMM must give the product of the dequantized weight, and an adap"):
        check_decode_gemm([layer])
