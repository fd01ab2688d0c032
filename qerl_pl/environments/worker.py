"""The program of environments' workers: each makes an environment, and serves one dialogue after the other."""

import asyncio
import inspect
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from qerl_pl.environments.contract import load_factory, methods_of, row_arguments, takes_messages, takes_row
from qerl_pl.errors import UserError
from qerl_pl.runtime.fork_server import ERROR_CHARS, clean, one_line


def load(settings: tuple[bytes, int]) -> Callable[[], "Worker"]:
    """What makes a worker.

    Args:
        settings: The pickled factory, and the limit of an answer in characters.
    """
    pickled, chars = settings
    factory = load_factory(pickle.loads(pickled))
    import torch  # noqa: F401 - what schemas of tools need, imported once and not in each fork
    import transformers.utils.chat_template_utils  # noqa: F401

    return partial(Worker, factory, chars)


class _Refused(Exception):
    """A call that the environment did not get."""


class _NoText(_Refused):
    """An answer that is no text."""


class Worker:
    """Serves dialogues with one environment, sequentially."""

    def __init__(self, factory: Callable[..., Any], chars: int) -> None:
        self.factory = factory
        self.chars = chars
        self.from_row = takes_row(factory)
        self.runner = asyncio.Runner()
        self.folder = os.getcwd()
        self.close: Callable[..., Any] | None = None

    def start(self) -> dict[str, Any]:
        """Make the environment, unless each row has its own."""
        reply: dict[str, Any] = {} if self.from_row else self._guarded(self._make)
        self.left = _left()
        return reply

    def answer(self, kind: str, *arguments: Any) -> dict[str, Any]:
        """The reply to a request: the method `answer_kind`, and its seconds."""
        started = time.perf_counter()
        reply = self._guarded(getattr(self, f"answer_{kind}"), *arguments)
        return {**reply, "seconds": time.perf_counter() - started}

    def _guarded(self, answer: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The answer, or the error in one line: whatever an environment raises ends neither worker nor run."""
        try:
            return answer(*arguments)
        except _Refused as refused:
            return {"error": clean(str(refused))[:ERROR_CHARS], "raised": isinstance(refused, _NoText)}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which a tool may raise
            try:
                return {"error": one_line(error), "raised": True}
            except BaseException as second:  # of the exception's own methods
                return {"error": f"{type(error).__name__}: its message raises {type(second).__name__}", "raised": True}

    def _make(self, *row: Mapping[str, Any]) -> dict[str, Any]:
        self.environment = self._result(self.factory(*row))
        flag = inspect.getattr_static(self.environment, "dialogue_done", False)
        is_value = not (callable(flag) or isinstance(flag, property))
        self.always_done = is_value and bool(flag)
        self.clears_done = is_value and not self.always_done
        try:
            self.methods = methods_of(self.environment)
        except UserError as error:
            return {"error": str(error), "refused": True}
        self.close = self.methods.close
        return {"tools": list(self.methods.schemas), "steps": self.methods.step is not None}

    def _result(self, value: Any) -> Any:
        """The value; of a coroutine its result."""
        return self.runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def answer_open(self, pickled: bytes, seed: int | None) -> dict[str, Any]:
        """Begin a dialogue: reset the environment for a row."""
        os.chdir(self.folder)
        signal.setitimer(signal.ITIMER_REAL, 0)
        row = pickle.loads(pickled)
        if seed is not None:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
        if self.from_row and "error" in (made := self._make(row)):
            return made
        try:
            arguments = row_arguments(self.methods.reset, row)
        except UserError as error:
            return {"error": str(error), "refused": True}
        if self.clears_done and self._done():  # left by the dialogue before
            self.environment.dialogue_done = False
        self.over = False
        observation = self._result(self.methods.reset(**arguments))
        if observation is not None and not isinstance(observation, str):
            got = f"it returned a value of type {type(observation).__name__}"
            return {"error": f"reset returns text or None; {got}; return one of them", "refused": True}
        return {
            "observation": None if observation is None else clean(observation),
            "tools": list(self.methods.schemas),
            "steps": self.methods.step is not None,
            "done": self._done() and not self.always_done,
        }

    def answer_call(self, name: str, encoded: str) -> dict[str, Any]:
        """Call a tool, unless a call of the same turn has ended the dialogue."""
        if self.over:
            raise _Refused("the dialogue is over: a call before this one ended it")
        tool = self.methods.tools.get(name)
        if tool is None:
            offered = ", ".join(self.methods.tools) or "none"
            raise _Refused(f"there is no tool {name:.80}; the tools are {offered}")
        arguments = json.loads(encoded)
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise _Refused(f"wrong arguments: {error}; call {name}{inspect.signature(tool)}") from error
        reply = self._text(self._result(tool(**arguments)))
        self.over = reply["done"]
        return reply

    def answer_step(self, text: str) -> dict[str, Any]:
        """Give the policy's text to the environment."""
        if self.methods.step is None:
            raise _Refused("the environment answers tool calls, and has no step")
        value = self._result(self.methods.step(text))
        if isinstance(value, tuple) and len(value) == 2:
            return {**self._text(value[0]), "done": bool(value[1])}
        return self._text(value)

    def answer_reward(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The environment's reward."""
        get_reward = self.methods.get_reward
        if get_reward is None:
            return {"reward": None}
        reward = self._result(get_reward(messages=messages) if takes_messages(get_reward) else get_reward())
        return {"reward": None if reward is None else float(reward)}

    def answer_close(self) -> dict[str, Any]:
        """End the dialogue; a worker in which a tool left threads or processes serves no other."""
        if self.from_row:
            self.answer_end()
        (threads, processes), (threads_made, processes_made) = _left(), self.left
        reusable = threads <= threads_made and processes <= processes_made
        return {"reusable": reusable} if reusable else self.answer_end()

    def answer_end(self) -> dict[str, Any]:
        """Close the environment, once."""
        close, self.close = self.close, None
        if close is not None:
            self._result(close())
        return {}

    def _done(self) -> bool:
        done = getattr(self.environment, "dialogue_done", False)
        return not callable(done) and bool(done)

    def _text(self, value: Any) -> dict[str, Any]:
        """An answer as text: JSON unless it is a string, cut at the limit."""
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except TypeError as error:
                raise _NoText(f"a tool returns text or JSON; it returned a {type(value).__name__}: {error}") from error
        text = clean(value)
        if len(text) > self.chars:
            text = f"{text[: self.chars]}\n[cut after {self.chars} of {len(text)} characters]"
        return {"text": text, "done": self._done()}


def _left() -> tuple[int, set[psutil.Process]]:
    """Number of threads, and the processes that this one started, also those whose own parents have ended."""
    with suppress(ChildProcessError):  # without any, nothing is to be looked for
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return threading.active_count(), {*psutil.Process().children(recursive=True)}
    return threading.active_count(), set()


async def _awaited(value: Any) -> Any:
    return await value
