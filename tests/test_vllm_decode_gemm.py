"""A decode step's linears in vLLM: who computes how many tokens, with which adapter, and in whose memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import triton.testing
from qerl_kernels import (
    decode_gemm_linear,
    decode_gemm_sizes,
    select_backend,
)
from test_vllm_marlin import BIAS, COLUMNS, ROWS, dense, linear, replace_marlin
from torch import Tensor, nn
from triton.runtime.errors import PTXASError

from qerl_pl.engines import EngineSpec
from qerl_pl.engines.vllm import attach, linear_methods
from qerl_pl.engines.vllm.attach import attach_all, check_decode_gemm
from qerl_pl.engines.vllm.linear_methods import FP4Method, fp4_linear, marlin_tensor
from qerl_pl.engines.vllm.merged import AdapterMode, merged_above
from qerl_pl.engines.vllm.worker import CONFIG_KEY, engine_config
from qerl_pl.errors import UserError

MAX_TOKENS, DENSE_ABOVE, RANK = 3, 5, 2
CONFIG = {
    "dense_above": DENSE_ABOVE,
    "decode_gemm_max_tokens": MAX_TOKENS,
    "rank": RANK,
    "targets": ["k_proj", "v_proj"],
}
SLICES = [("a.q_proj", 0, 64), ("a.k_proj", 64, 128), ("a.v_proj", 128, 192)]


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And vLLM's Marlin answers with sevens: it needs a GPU."""
    replace_marlin(monkeypatch)
    select_backend("triton")
    yield
    select_backend("torch")


def fused(config: dict[str, Any] = CONFIG) -> tuple[Any, Any]:
    """Three projections in one linear, of which two have an adapter; and what was attached."""
    layer = linear(False, rows=192)
    attached = attach_all({"a.qkv_proj": (layer, SLICES)}, config, torch.bfloat16)
    return layer, attached


