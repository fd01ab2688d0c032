"""Means with 95 % intervals over seeds, Holm's correction, the minimum detectable effect, verdicts on claims.

Student's t intervals: mean ± t(n - 1) · s / sqrt(n). With five seeds a percentile bootstrap would be too narrow by
a third: 1.96 · sqrt(4 / 5) instead of 2.78 standard errors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

CONFIDENCE = 0.95
POWER = 0.8
Rule = Literal["above", "not below"]
Verdict = Literal["holds", "does not hold", "mixed", "undecided", "not measured", "at its ceiling"]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    """Lower bound; nan for a single seed."""
    high: float
    """Upper bound; nan for a single seed."""
    count: int
    deviation: float = math.nan
    """Standard deviation of the values; nan for a single seed."""

    def at(self, confidence: float) -> "Interval":
        """The interval of the same values at another confidence."""
        return _around(self.mean, self.deviation, self.count, confidence)

    def p_value(self, bound: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that the mean is `bound`; needs two values."""
        if self.deviation == 0.0:
            return float(self.mean == bound)
        t = abs(self.mean - bound) * math.sqrt(self.count) / self.deviation
        return 2 * student_cdf(-t, self.count - 1)

    @property
    def detectable_effect(self) -> float:
        """The effect that such values show with power 0.8 in a two-sided test at 0.05; needs two values."""
        return noncentrality(self.count - 1) * self.deviation / math.sqrt(self.count)

    def __str__(self) -> str:
        spread = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.count > 1 else ""
        return f"{self.mean:+.3f}{spread}"


def student_cdf(t: float, degrees: int) -> float:
    """CDF of Student's t distribution: closed form for integer degrees of freedom.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Args:
        t: Argument.
        degrees: Degrees of freedom, at least 1.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term = total = (cosine if degrees > 1 else 0.0) if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided quantile: |t| is below it with probability `confidence`."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < (1 + confidence) / 2 else (low, middle)
    return (low + high) / 2


def noncentrality(degrees: int, power: float = POWER, confidence: float = CONFIDENCE) -> float:
    """Effect in standard errors that a two-sided t test finds with this power, on the effect's side.

    T > q with T = (Z + d) / S, where S² is chi-squared over its degrees of freedom, has the probability E[Φ(d - q S)].
    The expectation is a sum over 20,000 equal steps of S.
    """
    quantile = student_quantile(degrees, confidence)
    s = torch.linspace(0, 1 + 10 / math.sqrt(degrees), 20_001, dtype=torch.float64)[1:]
    log_density = (degrees - 1) * s.log() - degrees * s**2 / 2
    density = (log_density - log_density.max()).exp()
    density /= density.sum()
    low, high = 0.0, quantile + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        found = float((density * torch.special.ndtr(middle - quantile * s)).sum())
        low, high = (middle, high) if found < power else (low, middle)
    return (low + high) / 2


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and interval of one value per seed."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return _around(statistics.fmean(values), deviation, len(values), confidence)


def _around(mean: float, deviation: float, count: int, confidence: float) -> Interval:
    half = student_quantile(count - 1, confidence) * deviation / math.sqrt(count) if count > 1 else math.nan
    return Interval(mean, mean - half, mean + half, count, deviation)


def holm(p_values: Sequence[float], confidence: float = CONFIDENCE) -> list[float]:
    """The confidence of each test's interval by Holm's procedure, in the order of the p-values.

    The i-th smallest of m p-values is compared with (1 - confidence) / (m - i), counted from 0, until one is above it;
    the others share its level. An interval of this confidence excludes the bound if and only if Holm's test rejects.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    levels, level, rejects = [confidence] * len(p_values), 0.0, True
    for rank, index in enumerate(order):
        level = (1 - confidence) / (len(p_values) - rank) if rejects else level
        rejects = rejects and p_values[index] <= level
        levels[index] = 1 - level
    return levels


def verdict(difference: Interval | None, rule: Rule, margin: float = 0.0, negligible: float = 0.0) -> Verdict:
    """Verdict on a claim about a difference.

    Args:
        difference: Its interval, None if not measured; undecided for a single seed.
        rule: "above": the claim is difference > 0; "not below": difference >= -margin.
        margin: Tolerance of "not below".
        negligible: An "above" does not hold either if the interval lies within this distance of 0.
    """
    if difference is None:
        return "not measured"
    bound = -margin if rule == "not below" else 0.0
    if difference.low > bound:
        return "holds"
    within = rule == "above" and -negligible < difference.low and difference.high < negligible
    return "does not hold" if difference.high < bound or within else "undecided"


def within_policy(verdicts: Sequence[Verdict]) -> Verdict:
    """Verdict on a claim with several differences: it holds if all hold, and does not hold if one does not.

    If some were not measured and the others hold, it is undecided.
    """
    if all(one == "not measured" for one in verdicts):
        return "not measured"
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if all(one == "holds" for one in verdicts) else "undecided"


def across_policies(verdicts: Sequence[Verdict]) -> Verdict:
    """Verdict over policies: mixed if it holds for one and does not for another, else as within a policy."""
    if "holds" in verdicts and "does not hold" in verdicts:
        return "mixed"
    return within_policy(verdicts)
