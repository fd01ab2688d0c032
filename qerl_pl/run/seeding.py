"""Random streams that depend on names, not on the order of calls.

Every random draw of a run (a completion's tokens, a norm's noise, the dropout of a step) has its own stream, seeded by
what it is for. A resumed or regrouped run therefore draws the same numbers as one that never stopped.
"""

import hashlib


def stream_seed(*parts: int | str) -> int:
    """Seed of the random stream that `parts` name, equal on every machine and in every process.

    Args:
        parts: what the stream is for, from the general to the special, such as (run seed, "rollout", version, prompt).

    Returns:
        An integer in [0, 2**63), uniformly spread.
    """
    digest = hashlib.sha256("\x1f".join(f"{type(part).__name__}:{part}" for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
