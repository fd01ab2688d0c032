"""Kernels around a mixture's grouped products against plain PyTorch: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from poisoned import in_pytorch, triton_on_poisoned_memory
from qerl_kernels import (
    NVFP4Stack,
    NVFP4Tensor,
    experts,
    mixture_of_experts,
    quantize_nvfp4,
    silu_product,
    triton_experts,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(7, 3, 1100), (1, 1, 8), (5, 2, 1024)]  # tokens, experts of each, columns: one, a part and parts of blocks
if DEVICE == "cuda":
    SHAPES.append((16384, 8, 2048))


def rows_of(tokens: int, count: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a factor of each, and the sorted rows' order."""
    torch.manual_seed(0)
    rows = torch.randn(tokens * count, size).to(dtype).to(DEVICE)
    return rows, torch.rand(tokens * count, 1).to(DEVICE), torch.randperm(tokens * count).to(DEVICE)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_rows_are_added_in_its_order(shape: tuple[int, int, int], dtype: torch.dtype, scaled: bool) -> None:
    rows, factor, order = rows_of(*shape, dtype)
    found = experts._sum_of_rows(rows, factor if scaled else None, order, shape[1])
    with in_pytorch():
        sorted_back = torch.empty_like(rows, dtype=torch.float32)
        sorted_back[order] = rows.float() * factor if scaled else rows.float()
        expected = torch.zeros(shape[0], shape[2], device=DEVICE)
        for slot in range(shape[1]):  # in this order: a float32 sum depends on it
            expected += sorted_back.view(shape[0], shape[1], -1)[:, slot]
    assert found.dtype == dtype and found.shape == expected.shape
    if scaled:  # a GPU multiplies and adds with one rounding
        precision = 2**-8 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found.float(), expected, rtol=precision, atol=1e-5)
    else:
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_scaled_in_place_after_their_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, factor, _ = rows_of(*shape, dtype)
    others = torch.randn_like(rows)
    expected, products = (rows.float() * factor).to(dtype), (rows.double() * others.double()).sum(-1, keepdim=True)
    found = experts._scale_rows(rows, factor, others)
    assert torch.equal(rows, expected)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), products, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_scaled_into_others(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, factor, _ = rows_of(*shape, dtype)
    whole = torch.full((len(rows) + 2, rows.shape[1]), 7.0, dtype=dtype, device=DEVICE)
    experts._scale_into(whole[1:-1], rows, factor)
    assert torch.equal(whole[1:-1], (rows.float() * factor).to(dtype))
    assert (whole[0] == 7).all() and (whole[-1] == 7).all()


def test_a_mixture_and_its_gradients_are_those_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    count, hidden, inner, tokens = 3, 128, 64, 9

    def stack(rows: int, columns: int) -> NVFP4Stack:
        tensors = [quantize_nvfp4(torch.randn(rows, columns) * 2.0**-expert) for expert in range(count)]
        packed, scale, global_scale = (torch.stack(part).to(DEVICE) for part in zip(*tensors, strict=True))
        return NVFP4Stack(NVFP4Tensor(packed, scale, global_scale.flatten()))

    with in_pytorch():
        weights = stack(2 * inner, hidden), stack(hidden, inner)
    x = torch.randn(tokens, hidden, device=DEVICE, requires_grad=True)
    topk_weights, topk_ids = torch.randn(tokens, count, device=DEVICE).softmax(-1).topk(2, dim=-1)
    topk_weights.requires_grad_()
    direction = torch.randn(tokens, hidden, device=DEVICE)
    launched = []
    for kernel in ("sum_indexed_rows", "scale_rows"):
        own = getattr(triton_experts, kernel)
        monkeypatch.setattr(triton_experts, kernel, lambda *a, own=own: launched.append(own.__name__) or own(*a))

    def run() -> tuple[Tensor, ...]:
        y = mixture_of_experts(x, topk_weights, topk_ids, *weights, silu_product)
        return y, *torch.autograd.grad(y, (x, topk_weights), direction)

    found = run()
    assert launched == ["sum_indexed_rows", "scale_rows", "sum_indexed_rows"]
    monkeypatch.setattr(experts, "runs_triton", lambda tensor: False)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(launched) == 3
