"""Environments of OpenEnv (openenv.core): an environment class in the worker, or a server."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import urlopen

from qerl_pl.environments.contract import with_tools
from qerl_pl.errors import UserError
from qerl_pl.import_path import load_named

try:  # here, and not when it is used: once before workers are forked, for it takes seconds
    from openenv.core import GenericEnvClient
    from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
except ImportError as _error:
    GenericEnvClient, _MISSING = None, str(_error)

_NOT_SHOWN = {"done", "reward", "metadata"}
_SCHEMA_TIMEOUT_S = 30


class OpenEnv:
    """An environment of OpenEnv: its action is a tool, or its MCP tools are the tools.

    The reward is the sum of the rewards of all steps. An observation that is done ends the dialogue. An answer is the
    observation as JSON, or its text if it has only one field.

    Args:
        environment: A subclass of `openenv.core.env_server.Environment`, or its name (`module.Class`,
            `file.py:Class`), which runs in the worker; or the URL of a server.
        action: Class of the actions, or its name; null for MCP tools, and for a server, which tells it.
        tool: Name of the tool that takes an action's fields.
        description: Of that tool.
        columns: Columns of the data that the environment's `reset` takes, such as `seed`.
        init_args: Arguments of the environment class.
    """

    def __init__(
        self,
        environment: str | type,
        action: str | type | None = None,
        tool: str = "act",
        description: str = "Act in the environment.",
        columns: Sequence[str] = (),
        init_args: Mapping[str, Any] | None = None,
    ) -> None:
        if GenericEnvClient is None:
            raise UserError(f"OpenEnv needs the package openenv; {_MISSING}; install openenv")
        self._columns = tuple(columns)
        self._reward, self.dialogue_done = 0.0, False
        if isinstance(environment, str) and environment.startswith(("http://", "https://")):
            self._world: _Local | _Server = _Server(environment)
        else:
            self._world = _Local(_class(environment), None if action is None else _class(action), init_args or {})
        schema = self._world.action_schema()
        if schema is None:
            listed = self._world.step({"type": "list_tools"})[0]["tools"]
            names = [entry["name"] for entry in listed]
            schemas = [
                {"name": entry["name"], "description": entry["description"], "parameters": entry["input_schema"]}
                for entry in listed
            ]
            with_tools(self, {name: self._mcp_tool(name) for name in names}, schemas)
        else:
            fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
            parameters = {**schema, "properties": fields}
            with_tools(self, {tool: self._act}, [{"name": tool, "description": description, "parameters": parameters}])

    def reset(self, **row: Any) -> str:
        """Begin an episode."""
        self._reward, self.dialogue_done = 0.0, False
        return _shown(self._world.reset({name: row[name] for name in self._columns if name in row})[0])

    def get_reward(self) -> float:
        """The sum of the rewards of the episode's steps."""
        return self._reward

    def close(self) -> None:
        """Close the environment, or the session at its server."""
        self._world.close()

    def _act(self, **action: Any) -> str:
        if self.dialogue_done:
            raise ValueError("the episode is over")
        observation, reward, self.dialogue_done = self._world.step(action)
        self._reward += float(reward or 0.0)
        return _shown(observation)

    def _mcp_tool(self, name: str) -> Any:
        def call(**arguments: Any) -> str:
            return self._act(type="call_tool", tool_name=name, arguments=arguments)

        return call


class _Local:
    """An environment in this process.

    Args:
        kind: Its class.
        action: Class of its actions; None for MCP tools.
        init_args: Arguments of the class.
    """

    def __init__(self, kind: type, action: Any, init_args: Mapping[str, Any]) -> None:
        self.environment: Any = kind(**init_args)
        self.action = action

    def action_schema(self) -> Mapping[str, Any] | None:
        """JSON schema of an action's fields; None for MCP tools."""
        return None if self.action is None else self.action.model_json_schema()

    def reset(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Any, bool]:
        """As `step`."""
        return self._result(self.environment.reset(**arguments))

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, Any], Any, bool]:
        """The observation's fields, the reward, and whether the episode is over."""
        if self.action is None:
            kind: Any = ListToolsAction if action["type"] == "list_tools" else CallToolAction
        else:
            kind = self.action
        return self._result(self.environment.step(kind(**action)))

    def close(self) -> None:
        """Call the environment's own `close`, if it has one."""
        getattr(self.environment, "close", lambda: None)()

    def _result(self, observation: Any) -> tuple[dict[str, Any], Any, bool]:
        shown = observation.model_dump(mode="json", exclude=_NOT_SHOWN)
        return shown, observation.reward, bool(observation.done)


class _Server:
    """A session at a server.

    Args:
        url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.client: Any = GenericEnvClient(base_url=self.url).sync()
        self.client.connect()

    def action_schema(self) -> Mapping[str, Any] | None:
        """JSON schema of an action's fields; None for MCP tools."""
        with urlopen(f"{self.url}/schema", timeout=_SCHEMA_TIMEOUT_S) as response:
            schema: dict[str, Any] = json.load(response)["action"]
        return None if schema.get("title") in ("Action", "CallToolAction", "ListToolsAction") else schema

    def reset(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Any, bool]:
        """As `step`."""
        return self._result(self.client.reset(**arguments))

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, Any], Any, bool]:
        """The observation's fields, the reward, and whether the episode is over."""
        return self._result(self.client.step(dict(action)))

    def close(self) -> None:
        """End the session."""
        self.client.close()

    def _result(self, result: Any) -> tuple[dict[str, Any], Any, bool]:
        shown = {name: value for name, value in result.observation.items() if name not in _NOT_SHOWN}
        return shown, result.reward, bool(result.done)


def _class(named: str | type) -> Any:
    if not isinstance(named, str):
        return named
    rule = "an OpenEnv environment and its action are classes named module.Class or file.py:Class, or a server's URL"
    loaded = load_named(named, rule, "name its module or file", "environment")
    if not isinstance(loaded, type):
        raise UserError(f"{rule}; {named!r} is a {type(loaded).__name__}; name a class")
    return loaded


def _shown(observation: Mapping[str, Any]) -> str:
    """An observation as text for the policy."""
    if {*observation} == {"tool_name", "result", "error"}:  # of MCP
        if observation["error"] is not None:
            raise RuntimeError(observation["error"].get("message", observation["error"]))
        result = observation["result"]
        value = result["data"] if isinstance(result, Mapping) and "data" in result else result
    else:
        value = next(iter(observation.values())) if len(observation) == 1 else observation
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
