"""Retries of what may fail for a while: a service that restarts, or an environment's backend."""

import asyncio
import time

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class ExponentialBackoff:
    """Retries with pauses that double, until their number and their time are both used up.

    Args:
        retries: Least number of retries.
        seconds: Least time of retrying, from the first failure on.
    """

    def __init__(self, retries: int, seconds: float) -> None:
        self._retries, self._seconds, self._pause = retries, seconds, FIRST_PAUSE_S
        self._failed_at: float | None = None

    def is_used_up(self) -> bool:
        """Whether a failure is the last; to be asked after each of them."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._retries <= 0 and time.monotonic() - self._failed_at >= self._seconds

    async def pause(self) -> None:
        """Wait before the next retry."""
        self._retries -= 1
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
