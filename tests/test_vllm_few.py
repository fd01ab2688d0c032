"""A decode step's linears in vLLM: who computes how many tokens, with which adapter, and in whose memory."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from qerl_kernels import (
    MarlinRows,
    decode_gemm_linear,
    decode_gemm_sizes,
    select_backend,
    silu_of_halves,
    widened_linear,
)
from test_vllm_marlin import BIAS, COLUMNS, ROWS, dense, linear
from torch import Tensor, nn

from qerl_pl.engines import EngineSpec
from qerl_pl.engines.vllm import linear_methods
from qerl_pl.engines.vllm.linear_methods import (
    DecodeGemmMethod,
    MarlinOrDenseMethod,
    adapted_linear,
    attach_all,
    attach_decode_gemm,
    attach_dense,
    check_decode_gemm,
    marlin_tensor,
)
from qerl_pl.engines.vllm.worker import engine_config
from qerl_pl.errors import UserError

FEW, DENSE_ABOVE, RANK = 3, 5, 2
CONFIG = {
    "dense_above": DENSE_ABOVE,
    "decode_gemm_max_tokens": FEW,
    "gated": True,
    "rank": RANK,
    "targets": ["k_proj", "v_proj"],
}
PARTS = [("a.q_proj", 0, 64), ("a.k_proj", 64, 128), ("a.v_proj", 128, 192)]


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And vLLM's Marlin answers with sevens: it needs a GPU."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    def sevens(input: Tensor, *_: Tensor, size_n: int, size_k: int, bias: Tensor | None) -> Tensor:
        return input.new_full((len(input), size_n), 7.0)

    monkeypatch.setattr(marlin_utils_fp4, "apply_fp4_marlin_linear", sevens)
    select_backend("triton")
    yield
    select_backend("torch")


def fused(config: dict[str, Any] = CONFIG) -> tuple[Any, Any]:
    """Three projections in one linear, of which two have an adapter; and the adapter's places."""
    layer = linear(False, rows=192)
    slots = attach_all({"a.qkv_proj": (layer, PARTS)}, config, torch.bfloat16)
    return layer, slots


def tokens_of(count: int) -> Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_number_of_tokens_chooses_and_the_adapter_always_counts(compiled: bool) -> None:
    layer, slots = fused()
    assert isinstance(layer.quant_method, DecodeGemmMethod) and layer.quant_method.starts == (64, 128)
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
            dense_way, few, marlin = run(x), run(x[:FEW]), run(x[: FEW + 1])
        torch.testing.assert_close(dense_way.float(), exact + delta, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(few.float(), (exact + delta)[:FEW], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(marlin.float(), (7.0 + delta)[: FEW + 1], rtol=2e-2, atol=2e-2)
        with torch.inference_mode():
            own = decode_gemm_linear(x[:FEW], marlin_tensor(layer), a=layer.qerl_a, b=layer.qerl_b, starts=(64, 128))
        assert torch.equal(few, own)
    assert pointers == [factor.data_ptr() for pair in slots.values() for factor in pair]


def test_a_bias_comes_in_plain_order_and_without_an_adapter_there_is_none() -> None:
    layer = linear(True)
    assert attach_all({"a.o_proj": (layer, [("a.o_proj", 0, ROWS)])}, CONFIG, torch.bfloat16) == {}
    assert isinstance(layer.quant_method, DecodeGemmMethod) and layer.quant_method.starts == ()
    with torch.inference_mode():
        y = layer.quant_method.apply(layer, tokens_of(2), layer.bias)
    expected = tokens_of(2).float() @ dense(layer).T + BIAS.float()
    torch.testing.assert_close(y.float(), expected, rtol=8e-3, atol=1e-3)


WIDE = {
    "dense_above": DENSE_ABOVE,
    "decode_gemm_max_tokens": FEW,
    "rank": 8,
    "targets": ["gate_proj", "up_proj"],
    "gated": True,
}


def gate_up() -> Any:
    """Twice as many rows as columns, two adapters with 16 ranks in all."""
    layer = linear(False, rows=2 * COLUMNS)
    parts = [("a.gate_proj", 0, COLUMNS), ("a.up_proj", COLUMNS, 2 * COLUMNS)]
    for pair in attach_all({"a.gate_up_proj": (layer, parts)}, WIDE, torch.bfloat16).values():
        for factor in pair:
            factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(2)))
    return layer


