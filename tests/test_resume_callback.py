"""When ResumeCheckpoint saves and stops, on a module of one number: in this process, within moments."""

import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from test_killed import in_a_fork
from tiny_run import VALIDATED, Tiny, trainer_of
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.callbacks.resume import Preempted
from qerl_pl.cli.main import CALLBACKS
from qerl_pl.errors import UserError
from qerl_pl.runtime.checkpoint_io import newest_checkpoint


class Validations(Callback):
    """A state that a validation changes."""

    def __init__(self) -> None:
        self.ended = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}


def saved(folder: Path) -> set[str]:
    """Names of the checkpoints, beside which there is nothing."""
    return {path.name for path in (folder / "checkpoints").glob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("every", "keep", "names"),
    [
        (2, 1, {"step=6.ckpt"}),
        (2, 2, {"step=4.ckpt", "step=6.ckpt"}),
        (2, 3, {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}),
        (4, 3, {"step=4.ckpt", "step=6.ckpt"}),
        (1, 9, {f"step={step}.ckpt" for step in range(1, 7)}),
    ],
)
def test_one_is_saved_every_so_many_rollouts_and_the_newest_are_kept(
    tmp_path: Path, every: int, keep: int, names: set[str]
) -> None:
    trainer_of(tmp_path, ResumeCheckpoint(every, keep)).fit(Tiny())
    assert saved(tmp_path) == names


def test_by_default_every_tenth_is_saved_and_two_are_kept(tmp_path: Path) -> None:
    trainer_of(tmp_path, ResumeCheckpoint(), max_epochs=4).fit(Tiny())
    assert saved(tmp_path) == {"step=20.ckpt", "step=24.ckpt"}
    for sizes in ({"every_n_rollouts": 0}, {"keep": 0}):
        (name,) = sizes
        with pytest.raises(UserError, match=f"ResumeCheckpoint's {name} .*got 0"):
            ResumeCheckpoint(**sizes)
    ResumeCheckpoint(1, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_the_run_resumes_from_there(tmp_path: Path, number: int) -> None:
    module = Tiny({2: number})
    before = signal.signal(number, signal.default_int_handler)  # SIGHUP may be ignored here, as under nohup
    try:
        with pytest.raises(Preempted) as stopped:
            trainer_of(tmp_path, ResumeCheckpoint(4)).fit(module)
    finally:
        signal.signal(number, before)
    path = tmp_path / "checkpoints" / "step=3.ckpt"
    assert (stopped.value.signal_number, stopped.value.checkpoint) == (number, path)
    assert str(stopped.value) == f"stopped by {signal.Signals(number).name}; state saved in {path}"
    assert module.events == [0, 1, 2] and saved(tmp_path) == {path.name}
    resumed = Tiny()
    trainer_of(tmp_path, ResumeCheckpoint(4)).fit(resumed, ckpt_path=str(path), weights_only=True)
    assert resumed.events == [3, 4, 5] and saved(tmp_path) == {"step=4.ckpt", "step=6.ckpt"}


class Steps(DummyLogger):
    """Keeps the step that each logged number has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int | None, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.found += [(step, value) for name, value in metrics.items() if name == "batches before"]


class Numbered(Tiny):
    """Logs how many batches there were before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("batches before", float(self.trainer.fit_loop.total_batch_idx))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("stopped_at", "epochs"), [(2, 1), (5, 2), (5, 1)])
def test_a_signal_logs_the_step_and_starts_no_other(tmp_path: Path, stopped_at: int, epochs: int) -> None:
    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            begun.append(len(begun))

    begun: list[int] = []
    trainer = trainer_of(tmp_path, Look(), ResumeCheckpoint(4), max_epochs=epochs, log_every_n_steps=1)
    trainer.logger = logger = Steps()
    with pytest.raises(Preempted):
        trainer.fit(Numbered({stopped_at: signal.SIGTERM}))
    assert begun == [step for step, _ in logger.found] == [
        *range(stopped_at + 1)
    ] and f"step={stopped_at + 1}.ckpt" in saved(tmp_path)


