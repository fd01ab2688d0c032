"""One dialogue of the policy with an environment, tokens in, tokens out; and the settings of environments."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qerl_pl.chat.continuation import ChatContinuation
from qerl_pl.chat.tool_calls import MalformedCall, ToolCall, ToolFormat
from qerl_pl.environments.contract import Opening, ToolAnswer
from qerl_pl.environments.pool import EnvironmentPool
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.types import Completion, DialogueFacts, RolloutRequest

log = logging.getLogger("qerl_pl")


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environment of each completion, which then is a dialogue.

    Args:
        factory: A class that keeps to TRL's contract, or a function from a row to such an object, by name
            (`my_games.Guess`, `my_games.py:Guess`) or as `{class_path: ..., init_args: ...}`. `sampling.max_tokens`
            then bounds the tokens after the prompt, the environment's included. null samples one turn.
        weight: Weight of the environment's own reward (`get_reward`), named `environment`. `rewards` may then be empty.
        tool_format: How the policy writes tool calls: `hermes` (also Qwen 2.5 and 3), `qwen3_coder` (also Qwen3.5),
            `llama3_json`, or a regular expression with the group `name`, and `arguments` (JSON) or a group for each
            argument. auto chooses by the chat template.
        max_turns: Most turns of a dialogue.
        max_turn_tokens: Most tokens of a turn; null takes what is left of the dialogue.
        max_tool_response_tokens: Limit of tokens of an environment's answer, longer ones are cut; null does not cut.
        tool_time_limit: Seconds after which a tool, a step, `reset` or `get_reward` is ended.
        tool_wait: Seconds for which an engine that samples in rounds (TransformersEngine) waits for tools that have
            not answered, before it goes on with the dialogues whose tools have. vLLM goes on at once.
        workers: Most environments that are open at once, each in its process.
        variables: Names of variables that environments' processes get, such as that of an API key. They inherit few
            others, and no tokens.

    Raises:
        UserError: A limit is too small.
    """

    tool_format: str = "auto"
    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_tool_response_tokens: int | None = 256
    tool_wait: float = 10.0
    workers: int = 256
    factory: str | dict[str, Any] | Callable[..., Any] | None = None
    weight: float = 1.0
    tool_time_limit: float = 30.0
    variables: list[str] | None = None

    def __post_init__(self) -> None:
        limits = ("max_turns", "max_turn_tokens", "workers", "max_tool_response_tokens")
        require_at_least(1, {f"rollout.environment.{name}": getattr(self, name) for name in limits})
        if not self.tool_wait >= 0:
            raise UserError(f"rollout.environment.tool_wait is seconds from 0; got {self.tool_wait}; set it to 10, say")

    def pool(self) -> EnvironmentPool | None:
        """Where the environments are opened; None without a factory, with a warning of settings that need one."""
        if self.factory is None:
            if self != EnvironmentConfig():
                log.warning("rollout.environment has no effect without its factory")
            return None
        return EnvironmentPool(self.factory, self.tool_time_limit, self.workers, variables=self.variables or ())


