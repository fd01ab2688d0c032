"""Products of vLLM's 4-bit linears: who computes which, and that both see the same weight and bias."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from plain_ops import to_marlin
from qerl_kernels import MarlinTensor, dequantize_marlin, marlin_alpha, quantize_mxfp4, quantize_nvfp4
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_pl.engines.base import EngineSpec
from qerl_pl.engines.vllm import compat
from qerl_pl.engines.vllm.attach import attach_all
from qerl_pl.engines.vllm.linear_methods import (
    FP4Method,
    attach_fp4,
    marlin_tensor,
    shared_rows,
    why_not_shared,
)
from qerl_pl.engines.vllm.merged import attach_merged, merge
from qerl_pl.engines.vllm.weight_map import fused_slices
from qerl_pl.engines.vllm.worker import PolicyWorker
from qerl_pl.errors import UserError
from qerl_pl.models.families import family_of

COLUMNS, ROWS, DENSE_ABOVE = 128, 64, 4
BIAS = torch.arange(ROWS).bfloat16() - 20


class MarlinNvFp4LinearKernel:
    """Named as vLLM's kernel; the name is what decides."""


class MarlinMxFp4LinearKernel:
    """Likewise."""


class Method:
    """Multiplies as Marlin does, by a bias in an order of its own: here backwards."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = (x.float() @ dense(layer).T).to(x.dtype)
        return y if bias is None else y + bias.flip(0)


def dense(layer: Any) -> Tensor:
    held = MarlinTensor(layer.weight, layer.weight_scale, getattr(layer, "weight_global_scale", None))
    return dequantize_marlin(*held[:2], torch.float32, mx=held.global_scale is None) * marlin_alpha(held.global_scale)


def linear(biased: bool, rows: int = ROWS, mx: bool = False) -> Any:
    """A linear as vLLM holds it once Marlin has prepared it."""
    layer: Any = nn.Module()
    weight = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    held = to_marlin(quantize_mxfp4(weight) if mx else quantize_nvfp4(weight))
    for name, tensor in zip(("", "_scale", "_global_scale"), held, strict=True):
        if tensor is not None:
            setattr(layer, f"weight{name}", nn.Parameter(tensor, requires_grad=False))
    layer.workspace = torch.zeros(1, dtype=torch.int32)
    layer.bias = nn.Parameter(BIAS.flip(0), requires_grad=False) if biased else None
    layer.input_size_per_partition, layer.output_size_per_partition = COLUMNS, rows
    kernel = MarlinMxFp4LinearKernel() if mx else MarlinNvFp4LinearKernel()
    layer.scheme = type("Scheme", (), {"kernel": kernel})()
    layer.quant_method = Method()
    return layer


def replace_marlin(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Have vLLM's product, which needs a GPU, answer with sevens; gives the list of its calls."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    calls = []

    def product(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        weight_global_scale: Tensor | None,
        workspace: Tensor,
        size_n: int,
        size_k: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        calls.append((weight, weight_scale, weight_global_scale, workspace, size_n, size_k, bias))
        return input.new_full((len(input), size_n), 7.0)

    monkeypatch.setattr(marlin_utils_fp4, "apply_fp4_marlin_linear", product)
    return calls


@pytest.fixture
def marlin_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return replace_marlin(monkeypatch)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("biased", "mx", "locks"), [(False, False, True), (True, False, False), (True, True, True)])
def test_up_to_dense_above_marlin_multiplies_and_the_dense_weight_beyond(
    marlin_calls: list[tuple[Any, ...]], biased: bool, mx: bool, locks: bool, compiled: bool
) -> None:
    layer = linear(biased, mx=mx)
    if not locks:
        del layer.workspace  # as in vLLM 0.31
    attach_fp4(layer, DENSE_ABOVE)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = layer.quant_method.apply(layer, x, layer.bias)
        return y + 0

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    x = torch.randn(DENSE_ABOVE + 1, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)  # as vLLM does: a graph for one number of tokens is an error
    with torch.inference_mode():
        many = run(x)
        assert not marlin_calls
        by_marlin = run(x[:DENSE_ABOVE])
    assert by_marlin.shape == (DENSE_ABOVE, ROWS) and (by_marlin == 7.0).all()
    (call,) = marlin_calls
    global_scale, workspace = None if mx else layer.weight_global_scale, layer.workspace if locks else None
    held = (layer.weight, layer.weight_scale, global_scale, workspace)
    for found, own in zip(call, held, strict=False):
        assert (found is None) == (own is None) and (own is None or found.data_ptr() == own.data_ptr())
    assert call[4:6] == (ROWS, COLUMNS)
    assert torch.equal(call[6], BIAS.flip(0)) if biased else call[6] is None
    expected = x.float() @ dense(layer).T + (BIAS.float() if biased else 0.0)
    torch.testing.assert_close(many.float(), expected, rtol=8e-3, atol=1e-3)


def test_a_layout_that_is_read_otherwise_is_refused() -> None:
    layer = linear(False)
    layer.weight.data = layer.weight.data.flip(1)

    class Other(Method):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().apply(linear(False), x, bias)

    layer.quant_method = Other()
    with pytest.raises(UserError, match="must give the same product; they differ by .* dense_above to null"):
        attach_fp4(layer, DENSE_ABOVE)


@pytest.mark.parametrize(("value", "refused"), [(math.nan, True), (0.0, False)])
def test_a_product_that_is_no_number_is_refused_and_zeros_are_not(value: float, refused: bool) -> None:
    class Fixed(Method):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.full_like(super().apply(layer, x), value)

    layer = linear(False)
    layer.quant_method = Fixed()
    layer.weight_scale.data.zero_()
    with pytest.raises(UserError, match="differ by nan") if refused else nullcontext():
        attach_fp4(layer, DENSE_ABOVE)


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize(("sizes", "shared"), [([64, 64, 64], True), ([128, 32, 32], False)])
def test_only_full_tiles_are_shared(sizes: list[int], shared: bool, mx: bool) -> None:
    fused = linear(False, rows=192, mx=mx)
    fused.output_partition_sizes = sizes
    model: Any = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.config = SimpleNamespace(model_type="qwen2")

    class Worker(PolicyWorker):
        _qerl_family = family_of("qwen3")
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=None))

        def get_model(self) -> Any:
            return model

        def _linears(self) -> dict[str, Any]:
            return {"a.qkv_proj": (fused, fused_slices(model, "a.qkv_proj", fused))}

    weights = Worker().qerl_shared_weights()
    assert (weights is not None) == shared
    if weights is not None:
        slices = [rows.alpha * rows.dense(torch.float32) for rows in weights.linears.values()]
        assert torch.equal(torch.cat(slices), dense(fused))
        assert {name: (rows.start, rows.stop) for name, rows in weights.linears.items()} == {
            "a.q_proj": (0, 64),
            "a.k_proj": (64, 128),
            "a.v_proj": (128, 192),
        }


def dense_linear() -> Any:
    """A linear in 16 bits, as vLLM holds it on a GPU."""
    layer: Any = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    layer.input_size_per_partition, layer.output_size_per_partition = COLUMNS, ROWS
    return layer


def test_rows_of_a_16_bit_linear_are_shared_in_place() -> None:
    layer = dense_linear()
    shared = shared_rows(layer, [("a.q_proj", 0, 48), ("a.k_proj", 48, ROWS)])
    assert shared is not None and [weight.shape for weight in shared.values()] == [(48, COLUMNS), (16, COLUMNS)]
    keys = shared["a.k_proj"].dense(torch.bfloat16)
    assert keys.data_ptr() == layer.weight[48:].data_ptr() and torch.equal(keys, layer.weight[48:])


def test_a_convolution_is_neither_shared_nor_merged_and_stands_in_no_ones_way() -> None:
    layer = dense_linear()
    layer.weight = nn.Parameter(torch.zeros(ROWS, 1, 4), requires_grad=False)  # of a gated delta net
    other = dense_linear()
    other.quant_method = Method()
    linears = {"a.conv1d": (layer, [("a.conv1d", 0, ROWS)]), "a.o_proj": (other, [("a.o_proj", 0, ROWS)])}
    assert shared_rows(*linears["a.conv1d"]) == {}
    lora = {"a.o_proj": (torch.zeros(1, COLUMNS), torch.zeros(ROWS, 1))}
    assert len(attach_merged(linears, lora, 0, torch.bfloat16, nullcontext())) == 1
    assert not hasattr(layer, "qerl_merged")


@pytest.mark.parametrize("kind", ["padded in 4 bits", "padded in 16 bits", "repacked", "other codes"])
def test_what_the_trainer_cannot_read_is_not_shared(kind: str) -> None:
    layer = linear(False) if kind == "padded in 4 bits" else dense_linear()
    if kind.startswith("padded"):
        layer.output_size_per_partition = ROWS - 8
    elif kind == "repacked":  # as vLLM's CPU build leaves it
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    else:
        layer.weight = nn.Parameter(layer.weight.view(torch.int16), requires_grad=False)
    assert shared_rows(layer, [("a.o_proj", 0, layer.output_size_per_partition)]) is None


@pytest.mark.parametrize(("tokens", "by"), [(2, "adapter"), (3, "copy")])
def test_above_a_number_of_tokens_4_bit_linears_multiply_by_their_merged_copy(
    marlin_calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tokens: int, by: str
) -> None:
    monkeypatch.setattr(compat, "missing_names", lambda _: "")
    layer = linear(True)
    linears = {"a.o_proj": (layer, [("a.o_proj", 0, ROWS)])}
    limits = {"decode_gemm_max_tokens": None, "dense_above": 1}
    attached = attach_all(linears, limits | {"rank": 1, "targets": ["o_proj"]}, torch.bfloat16)
    before = [tensor.clone() for tensor in layer.state_dict().values()]
    rows = attach_merged(linears, attached.lora, 2, torch.bfloat16, nullcontext())
    a, b = attached.lora["a.o_proj"]
    a[0, 0], b[:, 0] = 1.0, torch.arange(ROWS)  # adds its row's number to the first column
    merge(rows)
    expected = dense(layer)
    expected[:, 0] += torch.arange(ROWS)
    assert torch.equal(layer.qerl_merged, expected.bfloat16())
    assert all(torch.equal(one, other) for one, other in zip(before, layer.state_dict().values(), strict=True))
    layer.qerl_merged.add_(1.0)  # to be told from the sum of two products
    x = torch.ones(tokens, COLUMNS).bfloat16()
    with torch.inference_mode():
        y = layer.quant_method.apply(layer, x, layer.bias)
    added = expected.sum(1) + BIAS.float() + (COLUMNS if by == "copy" else 0)
    torch.testing.assert_close(y.float(), added.expand(tokens, ROWS), rtol=2e-2, atol=0.5)


class Pool(TorchDispatchMode):
    """Keeps what is allocated in it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.held.append(func(*args, **(kwargs or {})))
        return self.held[-1]


