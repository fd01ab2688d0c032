"""The wheel by itself: it is built, unpacked, and used from a folder outside the repository."""

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
import qerl_kernels, qerl_pl
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
    shipped = {path.name: path.read_bytes() for path in (ROOT / "configs").iterdir()}
    assert {path.name: path.read_bytes() for path in (unpacked / "qerl_pl" / "configs").iterdir()} == shipped


def test_the_wheel_is_enough(unpacked: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked), "HF_HUB_OFFLINE": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 180}
    done = subprocess.run([sys.executable, "-c", USE], **options)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, kernels, *lines = done.stdout.splitlines()
    assert Path(ours).parents[1] == Path(kernels).parents[1] == unpacked
    names = sorted(path.stem for path in (ROOT / "configs").iterdir())
    listed = dict(line.split(maxsplit=1) for line in lines[: len(names)])
    assert list(listed) == names
    assert listed["dapo"].startswith("DAPO (arXiv 2503.14476) in place of GRPO, with a file")
    assert (tmp_path / "mine.yaml").read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()
    settings = yaml.safe_load("\n".join(lines[len(names) + 1 :]))
    assert settings["trainer"]["default_root_dir"] is None and settings["rollout"]["rewards"].keys() >= {"overlong"}
    assert settings["model"]["optimizer"]["init_args"]["lr"] == 0.002
