"""One-line messages for user errors, with the nearest key for a misspelt one."""

import errno
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from pkgutil import resolve_name
from types import ModuleType

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer, loggers
from lightning.pytorch.loggers import Logger

from qerl_pl import algorithm, datamodules, engines
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.callbacks import RolloutCallback
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.engines import RolloutEngine
from qerl_pl.errors import UserError, chain_of_causes
from qerl_pl.modules import QeRLModule
from qerl_pl.persistence.atomic_files import is_full_disk

_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class '(NoneType|bool|list|collections\.abc\.Iterable)'>$"
    r"|Expected a path but|Not a valid subclass|Subclass types expect|a class path|a dict with"
    r"|Given value type:|Given value: ([\[{]|.{80})|tip:|usage:"
)
"""Lines of jsonargparse's messages that say which types it tried, or repeat a long value."""

_PARSING = (
    jsonargparse.ArgumentError,
    TypeError,
    ValueError,
    ImportError,
    AttributeError,
    LookupError,
    OSError,
    yaml.YAMLError,
)
"""Errors that jsonargparse raises; any other cause comes from a user's module and keeps its traceback."""

_FILE_SYSTEM = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP", "ENOSPC", "EDQUOT", "EEXIST")
}
"""Errors of the file system that a user can correct. Not ENOENT: this package checks files before it reads them."""


_KEYS: dict[str, type | None] = {
    "model": QeRLModule,
    "data": PromptDataModule,
    "rollout": RolloutCallback,
    "trainer": Trainer,
    **dict.fromkeys(("seed_everything", "resume", "ckpt_path", "config")),
    **dict.fromkeys(("noise", "best", "checkpoint", "monitor", "completions", "summary", "report")),
}
"""Top-level keys, and the classes whose arguments are the keys below them."""

_UNKNOWN_KEY = re.compile(r"unrecognized arguments: --([\w.]+)|Subcommand '\w+' does not accept option '([\w.]+)'")
_UNKNOWN_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
_CLASS_PATH = re.compile(r"class_path[ =]'([\w.]+)'")
_PARSER_KEY = re.compile(r'Parser key "([\w.]+)":')
_GIVEN = re.compile(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_EXPECTED = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*)\])")
_NOT_EXPECTED = re.compile(r"^ *- (?!Expected)", re.MULTILINE)
"""A reason other than a type, such as that of a class."""
_TYPE_NAMES = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text", "NoneType": "null"}
"""Names of scalar types in messages."""
_NO_OPTIMIZER = re.compile(r"\"model\.optimizer\".*Expected a dot import path string", re.DOTALL)
_BARE_OPTIMIZER = re.compile(
    r"\"model\.optimizer\".*Dict must include a class_path and optionally init_args, but got "
    r"(?:NestedArg\(key='([\w.]+)', val=(.+?)\)|(\{.*?\}))\.?\s",
    re.DOTALL,
)
"""Arguments of an optimizer in a configuration that names no class of it: from the command line, or a file."""

_BARE_REWARD = re.compile(r"\"rollout\.rewards\".*NestedArg\(key='(.+?)\.([\w.]+)', val='?(.*?)'?\)", re.DOTALL)
"""An argument of a reward that is a function, or not there."""
_NO_REWARD = re.compile(r"\"rollout\.rewards\".*Given value: None$", re.DOTALL | re.MULTILINE)

_CLASSES: dict[str, tuple[str, ModuleType, Callable[[type], bool]]] = {
    "model.objective": ("objectives", algorithm, lambda kind: issubclass(kind, Objective) and kind is not Objective),
    "rollout.engine": ("engines", engines, lambda kind: kind.__name__.endswith("Engine") and kind is not RolloutEngine),
    "data": ("data modules", datamodules, lambda kind: issubclass(kind, LightningDataModule)),
    "trainer.logger": ("loggers", loggers, lambda kind: issubclass(kind, Logger) and kind is not Logger),
}
"""Keys of classes: what these are called, the package that has them, and which of its names they are."""
_NO_CLASS = re.compile(
    rf'"({"|".join(map(re.escape, _CLASSES))})".*(Expected a dot import path string|has no attribute)', re.DOTALL
)

