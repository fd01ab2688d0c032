"""Tasks of verifiers for `test_environments.py`: with and without tools."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    """A row."""

    answer: str


class Count(vf.State):
    """What tools and rewards share."""

    calls: int = 0


class Tools(vf.Toolset[vf.ToolsetConfig, Count]):
    """Tools with the row's secret."""

    async def setup_task(self, task: Data) -> None:
        self.secret = task.answer

    @vf.tool
    async def guess(self, number: int) -> str:
        """Guess the number."""
        self.state.calls += 1
        return "found" if str(number) == self.secret else "wrong"

    @vf.tool
    def fail(self) -> str:
        """Fail."""
        raise ValueError("not today")


class Game(vf.Task[Data, Count]):
    """A number is guessed by a tool, and said at the end."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Tools(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        return 1 / max(1, trace.state.calls)


class Question(vf.Task[Data]):
    """A question with one answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer == trace.last_reply)
