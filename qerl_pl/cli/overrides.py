"""Command-line overrides of list items, by class: `--trainer.callbacks.RolloutCallback.group_size 4`.

jsonargparse can replace or extend a list but not change one item of it, and callbacks and rewards come in lists.
"""

import json
import re
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from qerl_pl.errors import UserError

_ITEM = re.compile(r"^--([a-z_.]+)\.([A-Z]\w*(?:\.\w+)+)(?:=(.*))?$", re.DOTALL)
_SHOWS_ONLY = ("--print_config", "--help", "-h")


def expand_item_overrides(parser: ArgumentParser, args: list[str]) -> list[str]:
    """Replace overrides of list items by overrides of the whole lists, as the parser understands them.

    Args:
        parser: The main parser, with subcommands.
        args: The command line.

    Returns:
        The command line without `--LIST.Class.key value`, each such list appended whole as `--LIST JSON`.

    Raises:
        UserError: The list has no item of that class, or the override has no value.
    """
    plain: list[str] = []
    overrides: list[tuple[str, list[str], Any]] = []
    rest = iter(args)
    for arg in rest:
        match = _ITEM.match(arg)
        if match is None:
            plain.append(arg)
            continue
        text = match[3] if match[3] is not None else next(rest, None)
        if text is None:
            raise UserError(f"an override needs a value; found {arg} alone; write {arg} VALUE")
        overrides.append((match[1], match[2].split("."), _value(arg, text)))
    if not overrides:
        return plain
    config = parser.parse_args([arg for arg in plain if not arg.startswith(_SHOWS_ONLY)]).as_dict()
    config = config[config["subcommand"]]
    changed: dict[str, Any] = {}
    for key, path, value in overrides:
        if key not in changed:
            changed[key] = _lookup(config, key)
        _assign(changed[key], path, value, key)
    return [*plain, *(part for key, items in changed.items() for part in (f"--{key}", json.dumps(items)))]


def _value(arg: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UserError(f"an override's value is YAML; that of {arg} is {text!r}: {problem}; quote it") from error


def _lookup(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"an override names a key of the configuration; --{key} is none; see --help")
        value = value[part]
    return value


def _assign(node: Any, path: list[str], value: Any, where: str) -> None:
    """Set the value at `path` below `node`, through lists by class name and through init_args."""
    head, *tail = path
    if isinstance(node, dict) and _class_name(node) == head:  # one item where a list may be
        node = [node]
    if isinstance(node, list):
        for item in node:
            if isinstance(item, dict) and _class_name(item) == head:
                return _assign(item, tail, value, f"{where}.{head}")
        found = [_class_name(item) or "?" for item in node if isinstance(item, dict)]
        raise UserError(f"an override names an item of the list by its class; --{where} has {found} and no {head}")
    if isinstance(node, dict) and "class_path" in node and head not in ("class_path", "init_args"):
        node = node.setdefault("init_args", {})
    if not isinstance(node, dict):
        raise UserError(f"an override names a key of the configuration; --{where} has no keys; set it whole")
    if not tail:
        node[head] = value
        return None
    if isinstance(node.get(head), str):  # a class given by its path alone
        node[head] = {"class_path": node[head]}
    return _assign(node.setdefault(head, {}), tail, value, f"{where}.{head}")


def _class_name(item: dict[str, Any]) -> str:
    return str(item.get("class_path", "")).rpartition(".")[2]