def test_many_tokens_of_many_rows_take_one_product_with_the_adapter() -> None:
    layer, x = gate_up(), tokens_of(DENSE_ABOVE + 1)
    delta = x.float() @ layer.qerl_a.float().T @ layer.qerl_b.float().T
    with torch.inference_mode():
        many, marlin = layer.quant_method.apply(layer, x), layer.quant_method.apply(layer, x[:DENSE_ABOVE])
        own = widened_linear(x, MarlinRows(marlin_tensor(layer)), None, layer.qerl_a, layer.qerl_b)
    assert torch.equal(many, own)
    torch.testing.assert_close(many.float(), x.float() @ dense(layer).T + delta, rtol=2e-2, atol=0.5)
    torch.testing.assert_close(marlin.float(), (7.0 + delta)[:DENSE_ABOVE], rtol=2e-2, atol=0.5)


def test_rank_0_makes_room_for_no_adapter() -> None:
    layer, slots = fused(CONFIG | {"rank": 0})
    assert slots == {} and not hasattr(layer, "qerl_a") and isinstance(layer.quant_method, DecodeGemmMethod)


@pytest.mark.parametrize("decode_gemm_max_tokens", [FEW, None])
def test_what_cannot_take_it_multiplies_as_before(
    decode_gemm_max_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    select_backend("torch")
    with caplog.at_level("INFO"):
        layer, slots = fused(CONFIG | {"decode_gemm_max_tokens": decode_gemm_max_tokens})
    assert isinstance(layer.quant_method.base, MarlinOrDenseMethod) and len(slots) == 2
    assert ("0 of 1 linears" in caplog.text) == (decode_gemm_max_tokens is not None)


def test_without_a_dense_way_marlin_takes_all_above() -> None:
    layer, _ = fused(CONFIG | {"dense_above": None})
    with torch.inference_mode():
        assert (layer.quant_method.apply(layer, tokens_of(9)) == 7.0).all()
        assert (layer.quant_method.apply(layer, tokens_of(FEW)) != 7.0).any()


def test_other_linears_are_left_alone() -> None:
    other: Any = nn.Linear(2, 2)
    method = other.quant_method = object()
    assert not attach_decode_gemm(other, [], FEW) and other.quant_method is method


def test_a_wrong_product_of_few_tokens_is_refused_at_the_start() -> None:
    layer, _ = fused()
    check_decode_gemm([layer], FEW)
    with torch.inference_mode():
        layer.qerl_alpha.mul_(1.02)  # what it is compared with
    with pytest.raises(
        UserError, match="product of 1 tokens must be .* 192 x 128 they differ by .* decode_gemm_max_tokens to null"
    ):
        check_decode_gemm([layer], FEW)


def test_every_plan_has_run_before_a_graph_is_captured() -> None:
    layer = linear(False)
    held = marlin_tensor(layer)
    assert held is not None and decode_gemm_sizes(held, 8, 128)[:4] == [1, 9, 17, 33]


GATE_UP = [("m.gate_proj", 0, 128), ("m.up_proj", 128, 256)]


class SiluAndMul(nn.Module):
    """Named as vLLM's, which is made with a whole configuration only; the name is what decides."""

    def forward(self, x: Tensor) -> Tensor:
        return silu_of_halves(x)


class Projection(nn.Module):
    """Returns what vLLM's linears return; around one of them, or none."""

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self.layer = layer

    @property
    def quant_method(self) -> Any:
        return self.layer.quant_method

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return (x if self.layer is None else self.quant_method.apply(self.layer, x)), None


def mlp_of(kind: type[nn.Module]) -> Any:
    """One of vLLM's MLPs with these parts; what comes to `down_proj` comes out."""
    mlp: Any = kind.__new__(kind)
    nn.Module.__init__(mlp)
    mlp.gate_up_proj, mlp.act_fn, mlp.down_proj = Projection(linear(False, rows=256)), SiluAndMul(), Projection()
    return mlp


def attached(mlp: Any, **config: Any) -> None:
    changed = CONFIG | {"targets": ["gate_proj", "up_proj"]} | config
    linears = {"m.gate_up_proj": (mlp.gate_up_proj.layer, GATE_UP)}
    slots = attach_all(linears, changed, torch.bfloat16, [nn.Linear(2, 2), mlp])
    for seed, pair in enumerate(slots.values()):
        for factor in pair:
            factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("name", "rank"), [("qwen2.Qwen2MLP", RANK), ("mistral.MistralMLP", 0)])
