"""Rollouts whose MLPs are activated in the product before, beside rollouts as vLLM compiles the activation."""

from pathlib import Path

import pytest
import torch

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import linear_methods
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
DEVICE = torch.device("cuda")
TARGETS = ("gate_proj", "up_proj", "down_proj")
RANK, WIDTH, INTERMEDIATE, LAYERS = 8, 128, 128, 2  # of `tiny_policy_dir`
LOGPROB_BOUND = 0.05
"""One rounding of a bfloat16 number more or less in each MLP: a few thousandths."""


def adapter() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"gate_proj": (WIDTH, INTERMEDIATE), "up_proj": (WIDTH, INTERMEDIATE), "down_proj": (INTERMEDIATE, WIDTH)}
    return {
        f"model.layers.{layer}.mlp.{name}": (
            torch.randn(RANK, sizes[name][0], generator=generator).to(DEVICE) * 0.05,
            torch.randn(sizes[name][1], RANK, generator=generator).to(DEVICE) * 0.05,
        )
        for layer in range(LAYERS)
        for name in TARGETS
    }


def rollouts(base: Path) -> list[Completion]:
    """Greedy completions of 48 prompts, which are read at once, by more tokens than `decode_gemm_max_tokens`; and the same again."""
    engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=48, prefix_caching=False, sleep_mode=False)
    requests = [RolloutRequest(tuple(3 + (7 * i + k) % 12 for k in range(8 + i % 5)), (i,)) for i in range(48)]
    found = []
    try:
        engine.launch(EngineSpec(base, torch.bfloat16, DEVICE, RANK, TARGETS, 64))
        engine.sync(PolicyWeights(0, adapter(), 1.0))
        for _ in range(2):
            completions = engine.generate(requests, SamplingConfig(max_tokens=24, temperature=0.0))
            found.append([one for group in completions for one in group])
    finally:
        engine.close()
    assert found[0] == found[1]
    return found[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_rollouts_are_those_of_an_activation_after_the_product(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(tiny_policy_dir, tmp_path / "nvfp4", device="cpu")
    with caplog.at_level("INFO"):
        folded = rollouts(tmp_path / "nvfp4")
        assert f"{LAYERS} with an MLP's activation" in caplog.text
        monkeypatch.setattr(linear_methods, "GATED", False)
        after = rollouts(tmp_path / "nvfp4")
        assert "0 with an MLP's activation" in caplog.text
    for one, other in zip(folded, after, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        same = next((k for k, (token, second) in enumerate(pairs) if token != second), len(pairs))
        # Where they part, the two likeliest tokens were as likely.
        for ours, theirs in list(zip(one.logprobs, other.logprobs, strict=False))[: same + 1]:
            assert abs(ours - theirs) <= LOGPROB_BOUND
    assert sum(one.token_ids == other.token_ids for one, other in zip(folded, after, strict=True)) >= 24
