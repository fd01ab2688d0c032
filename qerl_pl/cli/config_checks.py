"""Checks of a parsed configuration, and its adaptation to supervised fine-tuning."""

import inspect
from argparse import ArgumentError
from dataclasses import asdict, is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.pytorch import Trainer

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.distributed.slurm import check_tasks
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule, SFTModule

ACCURACY = "val/accuracy"
"""Metric that `best` monitors by default."""
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
    _check_classes(run, "")
    set_parsing_settings(unset_sentinel=True)  # or null means that nothing was given, whatever the type
    try:
        parser.validate(config)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _check_classes(value: Any, key: str) -> None:
    """Check the arguments of every class that is named somewhere in `value`."""
    for item in value if isinstance(value, list) else []:
        name = item.get("class_path", "") if isinstance(item, Namespace) else ""
        _check_classes(item, f"{key}.{name.rpartition('.')[2]}".removesuffix("."))
    if isinstance(value, Namespace):
        if "class_path" in value and "init_args" in value:
            _check_group(resolve_name(value["class_path"]), value["init_args"], key)
        for name, item in vars(value).items():
            _check_classes(item, f"{key}.{name}".removesuffix(".init_args").removeprefix("."))


def _check_group(kind: type, value: Any, key: str) -> None:
    """Refuse a plain value in place of a class's keys, or of those of a dataclass among its arguments."""
    if not isinstance(value, Namespace):
        raise UserError(f"{key} is a mapping of keys; got {value!r}; set its keys, or leave it out")
    for name, parameter in inspect.signature(kind).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            _check_group(parameter.annotation, value.get(name), f"{key}.{name}")


def monitor_first_set(config: Namespace) -> None:
    """Have `best` monitor the accuracy of the first of `data.sets` instead of `val/accuracy`, which is not logged then.

    Args:
        config: Of the run, changed.
    """
    sets = config.data.get("init_args", Namespace()).get("sets")
    if sets and config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.monitor = f"val/{next(iter(sets))}/accuracy"


def is_sft(config: Namespace) -> bool:
    """Whether the data of a run are conversations."""
    kind = resolve_name(config.data.class_path)
    return isinstance(kind, type) and issubclass(kind, ConversationDataModule)


def prepare_sft(config: Namespace, command: str) -> None:
    """Refuse keys of reinforcement learning, and have `best` monitor the loss instead of the accuracy.

    Args:
        config: Of the run, changed.
        command: The subcommand.

    Raises:
        UserError: A key is set that has no meaning, or the command is test.
    """
    if command == "test":
        raise UserError(
            "conversations are validated on, not tested; got qerl test; use qerl validate, or name the adapter as "
            "model.policy.path of a configuration with prompts"
        )
    for name, parameter in inspect.signature(QeRLModule).parameters.items():
        if name not in SFT_KEYS and _plain(value := config.model[name]) != _plain(parameter.default):
            raise UserError(
                "supervised fine-tuning has no rollouts and no objective; got "
                f"model.{name} {_text(value)}; leave it out"
            )
    for key in ("noise", "report"):
        if config[key] is not None:
            raise UserError(f"supervised fine-tuning has no rollouts; got the key {key}; set it to null")
    if config.best is not None and config.best.init_args.get("monitor") == ACCURACY:
        config.best.init_args.update(Namespace(SFT_BEST))


def _plain(value: object) -> object:
    """A dataclass, or the parser's namespace of one, as a dictionary; else the value."""
    if isinstance(value, Namespace):
        return value.as_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _text(value: object) -> str:
    return str(value.class_path) if isinstance(value, Namespace) and "class_path" in value else str(_plain(value))


def sft_module(kind: type[QeRLModule], **settings: Any) -> SFTModule:
    """Instantiator for jsonargparse: builds the SFT module from the keys of `QeRLModule`."""
    return SFTModule(**{name: value for name, value in settings.items() if name in SFT_KEYS})
