"""Feedback control: a multiplicative controller that holds a logged metric at a target."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl_pl.errors import UserError, require_one_of

log = logging.getLogger(__name__)

PATIENCE = 10
"""Rollouts in a row at a bound after which `BoundWarning` logs."""

TOLERANCE = 0.1
"""Relative error of the metric that `BoundWarning` takes as on target."""

EXPLORATION_EFFECT: Mapping[str, int] = {
    "completions/sampler_entropy": 1,
    "policy/entropy": 1,
    "mismatch/ess": -1,
    "completions/groups_without_signal_frac": -1,
}
"""Metrics that can be held: +1 where more noise, or a higher temperature, raises the metric, -1 where it lowers it."""


@dataclass(frozen=True)
class Feedback:
    """Steers a positive value, such as the noise's sigma, so that a metric stays at its target.

    With the relative error e = (target - measured) / target, clipped to [-1, 1], and the sign s of the value's effect
    on the metric, the next value is value * exp(gain * s * e), clipped to [minimum, maximum]: an integral controller on
    the logarithm, after the adaptive scale of parameter noise (arXiv 1706.01905, section 3) and PSN-RLVR (arXiv
    2602.02555), which also steer noise by what it does and not by a clock.

    Args:
        target: Value of the metric to hold, above 0.
        metric: A key of `EXPLORATION_EFFECT`.
        minimum: Smallest value, above 0.
        maximum: Largest value.
        gain: Largest change of a step: the value changes by a factor of at most exp(gain).
        name: Configuration key of the value, for errors.

    Raises:
        UserError: A number is out of range, or the metric is unknown.
    """

    target: float
    metric: str
    minimum: float
    maximum: float
    gain: float
    name: str

    def __post_init__(self) -> None:
        require_one_of(list(EXPLORATION_EFFECT), "metric", self.metric)
        for what, value in (("its target", self.target), ("gain", self.gain), ("its minimum", self.minimum)):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{self.name} under feedback needs {what} above 0; got {value}; raise it")
        if not self.minimum <= self.maximum < math.inf:
            raise UserError(
                f"{self.name} needs a minimum that is at most its maximum; got {self.minimum} and {self.maximum}; "
                "swap them"
            )

    def clip(self, value: float) -> float:
        """The nearest value in [minimum, maximum]."""
        return min(max(value, self.minimum), self.maximum)

    def first(self, value: float) -> float:
        """The value of the first rollout, as it is given.

        Raises:
            UserError: It is outside [minimum, maximum].
        """
        if not self.minimum <= value <= self.maximum:
            raise UserError(
                f"{self.name} under feedback must start within its bounds, {self.minimum:g} to {self.maximum:g}; got "
                f"{value:g}; change it, or the bounds"
            )
        return value

    def next(self, value: float, measured: float) -> float:
        """The value for the next rollout.

        Args:
            value: Of the rollout that was measured.
            measured: The metric there; NaN, where no token trained, changes nothing.
        """
        if math.isnan(measured):
            return self.clip(value)
        error = min(max((self.target - measured) / self.target, -1.0), 1.0)
        return self.clip(value * math.exp(self.gain * EXPLORATION_EFFECT[self.metric] * error))


def logged_value(metrics: Mapping[str, object], metric: str) -> float:
    """The value of a logged metric.

    Raises:
        UserError: It is not among them.
    """
    if metric not in metrics:
        raise UserError(
            f"feedback needs a metric that the run logs; {metric} is not logged; choose one of "
            f"{', '.join(name for name in EXPLORATION_EFFECT if name in metrics)}"
        )
    return float(metrics[metric])  # type: ignore[arg-type]


class BoundWarning:
    """Logs a warning where steering is exhausted: the value stays at a bound, and the metric away from its target."""

    def __init__(self, feedback: Feedback) -> None:
        self.feedback = feedback
        self._rollouts = 0

    def record(self, value: float, measured: float) -> None:
        """Record a rollout's value and metric; logs after `PATIENCE` such rollouts in a row, once for each time."""
        target = self.feedback.target
        at_bound = self.feedback.next(value, measured) == value and abs(measured - target) > TOLERANCE * target
        self._rollouts = self._rollouts + 1 if at_bound else 0
        if self._rollouts == PATIENCE:
            log.warning(
                "%s has been at its bound of %g for %d rollouts, and %s is %.3g, not near its target of %g; choose "
                "another target, or wider bounds",
                self.feedback.name,
                value,
                PATIENCE,
                self.feedback.metric,
                measured,
                target,
            )


class TemperatureControl:
    """Chooses the temperature of each rollout by the sampler's entropy in the previous one.

    A rollout that is repeated, after a failure or from a checkpoint, has the temperature that it had.

    Args:
        feedback: Of `completions/sampler_entropy`.
        temperature: Of the first rollout, within the feedback's bounds.

    Raises:
        UserError: The temperature is outside of them.
    """

    def __init__(self, feedback: Feedback, temperature: float) -> None:
        self.feedback = feedback
        self._version, self._temperature = -1, feedback.first(temperature)
        self._entropy = math.nan

    def of(self, version: int) -> float:
        """Temperature of the rollout by this policy version."""
        return self._temperature if version <= self._version else self.feedback.next(self._temperature, self._entropy)

    def measured(self, version: int, entropy: float) -> None:
        """Record the sampler's entropy, in nats per token, in the rollout of this policy version."""
        self._version, self._temperature, self._entropy = version, self.of(version), entropy

    def state_dict(self) -> dict[str, Any]:
        """The last rollout's version, temperature and entropy."""
        return {"version": self._version, "temperature": self._temperature, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._version, self._temperature = state["version"], state["temperature"]
        self._entropy = state["entropy"]
