"""How a study's page opens: its question, the answer that its rows give, what a user may want to know, its limits."""

from collections.abc import Sequence

from benchmarks import report
from studies.train_on_4_bits.claims import ACCURACY, START, Contrast, Row
from studies.train_on_4_bits.findings import CEILING, Finding, Result, at_ceiling, difference, strata
from studies.train_on_4_bits.intervals import Interval
from studies.train_on_4_bits.pictures import of, sides
from studies.train_on_4_bits.plan import Level, Plan
from studies.train_on_4_bits.tables import NOT_ALONE, alone, cost

EQUAL_START = 0.01
"""Accuracy by which the starts of two methods may differ, as plan.md says."""
SHOWN = 3
"""Most differences in the answer, which has five lines."""


def opening(plan: Plan, rows: Sequence[Row], results: Sequence[Result]) -> list[str]:
    """The sections before the claims."""
    text = ["\n".join(answer(plan, rows))] if plan.question else []
    text += ["## What you may want to know", _table(plan, rows, results)]
    limits = [*plan.limits, *_limits(plan, rows)]
    return [*text, "## What this cannot say", "\n".join(f"- {limit}" for limit in limits)] if limits else text


def answer(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """The question and its answer, at most five lines of Markdown; a planned study answers for its first policy."""
    first, second = plan.compare
    kinds, lines = list[str](), list[str]()
    for stratum in deciding(plan, rows):
        sides_of = {"method": first}, {"method": second}
        end, start = (difference(plan, rows, Contrast(*sides_of, one), stratum) for one in (ACCURACY, START))
        if end is None:
            continue
        kind = answer_kind(end, start, plan.negligible)
        if not plan.preregistered or stratum == strata(plan)[0]:
            kinds.append(kind)
        before = f"; before training {start}" if start else ""
        if kind == "undecided" and end.count > 1:
            before += f"; minimum detectable effect {end.detectable_effect:.3f}"
        lines.append(f"- {name_of(plan, stratum)}: {end} in {ACCURACY.label}{before}")
    names = [plan.label("method", method) for method in plan.compare]
    summary = " ".join([*_summary(kinds, names, plan.negligible), plan.answer]).strip()
    if not lines:
        return [f"**{plan.question}** {summary}"]
    hidden = ["- Others: [differences](#differences)"] if len(lines) > SHOWN else []
    return [f"**{plan.question}** {summary} Difference of {names[0]} less {names[1]}:", "", *lines[:SHOWN], *hidden]


def answer_kind(end: Interval, start: Interval | None, negligible: float) -> str:
    """What a difference at the end says, given the difference at the start."""
    if start is not None and abs(start.mean) > EQUAL_START and not start.low <= 0 <= start.high:
        return "unequal"
    if end.low > 0:
        return "higher"
    if end.low > -negligible:
        return "as high"
    return "lower" if end.high < 0 else "undecided"


def _summary(kinds: Sequence[str], names: Sequence[str], negligible: float) -> list[str]:
    """The answer in a sentence."""
    first, second = names
    said = {
        "unequal": f"This study cannot say: {first} and {second} start at different accuracies.",
        "higher": f"Yes: {first} ends above {second}.",
        "as high": f"Yes: {first} ends at most {negligible} below {second}.",
        "lower": f"No: {first} ends below {second}.",
        "undecided": f"Undecided: {first} and {second} may end alike or not.",
    }
    outcomes = set(kinds)
    if not outcomes:
        return [f"This study cannot say: {second} has reached its ceiling, or runs are missing."]
    if len(outcomes) == 1:
        return [said[outcomes.pop()]]
    if "unequal" in outcomes:
        return [said["unequal"]]
    if outcomes == {"higher", "as high"}:
        return ["Yes."]
    return ["Mixed: policies differ." if "lower" in outcomes else "Undecided."]


def deciding(plan: Plan, rows: Sequence[Row]) -> list[dict[str, Level]]:
    """The strata whose reference has room to differ."""
    return [stratum for stratum in strata(plan) if not at_ceiling(plan, rows, stratum)]


def name_of(plan: Plan, stratum: dict[str, Level]) -> str:
    """A stratum's labels."""
    return of(plan, stratum).strip(" ()") or "all runs"


def detectable_effects(findings: Sequence[Finding]) -> str:
    """The minimum detectable effects of the undecided differences, by metric: the largest of each."""
    effects: dict[str, float] = {}
    for one in findings:
        if one.verdict == "undecided" and one.difference is not None and one.difference.count > 1:
            label = one.contrast.statistic.label
            effects[label] = max(effects.get(label, 0.0), one.difference.detectable_effect)
    said = ", ".join(f"{effect:.3f} in {label}" for label, effect in effects.items())
    return f"minimum detectable effect {said}" if said else ""


def short_verdict(result: Result) -> str:
    """Yes, no, or the verdict, as `with_effects` has it."""
    return with_effects({"holds": "yes", "does not hold": "no"}.get(result.verdict, result.verdict), result)


def with_effects(word: str, result: Result) -> str:
    """A word for a verdict; if undecided, with the minimum detectable effects."""
    effects = detectable_effects(result.findings) if result.verdict == "undecided" else ""
    return f"**{word}**" + (f" ({effects})" if effects else "")


def _table(plan: Plan, rows: Sequence[Row], results: Sequence[Result]) -> str:
    """Each claim's question with its differences where they decide, and time and memory if they were measured."""
    table = []
    for result in results:
        measured = [one for one in result.findings if one.difference is not None and not one.at_ceiling]
        several = len({one.contrast.statistic for one in measured}) > 1
        lines = [
            f"{sides(plan, one.contrast)}{of(plan, one.stratum)}"
            f"{', ' + one.contrast.statistic.label if several else ''}: {one.difference}"
            for one in measured
        ]
        label = f" in {measured[0].contrast.statistic.label}" if measured and not several else ""
        verdict = short_verdict(result)
        table.append([result.claim.asks, "<br>".join([verdict if " in " in verdict else verdict + label, *lines])])
    costs = [
        f"{plan.label('method', method)}{of(plan, stratum)}: {seconds} s, {gib} GiB"
        for stratum in strata(plan)
        for method in plan.compare
        for seconds, gib in [cost(plan, rows, {**stratum, "method": method})]
        if seconds != "-"
    ]
    if costs:
        table.append(["How many seconds and GiB does a run take?", "<br>".join(costs)])
    return report.markdown(["question", "result"], table)


def _limits(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """What the rows themselves cannot say."""
    left_out = [name_of(plan, stratum) for stratum in strata(plan) if at_ceiling(plan, rows, stratum)]
    limits = []
    if left_out:
        reference = plan.label("method", plan.compare[1])
        limits.append(
            f"At a ceiling: {'; '.join(left_out)}. Where {reference} is above {CEILING} in {plan.measure} at half of "
            "the run, there is no room to differ; differences are shown there, and left out of verdicts."
        )
    return limits if any(map(alone, rows)) else [*limits, NOT_ALONE]
