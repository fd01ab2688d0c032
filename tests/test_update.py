"""The update by itself: how an experience is divided among optimizer steps."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from qerl_pl.algorithm.objectives import GRPO
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.types import Experience


class Counting(GRPO):
    """Notes the completions of each minibatch."""

    sizes: list[int] = []

    def weights(self, mask: Tensor, max_tokens: int, completions: float, tokens: float) -> Tensor:
        assert completions == len(mask)
        self.sizes.append(len(mask))
        return super().weights(mask, max_tokens, completions, tokens)


def experience_of(rows: int, version: int = 0) -> Experience:
    """Rows of nine tokens, the last four sampled, half of them better than the others."""
    mask = torch.zeros(rows, 9, dtype=torch.bool)
    mask[:, 5:] = True
    return Experience(
        version=version,
        tokens=torch.randint(5, 300, (rows, 9), generator=torch.Generator().manual_seed(rows)),
        lengths=torch.full((rows,), 9),
        mask=mask,
        sampler_logprobs=torch.full((rows, 9), -3.0) * mask,
        advantages=torch.tensor([1.0, -1.0] * (rows // 2)),
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampled_tokens=4 * rows,
        seconds=0.0,
        temperature=1.0,
        max_tokens=4,
    )


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [2, 2, 2, 2]), (6, [2, 2, 1, 1]), (2, [1, 1, 0, 0]), (0, [0, 0, 0, 0])]
)
def test_fewer_completions_are_divided_evenly_and_steps_without_any_change_nothing(
    tiny_policy_dir: Path, rows: int, sizes: list[int]
) -> None:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4))
    policy = Policy(tiny_policy_dir, config, torch.device("cpu"), seed=1)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.5)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    counting = Counting()
    update = PolicyUpdate(counting, 2, 4, None, 1.0, reference_share=1.0, seed=0)

    def run(experience: Experience) -> dict[str, float]:
        counting.sizes.clear()
        return update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward())  # type: ignore[arg-type]

    run(experience_of(8))  # gives the optimizer a momentum
    before = [parameter.detach().clone() for parameter in trained]
    metrics = run(experience_of(rows, version=1))
    assert counting.sizes == 2 * sizes
    assert schedule.last_epoch == 2 * 2 * 4
    taken = 8 + 2 * sum(size > 0 for size in sizes)
    assert {int(state["step"]) for state in optimizer.state.values()} == {taken}
    same = all(torch.equal(parameter, old) for parameter, old in zip(trained, before, strict=True))
    assert same == (rows == 0)
    assert metrics["optim/lr"] == pytest.approx(0.01)
    assert torch.tensor(metrics["policy/kl"]).isnan() == (rows == 0)
