"""The gated activation against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter."""

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import select_backend, silu_of_halves, silu_product
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
    found, expected = silu_product(*inputs), functional.silu(gate) * up
    assert type(found.grad_fn).__name__ == "_SiluProductBackward" and found.dtype == dtype
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(y, inputs, direction) for y in (found, expected)), strict=True)
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
    full_finetuning = everything(*given)
    for start, stop in ((0, 6400), (0, 6400), (1, 6400), (1, 3201), (0, 1), (16, 17), (7, 6000), (0, 3200)):
        for one, other in zip(everything(*given[:, start:stop]), full_finetuning, strict=True):
            assert torch.equal(one, other[start:stop])


@pytest.mark.parametrize(
    "shape", [(1, 2), (3, 1400), (5, 4096), (0, 64), *([(6144, 37888)] if DEVICE == "cuda" else [])]
)
def test_halves_of_rows_have_the_bits_of_their_product(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).bfloat16()
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(silu_of_halves(x), silu_product(gate.contiguous(), up.contiguous()))
    select_backend("torch")
    assert torch.equal(silu_of_halves(x), functional.silu(gate) * up)


def test_the_activation_is_rounded_before_it_is_multiplied():
    # silu(1) is 187.15 / 256: 187 in bfloat16. Of that 1.4375 is 134.4 / 128, which rounds to 134; of silu(1) itself
    # 134.51, to 135.
    x = torch.tensor([[1.0, 1.4375]], device=DEVICE).bfloat16()
    assert silu_of_halves(x).item() == 134 / 128


def everything(gate, up, direction):
    """The product and its gradients."""
    inputs = gate.requires_grad_(), up.requires_grad_()
    y = silu_product(*inputs)
    return y, *torch.autograd.grad(y, inputs, direction)
