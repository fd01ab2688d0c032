"""RMSNorm, rotary embedding and gated activations: on a GPU, or on a CPU in Triton's interpreter."""

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
    rms_norm,
    rotary,
    select_backend,
    silu_product,
    triton_pointwise,
)
from qerl_kernels.pointwise import plain_rms_norm, plain_rotary
from torch.nn import functional
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORM_SHAPES = [(1, 1, 32), (2, 3, 96), (1, 7, 3584), (3, 7, 128)]
if DEVICE == "cuda":
    NORM_SHAPES += [
        (1, 6144, 3584),
        (1, 2048, 2048),
        (1, 1000, 5120),
        (1, 300, 8192),
        (1, 999, 256),
        (3, 50, 97),
        (512, 33, 128),
    ]
NORM_DTYPES = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
EPS = 0.1
# Of a float32 sum: at most 9 steps between threads, half of whose error the root keeps, then five roundings of 2**-24
# each; as much again for PyTorch's. The sums of 16 within a thread have errors that cancel out between threads.
CLOSE = 2.0**-20


def norm_inputs(shape, dtype, weight_dtype=torch.float32):
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


def test_a_norm_by_hand():
    x = torch.tensor([[1.0, 7.0]], device=DEVICE, requires_grad=True)  # the mean square is 25
    found = both(rms_norm, x, torch.tensor([1.0, 2.0], device=DEVICE), torch.tensor([[1.0, 0.0]], device=DEVICE), 0.0)
    torch.testing.assert_close(found[0].cpu(), torch.tensor([[0.2, 2.8]]))
    torch.testing.assert_close(found[1].cpu(), torch.tensor([[0.2 - 0.2**3 / 2, -7 * 0.2**3 / 2]]))


@pytest.mark.parametrize("dtype, weight_dtype", NORM_DTYPES)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_a_norms_values_and_gradients_are_those_of_plain_pytorch(shape, dtype, weight_dtype):
    given = norm_inputs(shape, dtype, weight_dtype)
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


@pytest.mark.parametrize("dtype, weight_dtype", NORM_DTYPES)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_a_norms_bits_repeat_whatever_the_number_of_rows_and_the_address(shape, dtype, weight_dtype):
    x, weight, direction = norm_inputs(shape, dtype, weight_dtype)
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


def test_a_norm_of_other_strides_and_no_rows():
    x, weight, direction = norm_inputs((4, 6, 32), torch.float32)
    turned = both(rms_norm, x.transpose(0, 1), weight, direction.transpose(0, 1))
    for one, other in zip(turned, both(rms_norm, x, weight, direction), strict=True):
        assert torch.equal(one.transpose(0, 1), other)
    for found in both(rms_norm, x[:0], weight, direction[:0]):
        assert found.shape == (0, 6, 32)


