"""A run that is stopped or killed at any moment and resumed ends with the bits of one that never stopped."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from fit_helpers import adapter, configuration, fit, fit_here
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from qerl_pl.runtime.checkpoint_io import newest_checkpoint
from qerl_pl.runtime.files import locked


def stop_where_an_update_may_not_repeat() -> None:
    """Fails the run where gradients are computed without asking for algorithms that repeat, as a GPU needs."""
    from qerl_pl.modules import update

    plain = update.RunningUpdate._accumulate

    def accumulate(self, *args):  # type: ignore[no-untyped-def]
        assert torch.are_deterministic_algorithms_enabled()
        return plain(self, *args)

    update.RunningUpdate._accumulate = accumulate  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def uninterrupted(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("resume") / "whole"
    status, output = fit(configuration(tiny_policy_dir, run), prepare=stop_where_an_update_may_not_repeat)
    assert status == 0, output
    return run


def checkpoint(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "checkpoints" / name, weights_only=True)
    return found


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*"))


def in_generation(applies: Callable[[Any, Any], bool], number: int, act: Callable[[], object]) -> None:
    """Call `act` at the beginning of the generation `number`, from 0, of those whose requests and sampling apply."""
    from qerl_pl.engines import transformers as engine

    plain, calls = engine.TransformersEngine.generate, iter(range(100))

    def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
        if applies(requests, sampling) and next(calls) == number:
            act()
        return plain(self, requests, sampling)

    engine.TransformersEngine.generate = generate  # type: ignore[method-assign]


def is_rollout(requests: Any, sampling: Any) -> bool:
    return len(requests[0].seeds) == 2  # evaluation samples once a prompt


def die_in_generation() -> None:
    """SIGKILL in the middle of decoding the completions of the fifth rollout."""

    def die_in_the_next_module() -> None:
        torch.nn.Module.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    in_generation(is_rollout, 4, die_in_the_next_module)


def die_before_the_first_checkpoint() -> None:
    """SIGKILL in the second update."""
    from qerl_pl.modules import update

    plain, calls = update.RunningUpdate._accumulate, iter(range(100))

    def accumulate(self, *args):  # type: ignore[no-untyped-def]
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    update.RunningUpdate._accumulate = accumulate  # type: ignore[method-assign]


def die_while_writing_the_second_checkpoint() -> None:
    """SIGKILL when the checkpoint of the sixth rollout is half written."""
    from qerl_pl.runtime import checkpoint_io

    plain = checkpoint_io.writing

    @contextmanager
    def write(path: Path) -> Iterator[BinaryIO]:
        with plain(path) as file:
            yield file
            if path.name == "step=6.ckpt":
                file.truncate(file.tell() // 2)
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_io.writing = write


def ask_to_stop_in_generation(number: int, rollout: int) -> Callable[[], None]:
    return AskToStop(number, rollout)


class AskToStop:
    """The signal that precedes the end of a preemptible machine, in the middle of a rollout."""

    def __init__(self, number: int, rollout: int) -> None:
        self.number = number
        self.rollout = rollout

    def __call__(self) -> None:
        in_generation(is_rollout, self.rollout - 1, lambda: signal.raise_signal(self.number))


KILLS: list[tuple[Callable[[], None], list[str]]] = [
    (die_before_the_first_checkpoint, []),
    (die_in_generation, ["step=3.ckpt"]),
    (die_while_writing_the_second_checkpoint, [".step=6.ckpt.tmp", "step=3.ckpt"]),
]
"""Where a run is killed, one after the other, and the checkpoints that are there afterwards."""


def test_a_run_that_is_killed_again_and_again_resumes_bit_for_bit(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    settings, kept = configuration(tiny_policy_dir, tmp_path / "run", summary=False), False
    settings["trainer"]["num_sanity_val_steps"] = -1
    for die, found in KILLS:
        status, output = fit(settings, "--resume", "auto", prepare=die)
        assert status == -signal.SIGKILL and ("resuming from" in output) == kept, output
        assert checkpoints(tmp_path / "run") == found
        kept = bool(found)
    (tmp_path / "run/checkpoints/step=4.ckpt").write_bytes(b"not a checkpoint")
    status, output = fit(settings, "--resume", "auto")
    assert status == 0 and "skipping a damaged checkpoint" in output and "step=3.ckpt" in output, output
    full_finetuning, resumed = adapter(uninterrupted), adapter(tmp_path / "run")
    assert full_finetuning.keys() == resumed.keys() and any("layernorm" in name for name in full_finetuning)
    assert all(torch.equal(full_finetuning[name], resumed[name]) for name in full_finetuning)
    written = [(run / "completions.jsonl").read_text() for run in (uninterrupted, tmp_path / "run")]
    assert written[0] == written[1]  # what was sampled twice stands there once
    for tag in ("reward/mean", "policy/entropy", "optim/lr"):
        assert curve(tmp_path / "run", tag) == curve(uninterrupted, tag)
    for tag in ("val/accuracy", "val/pass@1"):
        before, *after = curve(tmp_path / "run", tag)
        assert before[0] == -1 and after == curve(uninterrupted, tag)


def curve(run: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a tag: (step, value) of each point, by each of its two readers."""
    scalars = EventAccumulator(str(run)).Reload().Scalars(tag)
    tensors = plugin_event_accumulator.EventAccumulator(str(run)).Reload().Tensors(tag)
    points = [(event.step, event.value) for event in scalars]
    assert points == [(event.step, float(make_ndarray(event.tensor_proto))) for event in tensors]
    return points


