"""The measured differences of a study's claims: paired by seed, with Holm's correction, and their verdicts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from studies.train_on_4_bits.claims import ACCURACY, Claim, Contrast, Row, Statistic, claims
from studies.train_on_4_bits.intervals import Interval, Verdict, across_policies, holm, interval, verdict, within_policy
from studies.train_on_4_bits.plan import Level, Plan

CEILING = 0.9
"""Accuracy of the reference at half of the run above which a stratum decides nothing: there is no room to differ."""
Levels = Mapping[str, Level]
Unit = tuple[Level, ...]


@dataclass(frozen=True)
class Finding:
    """The measured difference of a contrast within one stratum."""

    contrast: Contrast
    stratum: dict[str, Level]
    difference: Interval | None
    """First minus second, paired by seed; None if no seed has both."""
    adjusted: Interval | None = None
    """The same at the confidence that Holm's procedure gives it; None for the preregistered outcome and one seed."""
    negligible: float = 0.0
    at_ceiling: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict of its interval."""
        return self._verdict(self.difference)

    @property
    def adjusted_verdict(self) -> Verdict:
        """The verdict of its adjusted interval, or of the plain one if it is not adjusted."""
        return self._verdict(self.adjusted or self.difference)

    def _verdict(self, difference: Interval | None) -> Verdict:
        if self.at_ceiling and difference is not None:
            return "at its ceiling"
        return verdict(difference, self.contrast.rule, self.contrast.margin, self.negligible)

    @property
    def bound(self) -> float:
        """The difference that the claim is tested against."""
        return -self.contrast.margin if self.contrast.rule == "not below" else 0.0


@dataclass(frozen=True)
class Result:
    """A claim with its measured differences."""

    claim: Claim
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """Over all contrasts and strata."""
        return self._over(lambda finding: finding.verdict)

    @property
    def adjusted_verdict(self) -> Verdict:
        """The same with Holm's correction."""
        return self._over(lambda finding: finding.adjusted_verdict)

    def _over(self, verdict_of: Callable[[Finding], Verdict]) -> Verdict:
        """Within each policy (the first factor of the strata), then over policies; ceilings decide nothing."""
        deciding, policies = [one for one in self.findings if not one.at_ceiling], dict[Level, list[Verdict]]()
        for one in deciding:
            policies.setdefault(next(iter(one.stratum.values()), ""), []).append(verdict_of(one))
        if len(deciding) < len(self.findings) and all(one.difference is None for one in deciding):
            return "at its ceiling"
        return across_policies([within_policy(verdicts) for verdicts in policies.values()])


def findings(plan: Plan, rows: Sequence[Row]) -> list[Result]:
    """The claims that the plan can test, with their measured differences.

    A claim on another accuracy than the study's measure, or on the gain over the start, is left out if no row has it.
    """
    results = []
    for claim in claims(plan):
        if not any(_compared(plan, contrast) for contrast in claim.contrasts):
            continue
        made = [
            Finding(
                contrast,
                stratum,
                difference(plan, rows, contrast, stratum),
                negligible=plan.negligible if contrast.statistic.curve in ("held out", "gain") else 0.0,
                at_ceiling=at_ceiling(plan, rows, stratum),
            )
            for contrast in claim.contrasts
            for stratum in _compared(plan, contrast)
        ]
        made += [Finding(contrast, {}, None) for contrast in claim.contrasts if not _compared(plan, contrast)]
        optional = all(one.contrast.statistic.tag or one.contrast.statistic.curve == "gain" for one in made)
        if not optional or any(one.difference is not None for one in made):
            results.append(Result(claim, made))
    return _adjusted(plan, results)


def _adjusted(plan: Plan, results: Sequence[Result]) -> list[Result]:
    """Holm's procedure over all differences with an interval but the preregistered outcome."""

    def counts(finding: Finding) -> bool:
        return finding.difference is not None and finding.difference.count > 1 and not _is_primary(plan, finding)

    pairs = [(one, one.difference) for result in results for one in result.findings if counts(one)]
    levels = iter(holm([difference.p_value(one.bound) for one, difference in pairs if difference is not None]))

    def adjust(finding: Finding) -> Finding:
        if finding.difference is None or not counts(finding):
            return finding
        return replace(finding, adjusted=finding.difference.at(next(levels)))

    return [replace(result, findings=[adjust(one) for one in result.findings]) for result in results]