def test_after_a_run_signals_are_as_before_and_forgotten(tmp_path: Path) -> None:
    class AtTheEnd(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            signal.raise_signal(signal.SIGTERM)

    def own(number: int, frame: Any) -> None:
        asked.append(number)

    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, own)
    try:
        callback = ResumeCheckpoint()
        trainer_of(tmp_path, AtTheEnd(), callback).fit(Tiny())
        assert not asked
        signal.raise_signal(signal.SIGTERM)
        assert asked == [signal.SIGTERM]
        again = Tiny()
        trainer_of(tmp_path, callback).fit(again)
        assert len(again.events) == 6
        with pytest.raises(Preempted):
            trainer_of(tmp_path, callback).fit(Tiny({0: signal.SIGTERM}))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_that_breaks_off_gives_the_signals_back_and_leaves_nothing_to_the_next(
    tmp_path: Path, stops: bool
) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise UserError("it breaks off")

    before = signal.getsignal(signal.SIGTERM)
    callback = ResumeCheckpoint()
    broken = trainer_of(tmp_path, callback) if stops else trainer_of(tmp_path, Breaks(), callback)
    try:
        with pytest.raises(Preempted if stops else UserError):
            broken.fit(Tiny({2: signal.SIGTERM} if stops else {}))
        assert signal.getsignal(signal.SIGTERM) == before
        again = Tiny()
        trainer_of(tmp_path, callback).fit(again)
        assert again.events == [*range(6)]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_kill_in_a_save_has_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    left = {folder / f".step={step}.ckpt.tmp" for step in (27, 28)}
    others = {folder / ".notes.tmp", folder / "kept.ckpt.tmp", tmp_path / ".step=27.ckpt.tmp"}
    for path in left | others:
        path.write_text("half")
    trainer_of(tmp_path, ResumeCheckpoint(), fast_dev_run=True).fit(Tiny())
    assert all(path.is_file() for path in left | others)
    trainer_of(tmp_path, ResumeCheckpoint()).fit(Tiny())
    assert not any(path.exists() for path in left) and all(path.is_file() for path in others)


def test_where_the_end_of_a_terminal_is_ignored_a_run_goes_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        trainer_of(tmp_path, ResumeCheckpoint()).fit(module := Tiny({2: signal.SIGHUP}))
        assert module.events == [*range(6)]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "after", "ends"),
    [
        (signal.SIGINT, 1.0, True),
        (signal.SIGTERM, 1.0, True),
        (signal.SIGTERM, 0.9, False),
        (signal.SIGHUP, 9.0, False),
    ],
)
def test_a_second_signal_ends_the_run_at_once_unless_it_repeats_the_first(
    monkeypatch: pytest.MonkeyPatch, number: int, after: float, ends: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda number, reduce_op: number)
    trainer: Any = SimpleNamespace(strategy=strategy)
    callback = ResumeCheckpoint()
    callback.on_sanity_check_start(trainer, Tiny())
    try:
        signal.raise_signal(signal.SIGTERM)
        assert callback._stop_signal(trainer) == signal.SIGTERM
        now[0] = after
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(number)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-number if ends else 0)
        assert callback._stop_signal(trainer) == signal.SIGTERM
    finally:
        callback.teardown(trainer, Tiny(), "fit")


@pytest.mark.parametrize(("own", "others", "found"), [(None, 0, None), (None, 15, 15), (2, 15, 15), (2, 0, 2)])
def test_all_ranks_stop_at_a_signal_to_one_rank(own: int | None, others: int, found: int | None) -> None:
    def reduce(number: Tensor, reduce_op: str) -> Tensor:
        assert number.device == torch.device("cpu")
        return {"max": torch.maximum}[reduce_op](number, torch.tensor(others))

    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=reduce)
    callback = ResumeCheckpoint()
    callback._signal = own
    trainer: Any = SimpleNamespace(strategy=strategy)
    assert callback._stop_signal(trainer) == found


