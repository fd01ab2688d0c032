"""The benchmark of mixtures: the model it writes, the tables it fills, and the key/value cache's size."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from tiny_families import PUBLISHED

from qerl_pl.formats.base import format_of
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.fp4 import MXFP4StacksFormat
from qerl_pl.models.folder import TensorFiles, read_config

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import mixture

        yield mixture


def test_the_cache_is_what_the_compared_completions_need(mixture: Any) -> None:
    args = Namespace(shape="30b-a3b", layers=48, compared=8, prompt=64, tokens=512)
    # 2 x 48 layers x 4 heads x 128 x 2 bytes = 96 KiB a token, 8 x (64 + 512 + 128) tokens: 528 MiB
    assert mixture.kv_gib(args) == 0.625


def test_gpt_oss_is_written_as_published_and_measured(
    mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mixture.random_model.mixture_config("gpt-oss-20b")
    same = real.keys() & PUBLISHED.keys()
    assert {key: real[key] for key in same} == {key: PUBLISHED[key] for key in same} and len(same) > 15
    base = tmp_path / "base"
    mixture.write_base(base, CPU, Namespace(shape="gpt-oss-tiny", layers=1))
    assert read_config(base)["quantization_config"] == PUBLISHED["quantization_config"]
    assert isinstance(format_of(base), MXFP4StacksFormat)
    validate_checkpoint(base)
    rows = TensorFiles(base).read("model.layers.0.mlp.experts.gate_up_proj_scales").float() - 127
    assert -9 < rows.mean() < -5  # blocks of 32 weights of 0.02: the largest is 0.05, which 4 to 6 times 2^-7 is
    args = ["--shape", "gpt-oss-tiny", "--layers", "1", "--engine", "transformers", "--device", "cpu"]
    args += ["--parts", "agreement", "update", "--update", "64", "--tokens", "8", "--compared", "4"]
    args += ["--base", str(base), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["mixture.py", *args])
    mixture.main()
    found = json.loads((tmp_path / "mixture_gpt-oss-tiny.json").read_text())["results"]
    assert found["layer"]["difference"] == 0 and found["update"][0]["tokens"] == 64 and len(found["agreement"]) == 6
    for row in found["agreement"]:
        assert 0 < row["trainer_from_float32"] < row["adapter_effect"]
        assert not row["replay"] or row["mean"] < row["adapter_effect"]
