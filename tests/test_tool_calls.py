"""Tool calls in a turn's text."""

import json

import pytest

from qerl_pl.chat.tool_calls import MalformedCall, ToolCall, tool_format_of
from qerl_pl.errors import UserError

ADD = ToolCall("add", {"a": 1, "b": [2]})
GUESS = r"(?P<name>guess) (?P<number>\S+)"
DEEP = "[" * 100_000


def calls(name: str, text: str) -> list[ToolCall | None]:
    """The calls, None for a malformed one."""
    found = tool_format_of(name, "")(text)
    for call in found:
        assert isinstance(call, ToolCall) or (call.error.startswith("error: a tool call is") and "\n" not in call.error)
    return [call if isinstance(call, ToolCall) else None for call in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>', [ADD]),
        ('Let me.<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}', [ADD]),  # cut by a stop string
        ('<tool_call>{"name": "now"}</tool_call> and <tool_call>{</tool_call>', [ToolCall("now", {}), None]),
        ('<think><tool_call>{"name": "now"}</tool_call></think>no', []),
        ('<tool_call>["add"]</tool_call>', [None]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [None]),
        (f"<tool_call>{DEEP}</tool_call>", [None]),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 63}{"]" * 63}}}}}</tool_call>', [None]),
    ],
)
def test_hermes(text: str, expected: list[ToolCall | None]) -> None:
    assert calls("hermes", text) == expected


ONE_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call <function=", []),
        (f"{ONE_CALL}\n</tool_call>", [ADD]),
        (f"Let me.{ONE_CALL}", [ADD]),  # cut by a stop string
        (f"<think>{ONE_CALL}</tool_call></think>\n<function=now>\n</function>{ONE_CALL}", [ToolCall("now", {}), ADD]),
        ("<function=say><parameter=text>\ntwo\n lines\n</parameter>", [ToolCall("say", {"text": "two\n lines"})]),
        ("<function=add><parameter=a>\n2 + 3\n</parameter>", [ToolCall("add", {"a": "2 + 3"})]),  # not 2
        (f"<function=add><parameter=a>{DEEP}", [ToolCall("add", {"a": DEEP})]),
        ("<function=" * 100_000, []),
    ],
)
def test_qwen3_coder(text: str, expected: list[ToolCall | None]) -> None:
    assert calls("qwen3_coder", text) == expected


def test_a_value_of_tags_is_text_where_the_tool_takes_text() -> None:
    (call,) = tool_format_of("qwen3_coder", "")("<function=say><parameter=text>\n42\n</parameter></function>")
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    assert isinstance(call, ToolCall) and call.arguments == {"text": 42}
    assert call.for_schema([{"function": {"name": "say", "parameters": schema}}]).arguments == {"text": "42"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call {", []),
        ('{"name": "add", "parameters": {"a": 1, "b": [2]}}', [ADD]),
        (
            '<|python_tag|>{"name": "now"}; {"name": "add", "parameters": {"a": 1, "b": [2]}}',
            [ToolCall("now", {}), ADD],
        ),
        ('{"name": "now"} {"name": 3}', [ToolCall("now", {}), None]),
        ('{"name": "now"', [None]),
        ("<|python_tag|>print(1)", [None]),
        ("{" + DEEP, [None]),
    ],
)
def test_llama3(text: str, expected: list[ToolCall | None]) -> None:
    assert calls("llama3_json", text) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (GUESS, "guess 7", [ToolCall("guess", {"number": 7})]),
        (GUESS, "guess x, guess 1e2", [ToolCall("guess", {"number": "x,"}), ToolCall("guess", {"number": 100.0})]),
        (r"(?P<name>\w+)\((?P<arguments>.*?)\)", 'add({"a": 1, "b": [2]})', [ADD]),
        (r"(?P<name>\w+)\((?P<arguments>.*?)\)", "add(1)", [None]),
        (r"(?P<name>\w+)!(?P<at>\d)?", "stop!", [ToolCall("stop", {})]),
        (GUESS, "guess null", [ToolCall("guess", {"number": None})]),
    ],
)  # fmt: skip
def test_a_pattern_of_ones_own(pattern: str, text: str, expected: list[ToolCall | None]) -> None:
    assert calls(pattern, text) == expected


