"""One-line messages for user errors, with the nearest key for a misspelt one."""

import re
import textwrap
from difflib import get_close_matches
from pkgutil import resolve_name

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, loggers
from yaml import YAMLError

from qerl_pl import algorithm, datamodules, engines
from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.commands import COMMAND_HELP, TRAINER_COMMANDS
from qerl_pl.cli.config_checks import CALLBACKS, module_class
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.errors import UserError, did_you_mean, explain_file_error
from qerl_pl.runtime.import_path import import_path_of

_IMPORTING = (AttributeError, ImportError, SyntaxError)
_PARSING = (*_IMPORTING, TypeError, ValueError, LookupError, OSError, ArgumentError, YAMLError)
"""Errors that jsonargparse raises; any other cause comes from a user's module and keeps its traceback."""

_PLAIN = ("seed_everything", "resume", "ckpt_path", "config", "dry-run", "model.optimizer.lr", *CALLBACKS)
_GROUPS = {"data": PromptDataModule, "rollout": RolloutCallback, "trainer": Trainer}
"""Top-level keys, and the classes whose arguments are the keys below them."""
_PACKAGES = (algorithm, datamodules, engines, loggers)
_CLASSES = {name for package in _PACKAGES for name in dir(package) if name[0].isupper()}
"""Names of most classes that keys are set to."""

# What is read of jsonargparse's messages: keys, from outside to inside, unknown and missing ones; classes; values.
_KEY = re.compile(r'Parser key "([\w.]+)":')
_UNKNOWN = re.compile(r"(?:unrecognized arguments: --|[Oo]ption '(?!class_path'))([\w.]+)")
_REQUIRED = re.compile(r"arguments are required: (?:fit\.|validate\.|test\.)?(\w+)")
_CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
_VALUE = re.compile(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)

_OF_AN_ENTRY = re.compile(r"NestedArg\(key='([\w.]+)'")
_NO_GROUP = re.compile(r"Unable to load config '(.*?)'")
_TYPES = re.compile(r"Subtypes: \[(.*)\]$|Expected a ([\w.]+\[.*\]|<class '[\w.]+'>)", re.MULTILINE)
_IMPORT_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_OTHER_CLASS = re.compile(r"Import path (?:\S+ )?does not (implement protocol|correspond to a subclass of) (\w+)")
_OTHER_REMEDIES = {
    "implement protocol": "it is no {}, whose methods it must have with the same arguments",
    "correspond to a subclass of": "derive it from {}",
}
_KINDS = {
    "int": ["an integer"],
    "float": ["a number"],
    "bool": ["true", "false"],
    "str": ["text"],
    "NoneType": ["null"],
    "Tensor": [],
    **dict.fromkeys(("tuple", "list", "Sequence", "Iterable"), ["a list [VALUE]"]),
    **dict.fromkeys(("dict", "Mapping"), ["a mapping {KEY: VALUE}"]),
}
"""What a value of each type is."""
_REMEDIES = {
    "data": "name a class, such as TableDataModule, and its file by data.path",
    "rollout.rewards": "give each by its name, rollout.rewards.NAME",
}
"""What to do about a wrong value of some keys, if their kinds do not say it."""


def explain(error: Exception, argv: list[str]) -> str | None:
    """The message for a user error; None for any other error, which keeps its traceback."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:  # jsonargparse wraps errors of the classes that it builds
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, UserError):
            return _one_line(cause)
        if memory := _out_of_memory(cause):
            return memory
    if isinstance(error, ArgumentError) and all(isinstance(cause, _PARSING) for cause in causes):
        command = next(word for word in argv if word in COMMAND_HELP)
        groups: dict[str, type] = _GROUPS | {"model": module_class(argv)} if command in TRAINER_COMMANDS else {}
        return f"{_parsing(str(error), causes[-1], groups)}; see qerl {command} --help"
    for cause in causes:
        if isinstance(cause, MisconfigurationException | ModuleNotFoundError):
            return _one_line(cause)
    return explain_file_error(error) if isinstance(error, OSError) else None


def _out_of_memory(error: BaseException) -> str | None:
    """What was missing on the GPU; None for another error."""
    if isinstance(error, torch.OutOfMemoryError):
        found = " ".join(re.split(r"(?<=\.) ", str(error))[:3])
    elif isinstance(error, RuntimeError) and "CUBLAS_STATUS" in str(error) and _gpu_is_full():
        found = "cuBLAS had none for its kernels."
    else:
        return None
    return (
        f"a run needs memory that its GPU does not have: {found} Lower model.micro_batch_tokens or kv_cache_gib, or "
        "end what else is on the GPU; then give the same command with --resume auto"
    )


def _gpu_is_full() -> bool:
    """Whether a fiftieth of the GPU's memory is free or less, other processes included."""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # of a GPU that answers nothing any more
        return False
    return free <= total / 50


