"""An engine on a GPU with all its optional features, and the same without the decode GEMM."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from qerl_kernels import DECODE_GEMM_MAX_TOKENS
from vllm_features import assert_active

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
DEVICE = torch.device("cuda")
TARGETS = ("gate_proj", "up_proj", "down_proj")
RANK, WIDTH, INTERMEDIATE, LAYERS = 8, 128, 128, 2  # of `tiny_policy_dir`
LOGPROB_BOUND = 0.05
"""Other roundings of bfloat16 numbers: a few thousandths."""


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


def rollouts(base: Path, decode_gemm_max_tokens: int | None) -> list[Completion]:
    """Greedy completions of 48 prompts, three times with the same result: the last after Lightning has freed memory."""
    engine = VLLMEngine(
        kv_cache_gib=0.25,
        max_num_seqs=48,
        prefix_caching=False,
        sleep_mode=False,
        decode_gemm_max_tokens=decode_gemm_max_tokens,
    )
    requests = [RolloutRequest(tuple(3 + (7 * i + k) % 12 for k in range(8 + i % 5)), (i,)) for i in range(48)]
    results = []
    try:
        engine.launch(EngineSpec(base, torch.bfloat16, DEVICE, RANK, TARGETS, 64))
        assert_active(engine)
        engine.sync(PolicyWeights(0, adapter(), 1.0))
        for _ in range(3):
            groups = engine.generate(requests, SamplingConfig(max_tokens=24, temperature=0.0))
            results.append([completion for group in groups for completion in group])
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
    finally:
        engine.close()
    assert results[0] == results[1] == results[2]
    return results[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_rollouts_by_the_decode_gemm_are_those_by_marlin(
    tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(tiny_policy_dir, tmp_path / "nvfp4", device="cpu")
    with caplog.at_level("INFO"):
        decode_gemm = rollouts(tmp_path / "nvfp4", DECODE_GEMM_MAX_TOKENS)
    linears = 4 * LAYERS
    active = f"decode GEMM on {linears} of {linears} linears, fused LoRA, Triton sampler, shared weights; started in"
    assert active in caplog.text
    marlin = rollouts(tmp_path / "nvfp4", None)
    for ours, other in zip(decode_gemm, marlin, strict=True):
        pairs = list(zip(ours.token_ids, other.token_ids, strict=False))
        same = next((k for k, (token, second) in enumerate(pairs) if token != second), len(pairs))
        # Where they part, the two likeliest tokens were as likely.
        for logprob, expected in list(zip(ours.logprobs, other.logprobs, strict=False))[: same + 1]:
            assert abs(logprob - expected) <= LOGPROB_BOUND
    assert sum(a.token_ids == b.token_ids for a, b in zip(decode_gemm, marlin, strict=True)) >= 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("quantization", "scale"),
    [("nvfp4", "weight_global_scale"), ("mxfp4", "weight_scale"), ("nf4", "weight.absmax")],
)
def test_the_trainer_takes_vllms_weights_if_they_are_the_checkpoints(
    tiny_policy_dir: Path, tmp_path: Path, quantization: str, scale: str
) -> None:
    base = tmp_path / quantization
    quantize_checkpoint(tiny_policy_dir, base, quantization, device="cpu")
    lora = LoraConfig(rank=RANK, alpha=16.0, targets=TARGETS)
    config = PolicyConfig(path=str(base), quantization=quantization, lora=lora)
    engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=8, sleep_mode=False, enforce_eager=True)
    spec = EngineSpec(base, torch.bfloat16, DEVICE, RANK, TARGETS, 64)
    if quantization == "nf4" and not find_spec("vllm.model_executor.layers.quantization.bitsandbytes"):
        with pytest.raises(UserError, match="vLLM reads NF4 by bitsandbytes; vLLM .* lacks .*: install vllm 0.25.1"):
            engine.launch(spec)  # releases since 0.28
        return
    try:
        engine.launch(spec)
        shared = engine.shared_weights()
        assert shared is not None and len(shared.linears) == 7 * LAYERS
        Policy(base, config, DEVICE, seed=1, shared=shared)
        with torch.inference_mode():
            stored = shared.linears["model.layers.1.self_attn.k_proj"].tensors()[scale]
            if quantization == "mxfp4":
                stored.view(torch.uint8).add_(1)  # exponents
            else:
                stored.mul_(3.0)
        with pytest.raises(UserError, match=r"first rows of model.layers.1.self_attn.[qk]_proj differ by [12]\b"):
            Policy(base, config, DEVICE, seed=1, shared=engine.shared_weights())
    finally:
        engine.close()
