"""Full fine-tuning on several ranks: one run on all of them, killed and resumed to the same bits."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import fit, fit_on_ranks
from safetensors.torch import load_file
from test_ranks import completions, learned, same_run, settings

from qerl_pl.formats.dense_checkpoint import load_dense_state
from qerl_pl.modules.update import RunningUpdate
from qerl_pl.runtime import communicator

ROLLOUTS, STEPS = 3, 4
"""Rollouts of a run, and optimizer steps of each."""


def full_finetuning(base: Path, run: Path, devices: int) -> dict[str, Any]:
    """Every weight trains, with a reference policy; a checkpoint after each rollout."""
    config = settings(base, run, devices)
    config["model"]["policy"] |= {"quantization": "none", "finetune": "full"}
    config["model"]["optimizer"]["init_args"]["lr"] = 0.001
    config["trainer"] |= {"max_steps": STEPS * ROLLOUTS, "val_check_interval": ROLLOUTS}
    config["trainer"]["callbacks"][2]["init_args"]["every_n_rollouts"] = 1
    config["trainer"]["callbacks"].append({"class_path": "fit_helpers.KeepsEachRank"})
    return config


def dies_in_the_third_rollout() -> None:
    plain, calls = RunningUpdate._accumulate, iter(range(99))

    def accumulate(self, *args):  # type: ignore[no-untyped-def]
        if next(calls) == 2 * STEPS + 1:
            time.sleep(0.5)  # the other rank gets here, too: the machine is taken away
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    RunningUpdate._accumulate = accumulate  # type: ignore[method-assign]


def sums_in_small_buckets() -> None:
    """A matrix alone, vectors together: as large models are summed."""
    communicator.BUCKET = 2**14


@pytest.fixture(scope="module")
def two(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    statuses, printed = fit_on_ranks(full_finetuning(tiny_policy_dir, run, 2), prepare=sums_in_small_buckets)
    assert statuses == [0, 0], printed
    return run


def test_two_ranks_end_with_the_same_weights_which_are_those_of_one(
    two: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    status, printed = fit(full_finetuning(tiny_policy_dir, tmp_path / "run", 1))
    assert status == 0, printed
    same_run(tmp_path / "run", two)
    first, second, saved = load_file(two / "rank0.safetensors"), load_file(two / "rank1.safetensors"), learned(two)
    assert first.keys() == second.keys() == saved.keys()
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], saved[name]) for name in first)
    before = load_dense_state(tiny_policy_dir, torch.float32)
    assert all((saved[name] != before[name]).any() for name in before)


def test_two_ranks_that_are_killed_go_on_bit_for_bit(two: Path, tiny_policy_dir: Path, tmp_path: Path) -> None:
    config = full_finetuning(tiny_policy_dir, tmp_path / "run", 2)
    statuses, printed = fit_on_ranks(config, prepare=dies_in_the_third_rollout)
    assert statuses == [-signal.SIGKILL] * 2, printed
    assert not (tmp_path / "run" / "model").exists()
    statuses, printed = fit_on_ranks(config, "--resume", "auto")
    assert statuses == [0, 0], printed
    expected = learned(two)
    for file in ("rank0", "rank1"):
        result = load_file(tmp_path / "run" / f"{file}.safetensors")
        assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in result)
    assert completions(tmp_path / "run") == completions(two)