def test_a_scale_that_trains_gets_its_gradient():
    x, weight = torch.randn(4, 32, device=DEVICE), torch.ones(32, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None


ROTATED_SHAPES = [(1, 1, 1, 2), (3, 4, 2, 64), (5, 28, 4, 80), (2, 3, 3, 96), (7, 7, 1, 128), (0, 2, 1, 64)]
if DEVICE == "cuda":
    ROTATED_SHAPES += [(6144, 28, 4, 128), (2048, 40, 8, 128), (777, 64, 8, 128), (1000, 32, 32, 96), (515, 14, 2, 64)]
ROTATED_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {2: torch.int16, 4: torch.int32}


def drawn(tokens, heads, keys, size, dtype):
    """Queries, keys, cosines, sines and gradients of what is rotated, with zeros of both signs among them."""
    torch.manual_seed(0)
    shapes = [(tokens, heads, size), (tokens, keys, size), (tokens, size), (tokens, size)]
    drawn = [3 * torch.randn(shape) for shape in (*shapes, *shapes[:2])]
    for tensor in drawn:
        tensor[torch.rand(tensor.shape) < 0.1] = 0.0
        tensor[torch.rand(tensor.shape) < 0.1] = -0.0
    return [tensor.to(dtype).to(DEVICE) for tensor in drawn]


def transformers_rotary(query, key, cos, sin):
    """As a decoder layer calls it, on transposed views with a batch of one."""
    heads_first = (tensor[None].transpose(1, 2) for tensor in (query, key))
    return tuple(tensor.transpose(1, 2)[0] for tensor in apply_rotary_pos_emb(*heads_first, cos[None], sin[None]))


def same_bits(one, other):
    """Whether signs of zeros are the same too."""
    bits = BITS[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_worked_by_hand(backend, dtype):
    select_backend(backend)
    turned = math.cos(math.pi / 3)  # 0.5, channels 0 and 2 by a sixth of a turn, 1 and 3 by a quarter
    cos = torch.tensor([[turned, 0.0, turned, 0.0]], device=DEVICE).to(dtype)
    sin = torch.tensor([[0.875, 1.0, 0.875, 1.0]], device=DEVICE).to(dtype)  # near enough to sqrt(3) / 2, and exact
    query = torch.tensor([[[2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 0.0, 0.0]]], device=DEVICE).to(dtype).requires_grad_()
    key = torch.tensor([[[0.0, 0.0, 8.0, -1.0]]], device=DEVICE).to(dtype)
    result = rotary(query, key, cos, sin)
    # 2 / 2 - 4 * 0.875, 3 * 0 - 5, 4 / 2 + 2 * 0.875, 5 * 0 + 3
    assert result[0].tolist() == [[[-2.5, -5.0, 3.75, 3.0], [0.5, 0.0, 0.875, 0.0]]]
    assert result[1].tolist() == [[[-7.0, 1.0, 4.0, 0.0]]]
    direction = torch.tensor([[[2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0]]], device=DEVICE).to(dtype)
    gradient = torch.autograd.grad(result[0], query, direction)[0]
    # turned back: 2 / 2 + 4 * 0.875, 3 * 0 + 5, 4 / 2 - 2 * 0.875, 5 * 0 - 3
    assert gradient.tolist() == [[[4.5, 5.0, 0.25, -3.0], [0.0, 0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("dtype", ROTATED_DTYPES)
@pytest.mark.parametrize("shape", ROTATED_SHAPES)
def test_values_and_gradients_have_the_bits_of_transformers(shape, dtype):
    query, key, cos, sin, *directions = drawn(*shape, dtype)
    inputs = (query.requires_grad_(), key.requires_grad_())
    expected = transformers_rotary(*inputs, cos, sin)
    gradients = torch.autograd.grad(expected, inputs, directions)
    ways = [(rotary, "_RotaryBackward"), (plain_rotary, "AddBackward0")]
    if DEVICE == "cuda":  # once more, by the launch that was kept
        ways.append(ways[0])
    for own, node in ways:
        result = own(*inputs, cos, sin)
        assert [type(tensor.grad_fn).__name__ for tensor in result] == [node, node]
        result += torch.autograd.grad(result, inputs, directions)
        for one, other in zip(result, (*expected, *gradients), strict=True):
            assert same_bits(one, other) and one.is_contiguous()


@pytest.mark.parametrize("kernel", [False, True])
def test_what_does_not_lie_in_rows_is_rotated_alike(kernel):
    query, key, cos, sin, *directions = drawn(6, 4, 2, 8, torch.float32)
    turned = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key)]
    wide = [torch.cat([tensor, tensor], dim=-1)[:, :8] for tensor in (cos, sin)]
    select_backend("triton" if kernel else "torch")
    inputs = [tensor.requires_grad_() for tensor in turned]
    result = rotary(*inputs, *wide)
    result += torch.autograd.grad(result, inputs, [tensor.mT.contiguous().mT for tensor in directions])
    inputs = (query.requires_grad_(), key.requires_grad_())
    expected = plain_rotary(*inputs, cos, sin)
    expected += torch.autograd.grad(expected, inputs, directions)
    assert all(map(same_bits, result, expected))


def test_one_of_the_two_may_be_all_that_has_a_gradient():
    query, key, cos, sin, direction, _ = drawn(3, 4, 2, 8, torch.float32)
    result, _ = rotary(query, key.requires_grad_(), cos, sin)
    assert not torch.autograd.grad(result.sum(), key)[0].any()
    result, _ = rotary(query.requires_grad_(), key, cos, sin)
    plain, _ = plain_rotary(query, key, cos, sin)
    ours, theirs = (torch.autograd.grad(y, query, direction)[0] for y in (result, plain))
    assert same_bits(ours, theirs)


def test_angles_that_train_get_their_gradient():
    query, key, cos, sin, *_ = drawn(3, 4, 2, 8, torch.float32)
    result = rotary(query, key, cos.requires_grad_(), sin)
    assert torch.autograd.grad(result[0].sum(), cos)[0].any()


def test_angles_of_another_precision_give_what_pytorch_gives():
    query, key, cos, sin, *_ = drawn(3, 4, 2, 8, torch.float32)
    low = [tensor.to(torch.bfloat16) for tensor in (query, key)]
    assert [tensor.dtype for tensor in rotary(*low, cos, sin)] == [torch.float32, torch.float32]


GATED_SHAPES = [(1, 1), (3, 700), (1, 5, 1024)]
if DEVICE == "cuda":
    GATED_SHAPES += [(1, 6144, 18944), (1, 77, 11008)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", GATED_SHAPES)
def test_an_activations_values_and_gradients_are_those_of_plain_pytorch(shape, dtype):
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
def test_an_activations_bits_repeat_at_any_address_and_size(dtype):
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
