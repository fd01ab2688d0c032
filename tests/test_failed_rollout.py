"""A rollout that fails leaves a checkpoint from which the run goes on as if nothing had happened."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fit_helpers import adapter, configuration
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny_run import VALIDATED, Tiny, trainer_of
from torch import Tensor

from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError

FLAKY = """
from pathlib import Path

broken = Path(__file__).with_name("broken")

def flaky(completions, **columns):
    if len(completions) == 4 and broken.exists():  # a rollout; a validation has another size
        left = int(broken.read_text()) - 1
        if left == 0:
            raise RuntimeError("the service is down")
        broken.write_text(str(left))
    return [len(text) / 100 for text in completions]
"""


pytestmark = pytest.mark.usefixtures("process_state")


def flaky_run(base: Path, folder: Path, every_n_rollouts: int) -> list[str]:
    """Arguments of a run of eight rollouts, validated after each fourth, whose reward fails while a file says so."""
    folder.mkdir(exist_ok=True)
    (folder / "flaky_reward.py").write_text(FLAKY)
    settings = configuration(base, folder / "run")
    settings["data"]["init_args"]["val_batch_size"] = 3
    rollout, checkpoint = (settings["trainer"]["callbacks"][index]["init_args"] for index in (0, 2))
    vowels = {"class_path": "fit_helpers.Vowels", "init_args": {"weight": 0.5}}
    # Vowels draws from Python's generator before the other one fails.
    rollout["rewards"] = {"vowels": vowels, "flaky": f"{folder}/flaky_reward.py:flaky"}
    checkpoint |= {"every_n_rollouts": every_n_rollouts, "keep": 99}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return ["fit", "-c", str(folder / "run.yaml"), "--resume", "auto"]


def checkpoint(run: Path, name: str) -> dict[str, Any]:
    """A checkpoint without what depends on the clock."""
    found: dict[str, Any] = torch.load(run / "checkpoints" / name, weights_only=True)
    summary = found["callbacks"]["RunSummary"]
    summary["train_seconds"], summary["points"] = (
        0.0,
        {name: values for name, values in summary["points"].items() if not name.startswith("time/")},
    )
    return found


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    """Places where two checkpoints, or parts of them, differ in a bit."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        pairs = [(key, value, second[key]) for key, value in first.items()]
    elif isinstance(first, list | tuple) and len(first) == len(second):
        pairs = list(zip(range(len(first)), first, second, strict=True))
    else:
        equal = torch.equal(first, second) if isinstance(first, Tensor) else first == second
        return [] if equal else [place]
    return [found for key, *values in pairs for found in differences(*values, f"{place}/{key}")]