@pytest.mark.parametrize("event", [1, VALIDATED, VALIDATED + 1])
def test_a_stop_where_a_step_is_validated_waits_for_its_end_and_keeps_it(tmp_path: Path, event: int) -> None:
    module, validations = Tiny({event: signal.SIGTERM}), Validations()
    settings = {"val_check_interval": 2, "limit_val_batches": 2}
    with pytest.raises(Preempted):
        trainer_of(tmp_path, validations, ResumeCheckpoint(), **settings).fit(module)
    assert module.events == [0, 1, VALIDATED, VALIDATED + 1] and saved(tmp_path) == {"step=2.ckpt"}
    path, resumed = str(tmp_path / "checkpoints" / "step=2.ckpt"), Tiny()
    assert torch.load(path, weights_only=True)["callbacks"]["Validations"] == {"ended": 1}
    trainer_of(tmp_path, Validations(), ResumeCheckpoint(), **settings).fit(resumed, ckpt_path=path, weights_only=True)
    assert resumed.events[:2] == [2, 3]  # it does not validate that step again


@pytest.mark.parametrize(
    ("settings", "validated"),
    [
        ({}, [6]),
        ({"val_check_interval": 2}, [2, 4, 6]),
        ({"val_check_interval": 0.5}, [3, 6]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2}, [4, 8, 12]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 2}, [12]),
        ({"val_check_interval": timedelta(microseconds=1)}, [1, 2, 3, 4, 5, 6]),
        ({"val_check_interval": 4}, [2]),  # where a callback ends the run
    ],
    ids=str,
)
def test_a_step_that_is_validated_is_saved_after_that(
    tmp_path: Path, settings: dict[str, Any], validated: list[int]
) -> None:
    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = validated == [trainer.global_step]

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert saved(tmp_path) == {f"step={step}.ckpt" for step in range(1, trainer.global_step)}
            seen.append(trainer.global_step)

    seen: list[int] = []
    trainer_of(tmp_path, Look(), ResumeCheckpoint(1, 99), **{"limit_val_batches": 2} | settings).fit(Tiny())
    assert seen == validated and saved(tmp_path) == {f"step={step}.ckpt" for step in range(1, validated[-1] + 1)}


@pytest.mark.parametrize("event", [VALIDATED, VALIDATED + 1])
def test_killed_in_a_validation_a_run_comes_to_it_again(tmp_path: Path, event: int) -> None:
    def trained() -> None:
        class FromTheSecond(Tiny):
            def _happens(self, event: int) -> None:
                self.signals = signals if 3 in self.events else {}
                super()._happens(event)

        signals: dict[int, int] = {event: signal.SIGKILL}
        trainer_of(tmp_path, ResumeCheckpoint(2), **settings).fit(FromTheSecond())

    settings = {"val_check_interval": 2, "limit_val_batches": 2}
    assert in_a_fork(trained) == -signal.SIGKILL and saved(tmp_path) == {"step=2.ckpt"}
    path, resumed = str(tmp_path / "checkpoints" / "step=2.ckpt"), Tiny()
    trainer_of(tmp_path, ResumeCheckpoint(2), **settings).fit(resumed, ckpt_path=path, weights_only=True)
    assert resumed.events == [2, 3, VALIDATED, VALIDATED + 1, 4, 5, VALIDATED, VALIDATED + 1]


@pytest.mark.parametrize("settings", [{"val_check_interval": 2}, {"val_check_interval": "00:01:00:00"}, {}], ids=str)
def test_a_step_is_saved_where_no_validation_follows(tmp_path: Path, settings: dict[str, Any]) -> None:
    class Unheld(Tiny):
        def val_dataloader(self) -> StatefulDataLoader[int]:
            return StatefulDataLoader(range(0 if settings.get("val_check_interval") == 2 else 2), batch_size=1)

    trainer_of(tmp_path, ResumeCheckpoint(2, keep=9), **{"limit_val_batches": 2} | settings).fit(Unheld())
    assert saved(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}


