"""The notebooks: the quickstart runs, shortened; those for a GPU build what they name."""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from cli_helpers import built
from nbclient import NotebookClient
from pages import ROOT

from qerl_pl.cli.main import main
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
    client = NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": folder}})
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


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_its_links_lead_somewhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        for link in re.findall(r"\]\(([^)\s#]+)", cell.source) if cell.cell_type == "markdown" else []:
            assert (NOTEBOOKS / link).is_file(), link


GPUS = {
    "NVIDIA L4, 23034, 8.9": "none",
    "NVIDIA A100-SXM4-80GB, 81920, 8.0\nNVIDIA A100-SXM4-80GB, 81920, 8.0": "none",
    "NVIDIA RTX PRO 6000, 97887, 12.0": "none",
    "NVIDIA GeForce RTX 3060 Ti, 8192, 8.6": "none",
    "NVIDIA RTX A2000, 6138, 8.6": "nvfp4",
}
"""What nvidia-smi prints, and the format in which the notebook trains its model of 1.5B there."""


def first_cell(folder: Path, printed: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that Colab's first cell sets, where nvidia-smi prints this or is not there."""
    monkeypatch.setenv("PATH", str(folder))
    if printed is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{printed}'\n")
        (folder / "nvidia-smi").chmod(0o755)
    names: dict[str, Any] = {}
    exec(compile(code("colab.ipynb")[0], "colab.ipynb", "exec"), names)
    return names


@pytest.mark.parametrize("printed", GPUS)
def test_colabs_first_cell_takes_16_bits_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    assert f"quantization {GPUS[printed]}" in first_cell(tmp_path, printed, monkeypatch)["FORMAT"]


@pytest.mark.parametrize(
    ("printed", "message"), [("Tesla T4, 15360, 7.5", "this one is a Tesla T4"), (None, "choose an L4")]
)
def test_colabs_first_cell_asks_for_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str | None, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        first_cell(tmp_path, printed, monkeypatch)


@pytest.mark.parametrize("table", ["", "mine.jsonl"])
@pytest.mark.parametrize("printed", list(GPUS)[::4])
def test_colabs_commands_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_state: None, printed: str, table: str
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 300)
    monkeypatch.chdir(tmp_path)
    names = first_cell(tmp_path, printed, monkeypatch)
    _, data, *cells = code("colab.ipynb")
    exec(data.replace('TABLE = ""', f'TABLE = "{table}"'), names)
    lines = [cell[1:].replace("\\\n", " ").format(**names) for cell in cells if cell.startswith("!")]
    (_, _, *fit), (_, _, *test), export = (shlex.split(line) for line in lines)
    settings = built("fit", *fit)
    assert settings.model.policy_config.quantization == GPUS[printed] and settings.trainer.limit_train_batches == 150
    assert (settings.noise is None) == (GPUS[printed] == "none")
    assert type(settings.data).__name__ == ("TableDataModule" if table else "GSM8KDataModule")
    Path("runs/colab").mkdir(parents=True)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", "runs/colab/config.yaml")
    assert "report" in built("test", *test)
    assert export == ["qerl", "export", "runs/colab", "my_adapter"] and main(export[1:]) == 2  # no checkpoint here
