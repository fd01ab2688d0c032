"""The claims of QeRL (arXiv 2510.11696) as differences between runs, and their verdicts."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.study.intervals import Interval, Rule, Verdict, interval, together, verdict
from benchmarks.study.plan import Level, Plan

MARGIN = 0.03
"""Accuracy that "near" and "stable" may lose. In the paper the distance to full fine-tuning is below 0.01."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Statistic:
    """A scalar metric of a run."""

    label: str
    curve: str
    """A curve of the row; "held out" is the held-out accuracy, "gain" its increase over the run."""
    share: float = 1.0
    """Fraction of the rollouts that is averaged, from the first one."""
    when: str = ""
    """The same, as a suffix in plots."""

    def of(self, row: Row, measure: str) -> float | None:
        """The metric of a row, None if the row lacks it. A diverged run has accuracy 0."""
        if self.curve in ("held out", "gain"):
            points = row["held_out"].get(measure, [])
            before = points[0][1] if self.curve == "gain" and points else 0.0
            if row["ended"] == "diverged":
                return 0.0 - before
            return points[-1][1] - before if points and points[-1][0] > 0 else None
        curve = row["curves"].get(self.curve, [])
        values = [value for value in curve[: max(1, round(self.share * len(curve)))] if value is not None]
        return statistics.fmean(values) if values else None


FIRST_ENTROPY = Statistic("sampler entropy, first tenth (nats)", "sampler_entropy", 0.1, ", first tenth")
ENTROPY = Statistic("sampler entropy, first half (nats)", "sampler_entropy", 0.5, ", first half")
REWARD = Statistic("mean reward", "reward")
SILENT = Statistic("mean share of groups without signal", "without_signal")
ACCURACY = Statistic("final held-out accuracy", "held out")
GAIN = Statistic("gain in held-out accuracy", "gain", when=", gain")


@dataclass(frozen=True)
class Contrast:
    """One difference that a claim is tested on: first minus second, all other factors equal."""

    first: Mapping[str, Level]
    second: Mapping[str, Level]
    statistic: Statistic
    rule: Rule = "above"
    margin: float = 0.0
    beside: Mapping[str, Level] = field(default_factory=dict)
    """Levels at which the same difference is computed and subtracted; empty: nothing is subtracted."""


@dataclass(frozen=True)
class Finding:
    """The measured difference of a contrast within one stratum."""

    contrast: Contrast
    stratum: dict[str, Level]
    difference: Interval | None
    """First minus second, paired by seed; None if no seed has both."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of its interval."""
        return verdict(self.difference, self.contrast.rule, self.contrast.margin)