_LIGHTNING = {
    "No supported gpu backend": (
        "trainer.accelerator gpu needs a GPU that PyTorch sees",
        "set trainer.accelerator to cpu and rollout.engine to TransformersEngine, or check the driver and "
        "CUDA_VISIBLE_DEVICES",
    ),
    "Automatic gradient clipping": (
        "the module clips its gradients itself",
        "leave it out and set model.max_grad_norm",
    ),
    "Automatic gradient accumulation": (
        "the module accumulates gradients itself",
        "leave it out and set model.micro_batch_tokens, or data.batch_size and model.minibatches for another step size",
    ),
}
"""First words of Lightning's messages about its own keys -> rule and remedy in this package's keys."""


def explain(error: Exception, argv: list[str], commands: Collection[str]) -> str | None:
    """The message for a user error; None for any other error, which keeps its traceback.

    Args:
        error: What stopped the program.
        argv: Arguments after the program's name.
        commands: Names of the program's commands.
    """
    causes = list(chain_of_causes(error))  # jsonargparse wraps errors of the classes that it builds
    for cause in causes:
        if isinstance(cause, UserError):
            return _one_line(cause)
    if isinstance(error, jsonargparse.ArgumentError) and all(isinstance(cause, _PARSING) for cause in causes):
        return _parsing(error, argv, commands)
    for cause in causes:
        if isinstance(cause, MisconfigurationException | ModuleNotFoundError):
            return _with_own_keys(_one_line(cause))
    if isinstance(error, OSError) and error.errno in _FILE_SYSTEM and error.filename is not None:
        path = os.fsdecode(error.filename)
        return f"a run must read and write its files; {path}: {error.strerror}; correct that, or choose another path"
    if any(map(is_full_disk, causes)):  # a write names no file
        return (
            f"saving needs free disk space; a write found none ({_one_line(error):.80}); free some and run the "
            "command again, training with --resume auto"
        )
    return None


def _one_line(error: BaseException) -> str:
    """The message and its notes."""
    return " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())


def _parsing(error: jsonargparse.ArgumentError, argv: list[str], commands: Collection[str]) -> str:
    """The key and the reason from jsonargparse's message of many lines."""
    if bare := _BARE_OPTIMIZER.search(str(error)):
        given = f"{bare[1]}={bare[2]}" if bare[1] else bare[3]
        return (
            f"model.optimizer is a class and its arguments; got {given} without a class; put --model.optimizer "
            "torch.optim.AdamW before it, or class_path and init_args into the file"
        )
    if bare := _BARE_REWARD.search(str(error)):
        key = f"--rollout.rewards.{bare[1]}"
        return (
            f"only a reward that is a class has arguments; got {key}.{bare[2]} {bare[3]:.40}; put the class before it, "
            f"for a function {key} RewardFunction {key}.function file.py:function"
        )
    if _NO_REWARD.search(str(error)):
        return (
            "a reward is a class or a function, never null; rollout.rewards has null; leave it out, or write {} for "
            "rollout.rewards to drop those of earlier files"
        )
    if argv and argv[0] in commands:
        command = f"qerl {argv[0]}"
    else:
        given = argv[0] if argv and not argv[0].startswith("-") else "none"
        meant = did_you_mean(given, commands)
        return f"qerl takes a command first, one of {', '.join(sorted(commands))}; got {given}; {meant}see qerl --help"
    if of_class := _unknown_argument(str(error), argv) or _wrong_type(str(error), argv):
        return f"{of_class}; see {command} --help"
    lines = [" ".join(line.split()).removeprefix("- ").rstrip(".") for line in str(error).splitlines()]
    useful = [line for line in lines if line and not _NOISE.match(line)] or lines[:1]
    useful = [line for line in useful if line.removeprefix("Given value: ") not in "".join(useful).replace(line, "")]
    hints = [text] if (text := _hint(str(error))) else []
    return "; ".join([*useful, *hints, f"see {command} --help"]).replace(":; ", ": ")


def _unknown_argument(message: str, argv: list[str]) -> str | None:
    """The message for an argument that a class does not have; None for any other error."""
    option = _UNKNOWN_ARGUMENT.search(message)
    owners = _CLASS_PATH.findall(message[: option.start()])[-1:] or _CLASS_PATH.findall(message) if option else []
    owner = resolve_name(owners[0]) if owners else None
    if option is None or not isinstance(owner, type) or not _PARSER_KEY.search(message):
        return None
    arguments = _arguments(owner)
    nearest = " or ".join(get_close_matches(option[1], arguments))
    possible = f"did you mean {nearest}?" if nearest else f"its arguments are {', '.join(arguments)}"
    text = textwrap.shorten(possible, 200, placeholder=" ...")
    return f"{_written(option[1], message, argv)} is no argument of {owner.__name__}; {text}"


