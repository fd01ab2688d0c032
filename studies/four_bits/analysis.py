"""The study's figures from its rows of counts, with numpy alone.

    python studies/four_bits/analysis.py studies/four_bits/counts.jsonl studies/four_bits/study.jsonl

A row of counts has a policy's levels, the format that served it, and the number of right samples of each question; one
of the study has a run's curves. A difference is paired by seed, its interval Student's t over seeds; verdicts are those
of plan.md.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy


def own_format(method: str) -> str:
    """The format that a method trains on."""
    return "none" if method == "lora16" else method.partition("_")[0]


FORMATS = {"none": "16 bits", "nvfp4": "NVFP4", "nf4": "NF4", "mxfp4": "MXFP4"}
SIGMAS = {"nvfp4": "0", "nvfp4_aqn": "0.5 %", "nvfp4_aqn_2": "2 %", "nvfp4_aqn_5": "5 %"}
"""Noise on the norms of an NVFP4 policy at its start, over each norm's RMS, by method."""
OWN_FORMAT = {method: own_format(method) for method in ("lora16", "nvfp4", "nvfp4_aqn", "nf4")}
"""Of the methods that are compared."""
MARGIN = 0.02
PRIMARY = ("nvfp4_aqn", "lora16")
TRAINED = (PRIMARY, ("nvfp4", "lora16"), ("nf4", "lora16"), ("nvfp4_aqn", "nvfp4"))
"""Methods that are compared in their own format, first less second."""
UNIT = ("order", "rollouts", "seed")
Key = tuple[str, str]
"""A method, and the format that serves its adapter."""


class Difference(NamedTuple):
    """Mean of paired differences, with 95 and 90 % intervals."""

    mean: float
    low: float
    high: float
    low90: float
    high90: float
    deviation: float
    pairs: int
    p_value: float


def student_cdf(t: float, degrees: int) -> float:
    """CDF of Student's t distribution, by Simpson's rule on its density over [0, |t|]."""
    x = numpy.linspace(0.0, abs(t), 20_001)
    density = numpy.exp(
        math.lgamma((degrees + 1) / 2)
        - math.lgamma(degrees / 2)
        - 0.5 * math.log(degrees * math.pi)
        - (degrees + 1) / 2 * numpy.log1p(x**2 / degrees)
    )
    weights = numpy.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    half = float((weights * density).sum() * abs(t) / 20_000 / 3)
    return 0.5 + math.copysign(half, t)


def student_quantile(degrees: int, probability: float) -> float:
    """The t below which the distribution has this probability, at least one half."""
    return _root(lambda t: student_cdf(t, degrees) - probability, 0.0, 1000.0)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return (low + high) / 2


def difference(values: Sequence[float]) -> Difference:
    """Mean and intervals of paired differences, one for each seed; needs two."""
    array = numpy.asarray(values, dtype=numpy.float64)
    mean, deviation, degrees = float(array.mean()), float(array.std(ddof=1)), len(array) - 1
    error = deviation / math.sqrt(len(array))
    wide, narrow = (student_quantile(degrees, one) * error for one in (0.975, 0.95))
    p_value = 2 * (1 - student_cdf(abs(mean) / error, degrees)) if error else float(mean == 0)
    return Difference(mean, mean - wide, mean + wide, mean - narrow, mean + narrow, deviation, len(array), p_value)


def with_half_width(values: Sequence[float], format_spec: str = ".3f") -> str:
    """Mean of several values and half the width of its 95 % interval, such as "0.380 ± 0.009"."""
    found = difference(values)
    return f"{found.mean:{format_spec}} ± {found.high - found.mean:{format_spec.removeprefix('+')}}"


def detectable_effect(deviation: float, pairs: int) -> float:
    """The difference that a two-sided test at 0.05 finds with power 0.8, on the difference's side."""
    degrees = pairs - 1
    quantile = student_quantile(degrees, 0.975)
    scale = numpy.linspace(0, 1 + 10 / math.sqrt(degrees), 20_001)[1:]  # of the estimated over the true deviation
    log_density = (degrees - 1) * numpy.log(scale) - degrees * scale**2 / 2
    density = numpy.exp(log_density - log_density.max())
    density /= density.sum()

    def power(effect: float) -> float:
        above = [0.5 * math.erfc((quantile * one - effect) / math.sqrt(2)) for one in scale[::20]]
        return float(numpy.dot(density[::20] / density[::20].sum(), above))

    return _root(lambda effect: power(effect) - 0.8, 0.0, quantile + 20) * deviation / math.sqrt(pairs)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm's procedure, in their order."""
    order = numpy.argsort(p_values)
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for rank, index in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = most
    return adjusted


