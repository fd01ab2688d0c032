"""Packed attention by itself, against loops over every pair of tokens."""

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qerl_pl.modules import packing as packing_module
from qerl_pl.modules.packing import Packing, attention_of_rows, packed_attention, takes_grouped_queries
from qerl_pl.run.random_state import deterministic

LENGTHS = torch.tensor([3, 1, 5])


def test_a_packing_knows_where_its_tokens_stand() -> None:
    packing = Packing.of(LENGTHS, 6)
    assert packing.kept.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert packing.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert packing.boundaries.tolist() == [0, 3, 4, 9] and packing.boundaries.dtype == torch.int32
    assert packing.longest == 5


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """[1, heads, S, size] to [1, S, heads, size]: every token looks back in its own sequence, so far as the window."""
    heads, tokens, repeats = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    starts = [0] * 3 + [3] + [4] * 5
    rows = []
    for now in range(tokens):
        first = starts[now] if window is None else max(starts[now], now - window + 1)
        for head in range(heads):
            keys, values = key[0, head // repeats, first : now + 1], value[0, head // repeats, first : now + 1]
            weights = torch.stack([(query[0, head, now] * one).sum() * scaling for one in keys]).softmax(0)
            rows.append(sum(weight * one for weight, one in zip(weights, values, strict=True)))
    return torch.stack(rows).view(1, tokens, heads, -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_and_its_gradient_are_those_of_loops(window: int | None, scaling: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 2, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    packing, direction = Packing.of(LENGTHS, 6), torch.randn(1, 9, 4, 2, dtype=torch.float64)
    expected = plain_attention(*tensors, scaling or 1 / math.sqrt(2), window)
    found, weights = packed_attention(
        nn.Module(), *tensors, None, scaling=scaling, sliding_window=window, packing=packing
    )
    assert weights is None
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((out * direction).sum(), tensors) for out in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


class OnGPU(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def variable_length_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What PyTorch's documentation says of its function, [S, heads, size], by the loops: causal, any window."""
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    assert key.shape == value.shape and (query.shape[1] == key.shape[1] or enable_gqa)
    assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 3, 4, 9] and max_q == max_k == 5
    left, right = window_size
    assert right == 0
    tensors = (tensor.as_subclass(Tensor).float().transpose(0, 1)[None] for tensor in (query, key, value))
    window = None if left == -1 else left + 1
    return plain_attention(*tensors, scale or 1 / math.sqrt(query.shape[2]), window)[0].to(query.dtype)


@pytest.fixture
def pytorchs_choice_forgotten() -> Iterator[None]:
    """Whether PyTorch's function takes grouped queries is asked anew in the test and after it."""
    takes_grouped_queries.cache_clear()
    yield
    takes_grouped_queries.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.usefixtures(pytorchs_choice_forgotten.__name__)
def test_sixteen_bits_on_a_gpu_take_its_own_function(
    dtype: torch.dtype, window: int | None, scaling: float | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def old(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        called.append(args[1].shape[1])
        return variable_length_attention(*args, scale=scale, window_size=window_size)

    def new(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        called.append(args[1].shape[1])
        return variable_length_attention(*args, **options, enable_gqa=enable_gqa)

    module = ModuleType("varlen")
    monkeypatch.setattr(module, "varlen_attn", new if grouped else old, raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 8).to(dtype) for heads in (4, 2, 2)]
    found, _ = packed_attention(
        nn.Module(),
        *(tensor.as_subclass(OnGPU) for tensor in tensors),
        None,
        scaling=scaling,
        sliding_window=window,
        packing=Packing.of(LENGTHS, 6),
    )
    expected = plain_attention(*(tensor.float() for tensor in tensors), scaling or 1 / math.sqrt(8), window)
    torch.testing.assert_close(found.as_subclass(Tensor).float(), expected, rtol=1e-2, atol=1e-2)
    assert called == ([] if dtype == torch.float32 else [2] if grouped else [4])


@pytest.mark.usefixtures(pytorchs_choice_forgotten.__name__)
def test_a_pytorch_without_the_function_takes_no_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert not takes_grouped_queries()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "keys", "size"), [(28, 4, 128), (40, 8, 128), (32, 32, 96), (14, 2, 64)])
@pytest.mark.parametrize("window", [None, 256])
def test_grouped_queries_on_a_gpu_give_what_repeated_keys_give(
    heads: int, keys: int, size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_grouped_queries():
        pytest.skip("this PyTorch takes no grouped queries")
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([1500, 700, 1848], device="cuda"), 1848)
    drawn = [torch.randn(4048, count, size, device="cuda", dtype=torch.bfloat16) for count in (heads, keys, keys)]
    inputs, direction = [tensor.requires_grad_() for tensor in drawn], torch.randn_like(drawn[0])
    found = []
    with deterministic():
        for grouped in (True, False):
            monkeypatch.setattr(packing_module, "takes_grouped_queries", lambda grouped=grouped: grouped)
            out = attention_of_rows(*inputs, packing, sliding_window=window)
            found.append((out, *torch.autograd.grad(out, inputs, direction)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    for ours, theirs in zip(found[0][2:], found[1][2:], strict=True):  # sums over the heads of a group
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


def test_what_it_cannot_do_is_refused() -> None:
    tensors = [torch.randn(1, heads, 9, 6) for heads in (4, 2, 2)]
    packed_attention(nn.Module(), *tensors, None, packing=Packing.of(LENGTHS, 5))
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None)
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None, dropout=0.1, packing=Packing.of(LENGTHS, 5))
