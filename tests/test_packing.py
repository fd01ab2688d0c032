"""Packed attention by itself, against loops over every pair of tokens."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qerl_pl.modules.packing import Packing, packed_attention

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
) -> Tensor:
    """What PyTorch's documentation says of its function, [S, heads, size], by the loops: causal, any window."""
    assert query.is_contiguous() and query.shape == key.shape == value.shape
    assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 3, 4, 9] and max_q == max_k == 5
    left, right = window_size
    assert right == 0
    tensors = (tensor.as_subclass(Tensor).float().transpose(0, 1)[None] for tensor in (query, key, value))
    window = None if left == -1 else left + 1
    return plain_attention(*tensors, scale or 1 / math.sqrt(query.shape[2]), window)[0].to(query.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_sixteen_bits_on_a_gpu_take_its_own_function(
    dtype: torch.dtype, window: int | None, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def varlen_attn(*args: Any, **options: Any) -> Tensor:
        called.append(options)
        return variable_length_attention(*args, **options)

    module = ModuleType("varlen")
    monkeypatch.setattr(module, "varlen_attn", varlen_attn, raising=False)
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
    assert len(called) == (dtype != torch.float32)


def test_what_it_cannot_do_is_refused() -> None:
    tensors = [torch.randn(1, heads, 9, 6) for heads in (4, 2, 2)]
    packed_attention(nn.Module(), *tensors, None, packing=Packing.of(LENGTHS, 5))
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None)
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None, dropout=0.1, packing=Packing.of(LENGTHS, 5))
