"""Copies of many trained tensors in another data type, made together, with a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def round_together(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `to(dtype)` gives for each, bit for bit, in a few launches for all of them, forward and backward.

    The masters get their gradients together, when the backward pass has come to the last of them.

    Args:
        groups: The masters, on one device and of one data type, another than the copies'. Those of a group are equal
            but for their rows.
        dtype: Of the copies.

    Returns:
        The copies of each group, one above the other in one tensor.
    """
    return _Rounded.apply(dtype, groups, *(master for group in groups for master in group))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, groups: Sequence[Sequence[Tensor]], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.rows = masters[0].dtype, [[len(master) for master in group] for group in groups]
        ctx.set_materialize_grads(False)
        made = [
            group[0].new_empty((sum(rows), *group[0].shape[1:]), dtype=dtype)
            for group, rows in zip(groups, ctx.rows, strict=True)
        ]
        parts = [part for whole, rows in zip(made, ctx.rows, strict=True) for part in _parts(whole, rows)]
        torch._foreach_copy_(parts, masters)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = [part for grad, rows in zip(grads, ctx.rows, strict=True) for part in _parts(grad, rows)]
        low = [part for part in parts if part is not None]
        made = [torch.empty_like(part, dtype=ctx.dtype) for part in low]
        if made:
            torch._foreach_copy_(made, low)
        wide = iter(made)
        return None, None, *(None if part is None else next(wide) for part in parts)


def _parts(whole: Tensor | None, rows: list[int]) -> Sequence[Any]:
    """A group's members, or their gradients, out of what is one above the other."""
    if whole is None:
        return [None] * len(rows)
    return [whole] if len(rows) == 1 else whole.split(rows)
