"""On a GPU an optional feature that is off fails the test."""

from collections.abc import Collection

from qerl_pl.engines import VLLMEngine


def assert_active(engine: VLLMEngine, except_for: Collection[str] = ()) -> None:
    """Fail with the reasons where an optional feature of a launched engine is off.

    Args:
        engine: After `launch`.
        except_for: Features that this base or these settings cannot have.
    """
    off = {name: reason for name, reason in engine.inactive.items() if name not in except_for}
    assert not off, f"optional features of vLLM are off: {off}"
