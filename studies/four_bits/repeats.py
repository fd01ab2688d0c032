"""Digests of a training, to compare it with another of the same settings, and where two differ first.

qerl fit -c RUN/config.yaml --trainer.default_root_dir AGAIN --trainer.callbacks+=studies.four_bits.repeats.Digests
python -m studies.four_bits.repeats ONE AGAIN
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

FILE = "digests.jsonl"


def digest(tensor: Tensor) -> str:
    return hashlib.sha1(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


class Digests(Callback):
    """Appends a line for each rollout to RUN/digests.jsonl: of its tensors, and of gradients and weights of its update.

    A line has the number of finished rollouts and, by name, digests of the experience's tensors (tokens, sampler's
    log-probabilities, advantages, ...), of the trained weights, and of the gradients at each optimizer step.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps: list[dict[str, str]] = []
        parameters = dict(pl_module.named_parameters())

        def keep(*_: Any) -> None:
            self._steps.append({n: digest(p.grad) for n, p in parameters.items() if p.grad is not None})

        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(keep)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = {
            "rollouts": pl_module.policy_version,
            "experience": {n: digest(t) for n, t in vars(batch.experience).items() if isinstance(t, Tensor)},
            "weights": {n: digest(p) for n, p in pl_module.named_parameters() if p.requires_grad},
            **{f"gradients of step {number}": step for number, step in enumerate(self._steps, 1)},
        }
        self._steps.clear()
        with (Path(trainer.default_root_dir) / FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")


def lines(run: Path) -> dict[int, dict[str, Any]]:
    """By the number of finished rollouts; of a rollout that was repeated after a kill, the last."""
    return {row["rollouts"]: row for row in map(json.loads, (run / FILE).read_text().splitlines())}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs of a rollout, such as "experience tokens"."""
    return [
        f"{part} {name}"
        for part, digests in one.items()
        if part != "rollouts"
        for name, value in digests.items()
        if other[part].get(name) != value
    ]


def compare(one: Path, other: Path) -> str:
    """The rollouts that both have, and the first that differs with what differs in it."""
    first, second = lines(one), lines(other)
    common = sorted(first.keys() & second.keys())
    for rollouts in common:
        if names := differences(first[rollouts], second[rollouts]):
            return f"{len(common)} common rollouts; the first that differs is {rollouts}: {', '.join(names)}"
    return f"{len(common)} common rollouts, all the same"


if __name__ == "__main__":
    print(compare(*map(Path, sys.argv[1:])))
