"""The line that a user's mistake prints."""

import errno
import os
import re
from collections.abc import Collection, Iterator

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from qerl_pl.errors import UserError
from qerl_pl.persistence.atomic_files import FULL_DISK

_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Expected a <class '(NoneType|list)'>$|Expected a path but"
    r"|Not a valid subclass|Subclass types expect|a class path|a dict with"
    r"|Given value type:|Given value: ([\[{]|.{80})|tip:|usage:"
)
"""Lines of jsonargparse's messages that say which types it tried, or repeat a long value."""

_PARSING = (
    jsonargparse.ArgumentError,
    TypeError,
    ValueError,
    ImportError,
    AttributeError,
    LookupError,
    OSError,
    yaml.YAMLError,
)
"""What jsonargparse raises; any other cause comes from a module of the user's, and keeps its traceback."""

_FILE_SYSTEM = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP", "ENOSPC", "EDQUOT", "EEXIST")
}
"""What a file system refuses for the user's files. ENOENT is absent: this package checks a file before it reads it."""


def explain(error: Exception, argv: list[str], commands: Collection[str]) -> str | None:
    """The line for a user's mistake, or None for any other error, which keeps its traceback.

    Args:
        error: What stopped the program.
        argv: Arguments after the program's name.
        commands: Names of the program's commands.
    """
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return _one_line(cause)
    if isinstance(error, jsonargparse.ArgumentError) and all(isinstance(cause, _PARSING) for cause in causes):
        return _parsing(error, argv, commands)
    for cause in causes:
        if isinstance(cause, MisconfigurationException | ModuleNotFoundError):
            return _one_line(cause)
    if isinstance(error, OSError) and error.errno in _FILE_SYSTEM and error.filename is not None:
        path = os.fsdecode(error.filename)
        return f"files must be open to the run; {path}: {error.strerror}; correct that, or name another place"
    if any(isinstance(cause, OSError) and cause.errno in FULL_DISK for cause in causes):  # a write names no file
        return (
            f"saving needs free disk space; a write found none ({_one_line(error):.80}); free some and give the "
            "command again, a training with --resume auto"
        )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from: jsonargparse wraps an error of a class that it builds in others."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parsing(error: jsonargparse.ArgumentError, argv: list[str], commands: Collection[str]) -> str:
    """Of jsonargparse's many lines the key and what is wrong with it."""
    lines = [" ".join(line.split()).removeprefix("- ").rstrip(".") for line in str(error).splitlines()]
    useful = [line for line in lines if line and not _NOISE.match(line)] or lines[:1]
    command = f"qerl {argv[0]}" if argv and argv[0] in commands else "qerl"
    return "; ".join([*useful, f"see {command} --help"]).replace(":; ", ": ")
