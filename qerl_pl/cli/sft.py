"""`qerl fit` and `validate` on conversations: supervised fine-tuning in place of reinforcement learning."""

import inspect
from dataclasses import asdict, is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import Namespace

from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule, SFTModule

KEYS = tuple(inspect.signature(SFTModule).parameters)
"""Keys under model that supervised fine-tuning has, too."""
CALLBACKS = ("best", "checkpoint")
"""Top-level keys of callbacks that supervised fine-tuning has; the others are of rollouts."""
BEST = {"monitor": "val/loss", "mode": "min", "filename": "best-{step}"}
"""Arguments of Lightning's ModelCheckpoint that keep the checkpoint of the smallest validation loss."""


def is_sft(config: Namespace) -> bool:
    """Whether the data of a run are conversations."""
    kind = resolve_name(config.data.class_path)
    return isinstance(kind, type) and issubclass(kind, ConversationDataModule)


def prepare_sft(config: Namespace, command: str) -> None:
    """Refuse keys of reinforcement learning, and have `best` go by the loss where it goes by the accuracy.

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
        if name not in KEYS and _plain(value := config.model[name]) != _plain(parameter.default):
            raise UserError(
                "supervised fine-tuning takes one step a batch on conversations, without an objective; found "
                f"model.{name} {_text(value)}; leave it out"
            )
    for key in ("noise", "report"):
        if config[key] is not None:
            raise UserError(f"supervised fine-tuning samples nothing; found the key {key}; set it to null")
    if config.best is not None and config.best.init_args.get("monitor") == "val/accuracy":
        config.best.init_args.update(Namespace(BEST))


def _plain(value: object) -> object:
    """A dataclass, or its keys as the parser has them, as a dictionary; else the value."""
    if isinstance(value, Namespace):
        return value.as_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _text(value: object) -> str:
    return str(value.class_path) if isinstance(value, Namespace) and "class_path" in value else str(_plain(value))


def sft_module(kind: type[QeRLModule], **settings: Any) -> SFTModule:
    """An instantiator of jsonargparse: the module of supervised fine-tuning from the keys of `QeRLModule`."""
    return SFTModule(**{name: value for name, value in settings.items() if name in KEYS})
