"""The correction between sampler and trainer against loops and numbers by hand."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from jsonargparse import auto_cli
from plain_objective import importance_weights
from torch import Tensor

from qerl_pl.algorithm import DAPO, DrGRPO, Objective, RolloutCorrection
from qerl_pl.algorithm.objectives import LossInputs
from qerl_pl.algorithm.off_policy import PRESETS, correction_weights
from qerl_pl.errors import UserError

CORRECTIONS = {
    **PRESETS,
    "all": RolloutCorrection("geometric", 1.1, "sequence", 0.2, 3.0, 0.1, 8.0),
    "wide": RolloutCorrection("token", 1.2, "token", 0.6, 1.5),
    "no limits": RolloutCorrection("sequence", None),
    "high alone": RolloutCorrection("token", 1.1, "token", 0.0, 1.2),
    "outliers above": RolloutCorrection(None, rejection="geometric", low=0.9, high=None, outlier_high=2.5),
}


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_weights(correction: RolloutCorrection, log_ratios: Sequence[float]) -> list[float]:
    return [weight for weight, _, _ in importance_weights(asdict(correction), log_ratios)]


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """(old, sampler, mask) of 40 completions of up to 9 tokens; small and large differences, larger ones outside."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(40, 9, generator=draw) < torch.linspace(0, 1, 40)[:, None]
    old = -torch.rand(40, 9, generator=draw, dtype=torch.float64) - 0.1
    size = torch.tensor([0.001, 0.01, 0.3, 1.0], dtype=torch.float64).repeat(10)[:, None]
    sampler = old - size * torch.randn(40, 9, generator=draw, dtype=torch.float64)
    return old.where(mask, -1.0), sampler.where(mask, -9.0), mask


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_those_of_plain_loops(name: str) -> None:
    correction, (old, sampler, mask) = CORRECTIONS[name], ragged()
    found = correction_weights(correction, old, sampler, mask)
    for row in range(len(mask)):
        ratios = (old - sampler)[row][mask[row]].tolist()
        expected = plain_weights(correction, ratios)
        assert found.weights[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-12)
        assert found.rejected[row][mask[row]].tolist() == [weight == 0 for weight in expected]
    assert not found.weights.requires_grad
    if correction.rejection is not None:  # both sides of each bound occur
        assert 0 < found.rejected[mask].sum() < mask.sum()
    if correction.cap is not None and correction.weights is not None:
        assert (0 < found.capped[mask].sum() < mask.sum()) == (name != "geometric_mask_token_tis")
        assert torch.equal(found.capped[mask], found.weights[mask] == correction.cap)


