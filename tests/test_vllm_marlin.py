"""Products of vLLM's NVFP4 linears: who computes which, and that both see the same weight and bias."""

from typing import Any

import pytest
import torch
import torch._dynamo
from qerl_kernels import MarlinTensor, dequantize_marlin, marlin_alpha, quantize_nvfp4
from qerl_kernels.marlin import to_marlin
from torch import Tensor, nn

from qerl_pl.engines import vllm_marlin
from qerl_pl.engines.vllm_marlin import MarlinOrDenseMethod, attach_dense, marlin_tensor

COLUMNS, ROWS, DENSE_ABOVE = 128, 64, 4
BIAS = torch.arange(ROWS).bfloat16() - 20


class MarlinNvFp4LinearKernel:
    """Named as vLLM's kernel; the name is what decides."""


class Method:
    """Multiplies as Marlin does, by a bias in an order of its own: here backwards."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = (x.float() @ dense(layer).T).to(x.dtype)
        return y if bias is None else y + bias.flip(0)


def dense(layer: Any) -> Tensor:
    held = MarlinTensor(layer.weight, layer.weight_scale, layer.weight_global_scale)
    return dequantize_marlin(*held[:2], torch.float32) * marlin_alpha(held.global_scale)


def linear(biased: bool) -> Any:
    """A linear as vLLM holds it once Marlin has prepared it."""
    layer: Any = nn.Module()
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    layer.weight, layer.weight_scale, layer.weight_global_scale = to_marlin(quantize_nvfp4(weight))
    layer.workspace = torch.zeros(1, dtype=torch.int32)
    layer.bias = nn.Parameter(BIAS.flip(0), requires_grad=False) if biased else None
    layer.input_size_per_partition, layer.output_size_per_partition = COLUMNS, ROWS
    layer.scheme = type("Scheme", (), {"kernel": MarlinNvFp4LinearKernel()})()
    layer.quant_method = Method()
    return layer


@pytest.fixture
def marlin_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of vLLM's product, which needs a GPU: it answers with sevens."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    calls = []

    def product(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_global_scale: Tensor,
        workspace: Tensor,
        size_n: int,
        size_k: int,
        bias: Tensor | None,
    ) -> Tensor:
        calls.append((weight, weight_scale, weight_global_scale, workspace, size_n, size_k, bias))
        return input.new_full((len(input), size_n), 7.0)

    monkeypatch.setattr(marlin_utils_fp4, "apply_fp4_marlin_linear", product)
    return calls


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_few_tokens_go_to_marlin_and_many_to_the_dense_weight(
    marlin_calls: list[tuple[Any, ...]], biased: bool, compiled: bool
) -> None:
    layer = linear(biased)
    attach_dense(layer, DENSE_ABOVE)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = layer.quant_method.apply(layer, x, layer.bias)
        return y + 0

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    x = torch.randn(DENSE_ABOVE + 1, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)  # as vLLM does: a graph for one number of tokens is an error
    with torch.inference_mode():
        many = run(x)
        assert not marlin_calls
        few = run(x[:DENSE_ABOVE])
    assert few.shape == (DENSE_ABOVE, ROWS) and (few == 7.0).all()
    (call,) = marlin_calls
    held = (layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace)
    assert all(found.data_ptr() == own.data_ptr() for found, own in zip(call, held, strict=False))
    assert call[4:6] == (ROWS, COLUMNS)
    assert torch.equal(call[6], BIAS.flip(0)) if biased else call[6] is None
    expected = x.float() @ dense(layer).T + (BIAS.float() if biased else 0.0)
    torch.testing.assert_close(many.float(), expected, rtol=8e-3, atol=1e-3)


def test_a_linear_that_marlin_has_not_prepared_or_has_padded_is_left_alone() -> None:
    other, padded = linear(False), linear(False)
    other.scheme.kernel = object()
    padded.output_size_per_partition = ROWS - 8
    for layer in (other, padded, nn.Linear(4, 4)):
        method = getattr(layer, "quant_method", None)
        attach_dense(layer, DENSE_ABOVE)
        assert marlin_tensor(layer) is None and getattr(layer, "quant_method", None) is method
    whole = linear(False)
    attach_dense(whole, DENSE_ABOVE)
    assert isinstance(whole.quant_method, MarlinOrDenseMethod) and marlin_tensor(whole) is not None


def test_a_vllm_without_marlins_product_is_named(
    monkeypatch: pytest.MonkeyPatch, marlin_calls: list[tuple[Any, ...]]
) -> None:
    assert vllm_marlin.missing() == []
    name = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
    monkeypatch.delattr(f"{name}.apply_fp4_marlin_linear")
    assert vllm_marlin.missing() == [f"{name}.apply_fp4_marlin_linear"]
