"""The two commands of docs/sft.md, shortened: SFT, then reinforcement learning from its adapter; killed and resumed."""

import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from fit_helpers import command
from pages import ROOT
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

TOY = "--model.policy.toy.layers 1 --model.policy.toy.steps 1 --model.policy.toy.batch_size 2"
SHORT = f"{TOY} --data.train_size 12 --data.batch_size 4 --data.val_size 4 --checkpoint.every_n_rollouts 1"
STEPS = "--trainer.val_check_interval 3 --trainer.enable_progress_bar false"
ROLLOUT = """--rollout.group_size 4 --rollout.sampling.max_tokens 6 --model.monitor_kl true
--rollout.rewards '{"letters": "fit_helpers.Letters"}'"""


def pair(runs: Path) -> list[list[str]]:
    """The words of both commands behind `qerl`, three steps each, with their runs in another folder."""
    lines = pages.commands(ROOT / "docs" / "sft.md")[:2]
    found = []
    for line, more in zip(lines, ("", ROLLOUT), strict=True):
        words = [*shlex.split(line)[1:], *shlex.split(f"{SHORT} {STEPS} {more}")]
        if "--trainer.default_root_dir" not in words:
            words += ["--trainer.default_root_dir", "runs/sft"]  # by its file's name
        found.append([word.replace("runs/", f"{runs}/").replace("configs/", f"{ROOT}/configs/") for word in words])
    return found


def run(words: list[str], log: Path, prepare: Callable[[], None] | None = None, status: int = 0) -> str:
    found, output = command(words, log, prepare)
    assert found == status, output
    return output


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("pair")
    for number, words in enumerate(pair(runs)):
        run(words, runs / f"{number}.log")
    return runs


def test_reinforcement_learning_starts_from_what_was_taught(whole: Path) -> None:
    taught, trained = adapter(whole / "sft"), adapter(whole / "sft_rl")
    assert taught.keys() == trained.keys() and len(taught) == 2 * 7 and not equal(taught, trained)
    kl = [event.value for event in EventAccumulator(str(whole / "sft_rl")).Reload().Scalars("policy/kl")]
    assert len(kl) == 3 and abs(kl[0]) < 1e-6 < abs(kl[-1])


def die_in_the_third_step() -> None:
    """SIGKILL in the backward pass of either part, which two checkpoints precede."""
    from qerl_pl.policy import policy

    plain, calls = policy.Policy.train, iter(range(100))

    def train(self: Any, mode: bool = True) -> Any:
        if mode and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, mode)

    policy.Policy.train = train  # type: ignore[method-assign]


@pytest.mark.parametrize("part", [0, 1], ids=["supervised", "reinforcement learning"])
def test_either_part_ends_with_the_same_bits_after_a_kill(whole: Path, tmp_path: Path, part: int) -> None:
    shutil.copytree(whole / "sft" / "adapter", tmp_path / "sft" / "adapter")
    words = pair(tmp_path)[part]
    run(words, tmp_path / "killed.log", die_in_the_third_step, -signal.SIGKILL)
    folder = ("sft", "sft_rl")[part]
    assert "resuming from" in run(words, tmp_path / "resumed.log")
    assert equal(adapter(tmp_path / folder), adapter(whole / folder))
