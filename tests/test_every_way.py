"""Every base format, and full fine-tuning: trains, validates, is killed, goes on bit for bit, and exports."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fit_helpers import configuration
from safetensors.torch import load_file
from test_killed import in_a_fork
from torch import Tensor

from qerl_pl.cli.main import main
from qerl_pl.formats.base import FORMATS
from qerl_pl.formats.dense_checkpoint import iterate_dense
from qerl_pl.modules import PolicyConfig
from qerl_pl.modules.update import RunningUpdate

WAYS = {one.name: {"quantization": one.name} for one in FORMATS} | {
    "full": {"quantization": "none", "finetune": "full"},
}


def written(base: Path, run: Path, way: str) -> Path:
    """The file of a run of four rollouts, with noise, that saves after each."""
    settings: dict[str, Any] = configuration(base, run)
    settings["model"]["policy"] |= WAYS[way]
    settings["model"]["optimizer"]["init_args"]["lr"] = 0.003
    settings["model"]["update_epochs"] = settings["model"]["minibatches"] = 1
    settings["model"]["micro_batch_tokens"] = None
    settings["trainer"] |= {"max_epochs": 1, "callbacks": settings["trainer"]["callbacks"][:3]}
    settings["trainer"]["callbacks"][2]["init_args"]["every_n_rollouts"] = 1
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


def killed(path: Path) -> None:
    """SIGKILL in the update of the third rollout."""
    plain, calls = RunningUpdate._accumulate, iter(range(9))

    def accumulate(self, *args):  # type: ignore[no-untyped-def]
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    RunningUpdate._accumulate = accumulate  # type: ignore[method-assign]
    main(["fit", "-c", str(path)])


def learned_and_exported(base: Path, folder: Path, way: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Tensor]:
    """What a run has learned, killed or not, and validated; it is in `exported`, and an adapter also in `merged`."""
    result, file = ("model", "model.safetensors") if way == "full" else ("adapter", "adapter_model.safetensors")
    run, broken = folder / "whole", folder / "broken"
    assert main(["fit", "-c", str(written(base, run, way))]) == 0
    learned = load_file(run / result / file)
    path = written(base, broken, way)
    assert in_a_fork(partial(killed, path)) == -signal.SIGKILL
    assert not (broken / result).exists()
    assert main(["fit", "-c", str(path), "--resume", "auto"]) == 0
    assert main(["validate", "-c", str(run / "config.yaml"), "--resume", "auto"]) == 0
    assert "val/accuracy" in capfd.readouterr().out
    assert main(["export", str(run), str(folder / "exported")]) == 0
    for found in (load_file(broken / result / file), load_file(folder / "exported" / file)):
        assert found.keys() == learned.keys() and all(torch.equal(found[name], learned[name]) for name in learned)
    if way != "full":
        assert main(["export", str(run), str(folder / "merged"), "--merge", "true"]) == 0
    return learned


@pytest.mark.usefixtures("process_state")
@pytest.mark.parametrize(
    "way", [way if way == "nvfp4" else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS]
)
def test_a_run_is_killed_goes_on_bit_for_bit_and_exports(
    tiny_policy_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    learned = learned_and_exported(tiny_policy_dir, tmp_path, way, capfd)
    if way == "full":
        before = dict(iterate_dense(tiny_policy_dir, torch.float32))
        assert all((learned[name] != before[name]).any() for name in before)  # everything has moved
        return
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = PolicyConfig(path=str(tiny_policy_dir), quantization=WAYS[way]["quantization"]).base_folder()  # type: ignore[arg-type]
    for name, weight in dict(iterate_dense(base, torch.float32)).items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in learned:
            weight = weight + 2.0 * learned[f"{stem}.lora_B.weight"] @ learned[f"{stem}.lora_A.weight"]
        weight = learned.get(f"{stem}.weight", weight)  # a trained norm
        torch.testing.assert_close(merged[name], weight.bfloat16(), rtol=1e-2, atol=1e-6)
