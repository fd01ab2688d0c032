"""The claims of QeRL (arXiv 2510.11696), and what users ask beside them, as differences between runs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from studies.train_on_4_bits.intervals import Rule
from studies.train_on_4_bits.plan import Level, Plan

MARGIN = 0.03
"""Accuracy that "near" and "stable" may lose. In the paper the distance to full fine-tuning is below 0.01."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Statistic:
    """A scalar metric of a run."""

    label: str
    curve: str
    """A curve of the row; "held out" is the held-out accuracy, "start" its first value, "gain" its increase."""
    share: float = 1.0
    """Fraction of the rollouts that is used, from the first one."""
    when: str = ""
    """The same, as a suffix in plots."""
    growth: bool = False
    """The least-squares slope of the curve instead of its mean."""
    tag: str = ""
    """Another held-out accuracy than the study's measure: "accuracy" (greedy) or "pass@1" (sampled)."""
    format_spec: str = ".3f"
    """Of its mean in a table."""

    def of(self, row: Row, measure: str) -> float | None:
        """The metric of a row, None if the row lacks it. A diverged run has accuracy 0."""
        if self.curve in ("held out", "start", "gain"):
            return self._accuracy(row, other(measure, self.tag) if self.tag else measure)
        curve = row["curves"].get(self.curve, [])
        values = list(enumerate(curve[: max(1, round(self.share * len(curve)))]))
        values = [(point, value) for point, value in values if value is not None]
        if not self.growth:
            return statistics.fmean(value for _, value in values) if values else None
        if len(values) < 2:
            return None
        slope = statistics.linear_regression(*zip(*values, strict=True)).slope
        return slope / rollouts_of_point(row, curve) * 100

    def _accuracy(self, row: Row, measure: str) -> float | None:
        points = row["held_out"].get(measure, [])
        before = points[0][1] if points and points[0][0] == 0 else None
        if self.curve == "start":
            return before
        if row["ended"] == "diverged":
            after: float | None = 0.0
        else:
            after = points[-1][1] if points and points[-1][0] > 0 else None
        if self.curve == "gain":
            return None if after is None or before is None else after - before
        return after


