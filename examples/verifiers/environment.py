"""Tasks of verifiers (`verifiers.v1`): the tools of their toolsets, and their rewards; see ../README.md."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.utils.decorators import discover_decorated

from qerl_pl.runtime.import_path import load_named


class Verifiers:
    """Tasks of verifiers, made from the rows of the data; a task without toolsets answers by one `step`.

    A row's columns are the fields of the task's data. The reward is the weighted sum of the task's rewards for the
    dialogue; those that need a runtime (a sandbox) are left out, as verifiers does when it scores offline.

    Args:
        task: The class of the tasks, named module.Class or file.py:Class.
        config: Fields of the task's configuration.
    """

    def __init__(self, task: str, config: Mapping[str, Any] | None = None) -> None:
        self._kind: Any = load_named(task, "a task is named module.Class or file.py:Class", "", "environment")
        self._config = self._kind.config_type()(**(config or {}))
        self._state: Any = None
        self._toolsets = [self._sharing_state(toolset) for toolset in self._kind.toolsets(self._config)]
        self._server = MCPServer("tools")
        self._ready = False
        names = []
        for toolset in self._toolsets:
            for function in discover_decorated(toolset, "tool"):
                names.append(getattr(function, "tool_name", None) or function.__name__)
                self._server.add_tool(function, name=names[-1], description=(function.__doc__ or "").strip() or None)
        self._offer(names)

    async def reset(self, **row: Any) -> None:
        """Make the row's task."""
        fields = self._kind.data_type().model_fields
        data = self._kind.data_type()(**{name: value for name, value in row.items() if name in fields})
        self._task = self._kind(data, self._config)
        task = vf.TraceTask(type=self._kind.__name__, data=data, key=self._task.key, hash=self._task.hash)
        self._trace = vf.Trace(
            task=task, state=vf.state.state_cls(self._kind)(), agent=vf.AgentInfo(config=vf.AgentConfig())
        )
        self._state = self._trace.state
        for toolset in self._toolsets:
            if not self._ready:
                await toolset.setup()
            await toolset.setup_task(data)
        self._ready = True
        await self._task.setup(self._trace, None)

    async def get_reward(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """The task's rewards of a dialogue."""
        for number, message in enumerate(messages):
            role, content = message["role"], message["content"]
            made = vf.AssistantMessage(content=content) if role == "assistant" else vf.UserMessage(content=content)
            made = vf.ToolMessage(tool_call_id=str(number), content=content) if role == "tool" else made
            parent = len(self._trace.nodes) - 1 if self._trace.nodes else None
            self._trace.nodes.append(vf.MessageNode(parent=parent, message=made, sampled=role == "assistant"))
        await self._task.finalize(self._trace, None)
        await self._task.score(self._trace)
        return float(self._trace.reward)

    def _offer(self, names: Sequence[str]) -> None:
        """Have the toolsets' tools as methods; without any, `step`."""
        if not names:
            self.__class__ = type("Verifiers", (type(self),), {"step": _answered})
            return
        listed = asyncio.run(self._server.list_tools())
        schemas = [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in listed
        ]
        _with_tools(self, {name: self._caller(name) for name in names}, schemas)

    def _caller(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            result = await self._server.call_tool(name, arguments)
            return "\n".join(block.text for block in result.content if block.type == "text")

        return call

    def _sharing_state(self, toolset: Any) -> Any:
        """The toolset with the task's state, which verifiers passes over HTTP."""
        environment = self
        toolset.__class__ = type(
            type(toolset).__name__, (type(toolset),), {"state": property(lambda self: environment._state)}
        )
        return toolset


def _answered(self: Any, text: str) -> tuple[str, bool]:
    return "", True


def _with_tools(environment: Any, tools: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> None:
    """Offer functions as methods of the environment, each with its name, description and parameters as JSON schema."""
    for schema in schemas:
        tools[schema["name"]].json_schema = {"type": "function", "function": dict(schema)}
    kind = type(environment)
    environment.__class__ = type(kind.__name__, (kind,), {name: staticmethod(tool) for name, tool in tools.items()})
