"""Settings that would have no effect: refused, or named in a warning."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_helpers import saved_config
from short_run import module_of, rollout_of

from qerl_pl.algorithm import DAPO, GRPO, DrGRPO, OnPolicyDistillation
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.callbacks import EnvironmentConfig
from qerl_pl.errors import UserError
from qerl_pl.policy.teacher import TeacherConfig

QUICK = ("fit", "-c", "quickstart")


@pytest.mark.parametrize(
    ("later", "names"),
    [
        (["{rollout: {rewards: {}, environment: {factory: qerl_pl.environments.Calculator}}}"], []),
        (["{rollout: {rewards: {mine: MathAnswer}}}"], ["accuracy", "format", "mine"]),
        (
            [
                "{rollout: {rewards: {mine: MathAnswer}}}",
                "{rollout: {rewards: {}}}",
                "{rollout: {rewards: {b: Format}}}",
            ],
            ["b"],
        ),
        (["{rollout: {rewards: [MathAnswer]}}", "{rollout: {rewards: {}}}"], []),
        (["{trainer: {max_steps: 4}}", "{rollout: {rewards: {format: MathAnswer}}}"], ["accuracy", "format"]),
    ],
)
def test_no_rewards_in_a_file_drop_those_of_earlier_files(later: list[str], names: list[str], tmp_path: Path) -> None:
    words: list[str] = []
    for number, text in enumerate(later):
        (tmp_path / f"{number}.yaml").write_text(text)
        words += ["-c", str(tmp_path / f"{number}.yaml")]
    assert list(yaml.safe_load(saved_config(*QUICK, *words))["rollout"]["rewards"]) == names


def test_no_rewards_of_the_command_line_drop_those_of_files() -> None:
    assert yaml.safe_load(saved_config(*QUICK, "--rollout.rewards", "{}"))["rollout"]["rewards"] == {}


@pytest.mark.parametrize(
    ("objective", "norm", "said"),
    [
        (GRPO, "batch", r"advantage_norm batch \(GRPO\); set it to group"),
        (DAPO, "maxrl", r"advantage_norm maxrl \(DAPO\)"),
        (DrGRPO, "none", r"advantage_norm none \(DrGRPO\)"),
    ],
)
def test_gdpo_refuses_another_advantage_norm_than_its_own(objective: type[Objective], norm: Any, said: str) -> None:
    with pytest.raises(UserError, match=r"^normalize_then_sum \(GDPO\) divides .*; got " + said):
        objective(advantage_norm=norm, multi_objective_aggregation="normalize_then_sum")
    objective(advantage_norm=norm)
    objective(advantage_norm="group", multi_objective_aggregation="normalize_then_sum")


@pytest.mark.parametrize(
    ("teacher", "is_named"),
    [
        (TeacherConfig("larger"), True),
        (TeacherConfig(dtype="float32"), True),
        (TeacherConfig(), False),
    ],
)
def test_a_teacher_that_nothing_learns_from_is_named(
    teacher: TeacherConfig, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def set_up(objective: Objective) -> None:
        module = module_of(Path("nowhere"), objective=objective, teacher=teacher)
        loop = SimpleNamespace(total_batch_idx=-1)
        module._trainer = SimpleNamespace(fit_loop=loop, datamodule=None)  # type: ignore[assignment]
        module.setup("fit")

    set_up(GRPO(beta=0.04))
    found = [message.startswith("model.teacher has no effect without ") for message in caplog.messages]
    assert found == [True] * is_named
    caplog.clear()
    set_up(OnPolicyDistillation())
    assert not caplog.messages


@pytest.mark.parametrize("kind", [GRPO, DAPO])
def test_a_divergence_is_refused_that_nothing_learns_by(kind: type[Objective]) -> None:
    with pytest.raises(UserError, match="^distillation_divergence full_vocabulary needs a distillation_coefficient"):
        kind(distillation_divergence="full_vocabulary")  # type: ignore[call-arg]
    OnPolicyDistillation(distillation_divergence="full_vocabulary")


@pytest.mark.parametrize(
    ("settings", "is_named"),
    [
        ({"max_turns": 4}, True),
        ({"tool_format": "hermes", "weight": 0.5}, True),
        ({"max_tool_response_tokens": None}, True),
        ({"max_turns": 4, "factory": "qerl_pl.environments.Calculator"}, False),
        ({"max_turns": 8}, False),
    ],
)
def test_an_environment_without_its_factory_is_named(
    settings: dict[str, Any], is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rollout_of(environment=EnvironmentConfig(**settings)).close()
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert found == ["rollout.environment has no effect without its factory"] * is_named
