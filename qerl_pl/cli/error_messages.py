"""One-line messages for user errors, with the nearest key for a misspelt one."""

import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from contextlib import suppress
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
from qerl_pl.errors import UserError, chain_of_causes, explain_file_error
from qerl_pl.modules import QeRLModule
from qerl_pl.runtime.files import is_full_disk

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

_CALLBACKS = ("noise", "best", "checkpoint", "monitor", "completions", "summary", "report")
_KEYS: dict[str, type | None] = {
    "model": QeRLModule,
    "data": PromptDataModule,
    "rollout": RolloutCallback,
    "trainer": Trainer,
    **dict.fromkeys(("seed_everything", "resume", "ckpt_path", "config", "dry-run")),
    **dict.fromkeys(_CALLBACKS),
}
"""Top-level keys, and the classes whose arguments are the keys below them."""

_ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate"), "model.optimizer.lr"),
    "weight_decay": "model.optimizer.weight_decay",
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "model.policy.lora.rank"),
    "lora_alpha": "model.policy.lora.alpha",
    **dict.fromkeys(("target_modules", "lora_target_modules"), "model.policy.lora.targets"),
    **dict.fromkeys(("model_name_or_path", "model_name"), "model.policy.path"),
    "load_in_4bit": "model.policy.quantization",
    **dict.fromkeys(("num_generations", "n"), "rollout.group_size"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), "rollout.sampling.max_tokens"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.path"),
    **dict.fromkeys(("epochs", "num_train_epochs"), "trainer.max_epochs"),
    "steps": "trainer.max_steps",
    "output_dir": "trainer.default_root_dir",
    "seed": "seed_everything",
    "resume_from_checkpoint": "resume",
}
"""Last names of keys in other libraries, and the keys here."""

_OF_CALLBACKS = {
    **dict.fromkeys(("off", "none", "false", "no"), "write --{key} null"),
    **dict.fromkeys(("on", "true", "yes"), "write --{key} {{}}"),
}
"""Words that are no settings of a callback, and the remedy."""