def test_a_stop_in_the_validation_before_training_waits_for_no_step(tmp_path: Path) -> None:
    module = Tiny({VALIDATED: signal.SIGTERM})
    settings = {"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}
    with pytest.raises(Preempted, match="^stopped by SIGTERM; before a step$") as stopped:
        trainer_of(tmp_path, ResumeCheckpoint(), **settings).fit(module)
    assert stopped.value.checkpoint is None
    assert module.events == [VALIDATED] and saved(tmp_path) == set()


def test_nothing_is_saved_but_by_training_in_earnest(tmp_path: Path) -> None:
    trainer_of(tmp_path, ResumeCheckpoint(1), limit_val_batches=2).validate(Tiny(), verbose=False)
    trainer_of(tmp_path, ResumeCheckpoint(1), fast_dev_run=True).fit(Tiny())
    assert saved(tmp_path) == set()


@pytest.mark.parametrize("steps", [2, 6, 8, 12])
@pytest.mark.parametrize("limited", [True, False])
def test_a_run_goes_on_where_it_was_in_its_epochs(tmp_path: Path, steps: int, limited: bool) -> None:
    first, second, settings = Tiny(), Tiny(), {"max_epochs": 3, "val_check_interval": 3, "limit_val_batches": 2}
    limits = {"max_steps": steps} if limited else {}
    trainer_of(tmp_path, ResumeCheckpoint(2, keep=99), **settings | limits).fit(first)
    path = str(tmp_path / "checkpoints" / f"step={steps}.ckpt")
    trainer = trainer_of(tmp_path, ResumeCheckpoint(), **settings)
    trainer.fit(second, ckpt_path=path, weights_only=True)
    trained = [[event for event in module.events if event < VALIDATED] for module in (first, second)]
    assert trained[0][:steps] + trained[1] == [*range(6), *range(6), *range(6)]
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


@pytest.mark.parametrize("steps", [2, 8, 14])
def test_an_epoch_that_a_limit_ends_counts_as_one_that_goes_on(tmp_path: Path, steps: int) -> None:
    progress = []
    for limits, name in (({"max_steps": steps}, "limited"), ({}, "whole")):
        trainer_of(tmp_path / name, ResumeCheckpoint(2, keep=99), max_epochs=3, **limits).fit(Tiny())
        checkpoint = torch.load(tmp_path / name / "checkpoints" / f"step={steps}.ckpt", weights_only=True)
        progress.append(checkpoint["loops"]["fit_loop"]["epoch_progress"])
    assert progress[0] == progress[1]


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    trainer_of(tmp_path, ResumeCheckpoint(1, keep=9)).fit(Tiny())
    (folder / "other=9.ckpt").touch()
    newer = {name: (folder / name).read_bytes() for name in ("step=5.ckpt", "step=6.ckpt")}
    path = str(folder / "step=4.ckpt")
    trainer_of(tmp_path, ResumeCheckpoint(9, keep=9)).fit(Tiny(), ckpt_path=path, weights_only=True)
    assert saved(tmp_path) == {*(f"step={step}.ckpt" for step in (1, 2, 3, 4)), "step=6.ckpt", "other=9.ckpt"}
    assert {path.name: path.read_bytes() for path in (folder / "abandoned").iterdir()} == newer
    assert caplog.text.count("is newer than where this run starts: moved to") == 2


class Scores(Tiny):
    """Has the accuracy that `ModelCheckpoint` watches, higher each time."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log_dict({"val/accuracy": -float(self.weight), "rollouts": float(self.trainer.global_step)})


def scored(folder: Path, *, every: int, steps: int, resume: str | None = None) -> list[str]:
    """Names of the best checkpoints after a run that validates every second step."""
    kind, settings, _ = CALLBACKS["best"]
    best = kind(dirpath=folder / "checkpoints", **settings or {})
    given = {"limit_val_batches": 1, "val_check_interval": 2, "max_steps": steps}
    path = resume and str(folder / "checkpoints" / resume)
    trainer_of(folder, best, ResumeCheckpoint(every, 9), **given).fit(Scores(), ckpt_path=path, weights_only=True)
    return sorted(path.name for path in (folder / "checkpoints").glob("best-*.ckpt"))


def test_a_validation_that_is_repeated_replaces_its_checkpoint(tmp_path: Path) -> None:
    assert scored(tmp_path, every=3, steps=4) == ["best-rollouts=4.ckpt"]
    assert scored(tmp_path, every=3, steps=4, resume="step=3.ckpt") == ["best-rollouts=4.ckpt"]


def test_what_saves_stands_before_all_callbacks_once_however_often_it_is_set_up() -> None:
    callback, other = ResumeCheckpoint(), Validations()
    trainer: Any = SimpleNamespace(callbacks=[other, callback])
    for _ in range(2):
        callback.setup(trainer, Tiny(), "fit")
        assert trainer.callbacks == [callback._first, other, callback]


def up_to(*steps: int) -> list[dict[str, int]]:
    return [{"max_steps": step, "max_epochs": -1} for step in steps]


@pytest.mark.parametrize(
    ("limits", "settings"),
    [
        (up_to(2, 4, 6), {"val_check_interval": 2, "check_val_every_n_epoch": None}),
        (up_to(1, 2, 3, 4), {"val_check_interval": 1, "check_val_every_n_epoch": None}),
        (up_to(4, 8, 14), {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        (up_to(6, 9, 12), {"val_check_interval": 3, "check_val_every_n_epoch": None}),
        (up_to(2, 4, 5), {"val_check_interval": 2}),
        (up_to(2, 4, 5), {"val_check_interval": 3, "check_val_every_n_epoch": None}),
        (up_to(2, 4), {"limit_val_batches": 0}),
        ([*up_to(3), {"max_epochs": 2}], {"val_check_interval": 0.5}),
        ([{"max_epochs": 1}, {"max_epochs": 2}], {"val_check_interval": 2}),
        ([{"max_epochs": 2}, {"max_epochs": 4}], {"check_val_every_n_epoch": 2}),
    ],
)
def test_the_curves_of_a_finished_run_go_on_where_they_ended(
    limits: list[dict[str, int]], settings: dict[str, Any], tmp_path: Path
) -> None:
    logger, checkpoint = Steps(), None
    for limit in limits:
        given = {"limit_val_batches": 1, "log_every_n_steps": 1} | settings | limit
        trainer = trainer_of(tmp_path, ResumeCheckpoint(100), **given)
        trainer.loggers = [logger]
        trainer.fit(Numbered(), ckpt_path=checkpoint, weights_only=True)
        checkpoint = str(newest_checkpoint(tmp_path))
    assert logger.found == [(step, step) for step in range(len(logger.found))] and len(logger.found) > 3


class Marked(Tiny):
    """Has an accuracy for each epoch: best in the third."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        steps = self.trainer.global_step
        self.log_dict({"val/accuracy": (0.5, 0.6, 0.9, 0.8, 0.7, 0.6)[steps // 6 - 1], "rollouts": float(steps)})


class Marks:
    """A run of epochs that are validated at their end, with what follows their accuracy."""

    def __init__(self, folder: Path, patience: int = 2) -> None:
        kind, settings, _ = CALLBACKS["best"]
        self.folder = folder
        self.stop = EarlyStopping("val/accuracy", mode="max", patience=patience)
        best = kind(dirpath=folder / "checkpoints", **settings or {})
        given = {"max_epochs": 6, "limit_val_batches": 1}
        self.trainer = trainer_of(folder, self.stop, ResumeCheckpoint(3, 99), best, **given)

    def fit(self, signals: dict[int, int] | None = None, resume: str | None = None) -> list[int]:
        """The events."""
        module, path = Marked(signals), resume and str(self.folder / "checkpoints" / resume)
        self.trainer.fit(module, ckpt_path=path, weights_only=True)
        return module.events

    @property
    def best(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("best-*.ckpt"))


EPOCH = [*range(6), VALIDATED]


@pytest.mark.parametrize("steps", [3, 6, 12, 18, 24, 27])
def test_callbacks_that_end_an_epoch_go_on_with_what_they_had(tmp_path: Path, steps: int) -> None:
    whole = Marks(tmp_path)
    assert whole.fit() == EPOCH * 5 and whole.best == ["best-rollouts=18.ckpt"]
    for name in whole.best:  # the resumed run has its own, if it comes to it
        (tmp_path / "checkpoints" / name).rename(tmp_path / name) if steps < 18 else None
    resumed = Marks(tmp_path)
    assert resumed.fit(resume=f"step={steps}.ckpt") == (EPOCH * 5)[steps + steps // 6 :]
    assert resumed.stop.wait_count == whole.stop.wait_count == 2 and resumed.best == ["best-rollouts=18.ckpt"]


def test_a_moved_run_knows_its_best_checkpoint(tmp_path: Path) -> None:
    assert Marks(tmp_path / "old").fit() == EPOCH * 5
    (tmp_path / "old").rename(tmp_path / "new")
    moved = Marks(tmp_path / "new")
    assert moved.fit(resume="step=24.ckpt") == EPOCH and moved.best == ["best-rollouts=18.ckpt"]
    state = torch.load(tmp_path / "new/checkpoints/step=30.ckpt", weights_only=True)["callbacks"]
    assert str(tmp_path / "old") not in str(state)


@pytest.mark.parametrize("event", [5, VALIDATED])
def test_stopped_at_the_end_of_its_best_epoch_a_run_keeps_that(tmp_path: Path, event: int) -> None:
    class Late(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.current_epoch == 2:
                pl_module.signals = {event: signal.SIGTERM}  # type: ignore[assignment]

    first = Marks(tmp_path)
    first.trainer.callbacks.append(Late())  # type: ignore[attr-defined]
    with pytest.raises(Preempted):
        first.fit()
    assert first.best == ["best-rollouts=18.ckpt"] and "step=18.ckpt" in saved(tmp_path)
    second = Marks(tmp_path)
    assert second.fit(resume="step=18.ckpt") == EPOCH * 2 and second.best == ["best-rollouts=18.ckpt"]


def test_a_run_that_early_stopping_has_ended_only_ends_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(Marks(tmp_path).fit()) == 35
    assert Marks(tmp_path).fit(resume="step=30.ckpt") == []
    assert "EarlyStopping by val/accuracy has ended this run: to go on, leave it out" in caplog.text
    on = Marks(tmp_path)
    on.trainer.callbacks.remove(on.stop)  # type: ignore[attr-defined]
    assert on.fit(resume="step=30.ckpt") == EPOCH


def test_a_run_without_patience_begins_and_ends_with_the_first_epoch_that_is_no_better(tmp_path: Path) -> None:
    assert Marks(tmp_path, patience=0).fit() == EPOCH * 4
    assert Marks(tmp_path, patience=0).fit(resume="step=18.ckpt") == EPOCH
    assert Marks(tmp_path, patience=0).fit(resume="step=24.ckpt") == []


@pytest.mark.parametrize("steps", [1, 3, 6, 8])
def test_a_run_that_was_stopped_goes_on_in_the_middle_of_its_epoch(tmp_path: Path, steps: int) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == steps

    trainer_of(tmp_path, Stop(), ResumeCheckpoint(9), max_epochs=2).fit(Tiny())
    resumed = Tiny()
    path = str(tmp_path / "checkpoints" / f"step={steps}.ckpt")
    trainer_of(tmp_path, ResumeCheckpoint(9), max_epochs=2).fit(resumed, ckpt_path=path, weights_only=True)
    assert resumed.events == ([*range(6)] * 2)[steps:]


def test_a_run_in_a_thread_saves_without_handling_signals(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trainer_of(tmp_path, ResumeCheckpoint(4)).fit, Tiny()).result()
    assert saved(tmp_path) == {"step=4.ckpt", "step=6.ckpt"}
