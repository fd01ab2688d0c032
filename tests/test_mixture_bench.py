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
from transformers import AutoConfig, Qwen3_5MoeTextConfig

from qerl_pl.formats.base import format_of
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.fp4 import MXFP4StacksFormat
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.models.shape import Shape

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


def test_codes_of_qwen3_5_have_the_names_and_shapes_of_a_quantized_model(mixture: Any, tmp_path: Path) -> None:
    model = mixture.random_model
    published = Qwen3_5MoeTextConfig()  # whose defaults are 35B-A3B's
    assert Shape.of(AutoConfig.for_model(**model.mixture_config("qwen3.5-35b-a3b"))) == Shape.of(published)
    sizes = model.published_sizes(model.mixture_config("qwen3.5-35b-a3b"))
    assert len([name for name in sizes if ".experts." in name]) == 40 * 256 * 3
    folders = [tmp_path / name for name in ("dense", "quantized", "codes")]
    for folder, nvfp4 in ((folders[0], False), (folders[2], True)):
        model.write_model(folder, "qwen3.5-moe-tiny", CPU, nvfp4, codes=True)
    quantize_checkpoint(folders[0], folders[1])
    validate_checkpoint(folders[2])
    quantized, codes = ((TensorFiles(folder).headers(), read_config(folder)) for folder in folders[1:])
    assert codes == quantized
