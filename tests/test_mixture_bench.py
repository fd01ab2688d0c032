"""The benchmark of mixtures: the taught mixture, its comparisons against each other, and the key/value cache's size."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from tiny_families import PUBLISHED

from qerl_pl.engines import EngineSpec, TransformersEngine
from qerl_pl.formats.base import format_of
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.model_folder import TensorFiles, read_config
from qerl_pl.formats.mxfp4 import MXFP4StacksFormat
from qerl_pl.modules import LoraConfig, PolicyConfig
from qerl_pl.types import Completion

CPU = torch.device("cpu")
COMPARED = 4
ARGS = ["--shape", "toy", "--layers", "1", "--engine", "transformers", "--device", "cpu", "--parts", "agreement"]
ARGS += ["--compared", str(COMPARED), "--tokens", "8"]


class Shifted(TransformersEngine):
    """Says of every token that it chose the next experts."""

    def generate(self, *args: Any) -> list[list[Completion]]:
        groups = super().generate(*args)
        return [[replace(one, routing=(one.routing + 1) % 16) for one in group] for group in groups]  # type: ignore[operator]


@pytest.fixture(scope="module")
def mixture() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import mixture

        yield mixture


@pytest.fixture(scope="module")
def base(mixture: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of one layer, taught a little, in NVFP4."""
    folder = tmp_path_factory.mktemp("mixture")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QERL_CACHE", str(folder / "cache"))
        mixture.write_base(folder / "base", CPU, Namespace(shape="toy", layers=1, steps=25, power_of_two=False))
    return folder / "base"


def test_the_table_of_a_taught_mixture_is_filled(
    mixture: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mixture.py", *ARGS, "--base", str(base), "--out", str(tmp_path)])
    mixture.main()
    found = json.loads((tmp_path / "mixture_toy.json").read_text())["results"]
    assert found["teaching"]["steps"] == 25 and found["teaching"]["loss"] < 0.6 * math.log(512)
    rows = found["agreement"]
    assert [(row["adapter"], row["sigma"], row["replay"]) for row in rows] == [
        (adapter, sigma, replay) for adapter, sigma in (("on", 0), ("off", 0), ("on", 1e-2)) for replay in (False, True)
    ]
    for row in rows:
        assert 0 < row["tokens"] <= 8 * COMPARED and row["logprob_mean"] < 0 <= row["other_experts"] < 0.2
        for name in ("mean", "trainer_from_float32", "engine_from_float32"):
            assert 0 < row[name] < row["adapter_effect"]
    assert (tmp_path / "mixture_toy.md").read_text().count("| the sampler's |") == 3


@pytest.mark.parametrize("shifted", [False, True])
def test_in_float32_only_other_experts_make_a_difference(mixture: Any, base: Path, shifted: bool) -> None:
    config = PolicyConfig(path=str(base), dtype="float32", lora=LoraConfig(rank=32, alpha=32.0))
    policy = mixture.trained_policy(base, config, CPU, None, 0.05).eval()
    prompts = mixture.prompts_for(base, Namespace(shape="toy", compared=COMPARED))
    engine = Shifted() if shifted else TransformersEngine()
    engine.launch(EngineSpec(base, torch.float32, CPU, 32, mixture.ATTENTION, 64, record_routing=True))
    rows = mixture.agreement(engine, policy, policy, prompts, Namespace(tokens=8, float32=COMPARED))
    fewer = mixture.agreement(engine, policy, policy, prompts, Namespace(tokens=8, float32=COMPARED - 1))
    engine.close()
    for row in fewer[1::2]:  # a smaller batch, whose sums some CPUs round otherwise
        assert row["trainer_from_float32"] < 1e-6
    for anew, replayed in zip(rows[::2], rows[1::2], strict=True):
        assert anew["mean"] < 1e-4 and replayed["trainer_from_float32"] == 0
        assert anew["adapter_effect"] > 1e-2
        wrong = (
            anew["other_experts"],
            anew["trainer_from_float32"],
            anew["engine_from_float32"],
            replayed["mean"],
            replayed["engine_from_float32"],
        )
        assert min(wrong) > 1e-2 if shifted else max(wrong) < 1e-4


def test_the_cache_is_what_the_largest_batch_needs(mixture: Any) -> None:
    args = Namespace(shape="30b-a3b", layers=48, batches=[2, 8], prompt=64, tokens=512)
    # 2 x 48 layers x 4 heads x 128 x 2 bytes = 96 KiB a token, 8 x (64 + 512 + 128) tokens: 528 MiB
    assert mixture.kv_gib(args) == 0.625


def test_gpt_oss_is_written_as_published_and_measured(
    mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mixture.random_model.mixture_config("gpt-oss-20b")
    same = real.keys() & PUBLISHED.keys()
    assert {key: real[key] for key in same} == {key: PUBLISHED[key] for key in same} and len(same) > 15
    base = tmp_path / "base"
    mixture.write_base(base, CPU, Namespace(shape="gpt-oss-tiny", layers=1, power_of_two=False))
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
