"""What a study's page concludes, worked out by hand: mixed verdicts, ceilings, Holm's procedure, units, the answer."""

from pathlib import Path
from typing import Any

import pages
import pytest

from qerl_pl.errors import UserError
from studies.train_on_4_bits.claims import GREEDY, GROWTH
from studies.train_on_4_bits.evidence import write_evidence
from studies.train_on_4_bits.findings import Result, at_ceiling, findings, interval_of
from studies.train_on_4_bits.intervals import Interval, across_policies, holm, interval, noncentrality, verdict
from studies.train_on_4_bits.opening import answer, answer_kind
from studies.train_on_4_bits.plan import Plan, read_plan
from studies.train_on_4_bits.tables import alone, cost, method_table
from studies.train_on_4_bits.tests.test_study import ENDS, plan_of, rows_of

BLOCK = {"method": ["lora16", "nvfp4_aqn"], "seed": [0, 1, 2], "policy": ["other", "toy"]}


def rows_with(plan: Plan, ends: dict[str, list[float]], start: float = 0.4, half: float = 0.5) -> list[dict[str, Any]]:
    """A row for each run: accuracy at the end by "method policy" and seed; `half` at half of the run."""
    rows = []
    for run in plan.runs:
        method, policy, seed = (run.levels[factor] for factor in ("method", "policy", "seed"))
        if f"{method} {policy}" in ends:
            end = ends[f"{method} {policy}"][int(seed)]
            rows.append(
                {
                    **{"run": run.name, "levels": run.levels, "ended": "done", "rollouts": 4, "seconds": [1.0, 8.0]},
                    "curves": {"reward": [0.1, 0.2, 0.3, 0.6], "sampler_entropy": [0.1, 0.1, 0.1, 0.1]},
                    "held_out": {"val/pass@1": [[0, start], [2, half], [4, end]]},
                    **{"peak_gib": 1.5, "wall_s": 9.0, "where": {"gpu": "H200", "values": {}}},
                }
            )
    return rows


def result_of(plan: Plan, rows: list[dict[str, Any]], name: str) -> Result:
    return next(result for result in findings(plan, rows) if result.claim.name == name)


def test_holms_procedure_by_hand() -> None:
    # 0.001 <= 0.05 / 4; 0.015 <= 0.05 / 3; 0.03 > 0.05 / 2, where it stops: the last has that level too
    assert holm([0.03, 0.001, 0.04, 0.015]) == pytest.approx([0.975, 1 - 0.05 / 4, 0.975, 1 - 0.05 / 3])
    assert holm([]) == []
    values = interval([1.0, 2.0, 3.0])  # t = 2 / (1 / sqrt(3)) = 3.4641 of two degrees: p = 0.0742
    assert values.p_value() == pytest.approx(0.07418, abs=1e-5) and values.at(1 - 0.07418).low == pytest.approx(
        0, abs=1e-4
    )
    assert interval([1.0, 1.0]).p_value(1.0) == 1.0 and interval([1.0, 1.0]).p_value() == 0.0


def test_detectable_effects_are_those_of_power_tables() -> None:
    # paired t test, power 0.8, two-sided 0.05: 5 pairs find 1.68 standard deviations, 10 pairs 1.00, 30 pairs 0.53
    effects = [noncentrality(count - 1) / count**0.5 for count in (5, 10, 30)]
    assert effects == pytest.approx([1.682, 0.996, 0.529], abs=1e-3)
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]).detectable_effect == pytest.approx(1.682 * 2.5**0.5, abs=2e-3)


def test_a_small_difference_is_none() -> None:
    near = Interval(0.002, -0.005, 0.009, 5)
    assert verdict(near, "above", negligible=0.01) == "does not hold" and verdict(near, "above") == "undecided"
    assert verdict(Interval(0.002, -0.011, 0.009, 5), "above", negligible=0.01) == "undecided"
    assert verdict(Interval(0.005, 0.002, 0.008, 5), "above", negligible=0.01) == "holds"