def test_an_mlp_is_activated_in_the_product_with_the_bits_it_has_after_it(name: str, rank: int) -> None:
    module, kind = name.split(".")
    both = [mlp_of(getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)) for _ in range(2)]
    for mlp, gated in zip(both, (True, False), strict=True):
        attached(mlp, gated=gated, rank=rank)
        assert isinstance(mlp.act_fn, nn.Identity) is gated and mlp.gate_up_proj.quant_method.gated is gated

    folded = torch.compile(lambda x: both[0](x) + 0, backend="aot_eager", fullgraph=True)
    x = tokens_of(DENSE_ABOVE + 1)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.inference_mode():
        for tokens in (DENSE_ABOVE + 1, FEW, FEW + 1):
            assert torch.equal(folded(x[:tokens]), both[1](x[:tokens]))
            assert folded(x[:tokens]).shape == (tokens, 128)


class Qwen2MLP(nn.Module):
    """Computes something else under a name that is known."""

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(x.clamp(max=4)))[0]  # type: ignore[no-any-return]


def test_other_mlps_are_activated_after_the_product(caplog: pytest.LogCaptureFixture) -> None:
    known = importlib.import_module("vllm.model_executor.models.qwen2").Qwen2MLP
    renamed, gelu, more = mlp_of(type("OtherMLP", (known,), {})), mlp_of(known), mlp_of(known)
    gelu.act_fn, more.norm = nn.GELU(), nn.LayerNorm(2)
    for mlp in (renamed, gelu, more, mlp_of(Qwen2MLP)):
        before = mlp.act_fn
        with caplog.at_level("INFO"):
            attached(mlp)
        assert mlp.act_fn is before and not mlp.gate_up_proj.quant_method.gated
        assert "1 of 1 linears" in caplog.text and "0 with an MLP's activation" in caplog.text
    select_backend("torch")
    mlp = mlp_of(known)
    attached(mlp)
    assert isinstance(mlp.act_fn, SiluAndMul)


def test_a_wrong_activated_product_is_refused_too() -> None:
    mlp = mlp_of(importlib.import_module("vllm.model_executor.models.qwen2").Qwen2MLP)
    attached(mlp)
    layer = mlp.gate_up_proj.layer
    with torch.inference_mode():
        layer.qerl_a.zero_()
        check_decode_gemm([layer], FEW)
        layer.qerl_alpha.mul_(1.02)
    with pytest.raises(UserError, match="product of 1 tokens must be .* 256 x 128 they differ by"):
        check_decode_gemm([layer], FEW)


def test_compiled_graphs_that_do_not_activate_in_the_product_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EngineSpec(Path(), torch.bfloat16, torch.device("cpu"), RANK, ("q_proj",), 8)
    with_it = engine_config(spec, DENSE_ABOVE, FEW)
    monkeypatch.setattr(linear_methods, "GATED", False)
    assert engine_config(spec, DENSE_ABOVE, FEW) != with_it


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "wide"), [(FEW, False), (FEW + 1, False), (DENSE_ABOVE + 1, False), (DENSE_ABOVE + 1, True)]
)
def test_the_operator_is_as_pytorch_wants_it(tokens: int, wide: bool, gated: bool) -> None:
    layer = gate_up() if wide else fused()[0]
    held = (layer.weight, layer.weight_scale.view(torch.uint8), layer.weight_global_scale)  # for it compares inputs
    adapter = (layer.qerl_a, layer.qerl_b, [0, COLUMNS] if wide else [64, 128], FEW, DENSE_ABOVE, gated)
    arguments = (tokens_of(tokens), *held, layer.workspace, None, None, layer.qerl_alpha, *adapter)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(adapted_linear, arguments, test_utils=checks)


def test_attach_few_needs_attach_dense_first() -> None:
    layer = linear(False)
    with pytest.raises(AssertionError, match="attach_dense comes first"):
        attach_decode_gemm(layer, [], FEW)
    attach_dense(layer, DENSE_ABOVE)
    assert attach_decode_gemm(layer, [], FEW)