def _one_line(error: BaseException) -> str:
    """The message and its notes."""
    return " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())


def _parsing(message: str, cause: BaseException, groups: dict[str, type]) -> str:
    """What is wrong by jsonargparse's message of many lines; `groups` are keys that have others below."""
    place = ".".join(dict.fromkeys(_KEY.findall(message)))
    if unknown := _UNKNOWN.search(message):
        key = f"{place}.{unknown[1]}".removeprefix(".")
        for owner in _CLASS.findall(message[: unknown.start()])[-1:] or _CLASS.findall(message)[:1]:
            groups = groups | {place: resolve_name(owner)}
        nearest = _nearest_key(key, [*_PLAIN, *_keys_of(groups)])
        return f"there is no key {key}{f'; did you mean {nearest}?' if nearest not in (None, key) else ''}"
    if required := _REQUIRED.search(message):
        return f"{f'{place}.{required[1]}'.removeprefix('.')} needs a value; got none; set it"
    if text := _NO_GROUP.search(message):
        return f"{place} is a mapping of keys; got {text[1]:.80}; set --{place}.KEY for some, or leave it out"
    value = _VALUE.search(message, message.rfind("Parser key")) or _IMPORT_PATH.search(message)
    if not value:
        return textwrap.shorten(message.replace("  - ", ""), 250, placeholder=" ...")
    above, _, last = place.rpartition(".")
    if (entry := _OF_AN_ENTRY.search(message)) and entry[1].endswith(f".{last}") and not place.endswith(entry[1]):
        place = f"{above}.{entry[1]}"  # of a mapping, whose name is no key of jsonargparse's
    given = "null" if value[1] == "None" else re.sub(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)", r"\1=\2", value[1])
    reason = f" ({cause})" if isinstance(cause, _IMPORTING) else ""
    if other := _OTHER_CLASS.search(message):
        return f"{place} does not take {given:.80}; {_OTHER_REMEDIES[other[1]].format(other[2])}"
    remedy = "correct the name or the file" if reason else _remedy(message[message.rfind("Parser key") :])
    if import_path := import_path_of(given):
        remedy = f"name it by import path, {import_path}"
    if place in _REMEDIES and given != "null" and (not reason or isinstance(cause, ModuleNotFoundError)):
        remedy = _REMEDIES[place]
    return f"{place} does not take {given:.80}{reason}; {_class_meant(given) or remedy}"


def _remedy(message: str) -> str:
    """What a key takes, by the type or the union of types that jsonargparse expected; the first is the outermost."""
    types = _TYPES.search(message)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", (types[1] or types[2]) if types else "")
    while (inner := re.sub(r"\[[^\[\]]*\]", "", text)) != text:
        text = inner
    kinds = [kind for word in text.split(", ") if word for kind in _kinds(word)]
    if not kinds:
        return "give the import path of a class" if _IMPORT_PATH.search(message) else "correct it"
    *first, last = kinds
    return f"give {', '.join(first)} or {last}" if first else f"give {last}"


def _kinds(word: str) -> list[str]:
    """What a type of a union, or a choice in quotes, takes."""
    if word.startswith("'"):
        return [word.strip("'")]
    name = word.removeprefix("<class ").strip("'>").rpartition(".")[2]
    return _KINDS.get(name, [f"a class ({name} or one derived from it)"])


def _class_meant(given: str) -> str:
    """The question for the class whose name begins so, or with the most similar name; empty if there is none."""
    longer = [name for name in sorted(_CLASSES) if len(given) > 2 and name.lower().startswith(given.lower())]
    return f"did you mean {longer[0]}?" if longer else did_you_mean(given.rpartition(".")[2], _CLASSES).strip()


def _nearest_key(key: str, keys: list[str]) -> str | None:
    """The key whose last name is the most similar, and of several the one that is most similar as a whole."""
    names = get_close_matches(key.rpartition(".")[2], {one.rpartition(".")[2] for one in keys}, n=1, cutoff=0.7)
    similar = get_close_matches(key, [one for one in keys if one.rpartition(".")[2] in names], n=1, cutoff=0.0)
    return similar[0] if similar else None


def _keys_of(owners: dict[str, type]) -> list[str]:
    """Keys below these, of the classes' arguments and of dataclasses among them."""
    keys = []
    for key, owner in owners.items():
        parser = ArgumentParser()
        parser.add_class_arguments(owner, fail_untyped=False)
        keys += [f"{key}.{name}" for name in parser.get_defaults().keys()]
    return [key for key in keys if not key.startswith("model.policy.toy.")]
