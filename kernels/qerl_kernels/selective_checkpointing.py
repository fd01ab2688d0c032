"""Products that a checkpointed block keeps: its recomputation then does everything but them.

A linear layer's product is most of a decoder layer's work, and what follows it (norms, activation, rotation) is cheap.
`keeping_products` is made for `torch.utils.checkpoint`'s `context_fn`: in the forward pass the linears of this package
put their products on a tape, in the recomputation they take them from it, in the same order, and free them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

Products = tuple[Tensor, ...]


class _Tape:
    """The products of one block, by the order in which they were computed."""

    def __init__(self, last_is_added: bool) -> None:
        self._last_is_added = last_is_added
        self._products: list[Products | None] = []
        self._next: int | None = None
        """Number of the next product to give; None while they are recorded."""

    def __call__(self, compute: Callable[[], Products]) -> Products:
        if self._next is None:
            found = compute()
            self._products.append(tuple(product.detach() for product in found))
            return found
        kept, self._products[self._next] = self._products[self._next], None
        self._next += 1
        return compute() if kept is None else kept  # a second recomputation finds none

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _using(self):
            yield
        # No gradient needs that sum. Were it ever otherwise, the gradient would not be a number.
        if self._last_is_added and self._products and (last := self._products[-1]) is not None:
            first, *others = last
            self._products[-1] = (first.new_full((), torch.nan).expand(first.shape), *others)

    def rewind(self) -> None:
        self._next = 0


class _Current(threading.local):
    """A thread's tape: backward passes run in threads of their own."""

    tape: _Tape | None = None


_current = _Current()


@contextmanager
def _using(tape: _Tape) -> Iterator[None]:
    before, _current.tape = _current.tape, tape
    try:
        yield
    finally:
        _current.tape = before


class _Giving(AbstractContextManager[None]):
    """A block's recomputation; entered again where a graph is kept for a second backward pass."""

    def __init__(self, tape: _Tape) -> None:
        self._tape = tape
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._tape.rewind()
        self._open.enter_context(_using(self._tape))

    def __exit__(self, *error: object) -> None:
        self._open.close()


def keeping_products(last_is_added: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a block's forward pass and of its recomputation (`torch.utils.checkpoint`'s `context_fn`).

    Args:
        last_is_added: The block's result is a sum, and its last addend the last product, as in a decoder layer: that
            product need not be kept.
    """
    tape = _Tape(last_is_added)
    return tape.recording(), _Giving(tape)


def keeps_products() -> bool:
    """Whether products are kept, or taken from what was kept, just now."""
    return _current.tape is not None


def kept(compute: Callable[[], Products]) -> Products:
    """What `compute` gives, or gave in the forward pass of the block that is being recomputed.

    Args:
        compute: Gives the result first, or the results of layers on one input, new tensors; others are small, and may
            be older.
    """
    return compute() if _current.tape is None else _current.tape(compute)