def test_policies_that_differ_are_mixed_and_a_ceiling_decides_nothing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, blocks=[BLOCK], compare=["nvfp4_aqn", "lora16"])
    assert across_policies(["holds", "does not hold", "undecided"]) == "mixed"
    assert across_policies(["does not hold", "undecided"]) == "does not hold"
    high, low, middle = [0.70, 0.71, 0.70], [0.50, 0.51, 0.51], [0.60, 0.61, 0.60]
    ends = {"lora16 toy": middle, "lora16 other": middle, "nvfp4_aqn toy": low, "nvfp4_aqn other": high}
    claim = result_of(plan, rows_with(plan, ends), "gain")
    assert [one.verdict for one in claim.findings[:2]] == ["holds", "does not hold"] and claim.verdict == "mixed"
    assert claim.findings[0].stratum == {"policy": "other"}  # the plan's order
    rows = rows_with(plan, ends)
    for row in rows:
        if row["levels"]["policy"] == "toy":
            row["held_out"]["val/pass@1"][1][1] = 0.91
    assert at_ceiling(plan, rows, {"policy": "toy"}) and not at_ceiling(plan, rows, {"policy": "other"})
    claim = result_of(plan, rows, "gain")
    assert claim.findings[1].verdict == "at its ceiling" and claim.verdict == "undecided"  # NF4 was not measured
    assert Result(claim.claim, claim.findings[:2]).verdict == "holds"
    for row in rows:
        row["held_out"]["val/pass@1"][1][1] = 0.91
    assert result_of(plan, rows, "gain").verdict == "at its ceiling"


def test_values_are_averaged_within_the_first_random_factor(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, units=["decay", "seed"])
    found = interval_of(plan, {("a", 0): 1.0, ("a", 1): 3.0, ("b", 2): 5.0, ("b", 3): 7.0})
    assert found is not None and (found.count, found.mean, found.deviation) == (2, 4.0, pytest.approx(8**0.5))


def test_the_preregistered_outcome_is_not_adjusted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, blocks=[BLOCK], preregistered="plan.md")
    ends = {f"{method} {policy}": [0.6, 0.61, 0.6] for method in ("lora16", "nvfp4_aqn") for policy in ("toy", "other")}
    first, second, *_ = result_of(plan, rows_with(plan, ends), "accuracy").findings
    assert first.difference is not None and first.adjusted is None and second.adjusted is not None
    page = write_evidence(plan, rows_with(plan, ends), tmp_path / "docs", tmp_path / "raw.jsonl").read_text()
    assert "[planned](../plan.md)" in page and "but the preregistered outcome" in page


def test_answers_by_hand(tmp_path: Path) -> None:
    equal, apart = Interval(0.0, -0.005, 0.005, 5), Interval(0.1, 0.09, 0.11, 5)
    assert answer_kind(apart, apart, 0.01) == "unequal" and answer_kind(apart, equal, 0.01) == "higher"
    assert answer_kind(Interval(0.0, -0.009, 0.02, 5), equal, 0.01) == "as high"
    assert answer_kind(Interval(-0.1, -0.2, -0.05, 5), None, 0.01) == "lower"
    assert answer_kind(Interval(0.0, -0.02, 0.02, 5), equal, 0.01) == "undecided"
    plan = plan_of(tmp_path, blocks=[BLOCK], question="Should I?", answer="So it is.", limits=["The moon."])
    ends = {"lora16 other": [0.6, 0.61, 0.6], "nvfp4_aqn other": [0.7, 0.71, 0.71]}
    lines = answer(plan, rows_with(plan, ends))
    assert (
        lines[0] == "**Should I?** Yes: NVFP4 + AQN ends above lora16. So it is. Difference of NVFP4 + AQN less lora16:"
    )
    assert lines[2].startswith("- other: +0.103 [+0.089, +0.118] in final held-out accuracy; before training +0.000")
    page = write_evidence(plan, rows_with(plan, ends), tmp_path / "docs", tmp_path / "raw.jsonl").read_text()
    assert page.startswith("# A study of the paper's claims\n\n**Should I?** Yes") and "- The moon." in page
    assert "reached its ceiling, or runs are missing" in answer(plan, rows_with(plan, ends, half=0.95))[0]
    with pytest.raises(UserError, match="has 1 in compare"):
        plan_of(tmp_path, compare=["nvfp4"])