def test_a_copy_of_marlins_weight_adds_the_bias_in_plain_order_and_only_copies_are_released_with_the_cache() -> None:
    layers, pool = (linear(True), linear(True)), Pool()
    linears = {name: (layer, [(name, 0, ROWS)]) for name, layer in zip("ab", layers, strict=True)}
    rows = attach_merged(linears, {}, 0, torch.bfloat16, pool)
    assert len({tensor.data_ptr() for tensor in pool.held}) == 1
    for tensor in pool.held:
        tensor.fill_(torch.nan)  # what a sleeping engine's memory holds when it wakes
    merge(rows)
    for layer in layers:
        y = layer.quant_method.apply(layer, torch.zeros(1, COLUMNS).bfloat16(), layer.bias)
        assert torch.equal(y[0], BIAS) and layer.qerl_merged.storage_offset() % 128 == 0


def test_copies_of_16_bit_linears_hold_their_adapter_and_those_without_one_need_none() -> None:
    layer, plain = dense_linear(), dense_linear()
    layer.quant_method = plain.quant_method = Method()
    linears = {"a.o_proj": (layer, [("a.o_proj", 0, ROWS)]), "a.router": (plain, [("a.router", 0, ROWS)])}
    limits = {"decode_gemm_max_tokens": None, "dense_above": None}
    attached = attach_all(linears, limits | {"rank": 1, "targets": ["o_proj"]}, torch.bfloat16)
    rows = attach_merged(linears, attached.lora, 2, torch.bfloat16, nullcontext())
    assert len(rows) == 1 and not hasattr(plain, "qerl_merged")
    base = layer.weight.clone()
    x = torch.eye(COLUMNS).bfloat16()[:1]
    for scale in (1.0, 0.0):  # a later merge starts from the base again
        for factor in attached.lora["a.o_proj"]:
            factor.fill_(scale)
        merge(rows)
        with torch.inference_mode():
            y = layer.quant_method.apply(layer, x)
        assert torch.equal(y[0], (base[:, 0].float() + scale).bfloat16()) and torch.equal(layer.weight, base)


