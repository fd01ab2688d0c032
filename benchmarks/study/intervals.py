"""Means with 95 % intervals over seeds, and verdicts on claims.

Student's t intervals: mean ± t(n - 1) · s / sqrt(n). With five seeds a percentile bootstrap would be too narrow by
a third: 1.96 · sqrt(4 / 5) instead of 2.78 standard errors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
Rule = Literal["above", "not below"]
Verdict = Literal["holds", "does not hold", "undecided", "not measured"]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    """Lower bound; nan for a single seed."""
    high: float
    """Upper bound; nan for a single seed."""
    count: int

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


def interval(values: Sequence[float]) -> Interval:
    """Mean and interval of one value per seed."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = student_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def verdict(difference: Interval | None, rule: Rule, margin: float = 0.0) -> Verdict:
    """Verdict on a claim about a difference.

    Args:
        difference: Its interval, None if not measured; undecided for a single seed.
        rule: "above": the claim is difference > 0; "not below": difference >= -margin.
        margin: Tolerance of "not below".
    """
    if difference is None:
        return "not measured"
    bound = -margin if rule == "not below" else 0.0
    if difference.low > bound:
        return "holds"
    return "does not hold" if difference.high < bound else "undecided"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Verdict on a claim with several differences: it holds if all hold, and does not hold if one does not.

    If some were not measured and the others hold, it is undecided.
    """
    if all(one == "not measured" for one in verdicts):
        return "not measured"
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if all(one == "holds" for one in verdicts) else "undecided"
