"""The placebo of NVFP4: an error of the same size in each matrix, Gaussian, frozen, and read alike everywhere."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import load_dense_state
from qerl_pl.formats.gaussian import GaussianQuantizer
from qerl_pl.formats.model_folder import QUANTIZATION_REPORT
from qerl_pl.formats.nvfp4 import NVFP4Quantizer
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import Policy, PolicyConfig

UP = "model.layers.0.mlp.up_proj.weight"


def report(folder: Path) -> dict[str, float]:
    return json.loads((folder / QUANTIZATION_REPORT).read_text())["relative_squared_error"]


@pytest.mark.parametrize("scales", ["minmax", "search"])
def test_every_matrix_has_the_error_of_nvfp4(tiny_policy_dir: Path, tmp_path: Path, scales: str) -> None:
    for name in ("nvfp4", "gaussian"):
        quantize_checkpoint(tiny_policy_dir, tmp_path / name, name, scales=scales)  # type: ignore[arg-type]
    errors, expected = report(tmp_path / "gaussian"), report(tmp_path / "nvfp4")
    assert len(expected) == 14 and errors == pytest.approx(expected, rel=1e-3)
    before, stored = (
        load_file(tiny_policy_dir / "model.safetensors"),
        load_file(tmp_path / "gaussian/model.safetensors"),
    )
    rounded = load_dense_state(tmp_path / "nvfp4", torch.float32)
    for name, error in expected.items():
        exact = before[name].double()
        assert stored[name].dtype == before[name].dtype
        noise, rounding = stored[name].double() - exact, rounded[name].double() - exact
        assert noise.square().sum() / exact.square().sum() == pytest.approx(error, rel=1e-3)
        assert stored[f"{name}_error"].item() == pytest.approx(error, rel=1e-3)
        # Gaussian: a kurtosis of 3, as much in small weights as in large ones, and nothing of the rounding.
        normal = noise / noise.square().mean().sqrt()
        assert normal.mean().abs() < 0.05 and normal.pow(4).mean().item() == pytest.approx(3.0, abs=0.25)
        for other in (exact.abs(), rounding):
            assert abs(torch.corrcoef(torch.stack([normal.flatten(), other.flatten()]))[0, 1].item()) < 0.05
    assert all(torch.equal(stored[name], before[name]) for name in before if name not in expected)


def test_the_error_is_frozen_and_another_for_each_matrix(tiny_policy_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.manual_seed(len(name))
        quantize_checkpoint(tiny_policy_dir, tmp_path / name, "gaussian")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    before = load_file(tiny_policy_dir / "model.safetensors")
    gate = UP.replace("up_proj", "gate_proj")
    errors = torch.stack([(one[name].float() - before[name].float()).flatten() for name in (UP, gate)])
    assert abs(torch.corrcoef(errors)[0, 1].item()) < 0.05


def test_a_matrix_worked_out() -> None:
    rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    quantizer, nvfp4 = GaussianQuantizer("minmax", False), NVFP4Quantizer("minmax", False)
    scale = quantizer.global_scale([rows])
    assert scale is not None and torch.equal(scale, nvfp4.global_scale([rows]))
    difference = (nvfp4.decode(*nvfp4.encode(rows, scale), scale) - rows).tolist()
    expected = math.fsum(value * value for row in difference for value in row)
    codes, errors = quantizer.encode(rows, scale)
    assert errors.shape == (8, 1) and errors.sum().item() == pytest.approx(expected, rel=1e-6)
    stored, scales = quantizer.store(codes, errors, scale, torch.float32)
    found = (stored[""] - rows).double().square().sum().item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert torch.equal(quantizer.decode(codes, scales, scale), stored[""])
    assert stored["_error"].item() == pytest.approx(expected / rows.double().square().sum().item(), rel=1e-6)


def test_a_matrix_of_zeros_has_no_error() -> None:
    quantizer, zeros = GaussianQuantizer("minmax", False), torch.zeros(4, 32)
    scale = quantizer.global_scale([torch.ones(4, 32)])
    stored, _ = quantizer.store(*quantizer.encode(zeros, scale), scale, torch.bfloat16)
    assert torch.equal(stored[""], zeros.bfloat16()) and stored["_error"].item() == 0.0


def test_the_trainer_computes_with_the_stored_weights(tiny_policy_dir: Path) -> None:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="gaussian", dtype="float32")
    folder = config.base_folder()
    policy, stored = Policy(folder, config, torch.device("cpu"), seed=1), load_file(folder / "model.safetensors")
    linear = policy.base.get_submodule(f"{UP.removesuffix('.weight')}.base_layer")
    assert torch.equal(linear.qweight, stored[UP]) and not linear.qweight.requires_grad
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x), x @ stored[UP].float().t())
    with pytest.raises(UserError, match="full fine-tuning trains weights that are not quantized; got quantization gau"):
        PolicyConfig(path=str(tiny_policy_dir), quantization="gaussian", finetune="full")