@dataclass(frozen=True)
class Claim:
    """A claim and the differences that test it."""

    name: str
    text: str
    contrasts: Sequence[Contrast]
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Over all contrasts and strata."""
        return together([finding.verdict for finding in self.findings])


def _method(first: str, second: str, statistic: Statistic, rule: Rule = "above", margin: float = 0.0) -> Contrast:
    return Contrast({"method": first}, {"method": second}, statistic, rule, margin)


def claims(plan: Plan) -> list[Claim]:
    """All claims; learning rates and decays are compared for the levels in the plan."""
    aqn, own, quantized, lora = "nvfp4_aqn", "nvfp4_aqn_own", "nvfp4", "lora16"
    others = [decay for decay in _levels(plan, "decay") if decay != "exponential"]
    base, rising = plan.defaults.get("lr", ""), list(plan.labels.get("lr", {}))
    rising = rising or [str(rate) for rate in sorted(_levels(plan, "lr"))]  # levels that are values alone
    larger = [rate for rate in _levels(plan, "lr") if str(base) in rising[: rising.index(str(rate))]]
    decays = [
        Contrast({"method": aqn, "decay": "exponential"}, {"method": aqn, "decay": decay}, ACCURACY) for decay in others
    ]
    rates = [
        Contrast({"method": quantized, "lr": rate}, {"method": quantized, "lr": base}, ACCURACY, "not below", MARGIN)
        for rate in larger
    ]
    beside = [replace(contrast, rule="above", margin=0.0, beside={"method": lora}) for contrast in rates]
    entropy = [_method(quantized, lora, statistic) for statistic in (FIRST_ENTROPY, ENTROPY)]
    found = [
        Claim("entropy", "Quantization increases the entropy of the policy.", entropy),
        Claim("AQN entropy", "Adaptive noise increases it further.", [_method(aqn, quantized, ENTROPY)]),
        Claim(
            "AQN reward",
            "Adaptive noise makes the reward grow faster.",
            [_method(aqn, quantized, REWARD), _method(aqn, lora, REWARD)],
        ),
        Claim(
            "accuracy",
            "NVFP4 with adaptive noise reaches a higher accuracy than 16-bit LoRA and QLoRA (NF4).",
            [_method(aqn, other, ACCURACY) for other in (lora, "nf4")],
        ),
        Claim(
            "full fine-tuning",
            f"NVFP4 with adaptive noise matches full fine-tuning: at most {MARGIN} below its accuracy.",
            [_method(aqn, "full", ACCURACY, "not below", MARGIN)],
        ),
        Claim(
            "gain",
            "Our addition: NVFP4 with adaptive noise gains more accuracy over its start than 16-bit LoRA and QLoRA.",
            [_method(aqn, other, GAIN) for other in (lora, "nf4")],
        ),
        Claim("decay", "Exponential decay of the noise beats linear, cosine and logarithmic decay.", decays),
        Claim(
            "learning rate",
            f"NVFP4 is stable at larger learning rates: at most {MARGIN} below its accuracy at the default rate.",
            rates,
        ),
        Claim("learning rate, vs 16-bit", "NVFP4 tolerates larger learning rates better than 16-bit LoRA.", beside),
        Claim(
            "noise by rank",
            "3PO (arXiv 2608.09805): separate noise per rank leaves fewer groups without signal and reaches a higher "
            "reward and accuracy.",
            [_method(aqn, own, SILENT), _method(own, aqn, REWARD), _method(own, aqn, ACCURACY)],
        ),
    ]
    return found


def _levels(plan: Plan, factor: str) -> list[Any]:
    """Distinct levels of a factor in the plan's runs, in order."""
    return list(dict.fromkeys(run.levels[factor] for run in plan.runs if factor in run.levels))


def findings(plan: Plan, rows: Sequence[Row]) -> list[Claim]:
    """The claims that the plan can test, with their measured differences."""
    made = [claim for claim in claims(plan) if any(_compared(plan, contrast) for contrast in claim.contrasts)]
    for claim in made:
        for contrast in claim.contrasts:
            for stratum in _compared(plan, contrast) or [{}]:
                claim.findings.append(Finding(contrast, stratum, difference(plan, rows, contrast, stratum)))
    return made


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


def strata(plan: Plan) -> Iterator[dict[str, Level]]:
    """Every combination of the stratum factors' levels; runs are compared only within a stratum."""
    seen = dict.fromkeys(tuple(run.levels[factor] for factor in plan.strata) for run in plan.runs)
    for levels in seen:
        yield dict(zip(plan.strata, levels, strict=True))


def difference(plan: Plan, rows: Sequence[Row], contrast: Contrast, stratum: Mapping[str, Level]) -> Interval | None:
    """A contrast's difference within a stratum over the seeds that all its runs have; other factors at defaults."""
    pairs = _pairs(plan, rows, contrast, stratum)
    if contrast.beside:
        others = _pairs(plan, rows, contrast, {**stratum, **contrast.beside})
        pairs = {seed: pairs[seed] - others[seed] for seed in pairs if seed in others}
    return interval(list(pairs.values())) if pairs else None


def _pairs(plan: Plan, rows: Sequence[Row], contrast: Contrast, levels: Mapping[str, Level]) -> dict[Level, float]:
    """First minus second by seed at these levels, which override the contrast's own."""
    first, second = (
        by_seed(plan, rows, {**side, **levels}, contrast.statistic) for side in (contrast.first, contrast.second)
    )
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def by_seed(plan: Plan, rows: Sequence[Row], levels: Mapping[str, Level], statistic: Statistic) -> dict[Level, float]:
    """The metric by seed at these levels; factors that are not named are at their defaults."""
    wanted = {**plan.defaults, **levels}
    values: dict[Level, float] = {}
    for row in rows:
        others = {factor: level for factor, level in row["levels"].items() if factor != "seed"}
        value = statistic.of(row, plan.measure)
        if value is not None and all(wanted.get(factor) == level for factor, level in others.items()):
            values[row["levels"]["seed"]] = value
    return values
