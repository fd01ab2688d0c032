"""The gated activation against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter."""

import math
from functools import partial

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import (
    clamped_swiglu,
    clamped_swiglu_reference,
    gelu_tanh_product,
    pointwise,
    silu_product,
    triton_pointwise,
)
from torch.nn import functional

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (3, 700), (1, 5, 1024)]
if DEVICE == "cuda":
    SHAPES += [(1, 6144, 18944), (1, 77, 11008)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_plain_pytorch(shape, dtype):
    torch.manual_seed(0)
    gate, up, direction = ((6 * torch.randn(shape)).to(dtype).to(DEVICE) for _ in range(3))
    inputs = (gate.requires_grad_(), up.requires_grad_())
    result, expected = silu_product(*inputs), functional.silu(gate) * up
    assert type(result.grad_fn).__name__ == "_SiluProductBackward" and result.dtype == dtype
    pairs = [(result, expected)]
    pairs += zip(*(torch.autograd.grad(y, inputs, direction) for y in (result, expected)), strict=True)
    for one, plain in pairs:
        if DEVICE == "cuda":
            assert torch.equal(one, plain)
        else:  # another exponential, and Triton's interpreter cuts bfloat16 off instead of rounding
            precision = 2**-6 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(one, plain, rtol=precision, atol=precision * 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_repeat_at_any_address_and_size(dtype):
    torch.manual_seed(0)
    given = torch.randn(3, 6400).to(dtype).to(DEVICE)
    full = everything(*given)
    for start, stop in ((0, 6400), (0, 6400), (1, 6400), (1, 3201), (0, 1), (16, 17), (7, 6000), (0, 3200)):
        for one, other in zip(everything(*given[:, start:stop]), full, strict=True):
            assert torch.equal(one, other[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(5, 700), (1, 1), (3, 1024), (2, triton_pointwise.LONGEST_ROW + 1)])
def test_halves_of_rows_give_the_bits_of_their_copies_and_are_not_copied(rows, width, dtype, monkeypatch):
    torch.manual_seed(0)
    halves, direction = torch.randn(rows, 2 * width).to(dtype).to(DEVICE), torch.randn(rows, width).to(dtype).to(DEVICE)
    copies = everything(*(half.clone() for half in halves.chunk(2, dim=-1)), direction)
    launched = []

    def noted(kernel, ctas, warps, tensors, *numbers, **constants):
        launched.extend(tensors)
        kernel(ctas, warps, tensors, *numbers, **constants)

    for name in ("_silu_product", "_silu_product_gradient"):
        monkeypatch.setattr(triton_pointwise, name, partial(noted, getattr(triton_pointwise, name)))
    found = everything(*(half.detach() for half in halves.chunk(2, dim=-1)), direction)
    assert all(one.is_contiguous() and torch.equal(one, other) for one, other in zip(found, copies, strict=True))
    inside = sum(tensor.untyped_storage().data_ptr() == halves.untyped_storage().data_ptr() for tensor in launched)
    assert inside == (4 if width <= triton_pointwise.LONGEST_ROW else 0)  # gates and ups of both kernels


def test_the_activation_is_rounded_before_it_is_multiplied():
    # silu(1) is 187.15 / 256: 187 in bfloat16. Of that 1.4375 is 134.4 / 128, which rounds to 134; of silu(1) itself
    # 134.51, to 135.
    gate, up = torch.tensor([[1.0], [1.4375]], device=DEVICE).bfloat16()
    assert silu_product(gate, up).item() == 134 / 128


def test_gelu_is_its_tanh_approximation():
    # 0.5 (1 + tanh(sqrt(2 / pi) (1 + 0.044715))) = 0.8411920; the exact GELU of 1 is 0.8413447.
    gate, up = torch.tensor([[1.0, -1.0], [2.0, 3.0]], device=DEVICE)
    expected = torch.tensor([2 * 0.8411920, 3 * (0.8411920 - 1)], device=DEVICE)
    torch.testing.assert_close(gelu_tanh_product(gate, up), expected, rtol=1e-6, atol=0)


def test_the_clamped_swiglu_is_worked_out_by_hand():
    # sigmoid(1.702) = 0.8457958; a gate of 9 counts as 7, ups of 8 and -9 as 7 and -7; a gate of -9 is not cut off.
    gate = torch.tensor([[1.0, 9.0, 1.0, -9.0]], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([[2.0, 2.0, 8.0, -9.0]], dtype=torch.float64, requires_grad=True)
    y = clamped_swiglu(gate, up, 1.702, 7.0)
    tail = 9 / (1 + math.exp(1.702 * 9))
    expected = torch.tensor([[3 * 0.8457958, 21 / (1 + math.exp(-11.914)), 8 * 0.8457958, 6 * tail]])
    torch.testing.assert_close(y, expected.double(), rtol=1e-6, atol=0)
    of_gate, of_up = torch.autograd.grad(y.sum(), (gate, up))
    assert of_gate[0, 1] == 0 and of_up[0, 2] == 0 and of_up[0, 3] == 0
    slope = 0.8457958 * (1 + 1.702 * (1 - 0.8457958))
    torch.testing.assert_close(of_gate[0, [0, 2]], slope * torch.tensor([3.0, 8.0]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(of_up[0, 0].item(), 0.8457958, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_clamped_swiglu_errs_less_than_pytorchs_single_operations(dtype, monkeypatch):
    monkeypatch.setattr(pointwise, "TILE_ELEMENTS", 2000)  # four tiles
    hidden = (8 * torch.randn(11, 1400, generator=torch.Generator().manual_seed(0))).to(dtype).to(DEVICE)
    direction = torch.randn(11, 700, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)

    def values(function, precise):
        inputs = [part.to(precise).requires_grad_() for part in (hidden[:, ::2], hidden[:, 1::2])]
        y = function(*inputs, 1.702, 7.0)
        return y, *torch.autograd.grad(y, inputs, direction.to(precise))

    exact = values(clamped_swiglu_reference, torch.float64)
    assert all((gradient == 0).sum() > 100 for gradient in exact[1:])
    for found, plain, true in zip(
        values(clamped_swiglu, dtype), values(clamped_swiglu_reference, dtype), exact, strict=True
    ):
        assert found.dtype == dtype and found.is_contiguous()
        errors = [(result.double() - true).norm() for result in (found, plain)]
        assert errors[0] <= 1.01 * errors[1] and errors[0] < (2**-8 if dtype == torch.bfloat16 else 1e-6) * true.norm()


def everything(gate, up, direction):
    """The product and its gradients."""
    inputs = gate.requires_grad_(), up.requires_grad_()
    y = silu_product(*inputs)
    return y, *torch.autograd.grad(y, inputs, direction)