_UNKNOWN_KEY = re.compile(r"unrecognized arguments: --([\w.]+)|Subcommand '\w+' does not accept option '([\w.]+)'")
_UNKNOWN_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
_CLASS_PATH = re.compile(r"class_path[ =]'([\w.]+)'")
_PARSER_KEY = re.compile(r'Parser key "([\w.]+)":')
_GIVEN = re.compile(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_TYPED = re.compile(r"Given value: (.*)$", re.MULTILINE)
"""A value as it stands on the command line or in a file."""
_EXPECTED = re.compile(r"Expected a (?:<class '(?:collections\.abc\.)?(\w+)'>|typing\.Literal\[(.*)\])")
_NOT_EXPECTED = re.compile(r"^ *- (?!Expected)", re.MULTILINE)
"""A reason other than a type, such as that of a class."""
_TYPE_NAMES = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text", "NoneType": "null"}
_TYPE_NAMES |= dict.fromkeys(("list", "tuple", "Sequence"), "a list") | {"dict": "a mapping of keys"}
"""Names of plain types in messages."""
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
        if isinstance(cause, SyntaxError):
            where = f"{cause.filename}, line {cause.lineno}" if cause.lineno else cause.filename
            return f"a file of Python must be in its syntax; {where}: {cause.msg}; correct it"
    if isinstance(error, jsonargparse.ArgumentError) and all(isinstance(cause, _PARSING) for cause in causes):
        return _parsing(error, argv, commands)
    for cause in causes:
        if isinstance(cause, MisconfigurationException | ModuleNotFoundError):
            return _with_own_keys(_one_line(cause))
    if isinstance(error, OSError) and (line := explain_file_error(error)) is not None:
        return line
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
    command = f"qerl {next(word for word in argv if word in commands)}"
    if of_callback := _callback_value(str(error)):
        return of_callback
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
    key = _PARSER_KEY.search(message)
    if option is None or not isinstance(owner, type) or key is None:
        return None
    if option[1] == "class_path":  # of a mapping without init_args
        return f"arguments of a class stand under init_args; {key[1]} has others beside class_path; move them there"
    arguments = _arguments(owner)
    nearest = " or ".join(get_close_matches(option[1], arguments))
    possible = f"did you mean {nearest}?" if nearest else f"its arguments are {', '.join(arguments)}"
    text = textwrap.shorten(possible, 200, placeholder=" ...")
    return f"{_written(option[1], message, argv)} is no argument of {owner.__name__}; {text}"


def _wrong_type(message: str, argv: list[str]) -> str | None:
    """The message for a key of a plain type that has another value; None for any other error."""
    keys = list(_PARSER_KEY.finditer(message))
    start = keys[-1].end() if keys else len(message)
    given = len(keys) == 1 and _TYPED.search(message, start) or _GIVEN.search(message, start)
    if given is None:
        return None
    tried = message[keys[-1].end() : given.start()]
    expected = _EXPECTED.findall(tried)
    if len(keys) == 1 and (tried.count("Expected") > len(expected) or _NOT_EXPECTED.search(tried)):
        return None  # a class, too
    named = [(name, choices) for name, choices in dict.fromkeys(expected) if choices or name in _TYPE_NAMES]
    types = [_TYPE_NAMES[name] if name else choices.replace("'", "") for name, choices in named]
    types = [f"one of {choices}" if "," in choices else choices for choices in types]
    if not types or types == ["null"]:
        return None
    key = keys[0][1] if len(keys) == 1 else _written(keys[-1][1], message, argv)
    value = "null" if given[1] == "None" else given[1]
    return f"{key} takes {' or '.join(dict.fromkeys(types))}; got {value:.80}; {_remedy(types, value)}"


def _remedy(types: Collection[str], value: str) -> str:
    """How to write a value that a type does not take."""
    if "a list" in types and value != "null":
        return f"write [{value.strip('[]'):.80}]"
    with suppress(ValueError):
        if "a whole number" in types and (number := float(value)).is_integer():
            return f"write {number:.0f}"
    return "correct it"


def _callback_value(message: str) -> str | None:
    """The message for a word in place of a callback's settings; None for any other error."""
    key, given = _PARSER_KEY.search(message), _TYPED.search(message)
    if key is None or given is None or key[1] not in _CALLBACKS:
        return None
    word = given[1].lower()
    is_path = "/" in word or word.endswith(".ckpt")
    if "Expected a dot import path string" not in message and not is_path:
        return None  # a class that fails
    remedy = "name a checkpoint by --resume" if is_path or key[1] in ("best", "checkpoint") else "set its keys, or null"
    remedy = _OF_CALLBACKS.get(word, remedy).format(key=key[1])
    return f"{key[1]} takes the settings of a callback, or null for none; got {given[1]:.80}; {remedy}"


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
    """The key whose last name is the most similar, and of several the one that is most similar as a whole.

    An argument of a class is below the nearest key of a class.
    """
    above, _, last = key.rpartition(".")
    if last in _ELSEWHERE:
        return _ELSEWHERE[last]
    keys = _all_keys(_KEYS)
    for name in get_close_matches(last, {one.rpartition(".")[2] for one in keys}, n=1, cutoff=0.7):
        return get_close_matches(key, [one for one in keys if one.rpartition(".")[2] == name], n=1, cutoff=0.0)[0]
    nearest = _nearest_key(above) if above else None
    return None if nearest in (None, above) else f"{nearest}.{last}"


def _all_keys(owners: dict[str, type | None]) -> list[str]:
    """These keys, and those below them."""
    keys = []
    for key, owner in owners.items():
        below = {} if owner is None else _arguments(owner)
        groups = {name: kind if isinstance(kind, type) and is_dataclass(kind) else None for name, kind in below.items()}
        keys += [key, *(f"{key}.{name}" for name in _all_keys(groups))]
    return keys


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
