"""Killed at any moment: what lies under a name is whole, and the next start clears away what is left."""

import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fit_helpers import command, configuration, fit

from qerl_pl.callbacks.resume import _set_aside
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY, AtomicCheckpointIO
from qerl_pl.runtime.files import atomic_directory, build_once


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fork(work: Callable[[], object]) -> int:
    """Number of a copy of this process that does `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def exit_status(child: int) -> int:
    """Exit status of a process when it ends, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_fork(work: Callable[[], object]) -> int:
    """Exit status of `work` in a copy of this process, negative for a signal."""
    return exit_status(fork(work))


def fill(folder: Path, content: str) -> None:
    for name in ("config", "weights"):
        (folder / name).write_text(content)


def content_of(folder: Path) -> set[str]:
    """What the files of a folder hold; one element where all are of one writing."""
    assert sorted(path.name for path in folder.iterdir()) == ["config", "weights"]
    return {path.read_text() for path in folder.iterdir()}


def die_at(moment: int) -> None:
    """Have this process die before its operation number `moment` on files."""
    count = itertools.count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event.partition(".")[0] in ("os", "open", "shutil", "fcntl", "ctypes") and next(count) == moment:
            kill()

    sys.addaudithook(watch)


def replace_and_die(target: Path, moment: int) -> None:
    die_at(moment)
    with atomic_directory(target, replace=True) as folder:
        fill(folder, "new")


def test_a_folder_that_is_replaced_is_the_old_or_the_new_or_given_back_at_every_moment(tmp_path: Path) -> None:
    target, seen = tmp_path / "adapter", []
    for moment in range(200):
        with atomic_directory(target, replace=True) as folder:
            fill(folder, "old")
        assert list(tmp_path.iterdir()) == [target]  # what the last one left is gone
        status = in_a_fork(partial(replace_and_die, target, moment))
        if not target.exists():  # between two renames; the next start puts the old one back
            with pytest.raises(RuntimeError), atomic_directory(target, replace=True):
                raise RuntimeError
            seen.append("absent")
        (found,) = content_of(target)
        seen.append(found)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert seen[0] == "old" and seen[-1] == "new" and len(seen) > 15
    assert seen.count("absent") == 1
    assert list(tmp_path.iterdir()) == [target]


def set_aside_and_die(folder: Path, moment: int) -> None:
    die_at(moment)
    _set_aside(folder, 2)


def test_a_checkpoint_that_is_set_aside_is_whole_in_one_place_or_the_other(tmp_path: Path) -> None:
    for moment in range(200):
        folder = tmp_path / str(moment)
        for step in (2, 6):
            state = {CHECKPOINT_KEY: {"policy_version": step}}
            AtomicCheckpointIO().save_checkpoint(state, folder / f"step={step}.ckpt")
        status = in_a_fork(partial(set_aside_and_die, folder, moment))
        (found,) = folder.rglob("step=6.ckpt")
        assert AtomicCheckpointIO().load_checkpoint(found) == {CHECKPOINT_KEY: {"policy_version": 6}}
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert found == folder / "abandoned" / "step=6.ckpt" and moment > 2


def build_slowly(folder: Path, content: str) -> None:
    (folder / f"begun-{content}").touch()
    with build_once(folder / "model") as missing:
        if missing:
            with atomic_directory(folder / "model") as unfinished:
                fill(unfinished, content)
                wait_for(folder, "go-on")


def wait_for(folder: Path, pattern: str, text: str = "") -> None:
    """Wait for a file with its text, which is there later than the file."""
    while text not in [path.read_text() for path in folder.glob(pattern)]:
        time.sleep(0.01)


def test_the_unfinished_folder_of_a_living_process_stays_and_another_waits_for_its_end(tmp_path: Path) -> None:
    first = fork(partial(build_slowly, tmp_path, "first"))
    wait_for(tmp_path, "*/weights", "first")
    second = fork(partial(build_slowly, tmp_path, "second"))
    wait_for(tmp_path, "begun-second")
    assert content_of(tmp_path / ".model.unfinished") == {"first"} and (tmp_path / ".model.lock").exists()
    (tmp_path / "go-on").touch()
    assert [exit_status(child) for child in (first, second)] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"begun-first", "begun-second", "go-on", "model"}
    assert content_of(tmp_path / "model") == {"first"}


