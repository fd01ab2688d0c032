"""The two commands of docs/sft.md, shortened: SFT, then reinforcement learning from its adapter."""

import shlex
from pathlib import Path

import pages
import torch
from fit_helpers import command
from pages import ROOT
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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


def test_reinforcement_learning_starts_from_what_was_taught(tmp_path: Path) -> None:
    for number, words in enumerate(pair(tmp_path)):
        status, output = command(words, tmp_path / f"{number}.log")
        assert status == 0, output
    taught, trained = (load_file(tmp_path / run / "adapter/adapter_model.safetensors") for run in ("sft", "sft_rl"))
    assert taught.keys() == trained.keys() and len(taught) == 2 * 7
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in taught.items())
    kl = [event.value for event in EventAccumulator(str(tmp_path / "sft_rl")).Reload().Scalars("policy/kl")]
    assert len(kl) == 3 and abs(kl[0]) < 1e-6 < abs(kl[-1])
