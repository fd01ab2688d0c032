"""Tool calls in a turn's text: Qwen's and Hermes' JSON, Qwen3.5's tags, Llama 3's JSON, or a regular expression."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qerl_pl.errors import UserError


@dataclass(frozen=True)
class ToolCall:
    """A call that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]
    written: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Text of arguments that were read as JSON and may be text."""

    def for_schema(self, tools: Sequence[Mapping[str, Any]]) -> "ToolCall":
        """The call with the written text of those arguments that the tool's JSON schema has as strings."""
        functions = [tool["function"] for tool in tools if tool["function"]["name"] == self.name]
        properties = functions[0].get("parameters", {}).get("properties", {}) if functions else {}
        texts = {name: text for name, text in self.written.items() if properties.get(name, {}).get("type") == "string"}
        return ToolCall(self.name, {**self.arguments, **texts})


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read; the error goes back to the policy as the tool's answer."""

    error: str


ToolFormat = Callable[[str], list[ToolCall | MalformedCall]]
"""Finds the calls in a turn's text, in their order."""
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CLOSED = re.compile(r"\s*(?:</tool_call>|\Z)")
"""What follows a call; a stop string may have cut the mark."""
_FUNCTION = re.compile(r"<function=([^<>\n]{1,200})>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200})>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
"""An argument of such a call. The next one, or the end of the text, ends what has no closing tag."""
_LLAMA_TAG = "<|python_tag|>"
_REASONING_END = "</think>"
_MARK = re.compile(r'\{(?=\s*["}])|</?think>')
_OTHER_GROUPS = ("name", "arguments")
_DEPTH = 64
"""Most levels of lists and objects in a call: what copies or writes deeper ones may run out of stack."""


def tool_format_of(name: str, chat_template: str) -> ToolFormat:
    """The parser of a tool format.

    Args:
        name: `hermes`, `qwen3_coder`, `llama3_json`, or a regular expression with named groups, see `parse_pattern`;
            `auto` chooses one of the first three by the chat template.
        chat_template: Chat template of the policy.

    Raises:
        UserError: The name is no format, or the chat template has none of the known ones.
    """
    if name == "auto":
        if "<function=" in chat_template and "<parameter=" in chat_template:
            return parse_qwen3_coder
        if "<tool_call>" in chat_template and "<function=" not in chat_template:
            return parse_hermes
        if '"parameters"' in chat_template and "ipython" in chat_template:
            return parse_llama3
        raise UserError(
            "rollout.environment.tool_format auto takes the chat template's format, hermes, qwen3_coder or "
            "llama3_json; this template has none; set it to one of them, or to a regular expression with the group name"
        )
    parsers = {"hermes": parse_hermes, "qwen3_coder": parse_qwen3_coder, "llama3_json": parse_llama3}
    if name in parsers:
        return parsers[name]
    try:
        pattern = re.compile(name, re.DOTALL)
    except re.error as error:
        raise UserError(
            "rollout.environment.tool_format is auto, hermes, qwen3_coder, llama3_json or a regular expression; "
            f"{name!r} is none ({error}); correct it"
        ) from error
    if "name" not in pattern.groupindex:
        raise UserError(
            f"a regular expression for tool calls names the tool by a group called name; {name!r} has none; write "
            "(?P<name>...) around it"
        )
    return partial(parse_pattern, pattern)


def parse_hermes(text: str) -> list[ToolCall | MalformedCall]:
    """Calls as Qwen 2.5, Qwen 3 and Hermes write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls: list[ToolCall | MalformedCall] = []
    for part in _answers_of(text):
        start = part.find(_CALL)
        while start >= 0:
            value, end = _first_value(part, start + len(_CALL))
            closed = _CLOSED.match(part, end)
            if closed is None:  # no JSON, or more than that
                found = part.find(_CALL_END, end)
                value, end = None, len(part) if found < 0 else found
            calls.append(_call_of(part[start + len(_CALL) : end], value))
            start = part.find(_CALL, end)
    return calls


def parse_qwen3_coder(text: str) -> list[ToolCall | MalformedCall]:
    """Calls as Qwen3-Coder and Qwen3.5 write them: `<function=name><parameter=key>value</parameter></function>`.

    A value is read as JSON, or else as text, which `ToolCall.for_schema` keeps where the tool takes text.
    """
    calls: list[ToolCall | MalformedCall] = []
    for name, body in (call for part in _answers_of(text) for call in _FUNCTION.findall(part)):
        written = dict(_PARAMETER.findall(body))
        calls.append(ToolCall(name, {key: _value_of(value) for key, value in written.items()}, written))
    return calls


def parse_llama3(text: str) -> list[ToolCall | MalformedCall]:
    """Calls as Llama 3 writes them: a turn that is `{"name": ..., "parameters": {...}}`, or several, separated by ;."""
    rest = _answers_of(text)[-1].strip()
    is_call = rest.startswith(_LLAMA_TAG)
    rest = rest.removeprefix(_LLAMA_TAG).strip()
    if not is_call and not rest.startswith("{"):
        return []
    calls: list[ToolCall | MalformedCall] = []
    while rest:
        value, end = _first_value(rest, 0)
        end = end or len(rest)
        calls.append(_call_of(rest[:end], value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


def parse_pattern(pattern: re.Pattern[str], text: str) -> list[ToolCall | MalformedCall]:
    """Calls by a regular expression.

    The group `name` is the tool's name. A group `arguments` holds the arguments as a JSON object; any other named group
    is the argument of its name, as JSON, or else as text, which `ToolCall.for_schema` keeps where the tool takes text.
    """
    calls: list[ToolCall | MalformedCall] = []
    for match in itertools.chain.from_iterable(map(pattern.finditer, _answers_of(text))):
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        written = {name: value for name, value in groups.items() if name not in _OTHER_GROUPS}
        arguments = {name: _value_of(value) for name, value in written.items()}
        if "arguments" in groups:
            given = _decoded(groups["arguments"])
            if not isinstance(given, dict):
                calls.append(_malformed(groups["arguments"]))
                continue
            arguments = {**given, **arguments}
        calls.append(ToolCall(groups.get("name", ""), arguments, written))
    return calls


def _answers_of(text: str) -> list[str]:
    """The parts of a text outside of its reasoning, whose calls are not made; marks in JSON objects are text.

    A chat template may have opened the reasoning, so that all up to the first `</think>` is reasoning.
    """
    if _REASONING_END not in text:
        return [text]
    parts, begin, position = list[str](), 0, 0
    opened: int | None = 0
    while (mark := _MARK.search(text, position)) is not None:
        position = mark.end()
        if mark[0] == "{":
            position = max(position, _first_value(text, mark.start())[1])
        elif mark[0] != _REASONING_END:
            opened = mark.start() if opened is None else opened
        elif opened is not None:
            parts, begin, opened = [*parts, text[begin:opened]], mark.end(), None
    return [*parts[1:], text[begin:]]


def _first_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, None if it is nested too deeply, and its end; without a value, None and `start`."""
    while text[start : start + 1] in (" ", "\t", "\n", "\r"):
        start += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return None if _too_deep(value) else value, end


def _call_of(written: str, value: Any) -> ToolCall | MalformedCall:
    """The call of a JSON value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed(written)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else _malformed(written)


def _malformed(written: str) -> MalformedCall:
    call = " ".join(written.split())
    return MalformedCall(
        f'error: a tool call is a JSON object with "name" and "arguments"; got {call:.80}; write it again'
    )


def _decoded(text: str) -> Any:
    """The JSON value of a text; None where it has none, or one that is nested too deeply."""
    value, end = _first_value(text, 0)
    return None if text[end:].strip() else value


def _value_of(text: str) -> Any:
    """The JSON value of a text, or else the text."""
    value = _decoded(text)
    return text if value is None and text.strip() != "null" else value


def _too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more deeply than `_DEPTH`."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(_DEPTH):
        children = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        level = [child for child in children if isinstance(child, list | dict)]
    return bool(level)