def write(folder: Path, content: str) -> None:
    try:
        with atomic_directory(folder / "model") as unfinished:
            fill(unfinished, content)
            wait_for(folder, "go-on")
    except UserError as error:
        (folder / "refused").write_text(str(error))


def test_a_folder_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    first = fork(partial(write, tmp_path, "first"))
    wait_for(tmp_path, ".model.unfinished/weights", "first")
    assert exit_status(fork(partial(write, tmp_path, "second"))) == 0
    (tmp_path / "go-on").touch()
    assert exit_status(first) == 0
    assert (tmp_path / "refused").read_text() == (
        f"only one process may write to a folder; {tmp_path / 'model'} cannot be locked (another process uses it); "
        "wait for its end, or choose another destination"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"go-on", "model", "refused"}
    assert content_of(tmp_path / "model") == {"first"}


def die_when_all_weights_are_written() -> None:
    from qerl_pl.models.folder import ShardWriter

    ShardWriter.finish = lambda self: kill()  # type: ignore[method-assign]


def test_what_a_killed_quantization_leaves_is_gone_after_the_next(tiny_policy_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "nvfp4"
    words = ["quantize", str(tiny_policy_dir), str(target)]
    status, output = command(words, tmp_path / "log", die_when_all_weights_are_written)
    assert status == -signal.SIGKILL, output
    names = sorted(path.name for path in target.parent.iterdir())
    assert names == [".nvfp4.unfinished", ".nvfp4.unfinished.lock"]
    other = target.with_name(".nvfp4-of-mine")  # not ours
    other.mkdir()
    assert main(words) == 0
    assert sorted(target.parent.iterdir()) == [other, target] and (target / "model.safetensors").is_file()


class DieWriting:
    """SIGXFSZ, which ends a process as SIGKILL does, in the middle of the first file of over 100 bytes that a method
    writes."""

    def __init__(self, module: str, owner: str, method: str) -> None:
        self.place = module, owner, method

    def __call__(self) -> None:
        module, name, method = self.place
        owner = getattr(sys.modules[module], name)
        plain = getattr(owner, method)

        def dying(*args: Any, **kwargs: Any) -> Any:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            return plain(*args, **kwargs)

        setattr(owner, method, dying)


WRITERS = {  # in the order of a run
    "config.yaml": DieWriting("qerl_pl.cli.main", "SaveFitConfig", "on_train_start"),
    "adapter": DieWriting("qerl_pl.policy.policy", "Policy", "save"),
    "run.png": DieWriting("qerl_pl.callbacks.summary", "RunSummary", "_plot"),
}


def artefacts(run: Path) -> dict[str, bytes]:
    """Everything in a run's folder but checkpoints and what is added to line by line, by name."""
    found = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "checkpoints")
    return {str(path.relative_to(run)): path.read_bytes() for path in found if "tfevents" not in path.name}


def test_artefacts_that_are_written_again_are_whole_when_the_process_dies_in_them(
    tiny_policy_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = configuration(tiny_policy_dir, run)
    status, output = fit(settings, "--resume", "auto", "--trainer.max_steps", "4")
    assert status == 0, output
    assert f"no checkpoint in {run / 'checkpoints'} to resume from; starting fresh" in output
    first = artefacts(run)
    more = ("--resume", "auto", "--trainer.max_steps", "8", "--model.max_grad_norm", "0.1")
    for name, die in WRITERS.items():
        status, output = fit(settings, *more, prepare=die)
        assert status == -signal.SIGXFSZ, output
        assert (
            "goes on with other settings than the last command: model.max_grad_norm was 0.2 and is 0.1" in output
        ) == (name == "adapter")
        found = {key: data for key, data in artefacts(run).items() if key.startswith(name)}
        assert found and found == {key: data for key, data in first.items() if key.startswith(name)}
    status, output = fit(settings, *more)
    assert status == 0, output
    last = artefacts(run)
    assert b"resume: auto" not in last["config.yaml"]  # which an evaluation of the adapter may read
    assert last.keys() == first.keys()
    assert {key for key, data in last.items() if data == first[key]} == {
        ".lock",
        "hparams.yaml",
        "adapter/adapter_config.json",
        "adapter/chat_template.jinja",
        "adapter/qerl_base.json",
        "adapter/tokenizer.json",
        "adapter/tokenizer_config.json",
    }
