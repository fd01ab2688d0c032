"""Overriding one item of a list on the command line, by its class."""

import json
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from qerl_pl.cli.main import expand_item_overrides
from qerl_pl.errors import UserError

STOP = "lightning.pytorch.callbacks.EarlyStopping"
RATE = "lightning.pytorch.callbacks.LearningRateMonitor"


@pytest.fixture
def parser(tmp_path: Path) -> ArgumentParser:
    sub = ArgumentParser(exit_on_error=False)
    sub.add_argument("--callbacks", type=list[dict])
    sub.add_argument("--name", type=str, default="n")
    main = ArgumentParser(exit_on_error=False)
    main.add_subcommands().add_subcommand("fit", sub)
    return main


def line(*extra: str) -> list[str]:
    callbacks = [{"class_path": STOP, "init_args": {"monitor": "a", "patience": 3}}, {"class_path": RATE}]
    return ["fit", "--callbacks", json.dumps(callbacks), *extra]


@pytest.mark.parametrize(
    "form", [["--callbacks.EarlyStopping.patience", "7"], ["--callbacks.EarlyStopping.patience=7"]]
)
def test_one_key_of_one_item_changes(parser: ArgumentParser, form: list[str]) -> None:
    items = parser.parse_args(expand_item_overrides(parser, line(*form))).as_dict()["fit"]["callbacks"]
    assert items[0] == {"class_path": STOP, "init_args": {"monitor": "a", "patience": 7}}
    assert items[1] == {"class_path": RATE}


def test_several_overrides_and_nested_classes(parser: ArgumentParser) -> None:
    args = line(
        "--callbacks.LearningRateMonitor.engine=pkg.Engine",
        "--callbacks.LearningRateMonitor.engine.max_batch=8",
        "--name=x",
    )
    config = parser.parse_args(expand_item_overrides(parser, args)).as_dict()["fit"]
    engine = config["callbacks"][1]["init_args"]["engine"]
    assert engine == {"class_path": "pkg.Engine", "init_args": {"max_batch": 8}} and config["name"] == "x"


def test_other_arguments_pass_unchanged(parser: ArgumentParser) -> None:
    assert expand_item_overrides(parser, ["fit", "--name", "A.b"]) == ["fit", "--name", "A.b"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--callbacks.Missing.key", "1"], "no Missing"),
        (["--other.EarlyStopping.key", "1"], "--other is none"),
        (["--callbacks.EarlyStopping.patience"], "needs a value"),
    ],
)
def test_mistakes_are_named(parser: ArgumentParser, extra: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_item_overrides(parser, line(*extra))
