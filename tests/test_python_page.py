"""docs/python.md runs as written: training, evaluation, export, and a loop that equals the trainer bit for bit."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT, fences
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.modules import PolicyUpdate, QeRLModule
from qerl_pl.rewards import RewardFunction
from qerl_pl.toy.policy import ToyConfig
from qerl_pl.types import Experience

pytestmark = pytest.mark.nightly

TRAIN, VALIDATE, EXPORT, LOOP = fences(ROOT / "docs" / "python.md", "python")
ROLLOUTS = 3


@dataclass
class Update:
    experience: Experience
    metrics: dict[str, float]
    state: dict[str, Tensor]


class Denser(RewardFunction):
    """The page's reward and a share of letters, for the smaller policy is never right."""

    def __call__(self, samples: Any) -> list[float]:
        letters = [sum(map(str.isalpha, sample.completion)) / 100 for sample in samples]
        return [value + more for value, more in zip(super().__call__(samples), letters, strict=True)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, tiny_policy_dir: Path) -> dict[str, Any]:
    """Names that the page's blocks leave, run one after the other; the trainer stops as early as the loop."""
    folder, updates = tmp_path_factory.mktemp("page"), []
    shutil.copytree(tiny_policy_dir, folder / "cache" / f"toy-{ToyConfig().digest}")
    run, training_step = PolicyUpdate.run, QeRLModule.training_step

    def recorded(self: PolicyUpdate, policy: Any, experience: Experience, *arguments: Any) -> dict[str, float]:
        metrics = run(self, policy, experience, *arguments)
        state = {name: tensor.detach().clone() for name, tensor in policy.trained_state().items()}
        updates.append(Update(experience, metrics, state))
        return metrics

    def stopping(self: QeRLModule, *arguments: Any) -> None:
        training_step(self, *arguments)
        self.trainer.should_stop = self.policy_version == ROLLOUTS

    names: dict[str, Any] = {"updates": updates}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("QERL_CACHE", str(folder / "cache"))
        patch.setattr(PolicyUpdate, "run", recorded)
        patch.setattr(QeRLModule, "training_step", stopping)
        patch.setattr("qerl_pl.rewards.functions.RewardFunction", Denser)
        for block in (TRAIN, VALIDATE, EXPORT, LOOP):
            exec(compile(block, "docs/python.md", "exec"), names)
            if block == VALIDATE:
                names["evaluation"] = names["metrics"]
    return names | {"folder": folder}


def test_training_takes_at_most_25_lines_and_the_loop_40() -> None:
    def lines(block: str) -> int:
        return sum(1 for line in block.splitlines() if line)

    assert lines(TRAIN) <= 25 and lines(LOOP) <= 40


def test_the_loop_equals_the_trainer_bit_for_bit(page: dict[str, Any]) -> None:
    trainer, loop = page["updates"][:ROLLOUTS], page["updates"][ROLLOUTS:]
    assert len(trainer) == len(loop) == ROLLOUTS
    for ours, plain in zip(trainer, loop, strict=True):
        for name in ("tokens", "sampler_logprobs", "advantages"):
            assert torch.equal(getattr(ours.experience, name), getattr(plain.experience, name)), name
        assert all(torch.equal(tensor, plain.state[name]) for name, tensor in ours.state.items())
        assert ours.metrics == plain.metrics and ours.metrics["optim/grad_norm"] > 0
    sigmas = [update.experience.metrics["aqn/sigma"] for update in trainer]
    assert sigmas[0] == 0 < sigmas[-1] and page["noise"].sigma(ROLLOUTS - 1, page["rollouts"]) == sigmas[-1]
    assert not torch.equal(*(next(iter(update.state.values())) for update in loop[:2]))


def test_the_run_is_evaluated_exported_and_answers(page: dict[str, Any]) -> None:
    assert 0 <= page["evaluation"]["val/accuracy"] <= 1
    merged = page["folder"] / "runs" / "merged"
    assert (merged / "README.md").is_file() and (merged.parent / "adapter" / "adapter_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.dtype == torch.bfloat16 and page["generate"].model.dtype == torch.bfloat16
