"""A sampling temperature that is steered so that the sampler's entropy stays at a target."""

from typing import Any

from qerl_pl.algorithm.feedback import Feedback


class TemperatureControl:
    """Chooses the temperature of each rollout by the entropy of the one before.

    A rollout that is repeated, after a failure or from a checkpoint, has the temperature that it had.

    Args:
        feedback: Of `completions/sampler_entropy`.
        temperature: Of the first rollout.
    """

    def __init__(self, feedback: Feedback, temperature: float) -> None:
        self.feedback = feedback
        self._version, self._temperature = -1, feedback.clip(temperature)
        self._entropy = float("nan")

    def of(self, version: int) -> float:
        """Temperature of the rollout by this policy version."""
        return self._temperature if version <= self._version else self.feedback.next(self._temperature, self._entropy)

    def measured(self, version: int, entropy: float) -> None:
        """Note the sampler's entropy, in nats per token, of the rollout by this policy version."""
        self._version, self._temperature, self._entropy = version, self.of(version), entropy

    def state_dict(self) -> dict[str, Any]:
        """The last rollout's version, temperature and entropy."""
        return {"version": self._version, "temperature": self._temperature, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._version, self._temperature = state["version"], state["temperature"]
        self._entropy = state["entropy"]