def test_asked_to_stop_saves_says_how_to_resume_and_resumes_bit_for_bit(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run", summary=False)
    for number, rollout, left in ((signal.SIGTERM, 5, "step=5.ckpt"), (signal.SIGINT, 2, "step=7.ckpt")):
        status, output = fit(settings, "--resume", "auto", prepare=ask_to_stop_in_generation(number, rollout))
        assert status == 128 + number, output
        assert left in output and "--resume auto" in output and "Traceback" not in output
        with (tmp_path / "run" / "completions.jsonl").open("a") as file:
            file.write('{"version": 0, "prompt": "half a')  # as a kill may leave a line
    status, output = fit(settings, "--resume", "auto")
    assert status == 0, output
    written = [(run / "completions.jsonl").read_text() for run in (uninterrupted, tmp_path / "run")]
    assert written[0] == written[1]
    assert points(tmp_path / "run") == points(uninterrupted)  # those of the rollouts in which it stopped, too
    assert all(torch.equal(tensor, adapter(tmp_path / "run")[name]) for name, tensor in adapter(uninterrupted).items())


def with_validations(base: Path, run: Path) -> dict[str, Any]:
    """A run that is validated where its checkpoints are due, after rollouts 3 and 6, and keeps the best."""
    settings = configuration(base, run)
    settings["trainer"] |= {"val_check_interval": 3, "check_val_every_n_epoch": None, "num_sanity_val_steps": -1}
    best = {"monitor": "val/length_mean", "mode": "max", "filename": "best-{rollouts:.0f}"}
    at = next(i for i, one in enumerate(settings["trainer"]["callbacks"]) if "Resume" in one["class_path"])
    named = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": best}
    settings["trainer"]["callbacks"].insert(at, named)
    return settings


@pytest.fixture(scope="module")
def validated_whole(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("validated") / "whole"
    status, output = fit(with_validations(tiny_policy_dir, run))
    assert status == 0, output
    return run


def die_in_the_second_validation() -> None:
    """SIGKILL when the validation after the sixth rollout begins; the first is the one before training."""
    in_generation(
        lambda requests, sampling: not is_rollout(requests, sampling) and sampling.temperature == 1.0,
        4,  # in two batches each
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    )


def test_killed_before_a_validation_is_kept_it_is_made_as_if_nothing_had_happened(
    validated_whole: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    settings, run = with_validations(tiny_policy_dir, tmp_path / "run"), tmp_path / "run"
    for die in (die_in_the_second_validation, die_while_writing_the_second_checkpoint):
        status, output = fit(settings, "--resume", "auto", prepare=die)
        assert status == -signal.SIGKILL, output
        assert newest_checkpoint(run) == run / "checkpoints/step=3.ckpt"
    (tmp_path / "link").symlink_to(run)  # another name of the folder: the best score is not forgotten
    status, output = fit(settings, "--resume", "auto", "--trainer.default_root_dir", str(tmp_path / "link"))
    assert status == 0 and "step=3.ckpt" in output, output
    assert [step for step, _ in curve(run, "val/pass@1")] == [-1, 2, 5]
    assert points(run) == points(validated_whole)
    assert all(torch.equal(tensor, adapter(run)[name]) for name, tensor in adapter(validated_whole).items())
    ends = [checkpoint(one, "step=8.ckpt") for one in (validated_whole, run)]
    curves = [end["callbacks"]["RunSummary"]["points"] for end in ends]
    assert all(curves[0][metric] == curves[1][metric] for metric in ("accuracy", "pass@1", "reward_mean"))
    assert best(ends[0]) == best(ends[1])
    states = [one["qerl"]["random_states"][0]["torch"] for one in ends]
    assert torch.equal(states[0], states[1])  # as after a validation, which may draw


def best(saved: dict[str, Any]) -> tuple[float, str]:
    """Score of the best checkpoint that a run knows, and its rollouts."""
    (state,) = (state for name, state in saved["callbacks"].items() if name.startswith("ModelCheckpoint"))
    return float(state["best_model_score"]), Path(state["best_model_path"]).stem.partition("-v")[0]


MEASURED = ("time/", "perf/", "memory/peak")
"""Tags of what differs from run to run."""


def points(run: Path) -> dict[str, list[tuple[int, str]]]:
    """All that TensorBoard shows of scalars; of what is measured in seconds or bytes the steps alone."""
    events = EventAccumulator(str(run)).Reload()
    return {
        tag: [(event.step, "" if tag.startswith(MEASURED) else repr(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.usefixtures("process_state")
def test_what_does_not_go_on_from_a_checkpoint_is_refused_and_leaves_no_trace(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run")
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        assert fit_here(settings) == 2
    assert "cannot be locked (another process uses it)" in capsys.readouterr().err
    settings["data"]["init_args"]["batch_size"] = 4
    assert fit_here(settings, "--resume", str(uninterrupted / "checkpoints" / "step=6.ckpt")) == 2
    output = capsys.readouterr().err
    assert "the batch_size is 4, 2 in the checkpoint; restore" in output and "Traceback" not in output
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert fit_here(configuration(tiny_policy_dir, uninterrupted)) == 2  # which has checkpoints of its own
    output = capsys.readouterr().err
    assert "step=8.ckpt; add --resume auto" in output and "Traceback" not in output


@pytest.mark.usefixtures("process_state")
def test_a_finished_run_that_is_resumed_only_ends_again(
    uninterrupted: Path, tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    written = [run / "summary.json", run / "adapter/adapter_model.safetensors"]
    for path in written:
        path.unlink()
    assert fit_here(configuration(tiny_policy_dir, run), "--resume", "auto") == 0
    assert "all 8 training batches of this run are done: to go on, raise trainer.max_epochs or max_steps" in caplog.text
    versions = [json.loads(line)["version"] for line in (run / "completions.jsonl").read_text().splitlines()]
    assert versions == sorted([*range(8)] * 4)  # nothing was sampled twice
    assert all(path.stat().st_size > 0 for path in written)
