"""The command line without a run: what a configuration or a command builds."""

import pytest
from jsonargparse import Namespace

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.main import QeRLCLI


class Built(Exception):
    """Leaves the command line before it makes a Trainer: what the YAML names is built, no model, no data."""

    def __init__(self, settings: Namespace) -> None:
        self.settings = settings


class Builder(QeRLCLI):
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        settings = self.parser.instantiate_classes(self.config)[self.config["subcommand"]]
        if settings.rollout.rewards or settings.rollout.environment:
            settings.rollout = RolloutCallback(**settings.rollout)
        raise Built(settings)


def built(*args: str) -> Namespace:
    """What `qerl ARGS` would run with, for fit, validate and test."""
    with pytest.raises(Built) as stop:
        Builder(list(args))
    return stop.value.settings
