"""Checkpoint files and folders are whole or absent."""

import errno
import fcntl
import io
import os
import shutil
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_killed import exit_status, fork

from qerl_pl.errors import UserError
from qerl_pl.runtime.checkpoint_io import (
    AtomicCheckpointIO,
    DamagedCheckpoint,
    check_fits,
    finished_rollouts,
    newest_checkpoint,
    resume_files,
)
from qerl_pl.runtime.files import (
    atomic_directory,
    atomic_write,
    build_once,
    cache_root,
    folder_fingerprint,
    locked,
)


def save(run: Path, step: int, value: float = 0.0) -> Path:
    path = run / "checkpoints" / f"step={step}.ckpt"
    state = {"value": torch.tensor(value), "step": step, "qerl": {"policy_version": 0}}
    AtomicCheckpointIO().save_checkpoint(state, path)
    return path


def test_a_checkpoint_is_one_file_until_it_is_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 3, 1.5)
    assert AtomicCheckpointIO().load_checkpoint(path)["value"] == 1.5
    assert [*path.parent.iterdir()] == [path]
    for _ in range(2):
        AtomicCheckpointIO().remove_checkpoint(path)
        assert [*path.parent.iterdir()] == []


def test_newest_is_by_number_and_damaged_ones_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path) is None
    paths = {step: save(tmp_path, step) for step in (2, 9, 10, 30)}
    assert newest_checkpoint(tmp_path) == paths[30]
    data = bytearray(paths[30].read_bytes())
    data[len(data) // 2] ^= 1
    paths[30].write_bytes(data)  # one bit flipped
    paths[10].write_bytes(paths[10].read_bytes()[:-20])  # cut off
    assert newest_checkpoint(tmp_path) == paths[9]
    assert "step=30.ckpt" in caplog.text and "step=10.ckpt" in caplog.text


def test_a_disk_that_cannot_read_the_newest_costs_an_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = {step: save(tmp_path, step) for step in (2, 9, 30)}
    paths[30].unlink()
    paths[30].symlink_to("/proc/self/mem")  # its first page is nowhere: reading is an error of input and output
    paths[9].unlink()
    paths[9].mkdir()
    assert newest_checkpoint(tmp_path) == paths[2]
    assert "step=30.ckpt cannot be read" in caplog.text and "step=9.ckpt is not a file" in caplog.text


def test_whichever_byte_has_changed_a_checkpoint_is_refused_or_the_same(tmp_path: Path) -> None:
    path, step = save(tmp_path, 7, 1.5), save(tmp_path, 8)
    data, refused = path.read_bytes(), 0
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1, 16, 255)[place % 3]]) + data[place + 1 :])
        try:
            loaded = AtomicCheckpointIO().load_checkpoint(path)
        except DamagedCheckpoint:
            refused += 1
        else:
            assert loaded == {"value": torch.tensor(1.5), "step": 7, "qerl": {"policy_version": 0}}
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"data/0"))  # of the tensor, in the archive's list
    path.write_bytes(data[: entry + 38] + b"\x10" + data[entry + 39 :])  # marked as a folder: PyTorch reads nothing
    with pytest.raises(DamagedCheckpoint, match="data/0 does not fit"):
        AtomicCheckpointIO().load_checkpoint(path)
    assert refused > len(data) / 14 and newest_checkpoint(tmp_path) == step


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 3)

    def denied(file: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", denied)
        with pytest.raises(PermissionError, match="step=3.ckpt"):
            newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path) == path


def test_a_checkpoint_of_this_trainer_says_how_far_it_is_and_no_other_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "step=7.ckpt"
    AtomicCheckpointIO().save_checkpoint({"qerl": {"policy_version": 7}}, path)
    assert finished_rollouts(path) == 7
    for other in ({"state_dict": {}}, {"qerl": 7}, {"qerl": {}}, [7]):
        AtomicCheckpointIO().save_checkpoint(other, path)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="by this trainer; .*step=7.ckpt was written by another program"):
            finished_rollouts(path)


