"""The callback that drives the engine: what it launches, hands over, closes and warns of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fit_helpers import Vowels
from lightning.pytorch import Callback, LightningModule, Trainer
from short_run import data, module_of, rollout_of, trainer_of

from qerl_pl.algorithm import NoiseSchedule
from qerl_pl.callbacks import AdaptiveQuantizationNoise, RolloutCallback
from qerl_pl.engines import EngineSpec, TransformersEngine
from qerl_pl.engines.base import LentWeights
from qerl_pl.errors import UserError
from qerl_pl.types import SamplingConfig


class Recording(TransformersEngine):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[EngineSpec] = []
        self.noise: list[tuple[int, float | None]] = []
        self.closed = 0

    def launch(self, spec: EngineSpec) -> None:
        self.specs.append(spec)
        super().launch(spec)

    def lend(self) -> LentWeights | None:
        return LentWeights({}, {})

    def sync(self, weights: Any) -> Any:
        self.noise.append((weights.version, None if weights.noise is None else weights.noise.sigma))
        return super().sync(weights)

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_the_engine_is_launched_once_for_the_policy_and_closed_once(tiny_policy_dir: Path, tmp_path: Path) -> None:
    engine, module = Recording(), module_of(tiny_policy_dir)
    rollout = rollout_of(engine)
    trainer = trainer_of(tmp_path, rollout=rollout)
    rollout.close()
    assert engine.closed == 0
    trainer.fit(module, datamodule=data())
    trainer.validate(module, datamodule=data(), verbose=False)
    (spec,) = engine.specs
    lora = module.policy_config.lora
    assert spec == EngineSpec(
        module.base_folder, torch.float32, torch.device("cpu"), 4, lora.targets, max_tokens=256 + 4
    )
    assert module.hand_over is not None and module.hand_over.lent == LentWeights({}, {})
    assert rollout.collector.seed == 5 and rollout.collector.objective is module.objective
    for _ in range(2):
        rollout.close()
        assert engine.closed == 1


def test_noise_is_that_of_the_version_in_training_and_none_in_evaluation(tiny_policy_dir: Path, tmp_path: Path) -> None:
    engine, noise = Recording(), AdaptiveQuantizationNoise(0.02, 0.005, 3, "linear", False)
    trainer = trainer_of(tmp_path, noise, rollout=rollout_of(engine), noise=False)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data())
    schedule = NoiseSchedule(0.02, 0.005, 3, "linear", False)
    expected = [(version, schedule.sigma(version, 4)) for version in range(4)]
    assert [(version, sigma) for version, sigma in engine.noise if sigma is not None] == expected
    assert engine.noise[-1] == (4, None)  # the validation at the end
    assert noise.state_dict() == {"planned_rollouts": 4}
    resumed = AdaptiveQuantizationNoise()
    resumed.load_state_dict({"planned_rollouts": 9})
    assert resumed.state_dict() == {"planned_rollouts": 9} and resumed.schedule == NoiseSchedule()
    module = module_of(tiny_policy_dir)
    resumed.setup(trainer, module, "fit")
    assert module.noise is not None and module.noise(9).sigma == pytest.approx(1e-4)
    assert (module.noise(9).seed, module.noise(9).version) == (5, 9)


def test_settings_by_default() -> None:
    callback = RolloutCallback([Vowels()])
    config = callback.config
    assert isinstance(callback.engine, TransformersEngine) and config.sampling == SamplingConfig()
    found = (config.group_size, config.resample_rounds, config.eval_samples, config.check_every, config.accuracy_reward)
    assert found == (8, 0, 1, 50, None) and config.mismatch_bound == 0.25


@pytest.mark.parametrize(("bound", "warned"), [(0.25, False), (0.2, True)])
def test_a_mismatch_above_its_bound_is_warned_of(bound: float, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = SimpleNamespace(callback_metrics={"mismatch/logprob_abs_mean": torch.tensor(0.25)})
    rollout_of(mismatch_bound=bound).on_train_batch_end(trainer, module_of(Path("nowhere")), None, None, 0)
    assert ("differ by 0.250 nats a token, more than mismatch_bound=0.2:" in caplog.text) == warned
    assert bool(caplog.records) == warned


def test_sizes_that_do_not_divide_are_refused_in_training_alone(tiny_policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found 3 and 4"):
        trainer_of(tmp_path).fit(module_of(tiny_policy_dir, minibatches=3), datamodule=data())
    trainer_of(tmp_path).validate(module_of(tiny_policy_dir, minibatches=3), datamodule=data(), verbose=False)


@pytest.mark.parametrize("callback", [rollout_of(), AdaptiveQuantizationNoise()])
def test_other_modules_and_data_are_refused(callback: Callback, tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="QeRLModule; found a LightningModule; train that instead"):
        callback.setup(trainer, LightningModule(), "fit")
    if isinstance(callback, RolloutCallback):
        with pytest.raises(UserError, match="need a PromptDataModule; found NoneType;"):
            callback.setup(trainer, module_of(Path("nowhere")), "fit")
