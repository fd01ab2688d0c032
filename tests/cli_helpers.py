"""The command line without a run: what a configuration or a command builds."""

from typing import Any

import pytest
from jsonargparse import Namespace

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.main import QeRLCLI

OWN = """
from qerl_pl.modules import QeRLModule, SFTModule
from qerl_pl.modules.policy_module import PolicyModule


class Mine({base}):
    def __init__(self, shown: float = 0.5, **settings):
        super().__init__(**settings)
        self.shown = shown

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.log("mine/shown", self.shown, batch_size=1)
"""
"""A user's own module, with an argument of its own."""


class Built(Exception):
    """Leaves the command line before it makes a Trainer: what the YAML names is built, no model, no data."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings


class Builder(QeRLCLI):
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        settings = self.parser.instantiate_classes(self.config)[self.config["subcommand"]]
        if self._has_rollouts and (settings.rollout.rewards or settings.rollout.environment.factory):
            settings.rollout = RolloutCallback(**settings.rollout)
        raise Built(settings)


class Parser(QeRLCLI):
    def before_instantiate_classes(self) -> None:
        raise Built(self)


def saved_config(*args: str) -> str:
    """RUN/config.yaml of `qerl ARGS`."""
    with pytest.raises(Built) as stop:
        Parser(list(args))
    cli = stop.value.settings
    text: str = cli._parser(cli.subcommand).dump(cli.config[cli.subcommand], skip_unset=False)
    return text


def built(*args: str) -> Namespace:
    """What `qerl ARGS` would run with, for fit, validate and test."""
    with pytest.raises(Built) as stop:
        Builder(list(args))
    return stop.value.settings
