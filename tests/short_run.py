"""Runs by Python of a tiny policy, each a second: module, trainer and data that tests put together as they need."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fit_helpers import Vowels
from lightning.pytorch import Callback, Trainer
from tiny_run import quiet_trainer

from qerl_pl.callbacks import AdaptiveQuantizationNoise, RolloutCallback
from qerl_pl.datamodules import ArithmeticDataModule
from qerl_pl.engines import TransformersEngine
from qerl_pl.modules import LoraConfig, PolicyConfig, QeRLModule
from qerl_pl.runtime.strategy import UnwrappedDDPStrategy
from qerl_pl.types import SamplingConfig


def module_of(base: Path, lr: float = 0.01, alpha: float = 8.0, **settings: Any) -> QeRLModule:
    policy = PolicyConfig(path=str(base), quantization="none", dtype="float32", lora=LoraConfig(rank=4, alpha=alpha))
    given = {"optimizer": lambda params: torch.optim.AdamW(params, lr=lr), "update_epochs": 2, "seed": 5}
    return QeRLModule(policy, **given | settings)


def rollout_of(engine: TransformersEngine | None = None, **settings: Any) -> RolloutCallback:
    given: dict[str, Any] = {"group_size": 2, "sampling": SamplingConfig(max_tokens=4)}
    return RolloutCallback([Vowels()], engine, **given | settings)


def trainer_of(
    run: Path, *callbacks: Callback, rollout: Callback | None = None, noise: bool = True, **settings: Any
) -> Trainer:
    aqn = [AdaptiveQuantizationNoise(stages=4)] * noise
    return quiet_trainer(run, rollout or rollout_of(), *aqn, *callbacks, **settings)


def data() -> ArithmeticDataModule:
    return ArithmeticDataModule(train_size=8, batch_size=2, val_size=2, test_size=2)


def fit_and_evaluate(base: Path, run: Path, devices: int, environment: Mapping[str, str]) -> None:
    """A script on one of several devices: RUN/rank<N>.json has its metrics and weights.

    Args:
        base: The policy.
        run: The run's folder, which exists.
        devices: Processes.
        environment: Variables by which torchrun tells a process its place.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    reward = {"vowels": lambda completions, **_: [sum(map("aeiou".count, text)) / 10 for text in completions]}
    rollout = RolloutCallback(reward, group_size=2, sampling=SamplingConfig(max_tokens=4))
    strategy = UnwrappedDDPStrategy() if devices > 1 else "auto"
    trainer = trainer_of(run, rollout=rollout, devices=devices, strategy=strategy)
    module, task = module_of(base), ArithmeticDataModule(train_size=8, batch_size=2, val_size=5, test_size=3)
    trainer.fit(module, task)
    metrics = [stage(module, task, verbose=False)[0] for stage in (trainer.validate, trainer.test)]
    weights = {name: tensor.tolist() for name, tensor in module.policy.trained_state().items()}
    (run / f"rank{trainer.global_rank}.json").write_text(json.dumps({"metrics": metrics, "weights": weights}))
