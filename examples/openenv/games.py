"""Environments of OpenEnv for `test_environments.py`: actions, MCP tools, and a server."""

import sys
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    """An action."""

    number: int = Field(description="The guess.")


class Said(Observation):
    """An observation."""

    text: str = ""


class Game(Environment):
    """A number is guessed by asking; each wrong guess costs a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        self.number = (seed or 0) % 10
        return Said(text="Guess my number.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Said:
        found = action.number == self.number
        text = "found" if found else "higher" if self.number > action.number else "lower"
        return Said(text=text, done=found, reward=1.0 if found else -0.1)

    @property
    def state(self) -> State:
        return State()


class Adder(MCPEnvironment):
    """Tools by MCP."""

    def __init__(self) -> None:
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int = 2) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("not today")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    import uvicorn

    app = create_app(Game, Guess, Said, env_name="game", max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
