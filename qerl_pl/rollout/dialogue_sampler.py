"""Samples dialogues: turns by a rollout engine, answers by a pool of environments."""

import logging
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl_pl.chat.continuation import ChatContinuation
from qerl_pl.chat.template import template_texts
from qerl_pl.chat.tool_calls import MalformedCall, ToolCall, ToolFormat, tool_format_of
from qerl_pl.engines.base import RequestSource, RolloutEngine, generate_from
from qerl_pl.environments.contract import Opening, ToolAnswer
from qerl_pl.environments.pool import EnvironmentPool, Session, answered, remedy_of
from qerl_pl.rollout.dialogue import Dialogue, EnvironmentConfig
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

log = logging.getLogger("qerl_pl")


@dataclass(frozen=True)
class DialogueJob:
    """A dialogue to sample."""

    prompt: Prompt
    sample: int
    """Index among the dialogues of its prompt."""


class DialogueSampler:
    """Samples dialogues with environments.

    Args:
        config: Settings.
        environments: Where environments are opened.
        tokenizer: The policy's tokenizer.
        ends: Token ids that end a turn.
        max_prompt_tokens: Most tokens of a prompt, tools and observation included; a longer one ends its dialogue.
        system_prompt: System message of prompts without their own.
        template_kwargs: Variables of the chat template.
        instruction: Text behind prompts that are no conversations.

    Raises:
        UserError: The tool format is unknown, or the chat template can go on neither after a tool nor after a user.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        environments: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        max_prompt_tokens: int,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        instruction: str | None = None,
    ) -> None:
        self.config = config
        self.environments = environments
        self.max_prompt_tokens = max_prompt_tokens
        self.continuation = ChatContinuation(tokenizer, ends, template_kwargs, system_prompt, instruction)
        self._checked: set[str] = set()
        self._parse: ToolFormat | None = None
        self._failing: set[str] = set()
        self._too_long: list[int] = []
        """Tokens of the prompts that were too long, until a warning has told of them."""

    def sample(
        self, engine: RolloutEngine, jobs: Sequence[DialogueJob], sampling: SamplingConfig, *stream: int | str
    ) -> list[Completion]:
        """A dialogue for each job, in their order.

        A turn's seed depends on (stream, prompt, sample, turn), an environment's on (stream, prompt): the dialogues of
        a prompt meet the same environment.

        Args:
            engine: Rollout engine, awake and synced.
            jobs: What to sample.
            sampling: Its `max_tokens` bounds the tokens after a prompt, the environment's included.
            stream: Name of the random stream, such as (run seed, "rollout", version).

        Raises:
            UserError: An environment does not start, or the chat template cannot go on.
        """
        with _Running(self, jobs, sampling, stream) as running:
            generate_from(engine, running, sampling)
            self._warn_of_failing_tools(running.answers)
            self._warn_of_long_prompts(len(jobs))
            return running.completions()

    def start(
        self, job: DialogueJob, opening: Opening, sampling: SamplingConfig, stream: Sequence[int | str]
    ) -> Dialogue:
        """The dialogue of an environment that is open; it is over if its prompt is too long.

        Raises:
            UserError: The chat template cannot go on.
        """
        self.check(opening)
        prompt = job.prompt
        chat = prompt.text if prompt.messages is None else prompt.messages
        ids = self.continuation.prompt(chat, opening.tools, opening.observation)
        parse = None if opening.steps else self._parse
        seed_of = partial(stream_seed, *stream, prompt.id, job.sample)
        too_long = len(ids) > self.max_prompt_tokens
        shown = prompt.token_ids if too_long else ids  # rows have at most max_prompt_tokens
        dialogue = Dialogue(shown, opening, self.continuation, parse, self.config, sampling.max_tokens, seed_of)
        if too_long:
            self._too_long.append(len(ids))
            dialogue.end_before_first_turn()
        return dialogue

    def _warn_of_long_prompts(self, dialogues: int) -> None:
        """Log a warning about dialogues that a long prompt ended."""
        if self._too_long:
            log.warning(
                "%d of %d dialogues ended before their first turn: with tools and observation their prompts have up to "
                "%d tokens, more than data.max_prompt_tokens, %d",
                len(self._too_long),
                dialogues,
                max(self._too_long),
                self.max_prompt_tokens,
            )
        self._too_long = []

    def _warn_of_failing_tools(self, answers: Mapping[str, Sequence[ToolAnswer]]) -> None:
        """Log a warning, once for each, about tools of which every call raised."""
        for name, given in answers.items():
            if name not in self._failing and all(answer.raised for answer in given):
                self._failing.add(name)
                log.warning(
                    "every call of %s failed, %d of %d: the first by %s; %s",
                    name,
                    len(given),
                    len(given),
                    given[0].text,
                    remedy_of(given[0].text),
                )

    def check(self, opening: Opening) -> None:
        """Check chat template and tool format, by the first environment of each kind.

        Raises:
            UserError: The template cannot go on after an answer, or the format is unknown.
        """
        role = "user" if opening.steps else "tool"
        if role in self._checked:
            return
        tokenizer = self.continuation.tokenizer
        self.continuation.check(role, opening.tools)
        if role == "tool":
            self._parse = tool_format_of(self.config.tool_format, str(tokenizer.chat_template))
            asked = [{"role": "user", "content": "Go on."}]
            kwargs = self.continuation.template_kwargs
            plain, offered = (
                template_texts(tokenizer, [asked], kwargs, tools=tools)[0] for tools in ((), opening.tools)
            )
            if plain == offered:
                log.warning(
                    "the chat template of %s does not mention tools: describe them in the system prompt",
                    tokenizer.name_or_path or "the policy",
                )
        self._checked.add(role)


def environment_row(prompt: Prompt) -> dict[str, Any]:
    """What an environment's `reset` takes: the row's columns, its conversation as `prompt`, its reference as `answer`
    and `solution`, and its `id`."""
    messages = [{"role": "user", "content": prompt.text}] if prompt.messages is None else prompt.messages
    own = {"prompt": [dict(message) for message in messages], "id": prompt.id}
    return {**own, "answer": prompt.reference, "solution": prompt.reference, **prompt.columns}


class _Running(RequestSource):
    """The dialogues of one call, as a source of requests.

    The futures of the environments only announce themselves; everything else happens in the caller's thread.
    """

    def __init__(
        self,
        sampler: DialogueSampler,
        jobs: Sequence[DialogueJob],
        sampling: SamplingConfig,
        stream: Sequence[int | str],
    ) -> None:
        self._sampler, self._jobs, self._sampling, self._stream = sampler, jobs, sampling, stream
        self._sessions: dict[int, Session] = {}
        self._dialogues: dict[int, Dialogue] = {}
        self._asked: dict[int, tuple[Sequence[str | ToolCall | MalformedCall], list[Future[ToolAnswer]]]] = {}
        self._rewards: dict[int, Future[float | None]] = {}
        self.answers: dict[str, list[ToolAnswer]] = {}
        """Answers of the environment by the tool's name, or by "step"."""
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._pending: dict[int, int] = {}
        self._ready: list[int] = []
        self._unopened = iter(range(len(jobs)))
        self._left = len(jobs)
        for _ in range(sampler.config.workers):
            self._open_next()

    def _open_next(self) -> None:
        """Open the environment of the next dialogue, if there is one."""
        key = next(self._unopened, None)
        if key is not None:
            self._left -= 1
            prompt = self._jobs[key].prompt
            seed = stream_seed(*self._stream, prompt.id, "environment")
            self._sessions[key] = self._sampler.environments.open(environment_row(prompt), seed)
            self._await(key, [self._sessions[key].opened])

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.close()

    def take(self, wait: bool, gather: bool = False) -> Sequence[tuple[int, RolloutRequest]]:
        """Requests of the dialogues that have their answers; with `gather`, the others get `tool_wait` seconds."""
        self._advance()
        deadline = time.monotonic() + self._sampler.config.tool_wait * gather
        while wait and self._pending:
            left = deadline - time.monotonic()
            if self._ready and (left <= 0 or not self._left and self._rewards.keys() >= self._pending.keys()):
                break
            self._advance(max(left, 0.0) if self._ready else None)
        ready, self._ready = sorted(self._ready), []
        return [(key, self._dialogues[key].request()) for key in ready]

    def put(self, key: int, completion: Completion) -> None:
        """Ask the environment for its answers to a turn, or for its reward."""
        session = self._sessions[key]
        asked = self._dialogues[key].add_turn(completion)
        if not asked:
            self._finish(key)
            return
        answers = [self._ask(session, item) for item in asked]
        self._asked[key] = asked, answers
        self._await(key, answers)

    def completions(self) -> list[Completion]:
        """The dialogues, in the order of the jobs."""
        return [self._dialogues[key].completion(self._rewards[key].result()) for key in range(len(self._jobs))]

    @staticmethod
    def _ask(session: Session, item: str | ToolCall | MalformedCall) -> "Future[ToolAnswer]":
        if isinstance(item, str):
            return session.step(item)
        if isinstance(item, ToolCall):
            return session.call(item.name, item.arguments)
        return answered(ToolAnswer(item.error, failed=True, seconds=0.0))

    def _finish(self, key: int) -> None:
        self._rewards[key] = self._sessions[key].reward(self._dialogues[key].messages)
        self._await(key, [self._rewards[key]])

    def _await(self, key: int, futures: Sequence["Future[Any]"]) -> None:
        """Continue the dialogue when all of these are done."""
        self._pending[key] = len(futures)
        for future in futures:
            future.add_done_callback(lambda _: self._done.put(key))

    def _advance(self, timeout: float | None = 0.0) -> None:
        """Continue the dialogues whose futures are done; wait up to `timeout` seconds for one, None without limit."""
        try:
            key = self._done.get(timeout=timeout) if timeout is None or timeout > 0 else self._done.get_nowait()
            while True:
                self._pending[key] -= 1
                if not self._pending[key]:
                    del self._pending[key]
                    self._go_on(key)
                key = self._done.get_nowait()
        except queue.Empty:
            return

    def _go_on(self, key: int) -> None:
        if key in self._rewards:
            self._sessions.pop(key).close()
            self._open_next()
        elif key not in self._dialogues:
            opening = self._sessions[key].opened.result()
            self._dialogues[key] = self._sampler.start(self._jobs[key], opening, self._sampling, self._stream)
            if self._dialogues[key].truncated:
                self._finish(key)
            else:
                self._ready.append(key)
        else:
            asked, futures = self._asked.pop(key)
            answers = [future.result() for future in futures]
            for item, answer in zip(asked, answers, strict=True):
                if not isinstance(item, MalformedCall):
                    self.answers.setdefault(item.name if isinstance(item, ToolCall) else "step", []).append(answer)
            if self._dialogues[key].add_answers(asked, answers):
                self._ready.append(key)
            else:
                self._finish(key)
