"""Versions of installed packages, for reports and checkpoints."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each package that is installed, by name; a source tree on the path alone, without pip, has none."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
