"""Keys and values in fp8: half the cache, and the log-probabilities of attention to rounded keys and values."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_engines import GREEDY, PROMPTS, base, logprob_gap, reference, requests_of, spec_of, weights_of
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qerl_pl.engines import VLLMEngine
from qerl_pl.engines.vllm.compat import check_names
from qerl_pl.engines.vllm.startup import vllm_errors_as_user_errors
from qerl_pl.errors import UserError
from qerl_pl.types import Completion

__all__ = ["base", "reference"]  # fixtures

TOKEN_BYTES = 2 * 2 * 64  # 2 layers, one head of 64; in fp8


def to_e4m3(tensor: Tensor) -> Tensor:
    """The nearest number of E4M3 that is not larger in absolute value: vLLM's CPU build rounds towards zero."""
    nearest = tensor.to(torch.float8_e4m3fn)
    below = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn)  # of the same sign
    return torch.where(nearest.float().abs() > tensor.float().abs(), below.float(), nearest.float()).to(tensor.dtype)


def rounded_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    """Attention over keys and values that were rounded to E4M3."""
    return sdpa_attention_forward(module, query, to_e4m3(key), to_e4m3(value), mask, **rest)


AttentionInterface.register("rounded_to_fp8", rounded_attention)


@pytest.fixture(scope="module")
def fp8_engine(base: Path) -> Iterator[VLLMEngine]:
    """Its cache has room for 10 blocks of 128 tokens in fp8, for 2 in float32."""
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported() or torch.cuda.is_available()):
        pytest.skip("vLLM's CPU build has keys and values in fp8 with AVX-512 or AMX only")
    engine = VLLMEngine(kv_cache_gib=1280 * TOKEN_BYTES / 2**30, kv_cache_dtype="fp8", max_num_seqs=16)
    engine.launch(spec_of(base))
    yield engine
    engine.close()


@pytest.mark.vllm
def test_after_a_start_that_failed_another_engine_starts(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_names("cpu")  # imports vLLM's kernels, which it chooses by the processor
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(
        UserError, match=r"got kv_cache_dtype fp8 \(.*AVX-512.*\): set VLLMEngine.kv_cache_dtype to auto"
    ):
        VLLMEngine(kv_cache_gib=0.25, kv_cache_dtype="fp8", max_num_seqs=4).launch(spec_of(base))
    assert not torch.distributed.is_initialized()
    engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=4)
    engine.launch(spec_of(base))
    engine.close()


@pytest.mark.vllm
def test_log_probabilities_are_those_of_rounded_keys_and_values(fp8_engine: VLLMEngine, reference: PeftModel) -> None:
    fp8_engine.sync(weights_of(reference))
    completions: list[Completion] = [group[0] for group in fp8_engine.generate(requests_of(PROMPTS), GREEDY)]
    assert all(len(completion.token_ids) == GREEDY.max_tokens for completion in completions)
    exact = logprob_gap(reference, completions)
    reference.set_attn_implementation("rounded_to_fp8")
    try:
        rounded = logprob_gap(reference, completions)
    finally:
        reference.set_attn_implementation("sdpa")
    assert rounded < 0.1 * exact, (rounded, exact)


@pytest.mark.vllm
def test_the_cache_holds_as_many_tokens_as_are_planned(fp8_engine: VLLMEngine) -> None:
    config = fp8_engine._llm.llm_engine.vllm_config.cache_config
    assert config.cache_dtype == "fp8" and config.num_gpu_blocks * config.block_size == 1280
    assert fp8_engine.memory_gib()["kv_cache"] == pytest.approx(1280 * TOKEN_BYTES / 2**30)
    assert fp8_engine.cache_dtype(torch.bfloat16).itemsize == 1


def test_a_cache_for_one_sequence_in_fp8_is_too_small_in_the_models_type(base: Path) -> None:
    """192 tokens of 256 bytes."""
    gib = 192 * TOKEN_BYTES / 2**30
    with pytest.raises(UserError, match=r"one sequence of 192 tokens"):
        VLLMEngine(kv_cache_gib=gib).launch(spec_of(base))
    with pytest.raises(UserError, match=r"one sequence of 192 tokens"):
        VLLMEngine(kv_cache_gib=0.99 * gib, kv_cache_dtype="fp8").launch(spec_of(base))
    with pytest.raises(UserError, match="max_model_len must hold"):  # the cache is large enough
        VLLMEngine(kv_cache_gib=gib, kv_cache_dtype="fp8", max_model_len=191).launch(replace(spec_of(base)))


@pytest.mark.vllm
def test_attention_without_fp8_is_told_with_the_remedy() -> None:
    told = r"got kv_cache_dtype fp8 \(.*\): set VLLMEngine.kv_cache_dtype to auto"
    for error in (
        ValueError("No valid attention backend found for cuda with AttentionSelectorConfig(kv_cache_dtype=fp8)"),
        NotImplementedError("FP8 KV cache requires head_size divisible by 32 on CPU."),
    ):
        with pytest.raises(UserError, match=told), vllm_errors_as_user_errors("fp8"):
            raise error
        with pytest.raises(UserError, match="refuses the engine's settings"), vllm_errors_as_user_errors():
            raise error
    with pytest.raises(UserError, match="refuses the engine's settings: max_model_len"):
        with vllm_errors_as_user_errors("fp8"):
            raise ValueError("max_model_len")


@pytest.mark.vllm
def test_a_cache_that_vllm_finds_too_small_is_told_with_the_remedy() -> None:
    """The text is vLLM 0.30's."""
    refused = (
        "To serve at least one request with the model's max seq len (32768), (4.85 GiB KV cache is needed, which is"
    )
    with pytest.raises(
        UserError, match=r"hold one sequence \(To serve .*is\): raise kv_cache_gib, or lower the length"
    ):
        with vllm_errors_as_user_errors():
            raise ValueError(refused)
