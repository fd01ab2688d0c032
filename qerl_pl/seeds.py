"""Seeds of named random streams.

Every random draw of a run (a completion's tokens, a norm's noise, the dropout of a step) has its own stream with a seed
from its name. A resumed or regrouped run therefore draws the same numbers as an uninterrupted one. This file imports no
PyTorch, so that environments and their worker processes start at once.
"""

import hashlib


def stream_seed(*name: int | str) -> int:
    """Seed of a named random stream, equal on every machine and in every process.

    Args:
        name: Parts of the name, such as (run seed, "rollout", version, prompt).

    Returns:
        An integer, uniform in [0, 2**63).
    """
    digest = hashlib.sha256("\x1f".join(f"{type(item).__name__}:{item}" for item in name).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