def tokens_of(count: int) -> Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_number_of_tokens_chooses_and_the_adapter_always_counts(compiled: bool) -> None:
    layer, attached = fused()
    slots = attached.lora
    assert attached.decode_gemm == 1
    assert isinstance(layer.quant_method, FP4Method) and layer.quant_method.starts == (64, 128)
    pointers = [factor.data_ptr() for pair in slots.values() for factor in pair]

    def forward(x: Tensor) -> Tensor:
        y: Tensor = layer.quant_method.apply(layer, x)
        return y + 0

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    x = tokens_of(DENSE_ABOVE + 1)
    torch._dynamo.mark_dynamic(x, 0)  # as vLLM does
    exact = x.float() @ dense(layer).T
    for k in (0.0, 2.0):  # written in place between passes, as `sync` does
        slots["a.k_proj"][0].copy_(torch.eye(RANK, COLUMNS))
        slots["a.k_proj"][1].fill_(k)
        slots["a.v_proj"][0].copy_(torch.eye(RANK, COLUMNS))
        slots["a.v_proj"][1].fill_(1.0)
        delta = (x[:, :RANK].float().sum(1, keepdim=True) * torch.tensor([0.0, k, 1.0])).repeat_interleave(64, dim=1)
        with torch.inference_mode():
            dense_way, by_decode_gemm, marlin = run(x), run(x[:MAX_TOKENS]), run(x[: MAX_TOKENS + 1])
        torch.testing.assert_close(dense_way.float(), exact + delta, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(by_decode_gemm.float(), (exact + delta)[:MAX_TOKENS], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(marlin.float(), (7.0 + delta)[: MAX_TOKENS + 1], rtol=2e-2, atol=2e-2)
        with torch.inference_mode():
            own = decode_gemm_linear(
                x[:MAX_TOKENS], marlin_tensor(layer), a=layer.qerl_a, b=layer.qerl_b, starts=(64, 128)
            )
        assert torch.equal(by_decode_gemm, own)
    assert pointers == [factor.data_ptr() for pair in slots.values() for factor in pair]


def test_a_bias_comes_in_plain_order_and_without_an_adapter_there_is_none() -> None:
    layer = linear(True)
    assert attach_all({"a.o_proj": (layer, [("a.o_proj", 0, ROWS)])}, CONFIG, torch.bfloat16) == ({}, 1)
    assert isinstance(layer.quant_method, FP4Method) and layer.quant_method.starts == ()
    with torch.inference_mode():
        y = layer.quant_method.apply(layer, tokens_of(2), layer.bias)
    expected = tokens_of(2).float() @ dense(layer).T + BIAS.float()
    torch.testing.assert_close(y.float(), expected, rtol=8e-3, atol=1e-3)


def test_rank_0_makes_room_for_no_adapter() -> None:
    layer, attached = fused(CONFIG | {"rank": 0})
    assert attached.lora == {} and not hasattr(layer, "qerl_a") and isinstance(layer.quant_method, FP4Method)


@pytest.mark.parametrize("decode_gemm_max_tokens", [MAX_TOKENS, None])
def test_where_the_kernels_do_not_run_linears_multiply_as_before(decode_gemm_max_tokens: int | None) -> None:
    select_backend("torch")
    layer, attached = fused(CONFIG | {"decode_gemm_max_tokens": decode_gemm_max_tokens})
    assert isinstance(layer.quant_method, FP4Method) and layer.quant_method.decode_gemm_max_tokens == 0
    assert len(attached.lora) == 2 and attached.decode_gemm == 0


def test_without_a_dense_way_marlin_takes_all_above() -> None:
    layer, _ = fused(CONFIG | {"dense_above": None})
    with torch.inference_mode():
        assert (layer.quant_method.apply(layer, tokens_of(9)) == 7.0).all()
        assert (layer.quant_method.apply(layer, tokens_of(MAX_TOKENS)) != 7.0).any()


def test_other_linears_are_left_alone() -> None:
    other: Any = nn.Linear(2, 2)
    method = other.quant_method = object()
    assert attach_all({"a.o_proj": (other, [("a.o_proj", 0, 2)])}, CONFIG, torch.bfloat16) == ({}, 0)
    assert other.quant_method is method


def test_a_wrong_decode_gemm_is_refused_at_the_start() -> None:
    layer, _ = fused()
    check_decode_gemm([layer])
    with torch.inference_mode():
        layer.qerl_alpha.mul_(1.02)  # what it is compared with
    with pytest.raises(
        UserError, match="for 1 tokens and a weight 192 x 128 they differ by .* decode_gemm_max_tokens to null"
    ):
        check_decode_gemm([layer])


def changed_product(change: str) -> Any:
    """The decode GEMM with an adapter's product that is wrong in one way."""

    def product(x: Tensor, weight: Any, bias: Any = None, *, a: Tensor, b: Tensor, starts: Any = (0,)) -> Tensor:
        rank, last = len(a) // len(starts), starts[-1]
        if change == "negated":
            b = -b
        elif change == "left out":
            b = torch.zeros_like(b)
        elif change == "scaled":
            b = b * 1.05
        elif change == "of another slice":
            b = torch.cat([b[:, rank:], b[:, :rank]], dim=1)
        elif change == "of the last slice left out":
            b = torch.cat([b[:last], torch.zeros_like(b[last:])])
        elif change == "ranks in another order":
            a = a.flip(0)
        elif change == "last rank left out":
            a = torch.cat([a[:-1], torch.zeros_like(a[-1:])])
        return decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)

    return product


@pytest.mark.parametrize(
    "change",
    [
        *("negated", "left out", "scaled", "of another slice", "of the last slice left out"),
        *("ranks in another order", "last rank left out"),
    ],
)
def test_a_wrong_adapter_product_is_refused_at_the_start(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, attached = fused()
    assert all((factor == 0).all() for pair in attached.lora.values() for factor in pair)  # as before the check
    monkeypatch.setattr(linear_methods, "decode_gemm_linear", changed_product(change))
    with pytest.raises(UserError, match="and an adapter's; for 1 tokens .* decode_gemm_max_tokens to null"):
        check_decode_gemm([layer])
    assert not layer.qerl_a.any() and not layer.qerl_b.any()


@pytest.mark.parametrize(
    ("adapter", "sequences", "expected"),
    [("fused", 65, 1024), ("auto", 65, 64), ("auto", 64, 1024), ("merged", 65, None), ("merged", 1, None)],
)
def test_passes_that_take_merged_copies_compile_no_decode_gemm(
    adapter: AdapterMode, sequences: int, expected: int | None
) -> None:
    """Nor are there copies where no decode step would take them."""
    spec = EngineSpec(Path("base"), torch.bfloat16, torch.device("cpu"), 8, ("q_proj",), 64)
    above = merged_above(adapter, True, sequences)
    assert engine_config(spec, 256, 1024, above)[CONFIG_KEY]["decode_gemm_max_tokens"] == expected
    without = replace(spec, lora_rank=0, lora_targets=())
    assert engine_config(without, 256, 1024, above)[CONFIG_KEY]["decode_gemm_max_tokens"] == 1024
    assert engine_config(spec, 256, None, above)[CONFIG_KEY]["decode_gemm_max_tokens"] is None
    assert merged_above(adapter, False, 1) == {"fused": None, "auto": 64, "merged": 0}[adapter]


@pytest.mark.parametrize(
    ("milliseconds", "limit"),
    [({8: 1.0, 16: 1.7, 32: 1.9}, 16), ({8: 1.9}, 0), ({8: None}, 0), ({8: 1.0, 16: None}, 8), ({}, 64)],
)
def test_a_gpu_that_nobody_has_measured_is_timed(
    milliseconds: dict[int, float | None], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marlin takes 2 ms of each linear; a kernel that has no time does not compile."""

    def bench(product: Any, warmup: int, rep: int) -> float:
        method, (layer, x, _) = product.func.__self__, product.args
        assert layer.quant_method is method
        if method.decode_gemm_max_tokens == 0:
            return 2.0
        if (found := milliseconds.get(len(x), 1.0)) is None:
            raise PTXASError("sm_86")
        return found

    monkeypatch.setattr(triton.testing, "do_bench", bench)
    monkeypatch.setattr(attach, "decode_gemm_measured", lambda weight: False)
    layer, attached = fused(CONFIG | {"decode_gemm_max_tokens": 100})
    assert layer.quant_method.decode_gemm_max_tokens == limit and attached.decode_gemm == (limit > 0)
    assert fused(CONFIG | {"decode_gemm_max_tokens": 12})[0].quant_method.decode_gemm_max_tokens == min(limit, 8)


def test_every_plan_has_run_before_a_graph_is_captured() -> None:
    layer = linear(False)
    held = marlin_tensor(layer)
    assert held is not None and decode_gemm_sizes(held, 8, 128)[:4] == [1, 9, 17, 33]


@pytest.mark.parametrize("tokens", [MAX_TOKENS, MAX_TOKENS + 1, DENSE_ABOVE + 1])
def test_the_operator_is_as_pytorch_wants_it(tokens: int) -> None:
    layer, _ = fused()
    held = (layer.weight, layer.weight_scale.view(torch.uint8), layer.weight_global_scale)  # for it compares inputs
    adapter = (layer.qerl_a, layer.qerl_b, [64, 128], MAX_TOKENS, DENSE_ABOVE)
    biases = (torch.ones(192).bfloat16(), torch.ones(192).bfloat16())  # in Marlin's order, and in plain order
    arguments = (tokens_of(tokens), *held, layer.workspace, *biases, layer.qerl_alpha, *adapter)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(fp4_linear, arguments, test_utils=checks)