def test_the_proof_of_a_checkpoint_and_how_far_it_is_are_read_without_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain, loaded = tmp_path / "step=7.ckpt", torch.load, []
    trained = {"a": torch.ones(2, 3), "b": torch.ones(3).bfloat16()}
    state = {"policy_version": 7, "trained": trained, "random_states": [{"cpu": torch.get_rng_state()}]}
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loaded.append(plain(*args, **kwargs)) or loaded[-1])
    AtomicCheckpointIO().save_checkpoint({"qerl": state}, path)
    assert finished_rollouts(path) == 7
    assert len(loaded) == 3  # when it is saved, verified and read
    assert all(tensor.is_meta for found in loaded for tensor in found["qerl"]["trained"].values())
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(path)["qerl"]["trained"]["a"], trained["a"])


def test_a_checkpoint_is_read_through_once_while_it_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, checked = zipfile.ZipFile.testzip, []
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: checked.append(self) or plain(self))
    path, other = save(tmp_path, 3, 1.0), save(tmp_path, 6, 2.0)
    assert newest_checkpoint(tmp_path) == other and len(checked) == 1
    assert AtomicCheckpointIO().load_checkpoint(other)["value"] == 2.0 and len(checked) == 1
    assert AtomicCheckpointIO().load_checkpoint(path)["value"] == 1.0 and len(checked) == 2
    save(tmp_path, 6, 3.0)  # replaced
    assert AtomicCheckpointIO().load_checkpoint(other)["value"] == 3.0 and len(checked) == 3
    path.write_bytes(path.read_bytes()[:-9])  # changed in place
    with pytest.raises(DamagedCheckpoint, match="must be undamaged"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="plain values only; .*step=1.ckpt holds numpy"):
        AtomicCheckpointIO().save_checkpoint({"best": np.float64(0.5)}, tmp_path / "step=1.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_may_be_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QERL_CACHE", "~/somewhere")
    assert cache_root() == Path.home() / "somewhere"


def test_a_folder_is_one_processs_at_a_time_and_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="another process uses it"), locked(tmp_path):
        pass
    with locked(tmp_path):  # the first has gone
        pass

    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for lock in (locked(tmp_path), build_once(tmp_path / "model")):
        with pytest.raises(UserError, match=f"{tmp_path} .*No locks available.* choose another"), lock:
            pass


def test_checkpoints_to_resume_from_are_those_of_steps_newest_first(tmp_path: Path) -> None:
    for name in ("step=3.ckpt", "step=12.ckpt", "step=12.end.ckpt", "step=x.ckpt", "step=99.ckpt.tmp", "9.ckpt"):
        (tmp_path / name).touch()
    found = [(path.name, rollouts) for path, rollouts in resume_files(tmp_path).items()]
    assert found == [("step=12.ckpt", 12), ("step=3.ckpt", 3)]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"base": "abd"}, "its base model; the checkpoint's is abc and this run's abd; set model.policy as in that"),
        ({"scaling": 0.5}, "its alpha / rank; the checkpoint's is 2.0 and this run's 0.5; set model.policy.lora as"),
        (
            {"finetune": "full"},
            "of fine-tuning; the checkpoint's is lora and this run's full; set model.policy.fine",
        ),
        ({"start": "1234567890abc"}, "is None and this run's 1234567890ab; set model.policy.adapter as"),
        ({"teacher": "def"}, "its teacher; the checkpoint's is abc and this run's def; set model.teacher as"),
        ({"scaling": 2.0, "base": "abd"}, "its base model; the checkpoint's is abc"),
    ],
    ids=str,
)
def test_a_checkpoint_fits_what_its_run_keeps_alone(own: dict[str, Any], message: str) -> None:
    state = {"base": "abc", "finetune": "lora", "scaling": 2.0, "start": None, "teacher": "abc"}
    check_fits(state, **state)
    check_fits(state | own, **own)
    check_fits({}, teacher="abc")
    with pytest.raises(UserError, match=f"{message}.* start another run$"):
        check_fits(state, **own)


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_is_built_once_says_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="/file cannot be locked"), build_once(tmp_path / "file" / "model"):
        pass


