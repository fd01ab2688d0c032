"""The optimizer and the learning-rate schedule of a training."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from qerl_pl.errors import UserError
from qerl_pl.runtime.import_path import load_named

WARMUP_RATIO = 0.1
"""Default share of the optimizer steps over which a named schedule warms up."""

ADAMW: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 0.1}
"""Arguments of the default optimizer."""

SETTING_TYPES = bool, int, float, str, dict
"""Types of a schedule's settings; a list holds learning rates."""

Schedule = str | Callable[[Optimizer], Any]
"""Name of a schedule of transformers, or what makes one of the optimizer, with settings of its own."""


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW with the learning rate, betas and weight decay of the QeRL authors' code."""
    return torch.optim.AdamW(parameters, **ADAMW)


def trial_weight() -> nn.Parameter:
    """A matrix to try optimizers on, of which some take no vectors."""
    return nn.Parameter(torch.zeros(1, 1))


def build_optimizer(make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer of `model.optimizer`; UserError if its class refuses its arguments or the parameters."""
    try:
        return make(parameters)
    except (RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"model.optimizer must take its init_args and the trained matrices; it says: {message:.200}; correct them"
        ) from error


def load_schedule(schedule: Schedule, warmup_ratio: float) -> Schedule:
    """The schedule, or the function of its name; UserError if there is none, or it is to warm up by `warmup_ratio`."""
    if isinstance(schedule, str) and re.search("[.:]", schedule):
        rule = "lr_scheduler is a schedule of transformers, or a function that makes one of the optimizer"
        schedule = load_named(schedule, rule, "write my_schedules.py:wsd, say", "schedule")
    if schedule == "constant" and warmup_ratio not in (0.0, WARMUP_RATIO):
        raise UserError(
            f"lr_scheduler constant has no warm-up; got a warmup_ratio of {warmup_ratio}; set constant_with_warmup"
        )
    if not isinstance(schedule, str) and warmup_ratio not in (0.0, WARMUP_RATIO):
        raise UserError(
            "model.warmup_ratio is that of a named schedule; got a schedule with settings of its own beside "
            f"{warmup_ratio}; have the schedule warm up, and leave warmup_ratio out"
        )
    return schedule


def build_schedule(schedule: Schedule, optimizer: Optimizer, warmup: int, steps: int) -> LRScheduler:
    """Build a learning-rate schedule: a named one has so many optimizer steps, the first of them its warm-up.

    Raises:
        UserError: transformers has no such schedule, it needs more than the number of steps, or it is none.
    """
    from transformers import get_scheduler  # imports PEFT, which is slow

    try:
        if not isinstance(schedule, str):
            built = schedule(optimizer)
        else:
            built = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        if not isinstance(built, LRScheduler) or isinstance(built, ReduceLROnPlateau):
            raise ValueError(f"{type(built).__name__} is no LRScheduler, or needs a metric")
    except (RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split()).replace(" through the `lr_scheduler_kwargs`", "")  # no key here
        raise UserError(
            f"lr_scheduler must be a schedule of transformers that steps are enough for; got {schedule!r}, which says: "
            f"{message:.90}; use cosine or linear, or a class or function that makes one (my_schedules.py:wsd)"
        ) from error
    return built


def describe_schedule(schedule: LRScheduler) -> str:
    """Class of a schedule that has not begun, and its settings but for learning rates.

    A checkpoint has the settings of classes such as CosineAnnealingLR, and none of a LambdaLR's: named schedules are
    LambdaLRs.
    """
    state = {} if isinstance(schedule, LambdaLR) else schedule.state_dict()
    plain = {name: value for name, value in state.items() if value is None or isinstance(value, SETTING_TYPES)}
    settings = [f"{name}={value}" for name, value in plain.items() if name[0] != "_" and name != "last_epoch"]
    return f"{type(schedule).__name__}({', '.join(settings)})"
