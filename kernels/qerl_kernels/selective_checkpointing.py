"""What a checkpointed block need not compute again: saved products of linears, and the last addend of its sum.

A linear layer's product is most of a decoder layer's work, and what follows it (norms, activation, rotation) is cheap.
The forward pass of a checkpointed block saves its products; the recomputation returns them in the same order and frees
them.

PyTorch's `create_selective_checkpoint_contexts` chooses among single operators and costs more here: the recomputation
would dequantize the weight again, for that is no product; an output that the adapter's product was added to in place is
refused as mutated; a block's last product would be saved or computed again; and a graph has one backward pass only.

A block whose result is a sum x + f(x) needs no values of f(x) in its recomputation: no gradient depends on them. f's
last linear, or mixture of experts, then saves what its backward pass needs and returns NaN: were the value ever used,
the gradient would not be a number.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

Products = tuple[Tensor, ...]


class _Thread(threading.local):  # backward passes run in threads of their own
    context: "_Context | None" = None
    leaves_out_addend: bool = False
    graph_only: bool = False


_thread = _Thread()


class _Context(AbstractContextManager[None]):
    """A block's forward pass or recomputation; the latter is entered again for a retained graph's second backward."""

    def __init__(self, products: list[Products | None]) -> None:
        self._products = products
        self._next = 0
        self._outer: _Context | None = None

    def __enter__(self) -> None:
        self._outer, _thread.context = _thread.context, self
        self._next = 0

    def __exit__(self, *error: object) -> None:
        _thread.context = self._outer

    def run(self, compute: Callable[[], Products]) -> Products:
        """Return the next saved product and free it; what was freed before is computed."""
        saved, self._products[self._next] = self._products[self._next], None
        self._next += 1
        return compute() if saved is None else saved


class _Forward(_Context):
    def __init__(self, products: list[Products | None], last_is_added: bool) -> None:
        super().__init__(products)
        self._last_is_added = last_is_added

    def run(self, compute: Callable[[], Products]) -> Products:
        results = compute()
        self._products.append(tuple(product.detach() for product in results))
        return results

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # No gradient needs the block's sum. Were it ever otherwise, the gradient would not be a number.
        if self._last_is_added and self._products and (last := self._products[-1]) is not None:
            first, *others = last
            self._products[-1] = (first.new_full((), torch.nan).expand(first.shape), *others)


def selective_checkpoint_contexts(
    last_is_added: bool,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass and of its recomputation (`torch.utils.checkpoint`'s `context_fn`).

    Args:
        last_is_added: The block's result is a sum, and its last addend the last product, as in a decoder layer: that
            product need not be saved.
    """
    products: list[Products | None] = []
    return _Forward(products, last_is_added), _Context(products)


@contextmanager
def without_saving_products() -> Iterator[None]:
    """Inside the block a selectively checkpointed block saves no products: its recomputation computes them anew."""
    outer, _thread.context = _thread.context, None
    try:
        yield
    finally:
        _thread.context = outer


def save_products(compute: Callable[[], Products]) -> Products:
    """Results of `compute`: new ones, or those of the forward pass in a block's recomputation.

    Args:
        compute: Returns the products, new tensors, then small ones, which may be older.
    """
    return compute() if _thread.context is None else _thread.context.run(compute)


def addend_checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass and of its recomputation, which leaves the last addend out (`context_fn`).

    The block must be a sum whose last addend is computed in `last_addend`.
    """
    return nullcontext(), without_last_addend()


@contextmanager
def without_last_addend() -> Iterator[None]:
    """Inside the block, a recomputation, what is computed in `last_addend` is left out.

    Its values would be lost outside of a recomputation, which builds a graph for the backward pass.
    """
    assert torch.is_grad_enabled(), "only a graph is needed of what is left out"
    outer, _thread.leaves_out_addend = _thread.leaves_out_addend, True
    try:
        yield
    finally:
        _thread.leaves_out_addend = outer


def leaves_out_last_addend() -> bool:
    """Whether this thread is in a recomputation that does not need the last addend."""
    return _thread.leaves_out_addend


@contextmanager
def last_addend() -> Iterator[None]:
    """Around the frozen linear, or mixture of experts, whose result is a block's last addend."""
    outer, _thread.graph_only = _thread.graph_only, _thread.leaves_out_addend
    try:
        yield
    finally:
        _thread.graph_only = outer


def computes_graph_only() -> bool:
    """Whether this thread computes a last addend that is not needed: a frozen linear's product is left out then."""
    return _thread.graph_only
