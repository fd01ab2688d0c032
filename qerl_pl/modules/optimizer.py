"""The optimizer and the learning-rate schedule that a configuration names."""

import inspect
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from qerl_pl.errors import UserError

LARGEST_RATE = 1e30
"""What Adam divides by its first bias correction, and float32 still holds."""


def build_optimizer(make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer of some parameters.

    Args:
        make: Builds it, as `model.optimizer` says.
        parameters: What it moves.

    Raises:
        UserError: Its class refuses its arguments or the parameters, its learning rate is no number, or its steps need
            what the update does not give.
    """
    try:
        optimizer = make(parameters)
    except (RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"model.optimizer must take its init_args and the trained matrices; it says: {said:.200}; correct them"
        ) from error
    for rate in [group.get("lr") for group in optimizer.param_groups]:
        if not isinstance(rate, int | float) or not 0 <= rate <= LARGEST_RATE:
            raise UserError(
                f"model.optimizer needs a learning rate from 0 to {LARGEST_RATE:g}; found {rate}; set its init_args.lr"
            )
    found, closure = type(optimizer).__name__, inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None:
        raise UserError(
            f"model.optimizer must have step(closure=None), which Lightning calls; {found} has another; use AdamW"
        )
    if closure.default is inspect.Parameter.empty:
        raise UserError(
            f"model.optimizer must step once a minibatch; {found} asks for several losses a step; use AdamW"
        )
    return optimizer


def build_schedule(name: str, optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """The schedule of a learning rate.

    Args:
        name: Of a transformers schedule.
        optimizer: Whose rates it sets.
        warmup: Optimizer steps with a rising rate.
        steps: Optimizer steps in all.

    Raises:
        UserError: There is no such schedule, or it needs more than these arguments.
    """
    try:
        schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        if not isinstance(schedule, LambdaLR):
            raise ValueError(f"{type(schedule).__name__} needs a metric")
    except (TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"lr_scheduler must be a schedule of transformers that steps are enough for; found {name!r}, which says: "
            f"{said:.120}; use cosine, linear or constant_with_warmup"
        ) from error
    return schedule
