"""Atomic files and folders: at any moment, also after a kill, a name has its old or its new content."""

import ctypes
import errno
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from qerl_pl.errors import UserError

log = logging.getLogger(__name__)

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write without space left."""
_BLOCK, _SAMPLES = 2**20, 64


def cache_root() -> Path:
    """Folder of cached models: $QERL_CACHE, or ~/.cache/qerl_pl."""
    return Path(os.environ.get("QERL_CACHE") or "~/.cache/qerl_pl").expanduser()


@contextmanager
def atomic_directory(target: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that is renamed to it when the block ends without an exception.

    Temporary folders of the same target that killed processes left are removed first.

    Args:
        target: The folder to create.
        replace: Whether an existing folder is replaced, or a symbolic link to one, whose folder stays as it is.
            Otherwise it stays, as another process has created it meanwhile, and the temporary folder is removed.

    Raises:
        UserError: The folder cannot be created, or the disk is full.
    """
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # The parent's lock, or another process could remove the folder before it is locked.
            with directory_lock(target.parent, wait=True) as locked_parent:
                if locked_parent:
                    _remove_leftovers(target)
                folder = Path(tempfile.mkdtemp(prefix=_unfinished(target), dir=target.parent))
                stack.enter_context(directory_lock(folder))
        except OSError as error:
            remedy = "set QERL_CACHE to" if target.parent == cache_root() else "choose"
            raise UserError(
                f"{target.name} is written to a folder; {target.parent} does not allow it ({error.strerror}); "
                f"{remedy} another folder"
            ) from error
        stack.callback(_remove, folder)
        with explain_full_disk(target):
            yield folder
            _follow_umask(folder)
            for path in [*folder.rglob("*"), folder]:
                _sync(path)
        _rename(folder, target, replace)
        _sync(target.parent)


def _follow_umask(folder: Path) -> None:
    """Give files and folders the modes of new ones: temporary folders, and safetensors files, are their owner's."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in [*folder.rglob("*"), folder]:
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)  # who may read a folder may enter it


@contextmanager
def build_once(target: Path) -> Iterator[bool]:
    """Hold a machine-wide lock while a missing folder is built in the block.

    Without a lock (no permission, no support) several processes build it, and the first to finish counts.

    Yields:
        Whether the folder is missing, so that this process has to build it.
    """
    if target.is_dir():
        yield False
        return
    name = hashlib.sha256(str(target.absolute()).encode()).hexdigest()[:16]
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(Path(tempfile.gettempdir()) / f"qerl-{name}.lock"))
        except OSError as error:
            log.debug("no lock for %s: %s", target, error)
        yield not target.is_dir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process. The lock ends with the process, however that ends.

    Raises:
        UserError: Another process has the lock.
    """
    lock = folder / ".lock"
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(lock, timeout=0))
        except Timeout as error:
            raise UserError(
                f"only one process may train in a folder; another uses {folder}; wait for its end, or choose another "
                "trainer.default_root_dir"
            ) from error
        except OSError as error:
            if error.filename is not None:  # the file cannot be opened; only the lock is optional
                raise
            log.warning("%s cannot be locked (%s): do not let another process train in it", folder, error.strerror)
        try:
            yield
        finally:
            if [*folder.iterdir()] == [lock]:  # of a start that was refused
                lock.unlink()


def _unfinished(target: Path) -> str:
    return f".{target.name}.unfinished-"


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _remove_leftovers(target: Path) -> None:
    for folder in target.parent.glob(f"{glob.escape(_unfinished(target))}*"):
        try:
            with directory_lock(folder) as abandoned:
                if abandoned:
                    _remove(folder)
                    log.info("removed %s of a killed process", folder)
        except (FileNotFoundError, PermissionError):  # renamed meanwhile; another user's
            continue
    if (old := _replaced(target)).exists():  # killed between the two renames of `_rename`
        if target.exists():
            _remove(old)
        else:
            old.rename(target)


def _remove(folder: Path) -> None:
    """Remove a folder, or a symbolic link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, target: Path, replace: bool) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        link = target.is_symlink()
        if error.errno not in ((errno.ENOTDIR,) if link else (errno.ENOTEMPTY, errno.EEXIST)):
            raise
        if (replace or link and not target.is_dir()) and not _swap(folder, target):
            target.rename(_replaced(target))
            folder.rename(target)
            _remove(_replaced(target))


def _swap(first: Path, second: Path) -> bool:
    """Exchange the names of two folders, or links, atomically; False where system or filesystem cannot (macOS, NFS)."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        rename = libc.renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    if rename(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


@contextmanager
def directory_lock(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder itself, with no file in it; False: another process has the lock, or the filesystem has no such."""
    descriptor, acquired = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            acquired = False
        yield acquired
    finally:
        os.close(descriptor)


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

    Raises:
        UserError: The disk is full; the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with explain_full_disk(path), temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file as `writing` does.

    Raises:
        UserError: The disk is full; the old content stays.
    """
    with writing(path) as file:
        file.write(data)


def remove_unwritten(folder: Path, names: str) -> None:
    """Remove temporary files that killed processes left; no process may be writing there now.

    Args:
        folder: May be missing.
        names: Pattern of the final names, such as "*.ckpt*".
    """
    for path in folder.glob(f".{names}.tmp"):
        path.unlink(missing_ok=True)
        log.info("removed %s of a killed process", path)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left" in the block into a UserError that names `path`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not any(map(is_full_disk, _contexts(error))):
            raise
        free = shutil.disk_usage(path.parent).free / 2**20
        raise UserError(
            f"saving needs free disk space; {path.parent} has {free:.0f} MiB left for {path.name}; "
            "free some and resume with --resume auto (earlier files are untouched)"
        ) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed without space left; safetensors tells the error's number in its text alone."""
    if isinstance(error, SafetensorError):
        return any(f"(os error {number})" in str(error) for number in FULL_DISK)
    return isinstance(error, OSError) and error.errno in FULL_DISK


def _contexts(error: BaseException) -> Iterator[BaseException]:
    """The error and its chain of contexts: PyTorch raises another when it closes an incomplete archive."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__context__


def folder_identity(folder: Path) -> str:
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