def test_a_weight_that_cannot_be_read_cannot_be_merged() -> None:
    padded = linear(False)
    padded.output_size_per_partition = ROWS - 8
    with pytest.raises(UserError, match="vLLM has a.o_proj in another layout, or padded: set VLLMEngine.adapter to"):
        attach_merged({"a.o_proj": (padded, [("a.o_proj", 0, ROWS - 8)])}, {}, 0, torch.bfloat16, nullcontext())


def test_why_nothing_is_shared() -> None:
    spec = EngineSpec(Path(), torch.bfloat16, torch.device("cuda"), 1, ("o_proj",), 8)
    half, single = (replace(spec, dtype=dtype) for dtype in (torch.float16, torch.float32))
    marlin, dense = MarlinNvFp4LinearKernel.__name__, "UnquantizedLinearMethod"  # of gpt-oss's linears
    for kernel in (marlin, MarlinMxFp4LinearKernel.__name__, "MarlinMxfp4LinearKernel"):  # as releases spell it
        assert why_not_shared([kernel, dense], spec) is None
    assert why_not_shared(["HummingNvFp4LinearKernel"], spec) == (
        "only Marlin's layout can be shared, and vLLM's kernels are HummingNvFp4LinearKernel"
    )
    assert "torch.float16" in (why_not_shared([marlin], half) or "")
    assert why_not_shared([dense, "MarlinExperts"], spec) is None
    assert "torch.float32" in (why_not_shared([dense, "MarlinExperts"], single) or "")
    assert why_not_shared([dense, "OAITritonExperts"], spec) == (
        "only Marlin's layout can be shared, and vLLM's kernels are UnquantizedLinearMethod, OAITritonExperts"
    )
    assert why_not_shared([dense], single) is None
    assert "trains its own" in (why_not_shared([dense], replace(spec, full_finetuning=True)) or "")
    assert "repacks" in (why_not_shared([dense], replace(spec, device=torch.device("cpu"))) or "")


def test_a_linear_that_marlin_has_not_prepared_or_has_padded_is_left_alone() -> None:
    other, padded = linear(False), linear(False)
    other.scheme.kernel = object()
    padded.output_size_per_partition = ROWS - 8
    dense_one: Any = nn.Linear(4, 4)
    dense_one.quant_method = Method()
    for layer in (other, padded, dense_one):
        method = layer.quant_method
        attach_fp4(layer, DENSE_ABOVE)
        assert marlin_tensor(layer) is None and layer.quant_method is method
    complete = linear(False)
    attach_fp4(complete, DENSE_ABOVE)
    assert isinstance(complete.quant_method, FP4Method) and marlin_tensor(complete) is not None


def test_linears_stay_as_they_are_where_vllm_lacks_marlins_product(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
    monkeypatch.delattr(f"{name}.apply_fp4_marlin_linear")
    layer, config = linear(False), {"dense_above": 4, "decode_gemm_max_tokens": 2, "rank": 0, "targets": []}
    attached = attach_all({"a.o_proj": (layer, [("a.o_proj", 0, ROWS)])}, config, torch.bfloat16)
    assert attached.decode_gemm == 0 and isinstance(layer.quant_method, Method)