def test_presets_by_hand() -> None:
    # Ratios of three completions: 1.25, 4, 0.4 with product 2; 1, 1.005; 3, 3 with product 9.
    old = f64([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    sampler = -f64([[1.25, 4, 0.4], [1.0, 1.005, 1.0], [3.0, 3.0, 1.0]]).log()
    mean = 2 ** (1 / 3)
    assert mean > 1.01
    expected: dict[str, list[float]] = {
        "off": [1, 1, 1, 1, 1, 1, 1],
        "token_tis": [1.25, 2, 0.4, 1, 1.005, 2, 2],
        "sequence_tis": [2, 2, 2, 1.005, 1.005, 2, 2],
        "token_mask": [1.25, 0, 0.4, 1, 1.005, 0, 0],
        "sequence_mask": [2, 2, 2, 1.005, 1.005, 0, 0],
        "geometric_mask": [0, 0, 0, 1, 1, 0, 0],
        "geometric_mask_token_tis": [0, 0, 0, 1, 1.005, 0, 0],
        "icepop": [1.25, 4, 0, 1, 1.005, 3, 3],
    }
    assert expected.keys() == PRESETS.keys()
    for name, values in expected.items():
        correction = PRESETS[name]
        if name == "sequence_mask":  # a product of exactly 2 may be rounded to more
            correction = replace(correction, high=2.0001)
        weights = correction_weights(correction, old, sampler, mask).weights[mask]
        assert weights.tolist() == pytest.approx(values), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "row"}, "correction.weights must be one of token, sequence, geometric; got 'row'"),
        ({"rejection": "row"}, "correction.rejection must be one of token, sequence, geometric; got 'row'"),
        ({"cap": 0.0}, "correction.cap must be a number above 0; got 0.0"),
        ({"high": math.nan}, "correction.high must be a number above 0; got nan"),
        ({"low": -0.1}, "correction.low must be a number of at least 0; got -0.1"),
        ({"low": 2.0}, "correction.low must be below correction.high; got 2.0 and 2.0; swap them"),
        ({"outlier_low": 3.0, "outlier_high": 2.0}, "correction.outlier_low must be below correction.outlier_high"),
    ],
)
def test_bad_settings_are_a_user_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RolloutCorrection(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tis", "got 'tis'; choose one, or write"),
        ("my_corrections.cubed", r"'my_corrections.cubed' cannot be imported \(.*\); correct the name or the file"),
        ("no_such_module.squared", "'no_such_module.squared' cannot be imported"),
        ("my_corrections.py:cubed", "'my_corrections.py:cubed' cannot be imported"),
        ("math.pi", "math.pi is a float; name a function"),
        ("qerl_pl.algorithm.RolloutCorrection", ".*RolloutCorrection is a type; name a function"),
    ],
)
def test_an_unknown_correction_is_told_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^correction must be one of off, token_tis, .*; {message}"):
        DAPO(correction=name)


def test_the_function_of_the_page_corrects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = pages.fences(pages.ROOT / "docs" / "objectives-and-noise.md", "python")
    (tmp_path / "my_corrections.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    old, sampler, mask = (
        f64([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]),
        f64([[-1.0, -1.0, -9.0], [-4.0, -3.0, -1.0]]),
        mask_of(),
    )
    for name in ("my_corrections.py:squared", f"{tmp_path}/my_corrections.py:squared"):
        objective = DrGRPO(correction=name)
        found = correction_weights(objective.rollout_correction, old, sampler, mask)
        assert found.weights[mask].tolist() == [1.0, 0.5, 0.0, 0.0] and not found.capped.any()
        assert found.rejected[mask].tolist() == [False, False, True, True]
    logprobs = old.clone().requires_grad_()
    inputs = LossInputs(logprobs, old, sampler, f64([1.0, 1.0]), mask, torch.ones_like(old))
    outputs = objective.loss(inputs)
    outputs.loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, -0.5, 0.0], [0.0, 0.0, 0.0]]
    assert outputs.metrics["rejected"] == 2


def mask_of() -> Tensor:
    """Two tokens of each of two completions."""
    return torch.tensor([[True, True, False], [True, True, False]])


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda log_ratio, mask: log_ratio[0], r"a tensor \[3\]"),
        (lambda log_ratio, mask: log_ratio.sum(), r"a tensor \[\]"),
        (lambda log_ratio, mask: 1.0, "a float"),
        (lambda log_ratio, mask: None, "a NoneType"),
    ],
)
def test_a_function_that_returns_no_weights_is_told(function: Any, got: str) -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(UserError, match=rf"a weight for each token, \[2, 3\]; got {got}; correct it"):
        correction_weights(function, zeros, zeros, mask_of())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--objective.correction=icepop"], "icepop"),
        (["--objective.correction={weights: sequence, cap: 3.0}"], RolloutCorrection("sequence", 3.0)),
        (["--objective.correction.rejection=token"], RolloutCorrection(rejection="token")),
        ([], "token_tis"),
    ],
)
def test_yaml_names_a_preset_or_gives_settings(given: list[str], expected: Any) -> None:
    def configured(objective: Objective) -> Objective:
        return objective

    found = auto_cli(configured, args=["--objective=qerl_pl.algorithm.DAPO", *given], as_positional=False)
    assert found == DAPO(correction=expected)
