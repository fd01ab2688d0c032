"""Full fine-tuning on several ranks: one run on all of them, killed and resumed to the same bits."""

from pathlib import Path
from typing import Any

import torch
from fit_helpers import fit, fit_on_ranks
from safetensors.torch import load_file
from test_ranks import learned, same_run, settings

from qerl_pl.formats.dense_checkpoint import iterate_dense
from qerl_pl.runtime import communicator

ROLLOUTS, STEPS = 2, 4
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


def sums_in_small_buckets() -> None:
    """A matrix alone, vectors together: as large models are summed."""
    communicator.BUCKET = 2**14


def test_two_ranks_end_with_the_same_weights_which_are_those_of_one(tiny_policy_dir: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    statuses, printed = fit_on_ranks(full_finetuning(tiny_policy_dir, two, 2), prepare=sums_in_small_buckets)
    assert statuses == [0, 0], printed
    status, printed = fit(full_finetuning(tiny_policy_dir, tmp_path / "run", 1))
    assert status == 0, printed
    same_run(tmp_path / "run", two)
    first, second, saved = load_file(two / "rank0.safetensors"), load_file(two / "rank1.safetensors"), learned(two)
    assert first.keys() == second.keys() == saved.keys()
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], saved[name]) for name in first)
    before = dict(iterate_dense(tiny_policy_dir, torch.float32))
    assert all((saved[name] != before[name]).any() for name in before)
