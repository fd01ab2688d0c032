"""The class of the module, and checks of a parsed configuration."""

import argparse
import inspect
import logging
from argparse import ArgumentError
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser, Namespace, dict_to_namespace, set_parsing_settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import OptimizerCallable

from qerl_pl.algorithm.objectives import Objective
from qerl_pl.callbacks import (
    AdaptiveQuantizationNoise,
    CompletionLog,
    EvaluationReport,
    Monitor,
    ResumeCheckpoint,
    RolloutCallback,
    RunSummary,
)
from qerl_pl.cli.configs import check_config
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.errors import UserError, did_you_mean
from qerl_pl.evaluation.metrics import evaluation_tag
from qerl_pl.modules import QeRLModule, SFTModule
from qerl_pl.modules.optimizer import ADAMW, default_optimizer
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.runtime.import_path import load_named
from qerl_pl.runtime.slurm import check_tasks

log = logging.getLogger(__name__)

ACCURACY = "val/accuracy"
"""Metric that `best` monitors by default."""
CALLBACKS: dict[str, tuple[type[Callback], dict[str, Any] | None, str]] = {
    "noise": (AdaptiveQuantizationNoise, None, "Adaptive quantization noise of the rollouts. null: no noise."),
    "best": (
        ModelCheckpoint,
        # Not step=N, the name of a checkpoint that --resume auto takes. A killed run repeats a validation and replaces
        # its checkpoint; with a version counter it would add another.
        {"monitor": ACCURACY, "mode": "max", "filename": "best-{rollouts:.0f}", "enable_version_counter": False},
        "Saves the checkpoint of the best validation. null saves none.",
    ),
    "checkpoint": (ResumeCheckpoint, {}, "Saves the checkpoints for --resume auto. null saves none."),
    "monitor": (Monitor, {}, "TensorBoard's layout and the peak of memory. null logs neither."),
    "completions": (CompletionLog, {}, "Shows completions in the loggers, or writes all of them. null does neither."),
    "summary": (RunSummary, {}, "Writes summary.json and run.png, and prints a table at the end. null does neither."),
    "report": (
        EvaluationReport,
        None,
        "Report of `qerl test` and `qerl validate`, with all samples. null: none.",
    ),
}
"""Top-level keys of callbacks: class, default arguments (None: off by default), help."""
SFT_CALLBACKS = ("best", "checkpoint")
"""Top-level keys of callbacks that a module without rollouts has."""
SFT_BEST = {"monitor": "val/loss", "mode": "min", "filename": "best-{step}"}
"""Arguments of Lightning's ModelCheckpoint that keep the checkpoint of the smallest validation loss."""


def module_class(args: Any) -> type[PolicyModule]:
    """The class that the last of the configurations and words names as `model.class_path`; QeRLModule by default.

    Args:
        args: Of the command line, also parsed. What `-c` reads from a pipe is not looked at.

    Raises:
        UserError: There is no such class, it is no module of this package, or it takes too few arguments.
    """
    if isinstance(args, dict | Namespace):
        parsed = dict_to_namespace(args) if isinstance(args, dict) else args
        return named_module(parsed.get(f"{parsed.subcommand}.model.class_path"))
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options: dict[str, Any] = {"dest": "named", "action": "append", "nargs": "?"}
    words.add_argument("-c", "--config", type=lambda file: (check_config, file), **options)
    words.add_argument("--model.class_path", type=lambda name: (str, name), **options)
    found = [read(value) for read, value in filter(None, words.parse_known_args(args)[0].named or [])]
    return named_module(next((name for name in reversed(found) if name), None))


def named_module(name: str | None) -> type[PolicyModule]:
    """The class of that name or import path; None is QeRLModule. Raises as `module_class`."""
    if name is None:
        return QeRLModule
    known = {kind.__name__: kind for kind in (QeRLModule, SFTModule)}
    rule = f"model.class_path is {' or '.join(known)}, or the import path of a subclass of one of them or PolicyModule"
    remedy = f"{did_you_mean(name, known)}write my_package.MyModule or my_file.py:MyModule for your own"
    kind = known.get(name) or load_named(name, rule, remedy, "module")
    if not (isinstance(kind, type) and issubclass(kind, PolicyModule)):
        raise UserError(f"{rule}; got {name}, which is none; derive it from one")
    if missing := [key for key in arguments_of(PolicyModule) if key not in arguments_of(kind)]:
        raise UserError(
            f"a module takes the arguments of PolicyModule; {name} has no {', '.join(missing)}; add **settings to its "
            "__init__, and give them to super().__init__"
        )
    return kind


def arguments_of(owner: type) -> dict[str, Any]:
    """Names and types of a constructor's arguments, also of the bases that get its **kwargs."""
    arguments: dict[str, Any] = {}
    for base in owner.__mro__[:-1]:
        parameters = inspect.signature(base).parameters
        for name, parameter in parameters.items():
            arguments.setdefault(name, parameter.annotation)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return arguments


def check_values(parser: ArgumentParser, config: Namespace, module: type[PolicyModule]) -> None:
    """Refuse null, as which YAML reads an empty value, for keys that do not take it, and tasks that no key fits.

    Raises:
        ArgumentError: A key has null for a value.
        UserError: A key with keys of its own has another value, or SLURM's tasks are not given by node.
    """
    check_tasks()
    run = config[config["subcommand"]]
    for key, kind in {"model": module, "rollout": RolloutCallback, "trainer": Trainer}.items():
        _check_group(kind, run[key], key)
    if "init_args" in run.data:
        _check_group(resolve_name(run.data.class_path), run.data.init_args, "data")
    set_parsing_settings(unset_sentinel=True)  # or null means that nothing was given, whatever the type
    try:
        parser.validate(config)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _check_group(kind: type, value: Any, key: str) -> None:
    """Refuse a plain value in place of a class's keys, or of those of a dataclass among its arguments."""
    if not isinstance(value, Namespace):
        raise UserError(f"{key} is a mapping of keys; got {value!r}; set its keys, or leave it out")
    for name, group in arguments_of(kind).items():
        if isinstance(group, type) and is_dataclass(group):
            _check_group(group, value.get(name), f"{key}.{name}")


