"""Files and folders that are whole or absent, never half written."""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl_pl.errors import UserError

log = logging.getLogger(__name__)

_BLOCK = 2**20
_SAMPLES = 64


def cache_root() -> Path:
    """Folder for what can be made again: $QERL_CACHE, or ~/.cache/qerl_pl."""
    return Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl_pl").expanduser()


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends without an exception.

    When another process has finished the same folder meanwhile, that one stays and this one is dropped.

    Raises:
        UserError: The folder cannot be made there, or the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"{target.name} needs a folder of its own; {target.parent} takes none ({error.strerror}); "
            "choose another place"
        ) from error
    try:
        with explain_full_disk(target):
            yield folder
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder inside the block. The lock ends with the process, however that ends.

    Raises:
        UserError: Another process is in it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"one process trains in a folder; another is in {folder}; wait for its end, or choose another "
                "trainer.default_root_dir"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): let no other process train in it", folder, error.strerror)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old content or the new, nothing between.

    One process writes a file; two at once would share the temporary one.

    Raises:
        UserError: The disk is full; the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # what a kill leaves is written over when its turn comes again
    try:
        with explain_full_disk(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left" inside the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free / 2**20
        raise UserError(
            f"saving needs free disk space; {path.parent} has {free:.0f} MiB left for {path.name}; "
            "free some and resume with --resume auto (earlier files are untouched)"
        ) from error


def folder_identity(folder: Path) -> str:
    """Digest of a model folder's content, equal for equal copies wherever they lie.

    Reads config.json whole and of each safetensors file its size and 64 evenly spaced blocks of 1 MiB (small files
    whole), so that it takes seconds for a model of any size.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for offset in sorted({max(0, size - _BLOCK) * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
