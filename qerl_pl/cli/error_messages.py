"""What a user may have meant who misspelt a key, or named no class where one is asked for."""

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib.metadata import packages_distributions
from pkgutil import resolve_name
from types import TracebackType

import jsonargparse
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from qerl_pl import algorithm
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.persistence.atomic_files import FULL_DISK

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


_UNTELLING = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Expected a path but"
    r"|Not a valid subclass|Subclass types expect|a class path|a dict with"
    r"|Given value type:|Given value: (\[|.{80})|tip:|usage:"
)

"""Lines of jsonargparse's messages that say what it tried, or repeat a long value."""

_OURS = ("qerl_pl", "qerl_kernels")

_TOLD = (UserError, MisconfigurationException, ModuleNotFoundError)

"""Errors whose message is the whole story: ours, Lightning's of its settings, a class whose package is missing."""

_LIGHTNINGS = (
    (
        "No supported gpu backend",
        "trainer.accelerator gpu needs a GPU that PyTorch sees",
        "set trainer.accelerator to cpu and RolloutCallback's engine to qerl_pl.engines.TransformersEngine, or check "
        "the driver and CUDA_VISIBLE_DEVICES",
    ),
    (
        "Automatic gradient clipping",
        "the module clips its gradients itself",
        "leave it out and set model.max_grad_norm",
    ),
    (
        "Automatic gradient accumulation",
        "the module accumulates gradients itself",
        "leave it out and set model.micro_batch_tokens, or data.batch_size and model.minibatches for another step size",
    ),
)

"""How Lightning's messages start that need our own keys, with the rule and the remedy."""

_REFUSED = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP", "ENOSPC", "EDQUOT", "EEXIST")
}

"""What a file system says of the user's files. A missing file is not among them: ours to look for before it is read."""


def explain(error: Exception, argv: list[str], commands: Collection[str]) -> str | None:
    """The line that a user's mistake ends with, or None where the error is no user's mistake.

    Where a class of the user's own raised, its traceback goes to standard error first, without the frames that lead
    there.

    Args:
        error: What stopped the program.
        argv: Arguments after the program's name.
        commands: Names of the program's commands.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return _joined(cause)
    installed = {*sys.stdlib_module_names, *packages_distributions(), *_OURS}
    for cause in causes:
        if (own := _users_part(cause.__traceback__, installed)) is not None:
            return _report(cause, own)
    if isinstance(error, jsonargparse.ArgumentError):
        return _parsing(error, argv, commands)
    for cause in causes:
        if isinstance(cause, _TOLD):
            return _in_our_keys(_joined(cause))
        if (name := _refusing_class(cause.__traceback__)) is not None:
            return f"a class must take the init_args that it is given; {name} says: {_joined(cause):.200}; correct them"
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename is not None:
        where = os.fsdecode(error.filename)
        return f"files must be open to the run; {where}: {error.strerror}; correct that, or name another place"
    if any(
        isinstance(cause, OSError) and cause.errno in FULL_DISK for cause in causes
    ):  # a write that fails names no file
        return (
            f"saving needs free disk space; a write found none ({_joined(error):.80}); free some and give the command "
            "again, a training with --resume auto"
        )
    return None


def _in_our_keys(said: str) -> str:
    """What Lightning says of its keys, with ours that take their place."""
    for start, rule, remedy in _LIGHTNINGS:
        if said.startswith(start):
            found = re.search(r"Trainer\((\w+)=(\S+)\)", said)
            return f"{rule}; found {f'trainer.{found[1]} {found[2]}' if found else 'none'}; {remedy}"
    return said


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from: jsonargparse wraps an error of a class that it builds in others."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _joined(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parsing(error: jsonargparse.ArgumentError, argv: list[str], commands: Collection[str]) -> str:
    """jsonargparse's errors spread over many lines: the key and what is wrong with it stay."""
    lines = [" ".join(line.split()).removeprefix("- ").rstrip(".") for line in str(error).splitlines()]
    telling = [line for line in lines if line and not _UNTELLING.match(line)] or lines[:1]
    command = f"qerl {argv[0]}" if argv and argv[0] in commands else "qerl"
    meant = [found] if (found := hint(str(error))) else []
    return "; ".join([*telling, *meant, f"see {command} --help"]).replace(":; ", ": ")


def _users_part(trace: TracebackType | None, installed: Collection[str]) -> TracebackType | None:
    """The traceback from the first frame of a module that is of no installed package; None where there is none."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")  # a compiled template has none
        if module is not None and module.partition(".")[0] not in installed:
            return trace
        trace = trace.tb_next
    return None


def _refusing_class(trace: TracebackType | None) -> str | None:
    """The class of another package that raised when jsonargparse called its constructor; None where none did."""
    caller = ""
    while trace is not None:
        module, code = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code
        if caller == "jsonargparse" and code.co_name == "__init__":
            found = f"{module}.{code.co_qualname}".removesuffix(".__init__")
            return None if found.startswith((*_OURS, "jsonargparse")) else found
        caller = module.partition(".")[0]
        trace = trace.tb_next
    return None


def _report(error: BaseException, trace: TracebackType) -> str:
    traceback.print_exception(type(error), error, trace, chain=error.__cause__ is not None, file=sys.stderr)
    where = f"{trace.tb_frame.f_globals['__name__']}.{trace.tb_frame.f_code.co_qualname}"
    said = f"{type(error).__name__}: {_joined(error)}".removesuffix(": ")
    return f"code of your own must not raise; {where} raised {said:.150}; correct it (QERL_DEBUG=1 shows who called it)"
