"""The claims of QeRL (arXiv 2510.11696) as differences between runs, and what was found of them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.study.intervals import Interval, Rule, Verdict, interval, together, verdict
from benchmarks.study.plan import Level, Plan

MARGIN = 0.03
"""Of accuracy: what "near" and "stable" may lose. The paper's own distance from full fine-tuning is below 0.01."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Statistic:
    """A number of a run."""

    label: str
    curve: str
    """Of the row's curves; "held out" is the accuracy, "gain" what it rose by."""
    share: float = 1.0
    """Of the run's rollouts, from the first."""
    when: str = ""
    """The same for a picture."""

    def of(self, row: Row, measure: str) -> float | None:
        """Its value; None where the run does not tell. A policy that is no longer finite answers nothing right."""
        if self.curve in ("held out", "gain"):
            found = row["held_out"].get(measure, [])
            before = found[0][1] if self.curve == "gain" and found else 0.0
            if row["ended"] == "diverged":
                return 0.0 - before
            return found[-1][1] - before if found and found[-1][0] > 0 else None
        curve = row["curves"].get(self.curve, [])
        known = [value for value in curve[: max(1, round(self.share * len(curve)))] if value is not None]
        return statistics.fmean(known) if known else None


FIRST_ENTROPY = Statistic("sampler's entropy over the first tenth, nats", "sampler_entropy", 0.1, ", first tenth")
ENTROPY = Statistic("sampler's entropy over the first half, nats", "sampler_entropy", 0.5, ", first half")
REWARD = Statistic("reward, mean over the run", "reward")
SILENT = Statistic("groups without signal, mean over the run", "without_signal")
ACCURACY = Statistic("held-out accuracy at the end", "held out")
GAIN = Statistic("held-out accuracy at the end less that before", "gain", when=", gain")


@dataclass(frozen=True)
class Part:
    """One difference that a claim stands on: first minus second, everything else the same."""

    first: Mapping[str, Level]
    second: Mapping[str, Level]
    statistic: Statistic
    rule: Rule = "above"
    margin: float = 0.0
    beside: Mapping[str, Level] = field(default_factory=dict)
    """Where the same difference is taken, too, and subtracted; nowhere if empty."""


@dataclass(frozen=True)
class Finding:
    """A part as it was measured, within one stratum."""

    part: Part
    stratum: dict[str, Level]
    difference: Interval | None
    """First minus second, paired by seed; None without a pair."""

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        return verdict(self.difference, self.part.rule, self.part.margin)


@dataclass(frozen=True)
class Claim:
    """What the paper says."""

    name: str
    text: str
    parts: Sequence[Part]
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Of all parts in all strata."""
        return together([finding.verdict for finding in self.findings])


def _method(first: str, second: str, statistic: Statistic, rule: Rule = "above", margin: float = 0.0) -> Part:
    return Part({"method": first}, {"method": second}, statistic, rule, margin)


def claims(plan: Plan) -> list[Claim]:
    """The claims; those about learning rates and decays for the levels that the plan has."""
    aqn, own, quantized, lora = "nvfp4_aqn", "nvfp4_aqn_own", "nvfp4", "lora16"
    others = [decay for decay in _levels(plan, "decay") if decay != "exponential"]
    base, rising = plan.defaults.get("lr", ""), list(plan.labels.get("lr", {}))
    rising = rising or [str(rate) for rate in sorted(_levels(plan, "lr"))]  # levels that are values alone
    larger = [rate for rate in _levels(plan, "lr") if str(base) in rising[: rising.index(str(rate))]]
    decays = [
        Part({"method": aqn, "decay": "exponential"}, {"method": aqn, "decay": decay}, ACCURACY) for decay in others
    ]
    rates = [
        Part({"method": quantized, "lr": rate}, {"method": quantized, "lr": base}, ACCURACY, "not below", MARGIN)
        for rate in larger
    ]
    beside = [replace(part, rule="above", margin=0.0, beside={"method": lora}) for part in rates]
    entropy = [_method(quantized, lora, statistic) for statistic in (FIRST_ENTROPY, ENTROPY)]
    found = [
        Claim("entropy", "Quantization raises the policy's entropy.", entropy),
        Claim("AQN's entropy", "Adaptive noise raises it further.", [_method(aqn, quantized, ENTROPY)]),
        Claim(
            "AQN's reward",
            "With adaptive noise the reward grows faster.",
            [_method(aqn, quantized, REWARD), _method(aqn, lora, REWARD)],
        ),
        Claim(
            "accuracy",
            "NVFP4 with adaptive noise ends above 16-bit LoRA and QLoRA (NF4).",
            [_method(aqn, other, ACCURACY) for other in (lora, "nf4")],
        ),
        Claim(
            "full fine-tuning",
            f"NVFP4 with adaptive noise ends near full fine-tuning: not more than {MARGIN} below.",
            [_method(aqn, "full", ACCURACY, "not below", MARGIN)],
        ),
        Claim(
            "gain",
            "Not the paper's: from where it began, NVFP4 with adaptive noise gains more than 16-bit LoRA and QLoRA.",
            [_method(aqn, other, GAIN) for other in (lora, "nf4")],
        ),
        Claim("decay", "Exponential decay beats the other three.", decays),
        Claim(
            "learning rate",
            f"Larger learning rates stay stable: NVFP4 ends not more than {MARGIN} below its end at the usual one.",
            rates,
        ),
        Claim("rates beside 16 bits", "Larger learning rates suit NVFP4 better than they suit 16-bit LoRA.", beside),
        Claim(
            "noise by rank",
            "3PO's (arXiv 2608.09805): noise of each rank's own leaves fewer groups without signal, and ends above.",
            [_method(aqn, own, SILENT), _method(own, aqn, REWARD), _method(own, aqn, ACCURACY)],
        ),
    ]
    return found


def _levels(plan: Plan, factor: str) -> list[Any]:
    """Levels that the plan's runs have of a factor, in their order."""
    return list(dict.fromkeys(run.levels[factor] for run in plan.runs if factor in run.levels))


