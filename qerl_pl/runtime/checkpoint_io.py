"""Atomic checkpoints with a SHA-256 digest, and the search for the newest valid one."""

import hashlib
import logging
import os
import pickle
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from qerl_pl.errors import UserError
from qerl_pl.runtime.files import atomic_write, writing

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
STEP_FILE = re.compile(r"^step=(\d+)(\.end)?\.ckpt$")
"""Checkpoints to resume from, by finished rollouts; `.end` marks the one after the run's last validation."""
CHECKPOINT_KEY = "qerl"
"""Key of this package's state in a checkpoint."""
MID_STEP = "hpc_ckpt_"
"""Begin of the names of checkpoints that Lightning saves at a signal of SLURM, in the middle of a step."""
SETTLED_S = 5.0
"""Seconds after which a change of a file gets another time stamp, however coarse the file system's clock."""
_digests: dict[tuple[int, ...], str] = {}
"""SHA-256 of files that this process has read, by device, inode, size in bytes and times of change in ns."""


class DamagedCheckpoint(UserError):
    """A checkpoint file that is missing, unreadable or differs from what was written."""


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint to a temporary file, then its digest, then renames the file.

    A process killed at any moment leaves the old file, the new file, or a digest without a file.
    """

    def __init__(self) -> None:
        self._checked_readable = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path` and its SHA-256 to `path`.sha256.

        Raises:
            UserError: The disk is full, or a value could not be loaded again; the old file is untouched.
        """
        target = Path(path)
        with writing(target) as file:
            try:
                torch.save(checkpoint, file)
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # raised by pickle
                raise UserError(
                    f"a checkpoint holds tensors and plain values only; {path} would hold other types ({error}); "
                    "change the callback or data module whose state it is"
                ) from error
            if not self._checked_readable:
                file.seek(0)
                _load(file, path, "meta")
                self._checked_readable = True
            digests = [_sha256(file)]
            if target.is_file():  # the old file stays valid until it is replaced
                with target.open("rb") as old:
                    digests.append(_sha256(old))
            atomic_write(digest_path(target), "".join(f"{digest}\n" for digest in digests).encode())

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU, plain values and tensors only.

        Raises:
            DamagedCheckpoint: It is missing, its digest differs, or it is no checkpoint.
            UserError: Another program wrote it, or Lightning in the middle of a step.
        """
        refuse_mid_step(path)
        verify(Path(path))
        return _load_own(Path(path), "cpu")

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint and its digest."""
        Path(path).unlink(missing_ok=True)
        digest_path(Path(path)).unlink(missing_ok=True)


def _load(file: BinaryIO, path: _PATH, device: str) -> dict[str, Any]:
    """Load tensors and plain values only: a checkpoint of unknown origin must not run code."""
    try:
        checkpoint: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise DamagedCheckpoint(
            f"a checkpoint holds tensors and plain values only; {path} holds {match[1] if match else 'another type'}; "
            "change the callback or data module whose state it is, or use another checkpoint"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, LookupError) as error:
        raise DamagedCheckpoint(
            f"a checkpoint must be undamaged; {path} cannot be read ({error}); use another"
        ) from error
    return checkpoint


def refuse_mid_step(path: _PATH | None) -> None:
    """Refuse a checkpoint that Lightning saved in the middle of a step, which it finds by itself in a job of SLURM.

    Raises:
        UserError: It is one.
    """
    if path is not None and Path(path).name.startswith(MID_STEP):
        raise UserError(
            f"a run goes on from the end of a step; Lightning saved {path} in the middle of one; remove {MID_STEP}* "
            "from the run's folder, and go on with --resume auto"
        )


def digest_path(path: Path) -> Path:
    """Path of a checkpoint's SHA-256."""
    return path.with_name(path.name + ".sha256")


def verify(path: Path) -> None:
    """Refuse a damaged checkpoint.

    Raises:
        DamagedCheckpoint: The file or its digest is missing or unreadable, or they disagree.
    """
    try:
        with path.open("rb") as file:
            expected = digest_path(path).read_text(errors="replace").split()
            digest = _known_digest(file)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedCheckpoint(
            f"a checkpoint is a file and its .sha256; {error.filename} is not a file; {_remedy(path)}"
        ) from error
    except OSError as error:
        if error.filename is not None:  # it may not be opened
            raise
        raise DamagedCheckpoint(
            f"a checkpoint must be undamaged; {path} cannot be read ({error}); use another"
        ) from error
    if digest not in expected:
        written = " or ".join(digest[:12] for digest in expected)
        raise DamagedCheckpoint(
            f"a checkpoint must be undamaged; {path} has digest {digest[:12]}, not {written}; use another"
        )


def _remedy(path: Path) -> str:
    """What to name in place of a path that is no checkpoint."""
    found = newest_checkpoint(path) or newest_checkpoint(path.parent) if path.is_dir() else None
    if found is not None:
        return f"name a file, such as {found}"
    return "name another with --resume, or auto for the newest below trainer.default_root_dir"


