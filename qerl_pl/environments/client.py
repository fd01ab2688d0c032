"""The trainer's side of a worker process of environments."""

import asyncio
import json
import os
import pickle
import re
import signal
from collections.abc import Mapping
from typing import Any

from qerl_pl.environments.worker import Frame

END_TIMEOUT_S = 5.0
"""Seconds that a process has to end, or to close its environment."""
_MISSING_VARIABLE = re.compile(r"KeyError: '(\w+)'")


class WorkerClient:
    """The trainer's side of a worker."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.pid: int | None = None
        self.made: Mapping[str, Any] = {}
        self.busy = True
        """Whether it is gone, or has not replied to a request."""
        self.ended: asyncio.Future[int | None] = loop.create_future()

    def note_end(self, status: int | None) -> None:
        """Note the process's exit status; None if it is unknown."""
        if not self.ended.done():
            self.ended.set_result(status)

    def disconnect(self) -> None:
        """Close the connection."""
        self.writer.close()

    async def ask(self, seconds: float, *message: Any) -> Mapping[str, Any]:
        """Send a request; returns as `receive`."""
        data = pickle.dumps(message)
        self.busy = True
        self.writer.write(Frame.pack(len(data)) + data)
        reply = await self.receive(seconds)
        self.busy = "gone" in reply
        return reply

    async def receive(self, seconds: float) -> Mapping[str, Any]:
        """The next reply. After `seconds`, or if the process ended, an error with `gone`: it is to be released."""
        reading = asyncio.ensure_future(read_message(self.reader))
        await asyncio.wait({reading, self.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and (reply := reading.result()) is not None:
            return reply
        if not reading.done() and not self.ended.done():
            reading.cancel()
            return {"error": f"ended after its time limit of {seconds:g} s", "gone": True}
        reading.cancel()
        await asyncio.wait({self.ended}, timeout=END_TIMEOUT_S)
        status = self.ended.result() if self.ended.done() else None
        return {"error": f"the environment's process ended ({_status(status)})", "gone": True}


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message; None at the end of the connection."""
    try:
        return json.loads(await reader.readexactly(Frame.unpack(await reader.readexactly(Frame.size))[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _status(status: int | None) -> str:
    if status is None:
        return "no exit status"
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def remedy_of(error: str) -> str:
    """What to do about an environment's error."""
    missing = _MISSING_VARIABLE.search(error)
    if missing is not None and missing[1] in os.environ:
        return f"workers get few variables: name {missing[1]} in rollout.environment.variables"
    return "correct it"