def verdict(found: Difference, margin: float = MARGIN) -> str:
    """The plan's verdict on a difference."""
    within = -margin < found.low90 and found.high90 < margin
    if found.low <= 0 <= found.high:
        effect = detectable_effect(found.deviation, found.pairs)
        return "equivalent" if within else f"undecided; {effect:.3f} would be found with power 0.8"
    if within:
        return "different, by less than the margin"
    return "better" if found.mean > 0 else "worse"


def accuracy(row: Mapping[str, Any], what: str) -> float:
    """Share of right answers, "greedy" or "sampled"."""
    answers = row["samples"] if what == "sampled" else 1
    return float(numpy.asarray(row[what]).sum() / answers / len(row[what]))


def accuracies(rows: Sequence[Mapping[str, Any]], what: str) -> dict[Key, dict[str, float]]:
    """Accuracy by method and serving format, then by seed ("start" before training), of 128 rollouts in order 0.

    Args:
        rows: Rows of `studies.four_bits.evaluate`.
        what: "sampled" or "greedy".
    """
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        levels = row["levels"]
        if levels["order"] != "0" or levels.get("rollouts", "128") != "128":
            continue
        by_seed = found.setdefault((levels["method"], levels["served"]), {})
        by_seed[levels.get("seed", "start")] = accuracy(row, what)
    return found


def paired(found: Mapping[Key, Mapping[str, float]], first: Key, second: Key) -> list[float]:
    """Differences of the seeds that both have, first less second."""
    one, other = found.get(first, {}), found.get(second, {})
    return [one[seed] - other[seed] for seed in sorted(one) if seed in other]


def comparisons(found: Mapping[Key, Mapping[str, float]]) -> dict[str, list[float]]:
    """Paired differences by name, the primary one first; those with fewer than two pairs are left out."""
    own = {method: (method, served) for method, served in OWN_FORMAT.items()}
    pairs: dict[str, list[float]] = {}
    for first, second in TRAINED:
        end = paired(found, own[first], own[second])
        pairs[f"{first} less {second}"] = end
        starts = [found.get(("start", OWN_FORMAT[method]), {}) for method in (first, second)]
        if OWN_FORMAT[first] != OWN_FORMAT[second] and all(starts):
            ahead = starts[0]["start"] - starts[1]["start"]
            pairs[f"gain of {first} less gain of {second}"] = [one - ahead for one in end]
    pairs["served on NVFP4: lora16 less nvfp4_aqn"] = paired(found, ("lora16", "nvfp4"), own["nvfp4_aqn"])
    for method in ("nvfp4_aqn", "nvfp4"):
        pairs[f"served on 16 bits: {method} less lora16"] = paired(found, (method, "none"), own["lora16"])
    return {name: values for name, values in pairs.items() if len(values) > 1}


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of these cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows))


