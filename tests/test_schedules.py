"""Learning-rate schedules beside the names; what a Trainer would do to the policy, and is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from short_run import data, module_of, trainer_of
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule, SFTModule
from qerl_pl.modules.optimizer import build_schedule, trial_weight
from qerl_pl.modules.policy_module import PolicyModule

STEPS = 8
RATE = 0.5


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def warmed_up(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 6, eta_min=0.1)]
    return SequentialLR(optimizer, parts, milestones=[2])


def wsd(optimizer: Optimizer) -> LambdaLR:
    return get_wsd_schedule(optimizer, num_warmup_steps=2, num_decay_steps=2, num_stable_steps=4)


def least(optimizer: Optimizer) -> LambdaLR:
    return get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, STEPS, min_lr=0.1)


SCHEDULES: dict[str, tuple[Any, list[float]]] = {
    "a least rate": (least, [0, 0.5, 0.4, 0.2, 0.1]),
    "warm-up, stable, decay": (wsd, [0, 0.5, 0.5, 0.5, 0]),
    "a warm-up by steps": (warmed_up, [0.125, 0.5, 0.4, 0.2, 0.1]),
}


def stepped(schedule: Any) -> list[float]:
    """The learning rate of each step of a schedule by itself, and after the last."""
    optimizer = sgd([trial_weight()])
    built = build_schedule(schedule, optimizer, 0, STEPS)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(STEPS):
        optimizer.step()
        built.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_what_makes_one_of_the_optimizer(name: str) -> None:
    schedule, expected = SCHEDULES[name]
    assert stepped(schedule)[::2] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("schedule", [least, warmed_up])
def test_a_run_and_the_run_that_resumes_it_have_the_rates_of_the_schedule(
    schedule: Any, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    for given in ({}, {"ckpt_path": str(tmp_path / "checkpoints" / "step=2.ckpt"), "weights_only": True}):
        module = module_of(tiny_policy_dir, optimizer=sgd, lr_scheduler=schedule)
        trainer_of(tmp_path, Rates(), ResumeCheckpoint(1, keep=9)).fit(module, datamodule=data(), **given)
    expected = stepped(schedule)[:-1:2]  # two steps a rollout
    assert rates == [*expected, *expected[2:]]


@pytest.mark.parametrize("schedule", ["polynomial", "linear"])
def test_a_run_that_is_all_warm_up_has_a_step_after_it(schedule: str, tiny_policy_dir: Path, tmp_path: Path) -> None:
    module = module_of(tiny_policy_dir, optimizer=sgd, lr_scheduler=schedule, warmup_ratio=1.0)
    trainer = trainer_of(tmp_path, ResumeCheckpoint(1))
    trainer.fit(module, datamodule=data())
    steps = module.planned_batches() * module.steps_per_batch
    (peak,) = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas  # of the last step
    assert peak(0) == 0 < peak(steps - 1) == 1 and peak(steps) < 1e-3


def test_a_resumed_run_keeps_the_class_of_its_schedule_and_its_settings(tiny_policy_dir: Path, tmp_path: Path) -> None:
    def fit(schedule: Any, **given: Any) -> None:
        module = module_of(tiny_policy_dir, optimizer=sgd, lr_scheduler=schedule)
        trainer_of(tmp_path, ResumeCheckpoint(1, keep=9)).fit(module, datamodule=data(), **given)

    def cosine(steps: int) -> Any:
        return lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps)

    fit(cosine(8))
    resumed = {"ckpt_path": str(tmp_path / "checkpoints" / "step=2.ckpt"), "weights_only": True}
    fit(cosine(8), **resumed)
    for other, said in {
        cosine(16): r"T_max=16.* for CosineAnnealingLR.T_max=8",
        "cosine": r"got LambdaLR\(\) for C",
    }.items():
        with pytest.raises(UserError, match=f"a resumed run keeps its lr_scheduler; .*{said}"):
            fit(other, **resumed)


def parsed(kind: type[PolicyModule], *words: str) -> Any:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "model")
    return parser.instantiate_classes(parser.parse_args([*words])).model.lr_scheduler


@pytest.mark.parametrize("kind", [QeRLModule, SFTModule])
def test_the_command_line_names_a_class_or_a_function(kind: type[PolicyModule], tmp_path: Path) -> None:
    file = tmp_path / "my_schedules.py"
    file.write_text(
        "from transformers import get_constant_schedule_with_warmup\n"
        "def steps(optimizer):\n    return get_constant_schedule_with_warmup(optimizer, 10)\n"
    )
    optimizer = sgd([trial_weight()])
    assert parsed(kind) == "cosine" and parsed(kind, "--model.lr_scheduler", "linear") == "linear"
    words = ["--model.lr_scheduler=CosineAnnealingLR", "--model.lr_scheduler.T_max=9", "--model.lr_scheduler.eta_min=1"]
    built = parsed(kind, *words)(optimizer)
    assert isinstance(built, CosineAnnealingLR) and (built.T_max, built.eta_min) == (9, 1)
    assert parsed(kind, f"--model.lr_scheduler={file}:steps")(optimizer).lr_lambdas[0](5) == 0.5
    assert callable(parsed(kind, "--model.lr_scheduler=transformers.get_constant_schedule"))
    with pytest.raises(UserError, match="lr_scheduler is a schedule .* cannot be imported"):
        parsed(kind, f"--model.lr_scheduler={file}:none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr_scheduler": "cosine_with_min_lr"},
            "got 'cosine_with_min_lr', .* min_lr_rate should be set; use cosine or",
        ),
        (
            {"lr_scheduler": "warmup_stable_decay"},
            "use cosine or linear, or a class or function that makes one .my_schedules.py:wsd.",
        ),
        ({"lr_scheduler": lambda optimizer: ReduceLROnPlateau(optimizer)}, "ReduceLROnPlateau is no LRScheduler, or"),
        ({"lr_scheduler": lambda optimizer: None}, "NoneType is no LRScheduler"),
        ({"lr_scheduler": lambda: None}, "takes 0 positional arguments"),
        ({"lr_scheduler": CosineAnnealingLR}, "T_max"),
        ({"lr_scheduler": wsd, "warmup_ratio": 0.3}, "warmup_ratio is that of a named schedule; .* beside 0.3;"),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.3}, "constant has no warm-up; got .* 0.3; set constant_with_w"),
    ],
)
def test_what_is_no_schedule_is_refused_by_keys_that_are_there(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        QeRLModule(**settings)
    assert "lr_scheduler_kwargs" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [QeRLModule, SFTModule])
@pytest.mark.parametrize("arguments", [("a.ckpt",), (Path("a.ckpt"), "cpu"), ("a.ckpt", None, None, False)])
def test_a_checkpoint_is_loaded_by_a_trainer(kind: type[PolicyModule], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match=f"loaded into a {kind.__name__} by a Trainer, .*; give it as ckpt_path to"):
        kind.load_from_checkpoint(*arguments)