def _wrong_type(message: str, argv: list[str]) -> str | None:
    """The message for a key of a plain type that has another value; None for any other error."""
    keys = list(_PARSER_KEY.finditer(message))
    given = _GIVEN.search(message, keys[-1].end()) if keys else None
    if given is None:
        return None
    tried = message[keys[-1].end() : given.start()]
    expected = _EXPECTED.findall(tried)
    if len(keys) == 1 and (tried.count("Expected") > len(expected) or _NOT_EXPECTED.search(tried)):
        return None  # a class, too
    named = [(name, choices) for name, choices in dict.fromkeys(expected) if choices or name in _TYPE_NAMES]
    types = [f"one of {choices}".replace("'", "") if choices else _TYPE_NAMES[name] for name, choices in named]
    if not types or types == ["null"]:
        return None
    key = keys[0][1] if len(keys) == 1 else _written(keys[-1][1], message, argv)
    value = "null" if given[1] == "None" else given[1]
    return f"{key} takes {' or '.join(types)}; got {value:.80}; correct it"


def _written(name: str, message: str, argv: list[str]) -> str:
    """The complete key of a class's argument: a word of the command line, or the place in a file.

    Args:
        name: Of the argument.
        message: jsonargparse's, with the values that were given: first the class's, last that of the key.
        argv: The command line.
    """
    first, *others = dict.fromkeys(_PARSER_KEY.findall(message))
    inner = [key for key in others if key != name]
    for word in (word.partition("=")[0].removeprefix("--") for word in argv):
        if word.startswith(f"{first}.") and word.endswith(f".{name}"):
            return word
    if inner:  # a class among the arguments of another
        return f"{'.'.join([first, *inner])}: {name}"
    values = [text for text in _GIVEN.findall(message) if f"'{name}'" in text]
    entry = re.search(rf"'([^']+)': {re.escape(values[0])}", values[-1]) if values else None
    return ".".join([first, *([entry[1]] if entry else []), "init_args", name])


def _with_own_keys(message: str) -> str:
    """Lightning's message, with this package's keys as the remedy where it has such."""
    for start, (rule, remedy) in _LIGHTNING.items():
        if message.startswith(start):
            setting = re.search(r"Trainer\((\w+)=(\S+)\)", message)
            return f"{rule}; got {f'trainer.{setting[1]} {setting[2]}' if setting else 'none'}; {remedy}"
    return message


def _hint(message: str) -> str | None:
    """A suggestion for an unknown class or key; None if nothing is similar."""
    if match := _NO_CLASS.search(message):
        plural, module, is_one = _CLASSES[match[1]]
        names = sorted(name for name, kind in vars(module).items() if isinstance(kind, type) and is_one(kind))
        return f"{plural} are {', '.join(names)}"
    if _NO_OPTIMIZER.search(message):
        return "name it by its import path, as in torch.optim.AdamW"
    key = _UNKNOWN_KEY.search(message)
    if key and (key[1] or key[2]).endswith("lora.target_parameters"):
        return "experts are frozen; leave it out: the adapter of a mixture is on attention, by lora.targets"
    nearest = _nearest_key(key[1] or key[2]) if key else None
    return None if nearest is None else f"did you mean {nearest}?"


def _nearest_key(key: str) -> str | None:
    """The key with its first unknown name replaced by the most similar; None if there is none."""
    names, below = key.split("."), dict(_KEYS)
    for index, name in enumerate(names):
        if name not in below:
            nearest = _nearest(name, below)
            return None if nearest is None else ".".join([*names[:index], nearest, *names[index + 1 :]])
        if (owner := below[name]) is None:
            return None
        kinds = _arguments(owner).items()
        below = {name: kind if isinstance(kind, type) and is_dataclass(kind) else None for name, kind in kinds}
    return None


def _arguments(owner: type) -> dict[str, type | None]:
    """Names and types of a constructor's arguments, also of the bases that get its **kwargs."""
    arguments: dict[str, type | None] = {}
    for base in owner.__mro__[:-1]:
        parameters = inspect.signature(base).parameters
        for name, parameter in parameters.items():
            arguments.setdefault(name, parameter.annotation)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return arguments


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question for the most similar of the names, and a space; empty if none is similar."""
    nearest = _nearest(name, names)
    return "" if nearest is None else f"did you mean {nearest}? "


def _nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, [*names], n=1)), None)
