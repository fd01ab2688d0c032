"""The benchmarks of rollouts and steps: kernels by kind, names of parts, and the tables' ratios."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT

pytestmark = pytest.mark.nightly

LAYER = ["qkv", "attention", "o", "gate_up", "down"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def kernels(product: str, reduce: str | None, head: str, steps: int) -> list[tuple[str, float, float]]:
    """Decode steps of two layers: 10 µs a product, 2 µs of anything else, 1 µs between them, 100 µs between steps."""
    found, now = [], 0.0
    for _ in range(steps):
        names = ["triton_red_fused_rms_norm_0"]
        for kind in LAYER * 2:
            names += ["flash_fwd"] if kind == "attention" else [product, *([reduce] if reduce else [])]
        for name in [*names, head, "_sample_blocks_kernel"]:
            us = 10.0 if name in (product, head) else 2.0
            found.append((name, now, us))
            now += us + 1
        now += 99
    return found


@pytest.mark.parametrize(
    ("product", "reduce", "kind"),
    [
        ("decode_gemm_stream_k_kernel", "decode_gemm_reduce_kernel", "decode GEMM with LoRA"),
        ("decode_gemm_stream_k_kernel", None, "decode GEMM with LoRA"),
        ("void marlin::Marlin<1>", None, "Marlin"),
        ("nvjet_sm90_tst_64x8", "void cublasLt::splitKreduce_kernel<32>", "16-bit products"),
        ("nvjet_sm90_tst_64x8", None, "16-bit products"),
    ],
)
def test_a_decode_step_is_divided_by_kind_linear_and_gaps(
    bench: Any, monkeypatch: pytest.MonkeyPatch, product: str, reduce: str | None, kind: str
) -> None:
    module, asked = bench("kernel_profile"), []

    class Engine:
        def generate(self, requests: Any, sampling: Any) -> None:
            asked.append(sampling.max_tokens)

    def kernels_of(work: Callable[[], object]) -> Any:
        work()
        return kernels(product, reduce, "nvjet_sm90_tst_128x8", asked[-1])

    monkeypatch.setattr(module, "kernels_of", kernels_of)
    found = module.of_a_step(Engine(), [], 9)
    each, calls = (0.020, 2) if reduce is None else (0.024, 4)
    for linear in module.LINEARS:
        assert found["kinds"][f"{kind}: {linear}"] == pytest.approx([each, calls])
    assert found["kinds"]["16-bit products: lm_head"] == pytest.approx([0.010, 1])
    assert found["kinds"]["norms"] == pytest.approx([0.002, 1]) and found["kinds"]["attention"][1] == pytest.approx(2)
    assert found["step"]["gaps of the host"] == pytest.approx(0.1)
    count = 1 + 2 + 8 * (1 if reduce is None else 2) + 2
    assert found["step"]["gaps between kernels"] == pytest.approx((count - 1) / 1e3)
    text = "\n".join(module.tables({"8": found, "64": found}))
    assert f"| {kind}: qkv | {each:.3f} ({calls}) | {each:.3f} ({calls}) |" in text and module.tables({}) == []


def test_products_of_other_layers_stay_together(bench: Any) -> None:
    module = bench("kernel_profile")
    run = kernels("nvjet_a", None, "nvjet_b", 1)
    assert module.kinds_of(run[:3] + run[4:]).count("16-bit products") == 8


@pytest.mark.parametrize(
    ("part", "found", "title"),
    [
        ("nvfp4", ("nvfp4", "", 32), "NVFP4 rank 32"),
        ("nvfp4-fused@128", ("nvfp4", "fused", 128), "NVFP4 fused rank 128"),
        ("bf16-bare", ("bf16", "bare", 0), "BF16 bare"),
        ("stock", ("stock", "", 0), "plain vLLM, BF16 merged"),
        ("stock-lora", ("stock", "lora", 32), "plain vLLM, BF16 lora rank 32"),
        ("int8", None, ""),
        ("nvfp4-melted", None, ""),
    ],
)
def test_a_part_names_base_way_and_rank(bench: Any, part: str, found: Any, title: str) -> None:
    module = bench("rollout_speed")
    if found is None:
        with pytest.raises(SystemExit, match="a part is one of"):
            module.split(part)
    else:
        assert module.split(part) == found and module.title(part) == title


def test_rollouts_are_compared_with_the_first_part(bench: Any) -> None:
    module = bench("rollout_speed")
    row = {"batch": 8, "slowest": 1.0, "fastest": 2.0, "decode_tokens_per_s": 80.0, "prefill_tokens_per_s": 9.0}
    rates = {"stock": 100.0, "nvfp4": 150.0}
    text = module.tables(
        {
            part: {"speed": [row | {"rollout_tokens_per_s": rate}], "start_s": 1.0, "gib": {"weights": 2.0}}
            for part, rate in rates.items()
        }
    )
    assert "| 8 | 100 (1.00) | 150 (1.50) |" in text
    assert "| NVFP4 rank 32 | 8 | 150 | 1 to 2 | 80 | 9 | 100.00 |" in text and "| 1 | 0 | weights 2.0 |" in text


def test_steps_are_compared_with_peers_of_the_same_size(bench: Any) -> None:
    module = bench("step_against")
    one = {"size": "4x8x512", "phases": [{"rollout": 1.0, "update": 2.0}], "peak_gib": {"rollout": 3.0}}
    labels = {"qerl_pl, NVFP4": 1.5, "TRL, BF16, 1.16": 3.5, "Unsloth, BF16": 2.5}
    found = [one | {"label": label, "seconds": [first, first + 1]} for label, first in labels.items()]
    text = module.table([*found, found[1] | {"size": "1x8x8", "seconds": [0.1]}])
    assert "| qerl_pl, NVFP4 | 4 x 8 x 512 | 2 | 2.00 (1.50 to 2.50) | 1.00 | 2.00 | 3.0 / 0.0 | 2.00 | 1.50 |" in text


def test_a_timer_leaves_the_steps_that_counted(bench: Any, tmp_path: Path) -> None:
    timer = bench("step_timer").StepTimer(1, tmp_path / "out.json")
    timer.begin()
    for number in range(3):
        timer.step({"rollout": float(number)})
    timer.end()
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["rollout"] for one in found["phases"]] == [1.0, 2.0] and len(found["seconds"]) == 2
