"""Atomic checkpoints, their check for damage, and the search for the newest valid one."""

import logging
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from qerl_pl.errors import UserError
from qerl_pl.runtime.files import writing

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
STEP_FILE = re.compile(r"step=(\d+)\.ckpt")
"""Checkpoints to resume from, by finished rollouts."""
CHECKPOINT_KEY = "qerl"
"""Key of this package's state in a checkpoint."""


class DamagedCheckpoint(UserError):
    """A checkpoint file that is missing, unreadable or differs from what was written."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, then renames it: a kill at any moment leaves the old or the new file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, a zip archive of PyTorch with a CRC-32 of each tensor.

        Raises:
            DamagedCheckpoint: A value could not be loaded again; the old file is untouched.
        """
        with writing(Path(path)) as file:
            torch.save(checkpoint, file)
            file.seek(0)
            _load(file, path, "meta")

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU, as `load_saved` does."""
        return load_saved(Path(path))


def _load(file: Path | BinaryIO, path: _PATH, device: str) -> dict[str, Any]:
    """Load tensors and plain values only: a checkpoint of unknown origin must not run code."""
    with _explain_damage(path):
        checkpoint: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    return checkpoint


def verify(path: Path) -> None:
    """Refuse a damaged checkpoint; of an undamaged one that stays as it is, all bytes are read once.

    Raises:
        DamagedCheckpoint: The file is missing, or it is no archive that fits its checksums.
    """
    if not path.is_file():
        raise DamagedCheckpoint(
            f"a checkpoint is a file; {path} is not a file; name one, such as RUN/{CHECKPOINTS}/step=N.ckpt, or give "
            "--resume auto for the newest below trainer.default_root_dir"
        )
    state = path.stat()
    _check_archive(path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    _load(path, path, "meta")


@lru_cache
def _check_archive(path: Path, *state: int) -> None:
    """Compare an archive with its checksums, once for each state of the file: it may have tens of GiB."""
    with _explain_damage(path), zipfile.ZipFile(path) as archive:
        # Of an entry that is marked as a folder, PyTorch takes memory as it finds it.
        folders = [entry.filename for entry in archive.infolist() if entry.external_attr]
        if (part := archive.testzip() or next(iter(folders), None)) is not None:
            raise zipfile.BadZipFile(f"{part} does not fit its checksum")


@contextmanager
def _explain_damage(path: _PATH) -> Iterator[None]:
    """Turn what PyTorch and zipfile raise of other types, and of a damaged archive, into a DamagedCheckpoint."""
    try:
        yield
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise DamagedCheckpoint(
            f"a checkpoint holds tensors and plain values only; {path} holds {match[1] if match else 'another type'}; "
            "change the callback or data module whose state it is, or use another checkpoint"
        ) from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError, OSError, LookupError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # it may not be opened
            raise
        raise DamagedCheckpoint(
            f"a checkpoint must be undamaged; {path} cannot be read ({error}); use another"
        ) from error


def resume_files(folder: Path) -> dict[Path, int]:
    """Checkpoint files to resume from -> finished rollouts, from the newest on."""
    rollouts = {path: int(match[1]) for path in folder.glob("*") if (match := STEP_FILE.fullmatch(path.name))}
    return dict(sorted(rollouts.items(), key=lambda item: item[1], reverse=True))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The valid checkpoint of a run with the most rollouts; None if there is no checkpoint. Skips damaged ones.

    Raises:
        UserError: All checkpoints are damaged: whether to start over is the user's decision.
    """
    files = resume_files(run_dir / CHECKPOINTS)
    for path in files:
        try:
            verify(path)
            return path
        except DamagedCheckpoint as error:
            log.warning("skipping a damaged checkpoint: %s", error)
    if files:
        raise UserError(
            f"a run resumes from an undamaged checkpoint; all {len(files)} in {run_dir / CHECKPOINTS} are damaged; "
            "restore a copy, or move that folder away to start over"
        )
    return None


def load_saved(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Load a checkpoint, also of Lightning's own trainer; on the device "meta" its tensors are not read.

    Raises:
        DamagedCheckpoint: It is missing or damaged, or holds other than tensors and plain values.
        UserError: It is another program's, or of a version that counted no rollouts.
    """
    verify(path)
    checkpoint = _load(path, path, device)
    state = checkpoint.get(CHECKPOINT_KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or "policy_version" not in state:
        raise UserError(
            f"a checkpoint must be written by this trainer; {path} was written by another program or version; name "
            "another"
        )
    return checkpoint


def finished_rollouts(path: Path) -> int:
    """Number of rollouts that a checkpoint's run had finished; raises as `load_saved` does."""
    return int(load_saved(path, "meta")[CHECKPOINT_KEY]["policy_version"])


KEPT = {
    "base": ("base model", "model.policy"),
    "finetune": ("kind of fine-tuning", "model.policy.finetune"),
    "scaling": ("alpha / rank", "model.policy.lora"),
    "start": ("starting adapter", "model.policy.adapter"),
    "teacher": ("teacher", "model.teacher"),
}
"""Parts of `CHECKPOINT_KEY` that a run keeps, with their names and settings."""


def check_fits(state: Mapping[str, Any], **own: Any) -> None:
    """Refuse a checkpoint of another base model, kind of fine-tuning, adapter scaling, start or teacher.

    Args:
        state: The checkpoint's entry `CHECKPOINT_KEY`.
        own: The run's values, by keys of `KEPT`: digests of folders (`folder_fingerprint`) and of weights, "lora" or
            "full", and alpha / rank.

    Raises:
        UserError: One of them differs.
    """
    for key, value in own.items():
        if (saved := state.get(key, value)) != value:
            name, setting = KEPT[key]
            raise UserError(
                f"a run keeps its {name}; the checkpoint's is {saved!s:.12} and this run's {value!s:.12}; set "
                f"{setting} as in that run, or start another run"
            )
