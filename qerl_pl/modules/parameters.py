"""What every way to train does with its parameters: takes over a checkpoint's, and gives back changed ones."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qerl_pl.errors import UserError


def take_over(own: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str, keys: str) -> None:
    """Copy a checkpoint's tensors into a policy's own, all of them or, where one does not fit, none.

    Args:
        own: Detached, by checkpoint name; written in place.
        state: The checkpoint's.
        what: Trains, for the message.
        keys: Of the configuration that say which names and shapes there are, for the message.

    Raises:
        UserError: Names or shapes differ.
    """
    shapes, found = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (own, state))
    if wrong := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        has, should = (one.get(wrong[0], "nothing") for one in (found, shapes))
        raise UserError(
            f"a checkpoint must hold this policy's {what}; found other names or shapes, {len(wrong)} in all: "
            f"{wrong[0]} is {has} there and {should} here; set {keys} as in the run that wrote it"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


@contextmanager
def given_back(parameters: Collection[Tensor]) -> Iterator[None]:
    """Inside the block the parameters may be changed in place; after it they are what they were, bit for bit."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
