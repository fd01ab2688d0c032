"""A batch sampled by this package's kernels, beside vLLM's own sampler on the same GPU."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from qerl_kernels import sample_tokens, select_backend
from torch import Tensor
from vllm_features import assert_active

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm.sampler import TritonSampler, why_not
from qerl_pl.engines.vllm.startup import import_vllm
from qerl_pl.toy.policy import ToyConfig, build_toy_policy
from qerl_pl.types import PolicyWeights, RolloutRequest, SamplingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS, VOCABULARY, PADDED = 192, 151936, 152064
TEMPERATURES = (1.0, 0.7, 0.0, 1.3)


@pytest.fixture(autouse=True)
def triton() -> Any:
    select_backend("triton")
    yield
    select_backend("torch")


def taken(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this release's function has."""
    return {name: value for name, value in known.items() if name in inspect.signature(function).parameters}


@pytest.fixture(scope="module")
def vllms() -> Any:
    """vLLM's sampler with as many requests as rows, every fourth greedy; the last ones are still reading prompts."""
    import_vllm()
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    device = torch.device("cuda")
    known = {"max_num_reqs": ROWS, "max_model_len": 64, "max_num_batched_tokens": 64, "num_speculative_steps": 0}
    known |= {"vocab_size": VOCABULARY, "device": device}
    states = RequestState(**taken(RequestState.__init__, known))
    known |= {"req_states": states, "logprobs_mode": "processed_logprobs", "vllm_config": VllmConfig()}
    sampler = Sampler(**taken(Sampler.__init__, known))
    for row in range(ROWS):
        params = SamplingParams(temperature=TEMPERATURES[row % 4], seed=7 * row - 99, logprobs=0)
        request = {"req_idx": row, "prompt_len": 5, "sampling_params": params}
        sampler.add_request(**taken(sampler.add_request, request))
        states.prefill_len.np[row] = 5 if row < ROWS - 2 else 500
    sampler.apply_staged_writes()
    states.prefill_len.copy_to_uva()
    return sampler


def drawn(dtype: torch.dtype, scale: float) -> Tensor:
    torch.manual_seed(0)
    held = torch.full((ROWS, PADDED), torch.inf, dtype=dtype, device="cuda")
    held[:, :VOCABULARY] = scale * torch.randn(ROWS, VOCABULARY, device="cuda")
    return held[:, :VOCABULARY]


def batch_of(rows: int) -> Any:
    """Requests in another order than their places."""
    generator = torch.Generator().manual_seed(rows)
    places = torch.randperm(ROWS, generator=generator)[:rows].int()
    counts = torch.arange(rows + 1, dtype=torch.int32)
    positions, last = torch.randint(0, 30000, (2 * rows,), generator=generator), 2 * torch.arange(rows) + 1
    numbers = {"idx_mapping_np": places.numpy(), "cu_num_logits_np": np.arange(rows + 1), "num_reqs": rows}
    held = {"idx_mapping": places, "expanded_idx_mapping": places, "cu_num_logits": counts, "positions": positions}
    held |= {"logits_indices": last.int(), "expanded_local_pos": torch.zeros(rows, dtype=torch.int32)}
    held |= {"input_ids": torch.zeros(2 * rows, dtype=torch.int32), "seq_lens": torch.full((rows,), 9).int()}
    numbers["seq_lens_cpu_upper_bound"] = torch.full((rows,), 9, dtype=torch.int32)
    return SimpleNamespace(**numbers, **{name: tensor.cuda() for name, tensor in held.items()})


def test_vllms_sampler_is_as_read(vllms: Any) -> None:
    config = SimpleNamespace(get_hidden_size=lambda: 8)
    runner = SimpleNamespace(sampler=vllms, rejection_sampler=None, model_config=config, _dummy_sampler_run=print)
    assert why_not(runner) is None


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 8, 64, ROWS])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 3.0), (torch.bfloat16, 0.1), (torch.float32, 3.0), (torch.bfloat16, 20.0)]
)
def test_both_take_the_same_tokens(vllms: Any, rows: int, dtype: torch.dtype, scale: float) -> None:
    logits, batch = drawn(dtype, scale)[:rows], batch_of(rows)
    ours = TritonSampler(vllms, logits.device)
    assert ours.serves(logits, batch)
    found, expected = ours(logits, batch), vllms(logits, batch)
    assert torch.equal(found.sampled_token_ids, expected.sampled_token_ids)
    kept, wanted = found.logprobs_tensors, expected.logprobs_tensors
    assert torch.equal(kept.logprob_token_ids, wanted.logprob_token_ids)
    torch.testing.assert_close(kept.logprobs, wanted.logprobs, rtol=0, atol=1e-5 if scale < 10 else 1e-4)
    assert torch.equal(found.num_sampled, expected.num_sampled)
    assert torch.equal(found.num_rejected, expected.num_rejected)
    for name in ("sampled_token_ids", "num_sampled", "num_rejected"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
    again = ours(logits, batch)
    assert torch.equal(again.sampled_token_ids, found.sampled_token_ids)
    assert torch.equal(again.logprobs_tensors.logprobs, kept.logprobs)


def test_a_row_beyond_two_billion_logits_is_read() -> None:
    held = torch.zeros(2**31 + VOCABULARY, dtype=torch.bfloat16, device="cuda")
    logits = held.as_strided((2, VOCABULARY), (2**31, 1))
    logits[1, 77] = 9.0
    given = [torch.tensor(one, device="cuda") for one in ([0.0], [1], [1], [0, 0], [0, 0])]
    for generator in ("philox", "murmur3"):
        tokens, _ = sample_tokens(logits, *given[:3], requests=given[3], last=given[4], generator=generator)
        assert tokens.tolist() == [0, 77]


def sampler_of(worker: Any) -> str:
    return type(worker.model_runner.sampler).__name__


def swap(worker: Any) -> str:
    """Between this package's sampler and vLLM's."""
    runner = worker.model_runner
    now = runner.sampler
    runner.sampler = now.base if isinstance(now, TritonSampler) else TritonSampler(now, runner.device)
    return sampler_of(worker)


def test_an_engine_samples_the_same_completions_as_with_vllms_sampler(tmp_path: Path) -> None:
    base = build_toy_policy(ToyConfig(layers=2, intermediate=128, steps=2, batch_size=2), tmp_path)
    engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=32, enforce_eager=True, prefix_caching=False)
    engine.launch(EngineSpec(base, torch.bfloat16, torch.device("cuda"), 8, ("q_proj", "v_proj"), 128))
    try:
        engine.sync(PolicyWeights(0, None, 1.0))
        assert_active(engine, except_for=("shared weights",))  # a 16-bit base
        requests = [RolloutRequest(tuple(range(3, 5 + 2 * i)), tuple(range(100 * i, 100 * i + 3))) for i in range(9)]
        for temperature, top_p in ((1.0, 1.0), (0.8, 1.0), (0.0, 1.0), (1.0, 0.9)):  # the last is vLLM's in both ways
            sampling = SamplingConfig(max_tokens=40, temperature=temperature, top_p=top_p)
            found = engine.generate(requests, sampling)
            assert engine._llm.collective_rpc(swap) == ["Sampler"]
            expected = engine.generate(requests, sampling)
            assert engine._llm.collective_rpc(swap) == ["TritonSampler"]
            for ours, theirs in zip(sum(found, []), sum(expected, []), strict=True):
                assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    finally:
        engine.close()
