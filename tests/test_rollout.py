"""What a rollout hands over, and when it stops the run: by runs on a tiny policy."""

from pathlib import Path
from typing import Any

import pytest
from fit_helpers import train

from qerl_pl.engines import TransformersEngine
from qerl_pl.errors import UserError


class Forgetful(TransformersEngine):
    """Takes no adapter any more once it has slept, and samples with the one that `holds` says.

    Args:
        holds: "none", the "last" before the sleep, or the first "probe" of all.
    """

    def __init__(self, holds: str) -> None:
        super().__init__()
        self.holds = holds
        self.rollouts = 0
        self.asleep = self.slept = False
        self.kept: dict[str, Any] = {}

    def sleep(self) -> None:
        self.asleep = True
        super().sleep()

    def wake(self) -> None:
        self.slept = self.asleep
        super().wake()

    def sync(self, weights: Any) -> Any:
        given = weights.adapter
        if given is not None and not self.slept:
            copied = {name: (a.clone(), b.clone()) for name, (a, b) in given.items()}
            if any(b.any() for _, b in given.values()):
                self.kept.setdefault("probe", copied)
            self.kept["last"] = copied
        if given is not None and self.slept:
            weights = weights.__class__(**{**vars(weights), "adapter": self.kept.get(self.holds)})
        return super().sync(weights)

    def generate(self, requests: Any, sampling: Any) -> Any:
        self.rollouts += sampling.temperature > 0
        return super().generate(requests, sampling)


@pytest.mark.parametrize("holds", ["none", "last", "probe"])
@pytest.mark.parametrize("lr", [0.0, 0.05])
def test_an_adapter_that_is_lost_on_waking_stops_the_run_at_the_next_self_check(
    tiny_policy_dir: Path, tmp_path: Path, holds: str, lr: float
) -> None:
    engine = Forgetful(holds)
    with pytest.raises(UserError, match="engine and trainer must agree within 0.25 nats"):
        train(tiny_policy_dir, tmp_path, engine, lr=lr)
    assert engine.rollouts == 1
