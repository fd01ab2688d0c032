"""MLPs in tiles of tokens, whose working memory is that of a tile; and recomputations without results of MLPs.

The forward pass saves the input alone; the backward pass computes each tile again and sums the gradients of weights
over the tiles in their own data type, float32. In a checkpointed layer the recomputation before the backward pass can
leave the MLP out: its result is only added, and no gradient needs a sum.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from qerl_kernels import without_saving_products
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Thread(threading.local):  # backward passes run in threads of their own
    results_needed: bool = True


_thread = _Thread()


def results_needed() -> bool:
    """Whether something uses an MLP's result: not in a recomputation, where it is only added and sums save nothing."""
    return _thread.results_needed


@contextmanager
def _results_not_needed() -> Iterator[None]:
    before, _thread.results_needed = _thread.results_needed, False
    try:
        yield
    finally:
        _thread.results_needed = before


def leaving_out_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpointed layer's forward pass and of its recomputation, which leaves results of MLPs out.

    For `torch.utils.checkpoint`'s `context_fn`, where the layer's result is a sum with the MLP's as last addend.
    """
    return nullcontext(), _results_not_needed()


def tiled(run: Callable[[Tensor], Tensor], x: Tensor, tokens: int, parameters: Sequence[Tensor]) -> Tensor:
    """run(x), a function of each row by itself, computed in tiles of rows.

    Args:
        run: [..., rows, hidden] to the same shape, with the same result whenever it is called.
        x: [..., rows, hidden].
        tokens: Most rows of a tile.
        parameters: Tensors that require gradients and that `run` uses; they get their gradients.
    """
    return _Tiled.apply(x, run, -(-x.shape[-2] // tokens), *parameters)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], tiles: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.run, ctx.tiles = run, tiles
        if not results_needed():  # were it ever needed, the gradient would not be a number
            return x.new_full((), torch.nan).expand(x.shape)
        y = torch.empty_like(x)
        with without_saving_products():
            for out, tile in zip(y.tensor_split(tiles, -2), x.tensor_split(tiles, -2), strict=True):
                out.copy_(run(tile))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        trained = [parameter for parameter, needed in zip(parameters, ctx.needs_input_grad[3:], strict=True) if needed]
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        sums: list[Tensor] = []
        for index, (tile, dy) in enumerate(
            zip(x.tensor_split(ctx.tiles, -2), grad.tensor_split(ctx.tiles, -2), strict=True)
        ):
            with torch.enable_grad(), _results_not_needed():
                piece = tile.detach().requires_grad_(dx is not None)
                y = ctx.run(piece)
            inputs = trained if dx is None else [piece, *trained]
            found = list(torch.autograd.grad(y, inputs, dy))
            if dx is not None:
                dx.tensor_split(ctx.tiles, -2)[index].copy_(found.pop(0))
            sums = [total.add_(one) for total, one in zip(sums, found, strict=True)] if sums else found
        totals = iter(sums)
        return dx, None, None, *(next(totals) if needed else None for needed in ctx.needs_input_grad[3:])
