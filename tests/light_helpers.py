"""What processes of environments import, without PyTorch, which takes them seconds, and the end of such a process."""

import time
from typing import Any

import psutil

from qerl_pl.toy.game import GuessNumber


class Echo:
    """Answers whatever is said."""

    def reset(self, **row: Any) -> None:
        """Begin a dialogue."""
        self.length = 0

    def step(self, text: str) -> tuple[str, bool]:
        """An answer, and whether the dialogue is over."""
        self.length = len(text)
        return "go on", False

    def get_reward(self) -> float:
        """One that differs between dialogues."""
        return float(self.length)


class WordyGame(GuessNumber):
    """Begins games of even numbers with an observation of several hundred tokens."""

    def reset(self, answer: str, **row: Any) -> str | None:  # type: ignore[override]
        """Begin a game."""
        super().reset(answer)
        return "word " * 300 if int(answer) % 2 == 0 else None


def gone(pid: int) -> bool:
    """Whether a process ends, which may take the system a moment."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