class Dialogue:
    """A dialogue's tokens and messages.

    The prompt of a turn is all tokens so far; nothing is tokenized twice. A turn that a token limit ends, and an answer
    after which there is no room for another turn, end the dialogue as truncated. Calls of the last turn run too, though
    the policy sees no answer: they may decide the reward.

    Args:
        prompt_ids: The rendered prompt.
        opening: What the environment's reset gave.
        continuation: Renders what follows a turn.
        parse: Finds the tool calls of a turn.
        config: Settings of the environment, with limits of turns and tokens.
        max_tokens: Most tokens after the prompt, the environment's included.
        seed_of: Seed of each turn, by its number from 0.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        opening: Opening,
        continuation: ChatContinuation,
        parse: ToolFormat | None,
        config: EnvironmentConfig,
        max_tokens: int,
        seed_of: Callable[[int], int],
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.opening = opening
        self.config = config
        self.max_tokens = max_tokens
        self._continuation = continuation
        self._parse = parse
        self._seed_of = seed_of
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._turn: tuple[int, ...] = ()
        self.messages: list[dict[str, Any]] = []
        self._turns = self._calls = self._failed = 0
        self._seconds = 0.0
        self.truncated = False
        """Whether a limit of tokens ended it."""
        self._routing: Tensor | None = None

    def request(self) -> RolloutRequest:
        """The next turn: a prompt of all tokens so far."""
        left = self.max_tokens - len(self._ids)
        limit = left if self.config.max_turn_tokens is None else min(left, self.config.max_turn_tokens)
        return RolloutRequest(self.prompt_ids + tuple(self._ids), (self._seed_of(self._turns),), limit)

    def end_before_first_turn(self) -> None:
        """End the dialogue as truncated, with an empty message of the policy, which rewards may read."""
        self.messages.append({"role": "assistant", "content": ""})
        self.truncated = True

    def add_turn(self, turn: Completion) -> list[str | ToolCall | MalformedCall]:
        """Add a sampled turn.

        Returns:
            What the environment is asked: the calls of the turn, or its text where the environment steps; empty where
            the dialogue is over.
        """
        self._ids += turn.token_ids
        self._logprobs += turn.logprobs
        self._sampled += [True] * len(turn.token_ids)
        self._turn = turn.token_ids
        self._routing = turn.routing  # its prompt is all that came before
        self._turns += 1
        self.truncated = turn.truncated
        text = self._continuation.text(turn.token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        self.messages.append(message)
        if turn.truncated:
            return []
        if self.opening.steps:
            return [text]
        calls = [
            call.for_schema(self.opening.tools) if isinstance(call, ToolCall) else call
            for call in ([] if self._parse is None else self._parse(text))
        ]
        named = [call for call in calls if isinstance(call, ToolCall)]
        if named:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in named
            ]
        return [*calls]

    def add_answers(self, asked: Sequence[str | ToolCall | MalformedCall], answers: Sequence[ToolAnswer]) -> bool:
        """Add the environment's answers to what `add_turn` returned.

        Returns:
            Whether there is another turn.

        Raises:
            UserError: The chat template cannot go on after a turn.
        """
        offered = {tool["function"]["name"] for tool in self.opening.tools}
        messages = [_message(call, answer.text, offered) for call, answer in zip(asked, answers, strict=True)]
        self.messages += messages
        self._calls += len(answers)
        self._failed += sum(answer.failed for answer in answers)
        self._seconds += sum(answer.seconds for answer in answers)
        if self._turns >= self.config.max_turns or any(answer.done for answer in answers):
            return False
        limit = self.config.max_tool_response_tokens
        suffix = self._continuation.suffix(self._turn, messages, self.opening.tools, limit)
        if len(self._ids) + len(suffix) >= self.max_tokens:
            self.truncated = True
            return False
        self._ids += suffix
        self._logprobs += [0.0] * len(suffix)
        self._sampled += [False] * len(suffix)
        return True

    def completion(self, reward: float | None) -> Completion:
        """The dialogue so far, with the environment's reward."""
        facts = DialogueFacts(self._turns, self._calls, self._failed, self._seconds, tuple(self.messages), reward)
        return Completion(
            tuple(self._ids),
            tuple(self._logprobs),
            "length" if self.truncated else "stop",
            tuple(self._sampled),
            self.prompt_ids,
            facts,
            self._routing,
        )


def _message(asked: str | ToolCall | MalformedCall, text: str, offered: Collection[str]) -> dict[str, Any]:
    """The environment's answer as a message; its name is that of a tool, whatever the policy wrote."""
    if isinstance(asked, str):
        return {"role": "user", "content": text}
    name = asked.name if isinstance(asked, ToolCall) else ""
    return {"role": "tool", "name": name if name in offered else "unknown", "content": text}
