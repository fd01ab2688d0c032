"""The notebooks: the quickstart runs, shortened; that for a GPU builds what it names."""

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ROOT

from qerl_pl.engines import VLLMEngine
from qerl_pl.toy.policy import ToyConfig

pytestmark = pytest.mark.nightly

NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, tiny_policy_dir: Path) -> list[dict[str, Any]]:
    """What the quickstart's code cells show, by kind, after three rollouts of a smaller policy."""
    folder = tmp_path_factory.mktemp("notebook")
    shutil.copytree(tiny_policy_dir, folder / "cache" / f"toy-{ToyConfig().digest}")
    settings = {"QERL_CACHE": f"{folder}/cache", "PL_TRAINER_LIMIT_TRAIN_BATCHES": "3"}
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env=os.environ | settings)
    return [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]


def test_the_quickstart_shows_accuracies_curves_and_completions(outputs: list[dict[str, Any]]) -> None:
    texts = [data["text/plain"] for data in outputs]
    assert sum("val/accuracy" in text for text in texts) == 2
    assert sum("image/png" in data for data in outputs) == 1
    (table,) = [data["text/markdown"] for data in outputs if "text/markdown" in data]
    before, after = table.split("**After 3 rollouts**")
    for part in (before, after):
        rows = [line for line in part.splitlines() if line.startswith("| There are")]
        assert len(rows) == 4 and len(set(rows)) == 4
    assert before.count("|") > 0 and before.split("Before**")[1].strip() != after.strip()


def code(name: str) -> list[str]:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_for_a_gpu_builds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": tmp_path / "model", "DATA": tmp_path, "STEPS": 8, "RUN": tmp_path / "run"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code("gpu_24gb.ipynb"):
        if cell.startswith("(before,)"):
            break
        exec(compile(cell, "gpu_24gb.ipynb", "exec"), names)
    assert isinstance(names["rollout"].engine, VLLMEngine)
    assert (names["trainer"].max_steps, names["trainer"].val_check_interval) == (8, 2)
    assert names["module"].policy_config.path == str(tmp_path / "model") and names["data"].batch_size == 16
