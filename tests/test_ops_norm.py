"""RMSNorm with a frozen scale against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter."""

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import rms_norm
from qerl_kernels.pointwise import plain_rms_norm

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 32), (2, 3, 96), (1, 7, 3584), (3, 7, 128)]
if DEVICE == "cuda":
    SHAPES += [
        (1, 6144, 3584),
        (1, 2048, 2048),
        (1, 1000, 5120),
        (1, 300, 8192),
        (1, 999, 256),
        (3, 50, 97),
        (512, 33, 128),
    ]
DTYPES = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
EPS = 0.1
# Of a float32 sum: at most 9 steps between threads, half of whose error the root keeps, then five roundings of 2**-24
# each; as much again for PyTorch's. The sums of 16 within a thread have errors that cancel out between threads.
CLOSE = 2.0**-20


def inputs(shape, dtype, weight_dtype=torch.float32):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(dtype).to(DEVICE).requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(weight_dtype).to(DEVICE)
    return x, weight, torch.randn(shape).to(dtype).to(DEVICE)


def both(norm, x, weight, direction, eps=EPS):
    """The norm and its gradient."""
    y = norm(x, weight, eps)
    return y, torch.autograd.grad(y, x, direction)[0]


def sizes(x, weight, direction):
    """Magnitudes that the errors of result and gradient are relative to: of what is summed up."""
    x, inner = x.detach().double(), direction.double() * weight.double()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    of_sum = (inner * x).abs().sum(-1, keepdim=True) * inverse**3 / x.shape[-1]
    return (weight * x * inverse).abs(), (inner * inverse).abs() + x.abs() * of_sum


def test_by_hand():
    x = torch.tensor([[1.0, 7.0]], device=DEVICE, requires_grad=True)  # the mean square is 25
    found = both(rms_norm, x, torch.tensor([1.0, 2.0], device=DEVICE), torch.tensor([[1.0, 0.0]], device=DEVICE), 0.0)
    torch.testing.assert_close(found[0].cpu(), torch.tensor([[0.2, 2.8]]))
    torch.testing.assert_close(found[1].cpu(), torch.tensor([[0.2 - 0.2**3 / 2, -7 * 0.2**3 / 2]]))


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_plain_pytorch(shape, dtype, weight_dtype):
    given = inputs(shape, dtype, weight_dtype)
    assert type(rms_norm(*given[:2], EPS).grad_fn).__name__ == "_FrozenRMSNormBackward"
    # One step of 8 bits, and only where the float32 numbers have a rounding boundary between them. A 16-bit scale
    # multiplies what is rounded already: a second step on top of the first. What the gradient sums up is rounded, too.
    roundings = 1 if weight_dtype == torch.float32 else 2
    bounds = (roundings * 2**-7, CLOSE), (2**-7, CLOSE if roundings == 1 else 2**-8)
    found, expected = both(rms_norm, *given), both(plain_rms_norm, *given)
    for one, plain, size, (of_plain, of_size) in zip(found, expected, sizes(*given), bounds, strict=True):
        assert one.dtype == dtype and one.shape == shape
        apart = (one.double() - plain.double()).abs()
        if dtype == torch.float32:
            assert (apart <= CLOSE * size).all()
            continue
        assert (apart <= of_plain * plain.double().abs() + of_size * size).all()
        assert (one != plain).sum().item() <= 1 + roundings * one.numel() / 1024


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_repeat_whatever_the_number_of_rows_and_the_address(shape, dtype, weight_dtype):
    x, weight, direction = inputs(shape, dtype, weight_dtype)
    expected = both(rms_norm, x, weight, direction)

    def moved(tensor):
        """At an address that is no multiple of 16."""
        return torch.cat((tensor.new_zeros(1), tensor.detach().flatten()))[1:].view(tensor.shape)

    for rows, move in ((slice(None), torch.clone), (slice(-1, None), torch.clone), (slice(None), moved)):
        again = both(rms_norm, move(x[:, rows].detach()).requires_grad_(), move(weight), move(direction[:, rows]))
        for one, other in zip(again, expected, strict=True):
            assert torch.equal(one, other[:, rows])


def test_a_16_bit_scale_multiplies_what_is_rounded_already():
    x = torch.tensor([[1.0, 3.0, 3.0, 5.0]], dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([3.0, 5.0, 7.0, 11.0], dtype=torch.bfloat16, device=DEVICE)
    expected = (x.float() / 11.5**0.5).bfloat16() * weight  # the mean square is 11
    assert torch.equal(rms_norm(x, weight, 0.5), expected)
    assert not torch.equal(rms_norm(x, weight.float(), 0.5), expected)


def test_other_strides_and_no_rows():
    x, weight, direction = inputs((4, 6, 32), torch.float32)
    turned = both(rms_norm, x.transpose(0, 1), weight, direction.transpose(0, 1))
    for one, other in zip(turned, both(rms_norm, x, weight, direction), strict=True):
        assert torch.equal(one.transpose(0, 1), other)
    for found in both(rms_norm, x[:0], weight, direction[:0]):
        assert found.shape == (0, 6, 32)


def test_a_scale_that_trains_gets_its_gradient():
    x, weight = torch.randn(4, 32, device=DEVICE), torch.ones(32, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None
