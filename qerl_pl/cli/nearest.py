"""What a user may have meant who misspelt a key, or named no class where one is asked for."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from pkgutil import resolve_name

from lightning.pytorch import Trainer

from qerl_pl import algorithm
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.modules import QeRLModule

_ROOTS: dict[str, type | None] = {
    "model": QeRLModule,
    "data": PromptDataModule,
    "trainer": Trainer,
    "seed_everything": None,
    "resume": None,
    "ckpt_path": None,
    "config": None,
}
"""Keys of the command line, and the classes whose arguments are below them."""
_KEY = re.compile(r"unrecognized arguments: --([\w.]+)|Subcommand '\w+' does not accept option '([\w.]+)'")
_OPTION = re.compile(r"Option '(\w+)' is not accepted|Group '\w+' does not accept option '(\w+)'")
_CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
_NO_OBJECTIVE = re.compile(r"\"model\.objective\".*(Expected a dot import path string|has no attribute)", re.DOTALL)


def hint(message: str) -> str | None:
    """What may have been meant, for the line that tells a mistake; None where nothing is near.

    Args:
        message: What jsonargparse says of a configuration.
    """
    if _NO_OBJECTIVE.search(message):
        return f"objectives are {', '.join(_objectives())}"
    found = None
    if key := _KEY.search(message):
        found = _nearest_key(key[1] or key[2])
    elif (option := _OPTION.search(message)) and (owner := _CLASS.search(message)):
        found = _nearest(option[1] or option[2], _arguments(resolve_name(owner[1])))
    return None if found is None else f"did you mean {found}?"


def _objectives() -> list[str]:
    classes = (one for one in vars(algorithm).values() if isinstance(one, type))
    return sorted(one.__name__ for one in classes if issubclass(one, Objective) and one is not Objective)


def _nearest_key(key: str) -> str | None:
    """The key with its first unknown part replaced; None where no part is, or nothing is near it."""
    parts, below = key.split("."), dict(_ROOTS)
    for index, part in enumerate(parts):
        if part not in below:
            near = _nearest(part, below)
            return None if near is None else ".".join([*parts[:index], near, *parts[index + 1 :]])
        if (owner := below[part]) is None:
            return None
        kinds = _arguments(owner).items()
        below = {name: kind if isinstance(kind, type) and is_dataclass(kind) else None for name, kind in kinds}
    return None


def _arguments(owner: type) -> dict[str, type | None]:
    """Names and types of what a class's constructor takes, and those of its bases that it passes them on to."""
    found: dict[str, type | None] = {}
    for one in owner.__mro__[:-1]:
        for name, parameter in inspect.signature(one).parameters.items():
            found.setdefault(name, parameter.annotation)
        if not any(given.kind is given.VAR_KEYWORD for given in inspect.signature(one).parameters.values()):
            break
    return found


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, [*known], n=1)), None)
