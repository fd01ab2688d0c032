"""The contract of an environment: TRL's `environment_factory`, and `step` for environments that answer text."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.runtime.import_path import load_named

Factory = str | Mapping[str, Any] | Callable[..., Any]
"""A name, a name with arguments (`class_path`, `init_args`), a class, or a function."""

_RULE = "an environment is a class, or a function from a row to one, named module.Class or file.py:Class"
_SCHEMA = "json_schema"
"""Attribute of a tool that has its schema from another library, in place of type hints and a docstring."""
_RESERVED = ("reset", "get_reward")


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a tool call or a step."""

    text: str
    """For the policy; a single line if the call failed."""
    failed: bool
    """Whether the call was wrong, raised, or was ended by its time limit."""
    seconds: float
    """Duration of the call."""
    done: bool = False
    """Whether the environment ended the dialogue."""
    raised: bool = False
    """Whether the environment's code failed, and not what the policy wrote."""


@dataclass(frozen=True)
class Opening:
    """What an environment's `reset` gave, and the tools that it offers."""

    observation: str | None
    """Text for the end of the last user message."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas, as `transformers.utils.get_json_schema` makes them."""
    steps: bool
    """Whether the environment answers text by `step`, and offers no tools."""


@dataclass(frozen=True)
class Methods:
    """An environment's methods by their role in the contract."""

    reset: Callable[..., Any]
    tools: Mapping[str, Callable[..., Any]]
    schemas: Sequence[Mapping[str, Any]]
    step: Callable[..., Any] | None
    get_reward: Callable[..., Any] | None
    close: Callable[..., Any] | None


def load_factory(factory: Factory) -> Callable[..., Any]:
    """The callable that creates environments, without arguments or from a row (`takes_row`).

    Raises:
        UserError: It cannot be imported, is not callable, or lacks arguments.
    """
    name, arguments = factory, {}
    if isinstance(factory, Mapping):
        unknown = sorted(set(factory) - {"class_path", "init_args"})
        if unknown or not isinstance(factory.get("class_path"), str):
            got = f"the keys {', '.join(map(str, factory))}" if factory else "no key"
            raise UserError(f"{_RULE}; got {got}; set class_path, and init_args if it takes arguments")
        name, arguments = factory["class_path"], dict(factory.get("init_args") or {})
    loaded = load_named(name, _RULE, "name its module or file", "environment") if isinstance(name, str) else name
    if not callable(loaded):
        raise UserError(f"{_RULE}; {name!r} is a {type(loaded).__name__}; name a class or a function")
    try:
        inspect.signature(loaded).bind_partial(**arguments)
    except (TypeError, ValueError) as error:  # the latter of a builtin, which has no signature
        raise UserError(f"{_RULE}; {name_of(loaded)} does not take its init_args ({error}); correct them") from error
    made = partial(loaded, **arguments) if arguments else loaded
    missing = _required(made)
    if inspect.isclass(loaded) and missing:
        raise UserError(
            f"an environment class is made without further arguments; {name_of(loaded)} needs {', '.join(missing)}; "
            "give them in init_args"
        )
    if len(missing) > 1:
        raise UserError(
            f"{_RULE}; {name_of(loaded)} needs {', '.join(missing)}; leave one argument, the row, and give the others "
            "in init_args"
        )
    return made


def takes_row(factory: Callable[..., Any]) -> bool:
    """Whether the factory creates an environment for each row, instead of one for all rows."""
    return bool(_required(factory))


def methods_of(environment: Any) -> Methods:
    """The methods of an environment by their role in the contract.

    Tools are the public methods of its class, as in TRL. An environment with `step` offers none.

    Raises:
        UserError: The class breaks the contract.
    """
    kind = type(environment)
    name = f"environment {kind.__qualname__}"
    functions = dict(inspect.getmembers(kind, lambda one: inspect.isfunction(one) or inspect.ismethod(one)))
    if "reset" not in functions:
        raise UserError(f"an environment has a method reset(**row); {name} has none; add one")
    for method in ("step", "get_reward"):
        if hasattr(kind, method) and method not in functions:
            kind_of_member = type(getattr(kind, method)).__name__
            raise UserError(
                f"reset, step and get_reward are methods; {name}'s {method} is a {kind_of_member}; rename it"
            )
    step = getattr(environment, "step") if "step" in functions else None  # noqa: B009
    if step is not None and not _accepts(step, "text"):
        raise UserError(f"an environment's step takes the text; {name} has step{inspect.signature(step)}; take one")
    get_reward = environment.get_reward if "get_reward" in functions else None
    if get_reward is not None and not (_accepts(get_reward) or takes_messages(get_reward)):
        raise UserError(
            f"an environment's get_reward takes no argument, or messages; {name} has "
            f"get_reward{inspect.signature(get_reward)}; take none"
        )
    close = environment.close if "close" in functions and _closes(environment.close) else None
    if step is not None:
        return Methods(environment.reset, {}, [], step, get_reward, close)
    reserved = _RESERVED if close is None else (*_RESERVED, "close")
    public = [tool for tool in functions if tool not in reserved and not tool.startswith("_")]
    if not public:
        raise UserError(
            f"an environment has public methods, which are its tools, or step(text); {name} has neither; add one"
        )
    tools = {tool: getattr(environment, tool) for tool in public}
    return Methods(environment.reset, tools, [_schema(name, tools[tool]) for tool in tools], None, get_reward, close)


def _closes(close: Callable[..., Any]) -> bool:
    """Whether `close` ends the environment: without arguments or an answer, with which it is a tool."""
    nothing = (None, "None", inspect.Signature.empty)
    return not _required(close) and _SCHEMA not in vars(close) and inspect.signature(close).return_annotation in nothing


def takes_messages(get_reward: Callable[..., Any]) -> bool:
    """Whether `get_reward` takes the messages of the dialogue, as TRL's does not."""
    return _required(get_reward) in ([], ["messages"]) and "messages" in inspect.signature(get_reward).parameters


def row_arguments(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes; all if it has `**row`.

    Raises:
        UserError: The row lacks a column that `reset` needs.
    """
    parameters = inspect.signature(reset).parameters.values()
    missing = [name for name in _required(reset) if name not in row]
    if missing:
        columns = ", ".join(row) or "no column"
        raise UserError(
            f"reset takes the columns of the data; it needs {missing[0]}, the row has {columns}; "
            "rename it, or give it a default"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.name in row}


def _schema(name: str, tool: Callable[..., Any]) -> Mapping[str, Any]:
    if (schema := getattr(tool, _SCHEMA, None)) is not None:
        return schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"a public method is a tool, with type hints and a docstring that has Args; {name}'s {tool.__name__}: "
            f"{reason:.300}; complete it, or begin its name with an underscore"
        ) from error


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def name_of(factory: Any) -> str:
    """Name of a class or function, or of what is named."""
    if isinstance(factory, Mapping):
        return str(factory.get("class_path"))
    return factory if isinstance(factory, str) else getattr(factory, "__qualname__", type(factory).__qualname__)