def test_building_yields_to_a_folder_that_appeared_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as folder:
        (folder / "mine").write_text("x")
        target.mkdir()
        (target / "theirs").write_text("x")
    assert [p.name for p in target.iterdir()] == ["theirs"] and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("names", ["a folder", "nothing"])
def test_a_link_is_replaced_and_the_folder_that_it_names_stays(tmp_path: Path, names: str) -> None:
    other, target = tmp_path / "other", tmp_path / "run" / "adapter"
    target.parent.mkdir()
    target.symlink_to("../other")
    if names == "a folder":
        other.mkdir()
        (other / "theirs").write_text("x")
    with atomic_directory(target, replace=True) as folder:
        (folder / "mine").write_text("x")
    assert [*target.parent.iterdir()] == [target] and not target.is_symlink()
    assert [path.name for path in target.iterdir()] == ["mine"]
    assert [path.name for path in other.glob("*")] == ["theirs"] * (names == "a folder")


def test_a_link_to_a_folder_stays_where_nothing_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "model").symlink_to("other")
    with atomic_directory(tmp_path / "model") as folder:
        (folder / "mine").write_text("x")
    assert (tmp_path / "model").is_symlink() and not [*(tmp_path / "model").iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"model", "other"}


def test_what_is_copied_from_a_private_folder_has_the_modes_of_what_is_new(tmp_path: Path) -> None:
    source, target = tmp_path / "private", tmp_path / "model"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").touch(0o600)
    for path in (source, source / "below"):
        path.chmod(0o700)
    with atomic_directory(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new file").touch()
    folders = {path.stat().st_mode for path in (tmp_path / "new", target, target / "below")}
    files = {path.stat().st_mode for path in (tmp_path / "new file", target / "below" / "file")}
    assert len(folders) == len(files) == 1


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    for name, content in (("a", b"1" * 5000), ("b", b"1" * 5000), ("c", b"1" * 4999 + b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (folder_fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(("size", "read"), [(12, range(12)), (13, [*range(9), 10, 11, 12])])
def test_identity_reads_small_files_completely_and_of_large_ones_evenly_spaced_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, read: Sequence[int]
) -> None:
    monkeypatch.setattr("qerl_pl.runtime.files._BLOCK", 3)
    monkeypatch.setattr("qerl_pl.runtime.files._SAMPLES", 4)  # blocks from bytes 0, 3, 6 and 10
    (tmp_path / "config.json").write_text("{}")
    file, content = tmp_path / "model.safetensors", bytes(range(size))
    file.write_bytes(content)
    before = folder_fingerprint(tmp_path)
    for byte in range(size):
        file.write_bytes(content[:byte] + b"x" + content[byte + 1 :])
        assert (folder_fingerprint(tmp_path) != before) == (byte in read)


@pytest.mark.parametrize("replace", [False, True])
def test_the_old_folder_of_a_process_killed_between_two_renames_is_given_back(tmp_path: Path, replace: bool) -> None:
    target, old = tmp_path / "adapter", tmp_path / ".adapter.replaced"
    old.mkdir()
    (old / "old").touch()
    with pytest.raises(RuntimeError), atomic_directory(target, replace):
        assert [path.name for path in target.iterdir()] == ["old"]
        raise RuntimeError
    assert [*tmp_path.iterdir()] == [target]
    old.mkdir()  # killed after the second rename
    with pytest.raises(RuntimeError), atomic_directory(target, replace):
        raise RuntimeError
    assert [*tmp_path.iterdir()] == [target]


def make_slowly(target: Path, made: Path) -> None:
    with build_once(target) as missing:
        if missing:
            time.sleep(0.3)
            with made.open("a") as file:
                file.write("x")
            with atomic_directory(target) as folder:
                (folder / "made").touch()


def test_a_folder_is_made_by_one_process_while_the_others_wait(tmp_path: Path) -> None:
    target, made = tmp_path / "cache" / "model", tmp_path / "made"
    children = [fork(partial(make_slowly, target, made)) for _ in range(3)]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    assert made.read_text() == "x" and [*target.parent.iterdir()] == [target]
