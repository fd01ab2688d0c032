"""Copies of many trained tensors in another data type, made together, with a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def round_together(masters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `to(dtype)` gives for each, bit for bit, in a few launches for all of them, forward and backward.

    The masters get their gradients together, when the backward pass has come to the last of them.

    Args:
        masters: On one device and of one data type, another than the copies'.
        dtype: Of the copies.
    """
    return _Rounded.apply(dtype, *masters)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = masters[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(_cast(masters, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = iter(_cast([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(made) for grad in grads)


def _cast(tensors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, tensors)
    return made
