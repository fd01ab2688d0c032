"""Values that jsonargparse lets pass: null for a key that takes none, and for one that has keys of its own."""

import inspect
from argparse import ArgumentError
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule


def check_values(parser: ArgumentParser, config: Namespace) -> None:
    """Refuse null, which an empty place in a YAML file is, where a key does not take it.

    Args:
        parser: The main parser.
        config: What it has parsed.

    Raises:
        ArgumentError: A key has null for a value.
        UserError: A key that has keys of its own has another value in their place.
    """
    run = config[config["subcommand"]]
    _check_groups(QeRLModule, run["model"], "model")
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
    if isinstance(value, list):
        for item in value:
            name = item.get("class_path", "") if isinstance(item, Namespace) else ""
            _check_classes(item, f"{key}.{name.rpartition('.')[2]}".removesuffix("."))
    if not isinstance(value, Namespace):
        return
    if "class_path" in value and "init_args" in value:
        _check_groups(resolve_name(value["class_path"]), value["init_args"], key)
    for name, item in vars(value).items():
        _check_classes(item, f"{key}.{name}".removesuffix(".init_args").removeprefix("."))


def _check_groups(class_type: type, given: Namespace, key: str) -> None:
    for name, parameter in inspect.signature(class_type).parameters.items():
        if not is_dataclass(parameter.annotation) or not isinstance(parameter.annotation, type):
            continue
        if not isinstance(found := given.get(name), Namespace):
            raise UserError(f"{key}.{name} has keys of its own; found {found!r}; set them, or leave it out")
        _check_groups(parameter.annotation, found, f"{key}.{name}")