def _is_primary(plan: Plan, finding: Finding) -> bool:
    first, second = plan.compare
    one = finding.contrast
    sides = (one.first, one.second) == ({"method": first}, {"method": second})
    return bool(plan.preregistered) and sides and one.statistic == ACCURACY and finding.stratum == strata(plan)[0]


def _compared(plan: Plan, contrast: Contrast) -> list[dict[str, Level]]:
    """The strata in which the plan has all runs of a contrast."""
    wanted = [
        contrast.first,
        contrast.second,
        {**contrast.first, **contrast.beside},
        {**contrast.second, **contrast.beside},
    ]
    sides = [[run.levels.items() for run in plan.runs if levels.items() <= run.levels.items()] for levels in wanted]
    return [one for one in strata(plan) if all(any(one.items() <= run for run in side) for side in sides)]


def strata(plan: Plan) -> list[dict[str, Level]]:
    """Every combination of the stratum factors' levels, by their order in the plan; runs are compared within one."""
    seen = dict.fromkeys(tuple(run.levels[factor] for factor in plan.strata) for run in plan.runs)
    orders = [list(dict.fromkeys(levels)) for levels in zip(*seen, strict=True)]
    ordered = sorted(seen, key=lambda levels: [order.index(one) for order, one in zip(orders, levels, strict=True)])
    return [dict(zip(plan.strata, levels, strict=True)) for levels in ordered]


def at_ceiling(plan: Plan, rows: Sequence[Row], stratum: Levels) -> bool:
    """Whether the reference is above `CEILING` when first validated at half of the run or later, mean over runs."""
    values = []
    for row in at(plan, rows, {**stratum, "method": plan.compare[1]}):
        points = row["held_out"].get(plan.measure, [])
        later = [value for rollout, value in points if 2 * rollout >= points[-1][0] > 0]
        values += later[:1]
    return bool(values) and statistics.fmean(values) > CEILING


def difference(plan: Plan, rows: Sequence[Row], contrast: Contrast, stratum: Levels) -> Interval | None:
    """A contrast's difference within a stratum over the units that all its runs have; other factors at defaults."""
    pairs = _pairs(plan, rows, contrast, stratum)
    if contrast.beside:
        others = _pairs(plan, rows, contrast, {**stratum, **contrast.beside})
        pairs = {unit: pairs[unit] - others[unit] for unit in pairs if unit in others}
    return interval_of(plan, pairs)


def _pairs(plan: Plan, rows: Sequence[Row], contrast: Contrast, levels: Levels) -> dict[Unit, float]:
    """First minus second by unit at these levels, which override the contrast's own."""
    first, second = (
        by_unit(plan, rows, {**side, **levels}, contrast.statistic) for side in (contrast.first, contrast.second)
    )
    return less(first, second)


def less(first: Mapping[Unit, float], second: Mapping[Unit, float]) -> dict[Unit, float]:
    """First minus second, of the units that both have."""
    return {unit: first[unit] - second[unit] for unit in first if unit in second}


def interval_of(plan: Plan, values: Mapping[Unit, float]) -> Interval | None:
    """Interval over the units; with several random factors, over means within the levels of the first."""
    groups: dict[Unit, list[float]] = {}
    for unit, value in values.items():
        groups.setdefault(unit[:1], []).append(value)
    return interval([statistics.fmean(group) for group in groups.values()]) if groups else None


def by_unit(plan: Plan, rows: Sequence[Row], levels: Levels, statistic: Statistic) -> dict[Unit, float]:
    """The metric by unit (seed) at these levels; factors that are not named are at their defaults."""
    values = {unit_of(plan, row): statistic.of(row, plan.measure) for row in at(plan, rows, levels)}
    return {unit: value for unit, value in values.items() if value is not None}


def unit_of(plan: Plan, row: Row) -> Unit:
    """The levels of the random factors."""
    return tuple(row["levels"][factor] for factor in plan.units)


def at(plan: Plan, rows: Sequence[Row], levels: Levels) -> list[Row]:
    """Rows at these levels, other factors at their defaults: one per unit."""
    wanted = {**plan.defaults, **levels}

    def matches(row: Row) -> bool:
        others = {factor: level for factor, level in row["levels"].items() if factor not in plan.units}
        return all(wanted.get(factor) == level for factor, level in others.items())

    return [row for row in rows if matches(row)]


def methods(plan: Plan) -> list[Level]:
    """The plan's methods, in its order."""
    return list(dict.fromkeys(run.levels["method"] for run in plan.runs))
