"""The wheel with the core dependencies alone: it is built, unpacked, and used from a folder outside the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
USE = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement

def needed(name, extras=frozenset(), seen=None):
    seen = set() if seen is None else seen
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return seen
    seen.add((name, extras))
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or ("",)):
            key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
            if key not in seen:
                needed(*key, seen)
    return seen

core = {name for name, _ in needed("qerl-pl")}
hidden = {
    module for module, owners in packages_distributions().items()
    if not any(owner.lower().replace("_", "-") in core for owner in owners)
} | {"vllm", "triton"}

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
assert "pytest" in hidden and "torch" not in hidden
import qerl_pl.rollout.collector
later = tuple(f"qerl_pl.{package}" for package in ("evaluation", "modules", "callbacks", "datamodules", "cli"))
print([name for name in sys.modules if name.startswith(later)])

import qerl_kernels, qerl_pl
count = 0
for package in (qerl_pl, qerl_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        short = module.name.rpartition(".")[2]
        if short == "__main__" or short.startswith("triton_"):
            continue  # a program; kernels, imported where a GPU asks for them
        importlib.import_module(module.name)
        count += 1
print(count)

from qerl_pl.cli.main import main
print(qerl_pl.__file__, qerl_kernels.__file__, sep="\\n")
assert main(["configs"]) == 0
assert main(["configs", "quickstart", "mine.yaml"]) == 0
main(["fit", "-c", "quickstart", "-c", "dapo", "--print_config"])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content; setuptools writes beside what it builds, so that a copy is built."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("qerl_pl", "kernels", "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source], check=True)
    (wheel,) = folder.glob("qerl_pl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_holds_code_types_and_configurations(unpacked: Path) -> None:
    packages = {path.name for path in unpacked.iterdir()} - {"qerl_pl-0.1.0.dist-info"}
    assert packages == {"qerl_pl", "qerl_kernels"}
    for package, folder in {"qerl_pl": ROOT / "qerl_pl", "qerl_kernels": ROOT / "kernels" / "qerl_kernels"}.items():
        modules = {path.relative_to(folder) for path in folder.rglob("*.py")}
        assert {path.relative_to(unpacked / package) for path in (unpacked / package).rglob("*.py")} == modules
        assert (unpacked / package / "py.typed").is_file()
    assert (unpacked / "qerl_pl" / "cli" / "model_card.md").is_file()
    licence = (unpacked / "qerl_pl-0.1.0.dist-info" / "licenses" / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in licence and "Copyright 2026 The qerl_pl authors" in licence
    shipped = {path.name: path.read_bytes() for path in (ROOT / "configs").iterdir()}
    assert {path.name: path.read_bytes() for path in (unpacked / "qerl_pl" / "configs").iterdir()} == shipped


@pytest.fixture(scope="module")
def used(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder where a new process has used the wheel, and the lines that it printed."""
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = os.environ | {"PYTHONPATH": str(unpacked), "HF_HUB_OFFLINE": "1"}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", USE], **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, done.stdout.splitlines()


def test_the_rollout_imports_nothing_of_what_comes_after_it(used: tuple[Path, list[str]]) -> None:
    assert used[1][0] == "[]"


def test_every_module_imports_with_the_core_dependencies_alone(used: tuple[Path, list[str]]) -> None:
    assert int(used[1][1]) > 50


def test_the_wheel_is_enough(unpacked: Path, used: tuple[Path, list[str]]) -> None:
    folder, (ours, kernels, *lines) = used[0], used[1][2:]
    assert Path(ours).parents[1] == Path(kernels).parents[1] == unpacked
    names = sorted(path.stem for path in (ROOT / "configs").iterdir())
    listed = dict(line.split(maxsplit=1) for line in lines[: len(names)])
    assert list(listed) == names
    assert listed["dapo"].startswith("DAPO (arXiv 2503.14476) in place of GRPO, with a file")
    assert (folder / "mine.yaml").read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()
    settings = yaml.safe_load("\n".join(lines[len(names) + 1 :]))
    assert settings["trainer"]["default_root_dir"] is None and settings["rollout"]["rewards"].keys() >= {"overlong"}
    assert settings["model"]["optimizer"]["init_args"]["lr"] == 0.002
