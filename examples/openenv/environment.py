"""An environment of OpenEnv (openenv.core): its action is a tool, or its MCP tools are the tools; see ../README.md."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import urlopen

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

from qerl_pl.runtime.import_path import load_named


class OpenEnv:
    """The reward is the sum over the steps; an observation that is done ends the dialogue.

    Args:
        environment: A class (`module.Class`, `file.py:Class`), which runs in the worker; or the URL of a server.
        action: Class of the actions; null for MCP tools, and for a server, which tells it.
        tool: Name of the tool that takes an action's fields.
        description: Of that tool.
        columns: Columns of the data that the environment's `reset` takes, such as `seed`.
    """

    def __init__(
        self,
        environment: str,
        action: str | None = None,
        tool: str = "act",
        description: str = "Act.",
        columns: Sequence[str] = (),
    ) -> None:
        self._columns, self._remote = tuple(columns), environment.startswith(("http://", "https://"))
        self._reward, self.dialogue_done = 0.0, False
        schema: dict[str, Any] | None = None
        if self._remote:
            self._world: Any = GenericEnvClient(base_url=environment).sync()
            self._world.connect()
            with urlopen(f"{environment}/schema", timeout=30) as response:
                schema = json.load(response)["action"]
            if schema["title"] in ("Action", "CallToolAction", "ListToolsAction"):
                schema = None
        else:
            self._world, self._kind = _named(environment)(), None if action is None else _named(action)
            schema = None if self._kind is None else self._kind.model_json_schema()
        if schema is None:
            listed = self._step({"type": "list_tools"})["tools"]
            keys = {"name": "name", "description": "description", "parameters": "input_schema"}
            schemas = [{key: entry[name] for key, name in keys.items()} for entry in listed]
            _with_tools(self, {entry["name"]: self._mcp_tool(entry["name"]) for entry in listed}, schemas)
        else:
            fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
            parameters = {**schema, "properties": fields}
            schemas = [{"name": tool, "description": description, "parameters": parameters}]
            _with_tools(self, {tool: lambda **action: self._act(**action)}, schemas)

    def reset(self, **row: Any) -> str:
        """Begin an episode."""
        result = self._world.reset(**{name: row[name] for name in self._columns if name in row})
        shown = self._observed(result)
        self._reward, self.dialogue_done = 0.0, False
        return _text(shown)

    def get_reward(self) -> float:
        """The sum of the rewards of the episode's steps."""
        return self._reward

    def _act(self, **action: Any) -> str:
        if self.dialogue_done:
            raise ValueError("the episode is over")
        return _text(self._step(action))

    def _mcp_tool(self, name: str) -> Any:
        return lambda **arguments: self._act(type="call_tool", tool_name=name, arguments=arguments)

    def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self._remote:
            return self._observed(self._world.step(action))
        mcp: Any = ListToolsAction if action.get("type") == "list_tools" else CallToolAction
        return self._observed(self._world.step((self._kind or mcp)(**action)))

    def _observed(self, result: Any) -> dict[str, Any]:
        """The observation's fields; the reward is added up."""
        self._reward, self.dialogue_done = self._reward + float(result.reward or 0.0), bool(result.done)
        fields = result.observation if self._remote else result.model_dump(mode="json")
        return {name: value for name, value in fields.items() if name not in ("done", "reward", "metadata")}


def _named(name: str) -> Any:
    return load_named(name, "an environment and its action are named module.Class or file.py:Class", "", "environment")


def _text(shown: Mapping[str, Any]) -> str:
    """An observation as text for the policy: JSON, or its only field."""
    value: Any = next(iter(shown.values())) if len(shown) == 1 else shown
    if {*shown} == {"tool_name", "result", "error"}:  # of MCP
        if shown["error"] is not None:
            raise RuntimeError(shown["error"].get("message", shown["error"]))
        result = shown["result"]
        value = result["data"] if isinstance(result, Mapping) and "data" in result else result
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_tools(environment: Any, tools: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> None:
    """Offer functions as methods of the environment, each with its name, description and parameters as JSON schema."""
    for schema in schemas:
        tools[schema["name"]].json_schema = {"type": "function", "function": dict(schema)}
    kind = type(environment)
    environment.__class__ = type(kind.__name__, (kind,), {name: staticmethod(tool) for name, tool in tools.items()})