def _known_digest(file: BinaryIO) -> str:
    """SHA-256 of an open file, cached while the file does not change: it may have tens of GiB."""
    status = os.fstat(file.fileno())
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if state in _digests:
        return _digests[state]
    digest = _sha256(file)
    if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S:
        _digests[state] = digest
    return digest


def _sha256(file: BinaryIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def resume_files(folder: Path) -> dict[Path, tuple[int, bool]]:
    """Checkpoint files to resume from -> (finished rollouts, whether it is a run's end)."""
    matches = {path: STEP_FILE.match(path.name) for path in folder.glob("step=*.ckpt")}
    return {path: (int(match[1]), match[2] is not None) for path, match in matches.items() if match}


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The valid checkpoint of a run with the most rollouts; None if there is no checkpoint. Skips damaged ones.

    Args:
        run_dir: The run's folder (`trainer.default_root_dir`).

    Raises:
        UserError: All checkpoints are damaged: whether to start over is the user's decision.
    """
    files = resume_files(run_dir / FOLDER)
    for path in sorted(files, key=lambda path: files[path], reverse=True):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            log.warning("skipping a damaged checkpoint: %s", error)
            continue
        return path
    if files:
        raise UserError(
            f"a run resumes from an undamaged checkpoint; all {len(files)} in {run_dir / FOLDER} are damaged; restore "
            "a copy, or move that folder away to start over"
        )
    return None


def saved_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run with the most rollouts, also of Lightning's own trainer; None if there is none.

    Args:
        run_dir: As for `newest_checkpoint`; or a folder of checkpoints.
    """
    if (newest := newest_checkpoint(run_dir)) is not None:
        return newest
    patterns = ("*.ckpt", f"{FOLDER}/*.ckpt", f"lightning_logs/version_*/{FOLDER}/*.ckpt")
    paths = sorted(
        (path for pattern in patterns for path in run_dir.glob(pattern)), key=lambda path: path.stat().st_mtime
    )
    return max(paths, key=finished_rollouts, default=None)


def load_saved(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Load a checkpoint, also of Lightning's own trainer, which writes no digest to compare.

    Args:
        path: The file.
        device: Of its tensors; on the meta device they are not read.

    Raises:
        DamagedCheckpoint: It is absent or cannot be read, or its digest differs.
        UserError: It is another program's.
    """
    if digest_path(path).exists() or not path.is_file():
        verify(path)
    return _load_own(path, device)


def _load_own(path: Path, device: str) -> dict[str, Any]:
    """A checkpoint of this trainer."""
    with path.open("rb") as file:
        checkpoint = _load(file, path, device)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(CHECKPOINT_KEY), dict):
        raise UserError(
            f"a checkpoint must be written by this trainer; {path} was written by another program; name another"
        )
    return checkpoint


def finished_rollouts(path: Path) -> int:
    """Number of rollouts that a checkpoint's run had finished; its tensors are not read.

    Raises:
        UserError: It cannot be read, or another program wrote it.
    """
    return int(load_saved(path, "meta")[CHECKPOINT_KEY]["policy_version"])


KEPT = {
    "base": "a checkpoint fits only the base model it was trained on; it has {0} and the policy has {1}; set "
    "model.policy as in that run",
    "finetune": "a checkpoint holds what was trained, an adapter or all weights; got {0}, and the policy trains {1}; "
    "set model.policy.finetune as in that run",
    "scaling": "an adapter keeps the alpha / rank it was trained with; the checkpoint has {0:g} and the policy {1:g}; "
    "set model.policy.lora as in that run",
    "start": "a run keeps the adapter that it started from; the SHA-256 of its weights is {0!s:.12} in the checkpoint "
    "and {1!s:.12} of model.policy.adapter; set that as in the checkpoint's run",
    "teacher": "a run keeps its teacher; the checkpoint has {0} and model.teacher is {1}; set model.teacher as in that "
    "run",
}
"""Rules for the parts of `CHECKPOINT_KEY` that a run keeps, for the checkpoint's value and the run's."""


def check_fits(state: Mapping[str, Any], **own: Any) -> None:
    """Refuse a checkpoint of another base model, kind of fine-tuning, adapter scaling, start or teacher.

    Args:
        state: The checkpoint's entry `CHECKPOINT_KEY`.
        own: The run's values, by keys of `KEPT`: digests of folders (`folder_fingerprint`) and of weights, "lora" or
            "full", and alpha / rank.

    Raises:
        UserError: One of them differs.
    """
    absent = own | {"finetune": "lora", "start": None}  # of earlier versions
    for key, value in own.items():
        if (saved := state.get(key, absent[key])) != value:
            raise UserError(f"{KEPT[key].format(saved, value)}, or start another run")