def test_arguments_that_a_tool_takes_as_text_stay_as_they_were_written() -> None:
    tools = [
        {
            "function": {
                "name": "look",
                "parameters": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
            }
        },
        {"function": {"name": "wait"}},
    ]
    parse = tool_format_of(r"(?P<name>\w+) (?P<at>\S+) (?P<n>\d+)", "")
    for text in ("2024", "1e3", "null", "[1]", "there"):
        for name, at in (("look", text), ("wait", None), ("other", None)):
            (call,) = parse(f"{name} {text} 7")
            assert isinstance(call, ToolCall) and call.arguments["n"] == 7
            assert call.for_schema(tools).arguments == (call.arguments if at is None else {"at": at, "n": 7})


def test_auto_chooses_by_the_template() -> None:
    text = json.dumps({"name": "add", "arguments": {}})
    hermes = tool_format_of("auto", "... <tool_call> ...")
    assert hermes(f"<tool_call>{text}") == [ToolCall("add", {})] and hermes(text) == []
    assert tool_format_of("auto", "<tool_call>\n<function=add>\n<parameter=a>")(ONE_CALL) == [ADD]
    llama = tool_format_of("auto", '{"name": function name, "parameters": ...} ... ipython')
    assert llama(text) == [ToolCall("add", {})]


@pytest.mark.parametrize(
    ("name", "template", "error"),
    [
        ("auto", "{{ messages }}", "this template has none; set it to one"),
        ("auto", "<tool_call>\n<function=add>{", "this template has none"),  # not Hermes'
        ("hermes2", "", "names the tool by a group called name; 'hermes2' has none"),
        ("(", "", "auto, hermes, qwen3_coder, llama3_json or a regular expression"),
    ],
)
def test_unknown_formats_are_refused(name: str, template: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        tool_format_of(name, template)


def test_a_malformed_call_shows_its_beginning() -> None:
    (found,) = tool_format_of("hermes", "")("<tool_call>{look\n at}</tool_call>")
    assert found == MalformedCall(
        'error: a tool call is a JSON object with "name" and "arguments"; got {look at}; write it again'
    )


MARKED = {"a": 'x</tool_call><tool_call></think><think>{"b": ' + "[" * 65 + ";"}
WROTE = ToolCall("write", MARKED)
HERMES = f"<tool_call>{json.dumps({'name': 'write', 'arguments': MARKED})}</tool_call>"
AS_TEXT = f"<tool_call>{json.dumps({'name': 'write', 'arguments': json.dumps(MARKED)})}"
LLAMA = json.dumps({"name": "write", "parameters": MARKED})
PATTERN = r"(?P<name>write)\((?P<arguments>\{.*?\})\)"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", HERMES, [WROTE]),
        ("hermes", f"<think>maybe {HERMES} or <tool_call>{{</think>{AS_TEXT}", [WROTE]),
        ("hermes", f"<think></think>{HERMES}<think><tool_call>{{</think>then{HERMES}", [WROTE, WROTE]),
        ("hermes", HERMES.replace("</tool_call>", " and more</tool_call>"), [None]),
        ("llama3_json", LLAMA, [WROTE]),
        ("llama3_json", f"{{it}} is </think> so <think>{LLAMA}</think>\n{LLAMA}; {LLAMA}", [WROTE, WROTE]),
        (PATTERN, f"write( </think> write({json.dumps(MARKED)})", [WROTE]),
        (GUESS, "guess 1 </think> guess 2 <think>guess 3</think> guess 2", [ToolCall("guess", {"number": 2})] * 2),
    ],
)  # fmt: skip
def test_marks_of_the_format_in_arguments_are_text(name: str, text: str, expected: list[ToolCall | None]) -> None:
    assert calls(name, text) == expected
