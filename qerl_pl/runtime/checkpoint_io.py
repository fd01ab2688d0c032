"""Atomic checkpoints with a SHA-256 digest, and the search for the newest valid one."""

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
from qerl_pl.runtime.files import atomic_write, writing

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
STEP_FILE = re.compile(r"^step=(\d+)(\.end)?\.ckpt$")
"""Checkpoints to resume from, by finished rollouts; `.end` marks the one after the run's last validation."""
CHECKPOINT_KEY = "qerl"
"""Key of this package's state in a checkpoint."""
SETTLED_S = 5.0
"""Seconds after which a change of a file gets another time stamp, however coarse the file system's clock."""
MID_STEP = "hpc_ckpt_"
"""Begin of the names of checkpoints that Lightning saves at a signal of SLURM, in the middle of a step."""
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
            writer = _HashingWriter(file)
            try:
                torch.save(checkpoint, cast(BinaryIO, writer))  # tensor by tensor: no second copy in memory
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # raised by pickle
                raise UserError(
                    f"a checkpoint holds tensors and plain values only; {path} would hold other types ({error}); "
                    "change the callback or data module whose state it is"
                ) from error
            if not self._checked_readable:
                file.seek(0)
                _load(file, path, "meta")
                self._checked_readable = True
            digests = [writer.digest.hexdigest()]
            if target.is_file():  # the old file stays valid until it is replaced
                with target.open("rb") as old:
                    digests.append(hashlib.file_digest(old, "sha256").hexdigest())
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
        return _load_own(Path(path), "cpu")

    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint and its digest."""
        Path(path).unlink(missing_ok=True)
        digest_path(Path(path)).unlink(missing_ok=True)


class _HashingWriter:
    """Writes to a file and updates a SHA-256 digest."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _load_own(path: Path, device: str) -> dict[str, Any]:
    """A valid checkpoint of this trainer; on the meta device without reading its tensors."""
    with opened(path) as file:
        return _own(_load(file, path, device), path)


def _own(checkpoint: Any, path: Path) -> dict[str, Any]:
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(CHECKPOINT_KEY), dict):
        raise UserError(
            f"a checkpoint must be written by this trainer; {path} was written by another program; name another"
        )
    return checkpoint


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


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a checkpoint after comparing its digest.

    Raises:
        DamagedCheckpoint: The file or its digest is missing or unreadable, or they disagree.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            expected = digest_path(path).read_text(errors="replace").split()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DamagedCheckpoint(
                f"a checkpoint is a file and its .sha256; {error.filename} is not a file; {_remedy(path)}"
            ) from error
        try:
            digest = _digest(file)
        except OSError as error:
            raise DamagedCheckpoint(
                f"a checkpoint must be undamaged; {path} cannot be read ({error}); use another"
            ) from error
        if digest not in expected:
            written = " or ".join(digest[:12] for digest in expected)
            raise DamagedCheckpoint(
                f"a checkpoint must be undamaged; {path} has digest {digest[:12]}, not {written}; use another"
            )
        file.seek(0)
        yield file


def _remedy(path: Path) -> str:
    """What to name in place of a path that is no checkpoint."""
    found = newest_checkpoint(path) or newest_checkpoint(path.parent) if path.is_dir() else None
    if found is not None:
        return f"name a file, such as {found}"
    return "name another with --resume, or auto for the newest below trainer.default_root_dir"


def _digest(file: BufferedReader) -> str:
    """SHA-256 of an open file, cached while the file does not change: it may have tens of GiB."""
    status = os.fstat(file.fileno())
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if state in _digests:
        return _digests[state]
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S:
        _digests[state] = digest
    return digest


def verify(path: Path) -> None:
    """Refuse a damaged checkpoint, as `opened` does."""
    with opened(path):
        pass


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
    return max(paths, key=lambda path: int(load_saved(path, "meta")[CHECKPOINT_KEY]["policy_version"]), default=None)


def load_saved(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Load a checkpoint, also of Lightning's own trainer, which writes no digest to compare.

    Raises:
        DamagedCheckpoint: It is absent or cannot be read, or its digest differs.
        UserError: It is another program's.
    """
    if digest_path(path).exists() or not path.is_file():
        return _load_own(path, device)
    with path.open("rb") as file:
        return _own(_load(file, path, device), path)


def finished_rollouts(path: Path) -> int:
    """Number of rollouts that a checkpoint's run had finished; its tensors are not read.

    Raises:
        UserError: It cannot be read, or another program wrote it.
    """
    return int(_load_own(path, "meta")[CHECKPOINT_KEY]["policy_version"])


def check_fits(state: dict[str, Any], base: str, finetune: str, scaling: float) -> None:
    """Refuse a checkpoint of another base model, kind of fine-tuning or adapter scaling.

    Args:
        state: The checkpoint's entry `CHECKPOINT_KEY`.
        base: Identity of the policy's base (`folder_identity`).
        finetune: "lora" or "full".
        scaling: alpha / rank of the policy's adapter; 1 without.

    Raises:
        UserError: One of them differs.
    """
    if state["base"] != base:
        raise UserError(
            f"a checkpoint fits only the base model it was trained on; it has {state['base']} and the policy has "
            f"{base}; set model.policy as in that run, or start another run"
        )
    if (saved := state.get("finetune", "lora")) != finetune:
        raise UserError(
            f"a checkpoint holds what was trained, an adapter or all weights; got {saved}, and the policy trains "
            f"{finetune}; set model.policy.finetune as in that run, or start another run"
        )
    if state["scaling"] != scaling:
        raise UserError(
            f"an adapter keeps the alpha / rank it was trained with; the checkpoint has {state['scaling']:g} and the "
            f"policy {scaling:g}; set model.policy.lora as in that run, or start another run"
        )


def check_teacher(state: dict[str, Any], teacher: str) -> None:
    """Refuse a checkpoint of a run with another teacher.

    Args:
        state: The checkpoint's entry `CHECKPOINT_KEY`.
        teacher: Identity of the teacher's folder (`folder_identity`).

    Raises:
        UserError: It differs.
    """
    if (saved := state.get("teacher", teacher)) != teacher:
        raise UserError(
            f"a run keeps its teacher; the checkpoint has {saved} and model.teacher is {teacher}; set model.teacher as "
            "in that run, or start another run"
        )


def check_start(state: dict[str, Any], start: str | None) -> None:
    """Refuse a checkpoint of a run that started from another adapter, its reference policy.

    Args:
        state: The checkpoint's entry `CHECKPOINT_KEY`.
        start: SHA-256 of the weights of `model.policy.adapter`; None without.

    Raises:
        UserError: It differs.
    """
    if (saved := state.get("start")) != start:
        raise UserError(
            f"a run keeps the adapter that it started from; the SHA-256 of its weights is {str(saved):.12} in the "
            f"checkpoint and {str(start):.12} of model.policy.adapter; set that as in the checkpoint's run, or start "
            "another run"
        )
