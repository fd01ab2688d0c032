"""Atomic files and folders: at any moment, also after a kill, a name has its old or its new content."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from qerl_pl.errors import UserError

_BLOCK, _SAMPLES = 2**20, 64


def require_absent(path: Path) -> None:
    """Refuse to write where there is something already.

    Raises:
        UserError: The path exists.
    """
    if path.exists():
        raise UserError(f"the destination must not exist; {path} does; choose another name or remove it")


def cache_root() -> Path:
    """Folder of cached models: $QERL_CACHE, or ~/.cache/qerl_pl."""
    return Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl_pl").expanduser()


@contextmanager
def atomic_directory(target: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that is renamed to it when the block ends without an exception.

    What a killed process left is removed first. A kill between the two renames of a replacement leaves the old folder
    under a hidden name, from which the next process restores it.

    Args:
        target: The folder to create.
        replace: Whether an existing folder is replaced, or a symbolic link to one, whose folder stays as it is.
            Otherwise it stays, as another process has created it meanwhile, and the temporary folder is removed.

    Raises:
        UserError: Another process writes the target, or the folder above it cannot be written to.
    """
    lock = target.with_name(f".{target.name}.unfinished.lock")
    with _lock(lock, 0.0, target, "destination"):
        try:
            with _unfinished(target, replace) as folder:
                yield folder
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def _unfinished(target: Path, replace: bool) -> Iterator[Path]:
    """The temporary folder of `atomic_directory`, in one process at a time."""
    folder, old = (target.with_name(f".{target.name}.{end}") for end in ("unfinished", "replaced"))
    if old.is_dir() and not os.path.lexists(target):  # killed between two renames
        old.rename(target)
    for path in (folder, old):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:
            path.chmod(mode if path.is_dir() else mode & 0o666)  # safetensors has its files for their owner
            _sync(path)
        if replace or not target.is_dir():
            if target.is_symlink():
                target.unlink()
            elif target.is_dir():
                target.rename(old)
            folder.rename(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def build_once(target: Path) -> Iterator[bool]:
    """Build a missing folder in the block, in one process while the others wait.

    Yields:
        Whether the folder is missing, so that this process has to build it.

    Raises:
        UserError: The folder cannot be created or locked.
    """
    if target.is_dir():
        yield False
        return
    file = target.with_name(f".{target.name}.lock")
    with _lock(file, -1.0, file.parent, "folder, for models by QERL_CACHE"):
        try:
            yield not target.is_dir()
        finally:
            file.unlink(missing_ok=True)  # still locked: who waits for it makes another


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process. The lock ends with the process, however that ends.

    Raises:
        UserError: Another process has the lock, or the folder cannot be created or locked.
    """
    file, is_new = folder / ".lock", not folder.exists()
    with _lock(file, 0.0, folder, "trainer.default_root_dir"):
        try:
            yield
        finally:
            if [*folder.iterdir()] == [file]:  # of a start that was refused
                file.unlink()
                if is_new:
                    folder.rmdir()


@contextmanager
def _lock(file: Path, timeout: float, folder: Path, another: str) -> Iterator[None]:
    """Lock a folder by a file, waiting for up to `timeout` seconds, or without a limit if that is negative."""
    with ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file, timeout, mode=0o666))
        except OSError as error:
            taken = isinstance(error, Timeout)
            rule = "only one process may write to a folder" if taken else "a folder to write to is locked first"
            reason = "another process uses it" if taken else error.strerror
            remedy = f"{'wait for its end, or ' if taken else ''}choose another {another}"
            raise UserError(f"{rule}; {folder} cannot be locked ({reason}); {remedy}") from error
        yield


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` when the block ends without an exception.

    Only one process may write a path at a time: the temporary name is fixed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file as `writing` does."""
    with writing(path) as file:
        file.write(data)


def folder_fingerprint(folder: Path) -> str:
    """Digest of a model folder's content, equal for equal copies on any path.

    It covers config.json, and of each safetensors file its size and 64 evenly spaced blocks of 1 MiB (of up to 64 MiB
    everything), so that it takes seconds for a model of any size.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _BLOCK:
                digest.update(file.read())
                continue
            for i in range(_SAMPLES):
                file.seek((size - _BLOCK) * i // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
