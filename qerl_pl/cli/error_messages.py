"""One-line messages for user errors, with the nearest key for a misspelt one."""

import re
import textwrap
from collections.abc import Collection
from dataclasses import is_dataclass
from difflib import get_close_matches
from pkgutil import resolve_name

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, loggers
from yaml import YAMLError

from qerl_pl import algorithm, datamodules, engines
from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.commands import TRAINER_COMMANDS
from qerl_pl.cli.config_checks import CALLBACKS, arguments_of, module_class
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.errors import UserError, chain_of_causes, did_you_mean, explain_file_error
from qerl_pl.modules import QeRLModule
from qerl_pl.runtime.files import is_full_disk

_PARSING = (TypeError, ValueError, ImportError, AttributeError, LookupError, OSError, ArgumentError, YAMLError)
"""Errors that jsonargparse raises; any other cause comes from a user's module and keeps its traceback."""

_PLAIN = ("seed_everything", "resume", "ckpt_path", "config", "dry-run")
_KEYS: dict[str, type | None] = dict.fromkeys((*_PLAIN, *CALLBACKS))
_KEYS |= {"data": PromptDataModule, "rollout": RolloutCallback, "trainer": Trainer}
"""Top-level keys, and the classes whose arguments are the keys below them."""
_ELSEWHERE = {
    "model.objective.multi_objective_aggregation": "multi_objective_aggregation",
    "rollout.evaluation.samples": "eval_samples num_generations_eval",
    "rollout.evaluation.sampling": "eval_sampling",
    "rollout.evaluation.batch": "eval_batch",
    "rollout.evaluation.extra_sampling": "extra_eval_sampling",
    "rollout.environment.weight": "environment_weight",
    "rollout.environment.workers": "environment_workers",
    "rollout.environment.variables": "environment_variables",
    "model.optimizer.lr": "lr learning_rate",
    "model.optimizer.weight_decay": "weight_decay",
    "model.policy.lora.rank": "r lora_r lora_rank",
    "model.policy.lora.alpha": "lora_alpha",
    "model.policy.lora.targets": "target_modules lora_target_modules target_parameters",
    "model.policy.path": "model_name_or_path model_name",
    "model.policy.quantization": "load_in_4bit",
    "rollout.group_size": "num_generations n",
    "rollout.sampling.max_tokens": "max_completion_length max_new_tokens",
    "data.path": "dataset dataset_name",
    "trainer.max_epochs": "epochs num_train_epochs",
    "trainer.max_steps": "steps",
    "trainer.default_root_dir": "output_dir",
    "seed_everything": "seed",
    "resume": "resume_from_checkpoint",
}
"""Keys, and the last names that TRL, PEFT and others have for them."""
_TRANSLATED = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}
_PACKAGES = (algorithm, datamodules, engines, loggers)
_CLASSES = {name for package in _PACKAGES for name in dir(package) if name[0].isupper()}
"""Names of most classes that keys are set to."""

# The parts of jsonargparse's messages that are read: keys, from outside to inside, values, and what is wrong.
_KEY = re.compile(r'Parser key "([\w.]+)":')
_TYPED = re.compile(r"Given value: (.*)$", re.MULTILINE)  # as it stands on the command line or in a file
_VALUE = re.compile(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_NO_KEY = re.compile(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'")
_NO_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
_CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
_NO_IMPORT = re.compile(r"Problem with given class_path '.*':\s+(.*(?:has no attribute|No module named).*)")


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
    if isinstance(error, ArgumentError) and all(isinstance(cause, _PARSING) for cause in causes):
        command = next(word for word in argv if word in commands)
        module = module_class(argv) if command in TRAINER_COMMANDS else QeRLModule
        return f"{_parsing(str(error), module)}; see qerl {command} --help"
    for cause in causes:
        if isinstance(cause, MisconfigurationException | ModuleNotFoundError):
            return _one_line(cause)
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


def _parsing(message: str, module: type) -> str:
    """What is wrong by jsonargparse's message of many lines, or its beginning; `module` has the keys of `model`."""
    message = re.sub(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)", r"\1=\2", message)
    keys = list(_KEY.finditer(message))
    if not keys:
        unknown = _NO_KEY.search(message)
        name = (unknown[1] or unknown[2]) if unknown else ""
        others = [key for key in arguments_of(QeRLModule) if key not in arguments_of(module)]
        if any(f"{name}.".startswith(f"model.{key}.") for key in others):
            return f"{module.__name__} has none of {', '.join(others)}, which are of rollouts; got {name}; leave it out"
        nearest = _nearest_key(name, module) if name else None
        return message if nearest is None else f"{message}; did you mean {nearest}?"
    key, start = ".".join(dict.fromkeys(match[1] for match in keys)), keys[-1].end()
    value = (len(keys) == 1 and _TYPED.search(message)) or _VALUE.search(message, start)
    if reason := _unknown_argument(key, message):
        return reason
    if not value or not value[1]:
        return textwrap.shorten(message.replace("  - ", ""), 250, placeholder=" ...")
    given = "null" if value[1] == "None" else value[1]
    absent = _NO_IMPORT.search(message)
    meant = did_you_mean(given.rpartition(".")[2], _CLASSES).strip() or "correct it"
    return f"{key} does not take {given:.80}{f' ({absent[1]})' if absent else ''}; {meant}"


def _unknown_argument(key: str, message: str) -> str | None:
    """The message for an argument that a class does not have; None for any other error."""
    if option := _NO_ARGUMENT.search(message):
        owners = _CLASS.findall(message[: option.start()])[-1:] or _CLASS.findall(message)
        if option[1] == "class_path":  # of a mapping without init_args
            return f"arguments of a class stand under init_args; {key} has others beside class_path; move them there"
        owner = resolve_name(owners[0])
        arguments = arguments_of(owner)
        meant = did_you_mean(option[1], arguments).strip() or f"its arguments are {', '.join(arguments)}"
        if owner is RolloutCallback and (nearest := _nearest_key(f"rollout.{option[1]}", QeRLModule)):
            meant = f"did you mean {nearest.removeprefix('rollout.')}?"
        meant = textwrap.shorten(meant, 200, placeholder=" ...")
        return f"{key}.{option[1]} is no argument of {owner.__name__}; {meant}"
    return None


def _nearest_key(key: str, module: type) -> str | None:
    """The key whose last name is the most similar, and of several the one that is most similar as a whole.

    An argument of a class is below the nearest key of a class.
    """
    above, _, last = key.rpartition(".")
    if last in _TRANSLATED:
        return _TRANSLATED[last]
    keys = _all_keys(_KEYS | {"model": module})
    for name in get_close_matches(last, {one.rpartition(".")[2] for one in keys}, n=1, cutoff=0.7):
        return get_close_matches(key, [one for one in keys if one.rpartition(".")[2] == name], n=1, cutoff=0.0)[0]
    nearest = _nearest_key(above, module) if above else None
    return None if nearest in (None, above) else f"{nearest}.{last}"


def _all_keys(owners: dict[str, type | None]) -> list[str]:
    """These keys, and those below them."""
    keys = []
    for key, owner in owners.items():
        below = {} if owner is None else arguments_of(owner)
        groups = {name: kind if isinstance(kind, type) and is_dataclass(kind) else None for name, kind in below.items()}
        keys += [key, *(f"{key}.{name}" for name in _all_keys(groups))]
    return keys