def rollouts_of_point(row: Row, curve: Sequence[float | None]) -> int:
    """Number of rollouts that a point of a row's curve is the mean of."""
    return -(-int(row["rollouts"]) // len(curve))


def other(measure: str, metric: str) -> str:
    """The tag of another metric of the same questions, such as val/test/pass@1 for val/test/accuracy."""
    return f"{measure.rpartition('/')[0]}/{metric}"


FIRST_ENTROPY = Statistic("sampler entropy, first tenth (nats)", "sampler_entropy", 0.1, ", first tenth")
ENTROPY = Statistic("sampler entropy, first half (nats)", "sampler_entropy", 0.5, ", first half")
REWARD = Statistic("mean reward", "reward")
GROWTH = Statistic("reward growth, first half (per 100 rollouts)", "reward", 0.5, ", growth", growth=True)
"""Rewards flatten in the second half. A slope uses every rollout of the first; differences of its ends use few."""
MISMATCH = Statistic(
    "mean absolute difference of log-probabilities, trainer against sampler (nats)", "mismatch", format_spec=".4f"
)
SILENT = Statistic("mean share of groups without signal", "without_signal")
ACCURACY = Statistic("final held-out accuracy", "held out")
START = Statistic("held-out accuracy at the start", "start", when=", start")
GREEDY = Statistic("final greedy accuracy", "held out", when=", greedy", tag="accuracy")
SAMPLED = Statistic("final sampled accuracy", "held out", when=", sampled", tag="pass@1")
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
class Claim:
    """A claim and the differences that test it."""

    name: str
    text: str
    asks: str
    """What a user may want to know."""
    contrasts: Sequence[Contrast]


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
    beaten = (lora, "nf4")
    greedy = plan.measure == other(plan.measure, "accuracy")
    second, name = (SAMPLED, "sampled accuracy") if greedy else (GREEDY, "greedy accuracy")
    tested = [
        Claim(
            "accuracy",
            "NVFP4 with adaptive noise reaches a higher accuracy than 16-bit LoRA and QLoRA (NF4).",
            "Does NVFP4 with noise end higher than 16-bit LoRA and QLoRA?",
            [_method(aqn, method, ACCURACY) for method in beaten],
        ),
        Claim(
            name,
            f"The same in {name}.",
            f"And in {name}?",
            [_method(aqn, method, second) for method in beaten],
        ),
        Claim(
            "AQN accuracy",
            "Our addition: adaptive noise raises the accuracy of NVFP4 and of 16-bit LoRA.",
            "Does the noise raise accuracy, on 4 bits and on 16?",
            [_method(aqn, quantized, ACCURACY), _method(f"{lora}_aqn", lora, ACCURACY)],
        ),
        Claim(
            "rivals",
            "Our addition: in 16-bit LoRA adaptive noise raises accuracy more than what explores as much without it: a "
            "temperature or an entropy bonus that keep the entropy, or a fixed error in the weights.",
            "Does the noise do more than a temperature, an entropy bonus or a fixed error?",
            [
                _method(f"{lora}_aqn", rival, ACCURACY)
                for rival in (f"{lora}_temperature", f"{lora}_entropy", "placebo")
            ],
        ),
        Claim(
            "gain",
            "Our addition: NVFP4 with adaptive noise gains more accuracy over its start than 16-bit LoRA and QLoRA.",
            "Does NVFP4 with noise gain more over its start?",
            [_method(aqn, method, GAIN) for method in beaten],
        ),
        Claim(
            "full fine-tuning",
            f"NVFP4 with adaptive noise matches full fine-tuning: at most {MARGIN} below its accuracy.",
            f"Does NVFP4 with noise match full fine-tuning (within {MARGIN})?",
            [_method(aqn, "full", ACCURACY, "not below", MARGIN)],
        ),
        Claim("entropy", "Quantization increases the entropy of the policy.", "Does NVFP4 raise entropy?", entropy),
        Claim(
            "AQN entropy",
            "Adaptive noise increases it further.",
            "Does the noise raise it further?",
            [_method(aqn, quantized, ENTROPY)],
        ),
        Claim(
            "stronger noise",
            "Our addition: adaptive noise of 5 % of each norm's scale raises the entropy and the accuracy of NVFP4.",
            "Does stronger noise, 5 % of each norm's scale, raise entropy and accuracy?",
            [_method(f"{aqn}_relative", quantized, statistic) for statistic in (ENTROPY, ACCURACY)],
        ),
        Claim(
            "AQN reward",
            "Adaptive noise makes the reward grow faster.",
            "Does the reward grow faster with noise?",
            [_method(aqn, quantized, GROWTH), _method(aqn, lora, GROWTH)],
        ),
        Claim(
            "decay",
            "Exponential decay of the noise beats linear, cosine and logarithmic decay.",
            "Is exponential decay of the noise the best?",
            decays,
        ),
        Claim(
            "learning rate",
            f"NVFP4 is stable at larger learning rates: at most {MARGIN} below its accuracy at the default rate.",
            "Is NVFP4 stable at larger learning rates?",
            rates,
        ),
        Claim(
            "learning rate, vs 16-bit",
            "NVFP4 tolerates larger learning rates better than 16-bit LoRA.",
            "Does it tolerate them better than 16 bits?",
            beside,
        ),
        Claim(
            "noise by rank",
            "3PO (arXiv 2608.09805): separate noise per rank leaves fewer groups without signal and reaches a higher "
            "reward and accuracy.",
            "Is separate noise per rank better?",
            [_method(aqn, own, SILENT), _method(own, aqn, REWARD), _method(own, aqn, ACCURACY)],
        ),
    ]
    compared = [contrast for claim in tested for contrast in claim.contrasts]
    reference = plan.compare[1]
    rest = [_method(str(method), reference, ACCURACY, "not below", MARGIN) for method in _levels(plan, "method")]
    rest = [one for one in rest if one.first != one.second and replace(one, rule="above", margin=0.0) not in compared]
    label = plan.label("method", reference)
    text = f"Our addition: every other method ends at most {MARGIN} below {label}."
    return [*tested, Claim("other methods", text, f"Do all other methods end near {label} (within {MARGIN})?", rest)]


def _levels(plan: Plan, factor: str) -> list[Any]:
    """Distinct levels of a factor in the plan's runs, in order."""
    return list(dict.fromkeys(run.levels[factor] for run in plan.runs if factor in run.levels))
