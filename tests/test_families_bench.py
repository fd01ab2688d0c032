"""The benchmark of families fills its tables, and says where noise reaches other norms than it should."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from qerl_pl.engines import transformers as reference_engine
from qerl_pl.models.families import Family, noisy_norm_names

pytestmark = pytest.mark.nightly

ARGS = ["--family", "gemma3_text", "--shape", "tiny", "--device", "cpu", "--engine", "transformers"]
ARGS += ["--prompts", "2", "--tokens", "8"]


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families

    return families


def test_tables_of_a_family_are_filled(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["families.py", *ARGS, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        families.main()
    (result,) = json.loads((tmp_path / "families.json").read_text())["results"]
    assert ended.value.code == 0 and result["failures"] == []
    assert result["linears"] == 14 and (result["noise"]["noisy"], result["noise"]["norms"]) == (4, 13)
    assert all(row["tokens"] == 64 and 0 < row["mean"] < row["effect"] for row in result["rows"].values())
    assert len(result["rows"]) == 4
    assert 0 < result["gradient_from_float32"] < 0.1 and result["tokens_per_s"] > 0
    text = (tmp_path / "families.md").read_text()
    assert text.count("| gemma3_text |") == 5 and "| ok |" in text


def test_noise_in_another_norm_fails(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def llamas(names: Any, family: Family) -> list[str]:
        return noisy_norm_names(names, replace(family, noisy_norms=("input_layernorm", "post_attention_layernorm")))

    monkeypatch.setattr(reference_engine, "noisy_norm_names", llamas)
    args = Namespace(shape="tiny", device="cpu", engine="transformers", format="nvfp4", prompts=2, tokens=8, move=0.03)
    found = families.run_family("gemma3_text", args)["failures"]
    assert any("in other norms" in line for line in found) and any("before quantized linears" in line for line in found)
