"""Functions and classes named by import path or file."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from qerl_pl.errors import UserError

_IN_FILE = re.compile(r"(?:.*/)?(\w+)\.py:(\w+)")


def import_path_of(name: str) -> str | None:
    """module.object, the import path of `file.py:object`; None for a name of another form."""
    in_file = _IN_FILE.fullmatch(name)
    return None if in_file is None else ".".join(in_file.groups())


def load_named(name: str, rule: str, remedy: str, kind: str) -> Any:
    """The object of `module.object`, `module:object` or `file.py:object`.

    Args:
        name: Import path, or path of a file and name in it.
        rule: What names are allowed, for the error.
        remedy: What to write in place of a name without a module, for the error.
        kind: A file becomes the module `qerl_<kind>_<file>`, with a digest of its path if another file has that name.

    Raises:
        UserError: There is no such module, file or object.
    """
    module, colon, attribute = name.rpartition(":")
    try:
        if module.endswith(".py"):
            return getattr(_load_file(Path(module).expanduser(), kind), attribute)
        if (colon or "." in name) and all(part.isidentifier() for part in re.split("[.:]", name)):
            return resolve_name(name)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise UserError(f"{rule}; {name!r} cannot be imported ({error}); correct the name or the file") from error
    raise UserError(f"{rule}; got {name!r}; {remedy}")


def _load_file(path: Path, kind: str) -> Any:
    """The module of a file, imported once."""
    file, plain = path.absolute(), f"qerl_{kind}_{path.stem}"
    # A file of the same name in another folder must not replace it: pickle and inspect find modules by name.
    for name in (plain, f"{plain}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"):
        loaded = sys.modules.get(name)
        if loaded is None:
            break
        if loaded.__file__ == str(file):
            return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # or it would be taken for the module when it is loaded again
        raise
    return module