def listed(given: Any) -> list[Any]:
    """A list of callbacks or plugins, which Lightning also takes as a single object or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def complete(config: Namespace, command: str, defaults: Namespace, module: type[PolicyModule]) -> None:
    """Set what depends on other keys, and refuse keys that exclude each other.

    Args:
        config: Of the run, changed.
        command: The subcommand.
        defaults: Of the command line.
        module: Class of the module.

    Raises:
        UserError: Two keys exclude each other.
    """
    _settle_callbacks(config, defaults)
    _check_data(config, command, module)
    if not issubclass(module, QeRLModule):
        _refuse_rollouts(config, defaults, module)
    _name_defaults(config.model)
    _monitor_first_set(config)


def _settle_callbacks(config: Namespace, defaults: Namespace) -> None:
    """Switch off the top-level keys that `trainer.callbacks` replaces: those of a listed class, or all if it rolls out.

    Raises:
        UserError: A key of a listed class is set, too.
    """
    given = [one for one in listed(config.trainer.callbacks) if isinstance(one, Namespace)]
    kinds = [resolve_name(one.class_path) for one in given]
    rolls_out = any(isinstance(kind, type) and issubclass(kind, RolloutCallback) for kind in kinds)
    replaced = [
        key for key in CALLBACKS if config[key] and (rolls_out or resolve_name(config[key].class_path) in kinds)
    ]
    replaced += ["rollout"] * rolls_out
    written = [key for key in replaced if _plain(config[key]) != _plain(defaults[key])]
    if written and rolls_out:
        log.warning(
            "trainer.callbacks has a RolloutCallback and is complete: what is set for %s has no effect; list it there",
            " and ".join(written),
        )
    elif written:
        raise UserError(
            f"a callback is set in one place; got the key {' and '.join(written)}, and trainer.callbacks has that "
            "class, too; set the key to null, or leave it out there"
        )
    for key in replaced:
        config[key] = defaults[key] if key == "rollout" else None


def _name_defaults(model: Namespace) -> None:
    """Name the classes of the optimizer and the objective that are not set, with their arguments, for RUN/config.yaml.

    As the keys' own defaults, their arguments would pass to another class that a user names.
    """
    parser = ArgumentParser(exit_on_error=False)
    if model.get("optimizer") is default_optimizer:
        parser.add_argument("--optimizer", type=OptimizerCallable)
        given = {"class_path": "torch.optim.AdamW", "init_args": {**ADAMW, "betas": [*ADAMW["betas"]]}}
        model.optimizer = parser.parse_object({"optimizer": given}).optimizer
    if "objective" in model and model.objective is None:
        parser.add_argument("--objective", type=Objective)
        model.objective = parser.parse_object({"objective": "qerl_pl.algorithm.GRPO"}).objective


def _monitor_first_set(config: Namespace) -> None:
    """Have `best` monitor the accuracy of the first of `data.sets`: `val/accuracy` is not logged then."""
    sets = config.data.get("init_args", Namespace()).get("sets")
    if sets and config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.monitor = evaluation_tag("val", next(iter(sets)), "accuracy")


def _check_data(config: Namespace, command: str, module: type[PolicyModule]) -> None:
    """Refuse conversations without a module that learns from them, and a module without its data.

    Raises:
        UserError: One of them is of another training, or conversations are to be tested on.
    """
    data = resolve_name(config.data.class_path)
    are_conversations = isinstance(data, type) and issubclass(data, ConversationDataModule)
    if are_conversations and issubclass(module, QeRLModule):
        raise UserError(
            f"{module.__name__} samples from prompts; got conversations, data {data.__name__}; set model.class_path to "
            "SFTModule to learn from them, or data to a module of prompts"
        )
    if issubclass(module, SFTModule) and not are_conversations:
        raise UserError(
            f"{module.__name__} learns from conversations; got data {data.__name__}; set data to "
            "ConversationDataModule, say, or leave model.class_path out"
        )
    if are_conversations and command == "test":
        raise UserError(
            "conversations are validated on, not tested; got qerl test; use qerl validate, or name the adapter as "
            "model.policy.path of a configuration with prompts"
        )


def _refuse_rollouts(config: Namespace, defaults: Namespace, module: type[PolicyModule]) -> None:
    """Refuse keys of rollouts, and have `best` monitor the loss instead of the accuracy.

    Raises:
        UserError: A key is set that has no meaning.
    """
    for key in (*(key for key in CALLBACKS if key not in SFT_CALLBACKS), "rollout"):
        if config[key] is not None and _plain(config[key]) != _plain(defaults[key]):
            raise UserError(
                f"{module.kind or module.__name__} has no rollouts; got the key {key}; set it to null, or leave it out"
            )
    if config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.update(Namespace(SFT_BEST))


def _plain(value: object) -> object:
    """The parser's namespace of a dataclass as a dictionary, a tuple as a list; else the value."""
    if isinstance(value, Namespace):
        return {name: _plain(item) for name, item in vars(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def without_class_path(kind: type[PolicyModule], class_path: str, **settings: Any) -> PolicyModule:
    """Instantiator for jsonargparse, which takes the class's name for an argument."""
    return kind(**settings)
