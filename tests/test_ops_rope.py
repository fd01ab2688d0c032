"""Rotary position embedding against transformers' own: on a GPU, or on a CPU in Triton's interpreter."""

import math

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import rotary, select_backend
from qerl_kernels.pointwise import plain_rotary
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1, 2), (3, 4, 2, 64), (5, 28, 4, 80), (2, 3, 3, 96), (7, 7, 1, 128), (0, 2, 1, 64)]
if DEVICE == "cuda":
    SHAPES += [(6144, 28, 4, 128), (2048, 40, 8, 128), (777, 64, 8, 128), (1000, 32, 32, 96), (515, 14, 2, 64)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
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