def findings(plan: Plan, rows: Sequence[Row]) -> list[Claim]:
    """The claims with what was measured of them; those that the plan has no difference of are left out."""
    made = [claim for claim in claims(plan) if any(_compared(plan, part) for part in claim.parts)]
    for claim in made:
        for part in claim.parts:
            for stratum in _compared(plan, part) or [{}]:
                claim.findings.append(Finding(part, stratum, difference(plan, rows, part, stratum)))
    return made


def _compared(plan: Plan, part: Part) -> list[dict[str, Level]]:
    """The strata in which the plan has all sides of a part."""
    wanted = [part.first, part.second, {**part.first, **part.beside}, {**part.second, **part.beside}]
    sides = [[run.levels.items() for run in plan.runs if levels.items() <= run.levels.items()] for levels in wanted]
    return [one for one in strata(plan) if all(any(one.items() <= run for run in side) for side in sides)]


def strata(plan: Plan) -> Iterator[dict[str, Level]]:
    """Every combination of levels that is compared within, never across."""
    seen = dict.fromkeys(tuple(run.levels[factor] for factor in plan.strata) for run in plan.runs)
    for levels in seen:
        yield dict(zip(plan.strata, levels, strict=True))


def difference(plan: Plan, rows: Sequence[Row], part: Part, stratum: Mapping[str, Level]) -> Interval | None:
    """A part's difference within a stratum, by seeds that all sides have; other factors at their defaults."""
    found = _pairs(plan, rows, part, stratum)
    if part.beside:
        others = _pairs(plan, rows, part, {**stratum, **part.beside})
        found = {seed: found[seed] - others[seed] for seed in found if seed in others}
    return interval(list(found.values())) if found else None


def _pairs(plan: Plan, rows: Sequence[Row], part: Part, levels: Mapping[str, Level]) -> dict[Level, float]:
    """First minus second at these levels by seed, which go before the part's own."""
    first, second = (by_seed(plan, rows, {**side, **levels}, part.statistic) for side in (part.first, part.second))
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def by_seed(plan: Plan, rows: Sequence[Row], levels: Mapping[str, Level], statistic: Statistic) -> dict[Level, float]:
    """A number of each seed's run at these levels; a factor that is not named is at its default."""
    wanted = {**plan.defaults, **levels}
    found: dict[Level, float] = {}
    for row in rows:
        others = {factor: level for factor, level in row["levels"].items() if factor != "seed"}
        value = statistic.of(row, plan.measure)
        if value is not None and all(wanted.get(factor) == level for factor, level in others.items()):
            found[row["levels"]["seed"]] = value
    return found
