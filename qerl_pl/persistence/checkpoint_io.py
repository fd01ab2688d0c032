"""Checkpoints that are whole or absent, and the search for the newest whole one."""

import hashlib
import logging
import os
import pickle
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from qerl_pl.errors import UserError
from qerl_pl.persistence.atomic_files import atomic_write, writing

log = logging.getLogger(__name__)

FOLDER = "checkpoints"

STEP_FILE = re.compile(r"^step=(\d+)(\.end)?\.ckpt$")

"""Checkpoints to resume from, by finished rollouts; `.end` marks the one after the run's last validation."""

CHECKPOINT_KEY = "qerl"

"""Under which a checkpoint holds the policy's part."""

SETTLED_S = 5.0

"""Seconds without a change after which a file system's clock tells the next one from the last."""

_digests: dict[tuple[int, ...], str] = {}

"""SHA-256 of files that this process has read, by device, inode, size in bytes and times of change in ns."""


class DamagedCheckpoint(UserError):
    """A checkpoint file whose content is not what was written."""


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint under a temporary name, then its digest, then renames it.

    A process killed at any moment leaves the old file, the new file, or a digest without a file, never half a file.
    """

    def __init__(self) -> None:
        self._proven = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path` and its SHA-256 to `path`.sha256.

        Raises:
            UserError: The disk is full, or the checkpoint holds what could not be read again; what was there before is
                untouched.
        """
        target = Path(path)
        with writing(target) as file:
            hashing = _Hashing(file)
            try:
                torch.save(checkpoint, cast(BinaryIO, hashing))  # tensor by tensor: no second copy in memory
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle says it
                raise UserError(
                    f"a checkpoint holds tensors and plain values only; {path} would hold others ({error}); "
                    "change the callback or data module whose state it is"
                ) from error
            if not self._proven:  # better now than when it is needed
                file.seek(0)
                _load(file, path, "meta")
                self._proven = True
            digests = [hashing.digest.hexdigest()]
            if target.is_file():  # until it is replaced, the file that is there stays valid
                with target.open("rb") as old:
                    digests.append(hashlib.file_digest(old, "sha256").hexdigest())
            atomic_write(digest_path(target), "".join(f"{digest}\n" for digest in digests).encode())

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on the CPU, plain values and tensors only.

        Raises:
            DamagedCheckpoint: It is absent, its digest differs, or it is no checkpoint.
            UserError: It is another program's.
        """
        return _load_own(Path(path), "cpu")

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint and its digest."""
        Path(path).unlink(missing_ok=True)
        digest_path(Path(path)).unlink(missing_ok=True)