def test_a_planned_study_answers_for_its_first_policy(tmp_path: Path) -> None:
    ends = {"lora16 other": [0.6, 0.61, 0.6], "nvfp4_aqn other": [0.7, 0.71, 0.71]}
    ends |= {"lora16 toy": [0.6, 0.7, 0.5], "nvfp4_aqn toy": [0.7, 0.5, 0.6]}
    plan = plan_of(tmp_path, blocks=[BLOCK], question="Should I?")
    assert answer(plan, rows_with(plan, ends))[0].startswith("**Should I?** Undecided.")
    plan = plan_of(tmp_path, blocks=[BLOCK], question="Should I?", preregistered="plan.md")
    lines = answer(plan, rows_with(plan, ends))
    assert lines[0].startswith("**Should I?** Yes: NVFP4 + AQN ends above lora16.")
    assert lines[3].startswith("- toy: +0.000 [") and "minimum detectable effect" in lines[3]


def test_growth_and_greedy_accuracy_by_hand(tmp_path: Path) -> None:
    # two rollouts a point; the slope over points 0, 2 and 3 is 0.1 a point, 0.05 a rollout
    row: dict[str, Any] = {"rollouts": 16, "ended": "done", "curves": {"reward": [0.1, None, 0.3, 0.4, *[9.0] * 4]}}
    assert GROWTH.of(row, "val/pass@1") == pytest.approx(5.0)
    row["held_out"] = {"val/test/accuracy": [[0, 0.2], [16, 0.5]]}
    assert GREEDY.of(row, "val/test/pass@1") == 0.5 and GREEDY.of(row, "val/pass@1") is None
    plan = plan_of(tmp_path)
    assert "greedy accuracy" not in {result.claim.name for result in findings(plan, rows_of(plan, ENDS))}


def test_the_noise_is_compared_with_its_rivals_where_the_plan_has_them(tmp_path: Path) -> None:
    plan = read_plan(Path(__file__).parents[1] / "gsm8k.yaml")
    rows = []
    for run in plan.runs:
        end = {"lora16_aqn": 0.4, "lora16_temperature": 0.3, "placebo": 0.5}.get(str(run.levels["method"]))
        if end is not None:
            held_out = {"val/accuracy": [[128, end + 0.001 * int(run.levels["seed"])]]}
            rows.append({"run": run.name, "levels": run.levels, "ended": "done", "held_out": held_out})
    found = {str(one.contrast.second["method"]): one for one in result_of(plan, rows, "rivals").findings}
    assert [found[rival].difference.mean for rival in ("lora16_temperature", "placebo")] == pytest.approx([0.1, -0.1])
    assert found["lora16_temperature"].verdict == "holds" and found["placebo"].verdict == "does not hold"
    assert found["lora16_entropy"].difference is None
    assert "rivals" not in {result.claim.name for result in findings(plan_of(tmp_path), [])}


def test_methods_have_columns_of_what_their_runs_measured(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, blocks=[BLOCK], measure="val/pass@1")
    rows = rows_with(plan, {"lora16 other": [0.6, 0.61, 0.6]})
    assert pages.rows(method_table(plan, rows))[0][2:6] == ["val/pass@1 before", "after", "gain", "reward"]
    for row in rows:
        row["held_out"] = {"val/pass@1": [[4, 0.6]], "val/cool_pass@1": [[4, 0.7]], "val/x/cool_pass@1": [[4, 0.8]]}
    header, cells, *_ = pages.rows(method_table(plan, rows))
    assert header[2:5] == ["val/pass@1", "val/cool_pass@1", "reward"] and cells[2].startswith("0.600")
    assert cells[3].startswith("0.700")


def test_seconds_are_of_runs_that_had_the_gpu_to_themselves(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, blocks=[BLOCK])
    rows = rows_with(plan, {"lora16 other": [0.6, 0.61, 0.6]})
    levels = {"policy": "other", "method": "lora16"}
    assert not any(map(alone, rows)) and cost(plan, rows, levels) == ("-", "-")
    rows[0]["where"]["at_once"], rows[1]["where"]["at_once"] = 1, 4
    assert cost(plan, rows, levels) == ("8", "1.50")
    page = write_evidence(plan, rows, tmp_path / "docs", tmp_path / "raw.jsonl").read_text()
    assert "| seconds | peak GiB |" in page and "GPU to itself" not in page