def before_training(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Accuracy by order of the channels and format, with its share of that in 16 bits."""
    found = {
        (row["levels"]["order"], row["levels"]["served"]): accuracy(row, what)
        for row in rows
        if row["levels"]["method"] == "start"
    }
    lines = []
    for order in sorted({order for order, _ in found}):
        baseline = found[order, "none"]
        lines.append([order, f"{baseline:.3f}"])
        for served in list(FORMATS)[1:]:
            quantized = found.get((order, served))
            lines[-1].append("" if quantized is None else f"{quantized:.3f} ({100 * quantized / baseline:.0f} %)")
    return markdown(["order", *FORMATS.values()], lines)


def single_pairs(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], what: str) -> str:
    """The primary comparison in other orders of the channels and after 400 rollouts, pair by pair.

    The first difference is that of the mean reward in training, the last one that of accuracy, once both are graded.
    """
    rewards: dict[tuple[str, ...], dict[str, float]] = {}
    ends: dict[tuple[str, ...], dict[str, float]] = {}
    for row in (*runs, *rows):
        method, unit = row["levels"]["method"], tuple(str(row["levels"].get(one)) for one in UNIT)
        if method not in PRIMARY or unit[:2] == ("0", "128"):
            continue
        if "curves" in row:
            rewards.setdefault(unit, {})[method] = float(numpy.mean(row["curves"]["reward"]))
        elif row["levels"]["served"] == OWN_FORMAT[method]:
            ends.setdefault(unit, {})[method] = accuracy(row, what)
    lines = []
    first, second = PRIMARY
    for unit, reward in sorted(rewards.items()):
        if len(reward) == len(PRIMARY):
            end = ends.get(unit, {})
            graded = [f"{end[method]:.3f}" if method in end else "" for method in (second, first)]
            difference = f"{end[first] - end[second]:+.3f}" if len(end) == len(PRIMARY) else ""
            lines.append([*unit, f"{reward[first] - reward[second]:+.3f}", *graded, difference])
    return markdown([*UNIT, "reward in training", "lora16", "nvfp4_aqn", "difference"], lines)


def curves_by_method(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, list[float]]]]:
    """Curves by method and seed, of 128 rollouts in channel order 0."""
    found: dict[str, dict[str, Mapping[str, list[float]]]] = {}
    for run in runs:
        levels = run["levels"]
        if (levels["order"], levels["rollouts"]) == (0, 128):
            found.setdefault(levels["method"], {})[str(levels["seed"])] = run["curves"]
    return found


def by_sigma(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """NVFP4 by the noise's size, means of the seeds that all sizes have, and accuracy of those graded in all sizes.

    Reward grows by the slope of least squares over the first third of the rollouts. Entropy is the sampler's, in nats a
    token, over the first third, where the noise is large, and the last.
    """
    curves = curves_by_method(runs)
    measured = [method for method in SIGMAS if method in curves]
    seeds = set.intersection(*(set(curves[method]) for method in measured))
    ends, lines = accuracies(rows, "sampled"), []
    graded = seeds.intersection(*(ends.get((method, "nvfp4"), {}) for method in measured))
    for method in measured:
        values = []
        for seed in seeds:
            curve = curves[method][seed]
            third = len(curve["reward"]) // 3
            slope = numpy.polyfit(numpy.arange(third), curve["reward"][:third], 1)[0]  # from point to point
            slope *= len(curve["reward"]) / 128 * 100
            entropy = curve["sampler_entropy"]
            values.append([slope, numpy.mean(entropy[:third]), numpy.mean(entropy[-third:])])
        end = f"{numpy.mean([ends[method, 'nvfp4'][seed] for seed in graded]):.3f}" if graded else ""
        cells = [*(f"{value:.3f}" for value in numpy.mean(values, axis=0)), str(len(seeds)), end, str(len(graded))]
        lines.append([SIGMAS[method], *cells])
    headers = ["sigma", "reward, per 100 rollouts", "entropy, first third", "last third", "seeds"]
    return markdown([*headers, "sampled accuracy", "of seeds"], lines)


def by_third(runs: Sequence[Mapping[str, Any]]) -> str:
    """Paired differences in reward during training, in thirds of the rollouts, with half their 95 % intervals."""
    curves, lines = curves_by_method(runs), []
    for first, second in TRAINED:
        pairs = [
            numpy.subtract(*(curves[method][seed]["reward"] for method in (first, second)))
            for seed in sorted(set(curves.get(first, {})) & set(curves.get(second, {})))
        ]
        if len(pairs) > 1:
            thirds = zip(*([part.mean() for part in numpy.array_split(one, 3)] for one in pairs), strict=True)
            cells = [with_half_width(values, "+.3f") for values in thirds]
            lines.append([f"{first} less {second}", *cells, str(len(pairs))])
    return markdown(["reward in training", "first third", "second", "last", "pairs"], lines)


def report(rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], what: str) -> str:
    """Accuracy before training, of each method and serving format, and the comparisons with their verdicts."""
    found = accuracies(rows, what)
    means = [
        [method, FORMATS[served], f"{numpy.mean(list(by_seed.values())):.3f}", str(len(by_seed))]
        for (method, served), by_seed in found.items()
        if method != "start"
    ]
    compared = {name: difference(values) for name, values in comparisons(found).items()}
    secondary = list(compared)[1:]
    adjusted = dict(zip(secondary, holm([compared[name].p_value for name in secondary]), strict=True))
    differences = []
    for name, one in compared.items():
        wide, narrow = f"[{one.low:+.3f}, {one.high:+.3f}]", f"[{one.low90:+.3f}, {one.high90:+.3f}]"
        p_value = f"{adjusted[name]:.3f}" if name in adjusted else "primary"
        differences.append([name, f"{one.mean:+.3f} {wide}", narrow, str(one.pairs), p_value, verdict(one)])
    headers = ["comparison", "difference [95 %]", "[90 %]", "pairs", "p by Holm", "verdict"]
    parts = [f"Before training, {what}:", before_training(rows, what), f"At the end, {what}:"]
    parts += [markdown(["method", "served on", "mean", "runs"], means), markdown(headers, differences)]
    parts += ["The other orders, and 400 rollouts:", single_pairs(rows, runs, what)]
    return "\n\n".join(parts)


def main(*paths: Path) -> None:
    counts, runs = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    parts = [report(counts, runs, what) for what in ("sampled", "greedy")]
    print("\n\n".join([*parts, "Noise:", by_sigma(counts, runs), "During training:", by_third(runs)]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