class _Hashing:
    """A file to write to that computes the SHA-256 of what is written.

    Args:
        file: Where it goes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _load_own(path: Path, device: str) -> dict[str, Any]:
    """A whole checkpoint of this trainer; on "meta" its tensors are not read."""
    with opened(path) as file:
        return _own(_load(file, path, device), path)


def _own(checkpoint: Any, path: Path) -> dict[str, Any]:
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(CHECKPOINT_KEY), dict):
        raise UserError(f"a checkpoint must be one of this trainer's; {path} is another program's; name another")
    return checkpoint


def _load(file: BinaryIO, path: _PATH, device: str) -> dict[str, Any]:
    """Tensors and plain values only: a checkpoint from elsewhere must not run code."""
    try:
        checkpoint: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise DamagedCheckpoint(
            f"a checkpoint holds tensors and plain values only; {path} holds a {found[1] if found else 'foreign one'}; "
            "change the callback or data module whose state it is, or use another checkpoint"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, LookupError) as error:
        raise DamagedCheckpoint(f"a checkpoint must be whole; {path} cannot be read ({error}); use another") from error
    return checkpoint


def digest_path(path: Path) -> Path:
    """Where the SHA-256 of a checkpoint lies."""
    return path.with_name(path.name + ".sha256")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A checkpoint whose digest fits, open at its start.

    Raises:
        DamagedCheckpoint: File or digest is absent, they disagree, or the disk cannot read the file.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            expected = digest_path(path).read_text(errors="replace").split()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DamagedCheckpoint(
                f"a checkpoint is a file and its .sha256; {error.filename} is no such file; name another with --resume"
            ) from error
        try:
            found = _digest(file)
        except OSError as error:  # of the disk below it
            raise DamagedCheckpoint(
                f"a checkpoint must be whole; {path} cannot be read ({error}); use another"
            ) from error
        if found not in expected:
            known = " or ".join(digest[:12] for digest in expected)
            raise DamagedCheckpoint(
                f"a checkpoint must be whole; {path} has digest {found[:12]}, not {known}; use another"
            )
        file.seek(0)
        yield file


def _digest(file: BufferedReader) -> str:
    """SHA-256 of an open file; a process reads the same file once for it, which may have tens of GiB."""
    status = os.fstat(file.fileno())
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if state in _digests:
        return _digests[state]
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S:
        _digests[state] = found
    return found


def verify(path: Path) -> None:
    """Refuse a checkpoint that is not whole, as `opened` does."""
    with opened(path):
        pass


def resume_files(folder: Path) -> dict[Path, tuple[int, bool]]:
    """The checkpoints to resume from in a folder, each with its finished rollouts and whether it is a run's end."""
    matches = {path: STEP_FILE.match(path.name) for path in folder.glob("step=*.ckpt")}
    return {path: (int(match[1]), match[2] is not None) for path, match in matches.items() if match}


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint of a run with the most steps; None where there is none. Damaged ones are named and skipped.

    Args:
        run_dir: The run's folder (`trainer.default_root_dir`).

    Raises:
        UserError: There are some and all are damaged: whether the run is lost is not for a program to decide.
    """
    found = resume_files(run_dir / FOLDER)
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            log.warning("skipping a damaged checkpoint: %s", error)
            continue
        return path
    if found:
        raise UserError(
            f"a run goes on from a whole checkpoint; every one in {run_dir / FOLDER} is damaged ({len(found)} found); "
            "put a copy back, or move that folder away to start over"
        )
    return None


def saved_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run with the most rollouts, also where Lightning's own trainer wrote it; None: there is none.

    Args:
        run_dir: As for `newest_checkpoint`; or a folder of checkpoints.
    """
    if (found := newest_checkpoint(run_dir)) is not None:
        return found
    places = ("*.ckpt", f"{FOLDER}/*.ckpt", f"lightning_logs/version_*/{FOLDER}/*.ckpt")
    paths = sorted((path for place in places for path in run_dir.glob(place)), key=lambda path: path.stat().st_mtime)
    return max(paths, key=lambda path: int(load_saved(path, "meta")[CHECKPOINT_KEY]["policy_version"]), default=None)


def load_saved(path: Path, device: str = "cpu") -> dict[str, Any]:
    """A checkpoint, of Lightning's own trainer too, which writes no digest: that one is taken as it is.

    Raises:
        DamagedCheckpoint: It is absent or cannot be read, or its digest differs.
        UserError: It is another program's.
    """
    if digest_path(path).exists() or not path.is_file():
        return _load_own(path, device)
    with path.open("rb") as file:
        return _own(_load(file, path, device), path)


def finished_rollouts(path: Path) -> int:
    """How many rollouts a checkpoint has behind it; its tensors are not read.

    Raises:
        UserError: It cannot be read, or is another program's.
    """
    return int(_load_own(path, "meta")[CHECKPOINT_KEY]["policy_version"])


def check_fits(state: dict[str, Any], base: str, finetune: str, scaling: float) -> None:
    """Refuse a checkpoint whose weights would do something else on this policy.

    Args:
        state: What the checkpoint holds under `CHECKPOINT_KEY`.
        base: Identity of the policy's base (`folder_identity`).
        finetune: What of the policy trains, "lora" or "full".
        scaling: alpha / rank of its adapter; 1 without.

    Raises:
        UserError: It was trained on another base, otherwise, or with another scaling.
    """
    if state["base"] != base:
        raise UserError(
            f"a checkpoint fits only the base model it was trained on; it has {state['base']} and the policy has "
            f"{base}; set model.policy as in that run, or start another run"
        )
    found = state.get("finetune", "lora")
    if found != finetune:
        raise UserError(
            f"a checkpoint holds what was trained, an adapter or all weights; found {found}, and the policy trains "
            f"{finetune}; set model.policy.finetune as in that run, or start another run"
        )
    if state["scaling"] != scaling:
        raise UserError(
            f"an adapter keeps the alpha / rank it was trained with; the checkpoint has {state['scaling']:g} and the "
            f"policy {scaling:g}; set model.policy.lora as in that run, or start another run"
        )