@pytest.fixture(scope="module")
def uninterrupted(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert main(flaky_run(tiny_policy_dir, folder, 1)) == 0
    return folder / "run"


def test_a_reward_that_fails_saves_the_state_before_its_rollout_and_the_run_resumes_bit_for_bit(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = tmp_path / "run", flaky_run(tiny_policy_dir, tmp_path, 99)
    saved = []
    for rollout, calls in ((5, 5), (7, 3)):  # the first of an epoch; the third, when the run has gone on
        (tmp_path / "broken").write_text(str(calls))
        assert main(words) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl: "))
        path = run / "checkpoints" / f"step={rollout - 1}.ckpt"
        assert line.startswith("qerl: reward 'flaky' raised RuntimeError: the service is down (line ")
        assert line.endswith(f"; the state is saved in {path}; continue with the same command and --resume auto")
        saved.append(path.name)
        assert sorted(one.name for one in path.parent.glob("*.ckpt")) == saved
        assert not differences(checkpoint(run, path.name), checkpoint(uninterrupted, path.name))
        assert main(words) == 2  # it fails again, and the checkpoint is there
        assert f"the state is saved in {path}" in capsys.readouterr().err
    (tmp_path / "broken").unlink()
    assert main(words) == 0
    assert not differences(checkpoint(run, "step=8.ckpt"), checkpoint(uninterrupted, "step=8.ckpt"))
    assert not differences(adapter(run), adapter(uninterrupted))
    assert (run / "completions.jsonl").read_text() == (uninterrupted / "completions.jsonl").read_text()


class Saves(Callback):
    """Saves a checkpoint after each rollout, before its update."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "within.ckpt")


def test_a_checkpoint_within_a_step_that_goes_on_changes_nothing(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    words = flaky_run(tiny_policy_dir, tmp_path, 99)[:-2]
    settings = yaml.safe_load((tmp_path / "run.yaml").read_text())
    settings["trainer"]["callbacks"].append({"class_path": f"{__name__}.Saves"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    assert main(words) == 0 and (tmp_path / "run" / "within.ckpt").is_file()
    assert not differences(adapter(tmp_path / "run"), adapter(uninterrupted))


def test_what_another_callback_saves_within_a_failed_rollout_resumes_before_it(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", flaky_run(tiny_policy_dir, tmp_path, 99)[:-2]
    settings = yaml.safe_load((tmp_path / "run.yaml").read_text())
    saves = {"monitor": "val/accuracy", "filename": "failed", "save_on_exception": True}
    settings["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (tmp_path / "broken").write_text("7")
    assert main(words) == 2
    (tmp_path / "broken").unlink()
    (path,) = run.rglob("failed*.ckpt")
    assert main([*words, "--ckpt_path", str(path)]) == 0
    assert not differences(adapter(run), adapter(uninterrupted))


class Fails(Callback):
    """Raises where a rollout would, before a number of the run's steps."""

    def __init__(self, step: int, error: type[Exception] = UserError) -> None:
        self.step = step
        self.error = error

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            raise self.error("it fails")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step=*.ckpt"))


# Between two epochs without a validation a sampler must know its epoch, as PromptSampler does and this one does not.
@pytest.mark.parametrize(("step", "validated"), [(step, step % 2 == 0) for step in range(1, 12)] + [(2, False)])
def test_a_run_of_two_epochs_that_fails_anywhere_does_nothing_twice(tmp_path: Path, step: int, validated: bool) -> None:
    settings = {"max_epochs": 2} | ({"val_check_interval": 2, "limit_val_batches": 1} if validated else {})
    modules = [Tiny(), Tiny(), Tiny()]
    trainer_of(tmp_path / "whole", ResumeCheckpoint(99), **settings).fit(modules[0])
    with pytest.raises(UserError) as raised:
        trainer_of(tmp_path, Fails(step), ResumeCheckpoint(99), **settings).fit(modules[1])
    path = tmp_path / "checkpoints" / f"step={step}.ckpt"
    assert raised.value.__notes__ == [f"the state is saved in {path}; continue with the same command and --resume auto"]
    trainer = trainer_of(tmp_path, ResumeCheckpoint(99), **settings)
    trainer.fit(modules[2], ckpt_path=str(path), weights_only=True)
    assert modules[1].events + modules[2].events == modules[0].events
    assert [event for event in modules[1].events if event < VALIDATED] == [*range(6), *range(6)][:step]
    assert modules[2].weight == modules[0].weight


def test_without_a_step_or_a_user_error_or_outside_of_a_rollout_nothing_is_saved(tmp_path: Path) -> None:
    class FailsInItsStep(Tiny):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise UserError("the update fails")
            return super().training_step(batch, batch_idx)

    class FailsInValidation(Tiny):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise UserError("the validation fails")

    settings = {"val_check_interval": 2, "limit_val_batches": 1}
    for module, fails, given in (
        (Tiny(), Fails(0), {}),
        (Tiny(), Fails(3, RuntimeError), {}),
        (FailsInItsStep(), Fails(99), {}),
        (FailsInValidation(), Fails(99), settings),
        (Tiny(), Fails(2), {"fast_dev_run": 3}),
    ):
        with pytest.raises((UserError, RuntimeError)) as raised:
            trainer_of(tmp_path, fails, ResumeCheckpoint(99), **given).fit(module)
        assert checkpoints(tmp_path) == [] and not hasattr(raised.value, "__notes__")


def test_one_rank_of_several_saves_nothing_that_the_others_would_wait_for(tmp_path: Path) -> None:
    class OneOfTwo(Fails):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == self.step:
                trainer.strategy.world_size = 2  # type: ignore[attr-defined]
            super().on_train_batch_start(trainer, *args)

    with pytest.raises(UserError) as raised:
        trainer_of(tmp_path, OneOfTwo(3), ResumeCheckpoint(99)).fit(Tiny())
    assert checkpoints(tmp_path) == [] and not hasattr(raised.value, "__notes__")


def test_a_failure_is_forgotten_by_the_next_run_of_the_callback(tmp_path: Path) -> None:
    callback = ResumeCheckpoint(2, keep=9)
    with pytest.raises(UserError):
        trainer_of(tmp_path / "first", Fails(3), callback).fit(Tiny())
    assert checkpoints(tmp_path / "first") == ["step=2.ckpt", "step=3.ckpt"]
    trainer_of(tmp_path / "second", callback).fit(Tiny())
    trainer_of(tmp_path / "third", ResumeCheckpoint(2, keep=9)).fit(Tiny())
    names = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert checkpoints(tmp_path / "second") == checkpoints(tmp_path / "third") == names
    for name in names:
        ends = [torch.load(tmp_path / run / "checkpoints" / name, weights_only=True) for run in ("second", "third")]
        assert not differences(ends[0]["loops"], ends[1]["loops"])
    with pytest.raises(UserError):
        trainer_of(tmp_path / "fourth", Fails(0), callback).fit(Tiny())
    assert checkpoints(tmp_path / "fourth") == []
