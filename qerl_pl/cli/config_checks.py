"""Checks of a parsed configuration, and its adaptation to supervised fine-tuning."""

import inspect
import logging
from argparse import ArgumentError
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
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
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.errors import UserError
from qerl_pl.evaluation.metrics import evaluation_tag
from qerl_pl.modules import QeRLModule, SFTModule
from qerl_pl.modules.optimizer import ADAMW, default_optimizer
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
SFT_KEYS = tuple(inspect.signature(SFTModule).parameters)
"""Keys under model that supervised fine-tuning has, too."""
SFT_CALLBACKS = ("best", "checkpoint")
"""Top-level keys of callbacks that supervised fine-tuning has; the others are of rollouts."""
SFT_BEST = {"monitor": "val/loss", "mode": "min", "filename": "best-{step}"}
"""Arguments of Lightning's ModelCheckpoint that keep the checkpoint of the smallest validation loss."""


def check_values(parser: ArgumentParser, config: Namespace) -> None:
    """Refuse null, as which YAML reads an empty value, for keys that do not take it, and tasks that no key fits.

    Raises:
        ArgumentError: A key has null for a value.
        UserError: A key with keys of its own has another value, or SLURM's tasks are not given by node.
    """
    check_tasks()
    run = config[config["subcommand"]]
    for key, kind in {"model": QeRLModule, "rollout": RolloutCallback, "trainer": Trainer}.items():
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
    for name, parameter in inspect.signature(kind).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            _check_group(parameter.annotation, value.get(name), f"{key}.{name}")


def listed(given: Any) -> list[Any]:
    """A list of callbacks or plugins, which Lightning also takes as a single object or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def complete(config: Namespace, command: str, defaults: Namespace) -> None:
    """Set what depends on other keys, and refuse keys that exclude each other.

    Args:
        config: Of the run, changed.
        command: The subcommand.
        defaults: Of the command line.

    Raises:
        UserError: Two keys exclude each other.
    """
    _settle_callbacks(config, defaults)
    conversations = is_sft(config)
    if conversations:
        _prepare_sft(config, command, defaults)
    _name_defaults(config.model, conversations)
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


def _name_defaults(model: Namespace, is_sft: bool) -> None:
    """Name the classes of the optimizer and the objective that are not set, with their arguments, for RUN/config.yaml.

    As the keys' own defaults, their arguments would pass to another class that a user names.
    """
    parser = ArgumentParser(exit_on_error=False)
    if model.optimizer is default_optimizer:
        parser.add_argument("--optimizer", type=OptimizerCallable)
        given = {"class_path": "torch.optim.AdamW", "init_args": {**ADAMW, "betas": [*ADAMW["betas"]]}}
        model.optimizer = parser.parse_object({"optimizer": given}).optimizer
    if model.objective is None and not is_sft:
        parser.add_argument("--objective", type=Objective)
        model.objective = parser.parse_object({"objective": "qerl_pl.algorithm.GRPO"}).objective


def _monitor_first_set(config: Namespace) -> None:
    """Have `best` monitor the accuracy of the first of `data.sets`: `val/accuracy` is not logged then."""
    sets = config.data.get("init_args", Namespace()).get("sets")
    if sets and config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.monitor = evaluation_tag("val", next(iter(sets)), "accuracy")


def is_sft(config: Namespace) -> bool:
    """Whether the data of a run are conversations."""
    kind = resolve_name(config.data.class_path)
    return isinstance(kind, type) and issubclass(kind, ConversationDataModule)


def _prepare_sft(config: Namespace, command: str, defaults: Namespace) -> None:
    """Refuse keys of reinforcement learning, and have `best` monitor the loss instead of the accuracy.

    Raises:
        UserError: A key is set that has no meaning, or the command is test.
    """
    if command == "test":
        raise UserError(
            "conversations are validated on, not tested; got qerl test; use qerl validate, or name the adapter as "
            "model.policy.path of a configuration with prompts"
        )
    own = [f"model.{name}" for name in inspect.signature(QeRLModule).parameters if name not in SFT_KEYS]
    for key in (*own, *(key for key in CALLBACKS if key not in SFT_CALLBACKS), "rollout"):
        if config[key] is not None and _plain(config[key]) != _plain(defaults[key]):
            found = f" and no objective; got {key} {_text(config[key])}; leave it out"
            found = found if key in own else f"; got the key {key}; set it to null, or leave it out"
            raise UserError(f"supervised fine-tuning has no rollouts{found}")
    if config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.update(Namespace(SFT_BEST))


def _plain(value: object) -> object:
    """The parser's namespace of a dataclass as a dictionary, a tuple as a list; else the value."""
    if isinstance(value, Namespace):
        return {name: _plain(item) for name, item in vars(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _text(value: object) -> str:
    return str(value.class_path) if isinstance(value, Namespace) and "class_path" in value else str(_plain(value))


def sft_module(kind: type[QeRLModule], **settings: Any) -> SFTModule:
    """Instantiator for jsonargparse: builds the SFT module from the keys of `QeRLModule`."""
    return SFTModule(**{name: value for name, value in settings.items() if name in SFT_KEYS})
