"""Which batches this package samples in vLLM's place, beside vLLM's own names."""

import inspect
import operator
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import sample_tokens, select_backend
from qerl_kernels.sampling import Generator
from torch import Tensor

from qerl_pl.engines.vllm import compat
from qerl_pl.engines.vllm import sampler as vllm_sampler
from qerl_pl.engines.vllm.sampler import TritonSampler, attach_sampler, why_not

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)]
REQUESTS, VOCABULARY = 6, 40
ROWS = np.array([4, 1, 3])


def state(name: str, **arrays: Any) -> Any:
    """What of a state of vLLM's is read, of a class with its name."""
    return type(name, (SimpleNamespace,), {})(**arrays)


class Sampler:
    """What of vLLM's `Sampler` is read, and that it was called; since 0.31 some states are in a list."""

    def __init__(self, listed: bool = True) -> None:
        none = np.zeros(REQUESTS, dtype=np.int32)
        self.logprobs_mode, self.compute_nans, self.use_fp64_gumbel = "processed_logprobs", False, False
        self.num_speculative_tokens, self.use_flashinfer = 1, False
        self.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.tensor([9, 9, 9, 9, 2, 9])))
        self.penalties_state = state("PenaltiesState", use_penalty=none.astype(bool))
        bias = state("LogitBiasState", use_logit_bias=none.astype(bool))
        bad_words = state("BadWordsState", num_bad_words=SimpleNamespace(np=none.copy()))
        if listed:
            self.use_xpu_sampler = False
            self.logits_processors = [bias, self.penalties_state, bad_words]
        else:
            self.logit_bias_state, self.bad_words_state = bias, bad_words
        self.logprob_token_ids_state = state("LogprobTokenIdsState", num_token_ids=SimpleNamespace(np=none.copy()))
        self.sampling_states = state(
            "SamplingStates",
            vocab_size=VOCABULARY,
            temperature=SimpleNamespace(gpu=torch.tensor([9.0, 0.0, 9.0, 0.5, 1.0, 9.0])),
            seeds=SimpleNamespace(gpu=torch.arange(REQUESTS) - 3),
            min_p=SimpleNamespace(np=none.astype(np.float32)),
            top_k=SimpleNamespace(np=none + VOCABULARY),
            top_p=SimpleNamespace(np=none + np.float32(1.0)),
            num_logprobs=none.copy(),
        )

    def __call__(self, logits: Tensor, batch: Any) -> Any:
        return "vLLM's"

    def add_request(self, index: int) -> str:
        return f"added {index}"


Sampler.__module__ = "vllm.v1.worker.gpu.sample.sampler"


def batch_of(rows: Any = ROWS) -> Any:
    """vLLM's `InputBatch` of two decoding requests and one whose prompt is being read: its last, of five tokens."""
    places = torch.from_numpy(np.asarray(rows))
    return SimpleNamespace(
        idx_mapping_np=np.asarray(rows),
        idx_mapping=places,
        expanded_idx_mapping=places,
        positions=torch.tensor([7, 8, 0, 1, 2, 3, 4]),
        logits_indices=torch.tensor([0, 1, 6]),
        seq_lens=torch.tensor([8, 9, 5], dtype=torch.int32),
        cu_num_logits=torch.arange(4),
        num_reqs=3,
    )


def counted(ones: Tensor, lengths: Tensor, logits: Tensor, places: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM's kernel, which needs a GPU."""
    sampled = torch.where(lengths < prompts[places], 0, ones)
    return sampled, torch.where(lengths < prompts[places], 0, logits.diff() - sampled)


@pytest.fixture(params=[False, True], ids=["attributes", "listed"])
def sampler(request: pytest.FixtureRequest) -> TritonSampler:
    made = TritonSampler(Sampler(request.param), torch.device("cpu"))
    made.num_sampled_and_rejected = counted
    return made


@pytest.mark.parametrize("generator", ["philox", "murmur3"])
def test_a_batch_with_temperatures_only_is_sampled_in_one_pass(sampler: TritonSampler, generator: Generator) -> None:
    assert sampler.generator == compat.random_numbers()
    sampler.generator = generator
    torch.manual_seed(0)
    logits, batch, states = torch.randn(3, VOCABULARY), batch_of(), sampler.base.sampling_states
    output = sampler(logits, batch)
    temperatures, seeds, positions = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, -2, 0]), torch.tensor([7, 8, 4])
    tokens, logprobs = sample_tokens(
        logits,
        temperatures,
        seeds,
        positions,
        requests=torch.arange(3),
        last=torch.arange(3),
        generator=generator,
    )
    assert torch.equal(output.sampled_token_ids, tokens[:, None]) and output.sampled_token_ids.dtype == torch.int64
    kept = output.logprobs_tensors
    assert torch.equal(kept.logprob_token_ids, tokens[:, None]) and torch.equal(kept.logprobs, logprobs[:, None])
    assert kept.selected_token_ranks.tolist() == [0, 0, 0] and kept.cu_num_generated_tokens is None
    assert output.num_sampled.tolist() == [1, 1, 0] and output.num_rejected.tolist() == [0, 0, 0]
    assert output.num_nans is None
    states.num_logprobs[ROWS] = -1  # nobody asks for a log-probability
    assert sampler(logits, batch).logprobs_tensors is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("PenaltiesState.use_penalty", True),
        ("LogitBiasState.use_logit_bias", True),
        ("BadWordsState.num_bad_words.np", 2),
        ("LogprobTokenIdsState.num_token_ids.np", 1),
        ("SamplingStates.min_p.np", 0.01),
        ("SamplingStates.top_k.np", VOCABULARY - 1),
        ("SamplingStates.top_p.np", 0.99),
        ("SamplingStates.num_logprobs", 1),
    ],
)
def test_what_else_a_request_asks_for_is_left_to_vllm(sampler: TritonSampler, path: str, value: float) -> None:
    states = SimpleNamespace(**vllm_sampler._states(sampler.base))
    logits, array = torch.randn(3, VOCABULARY), operator.attrgetter(path)(states)
    array[2] = value  # a request that is not in the batch
    assert sampler(logits, batch_of()) != "vLLM's"
    array[3] = value
    assert sampler(logits, batch_of()) == "vLLM's"


def test_drafted_tokens_and_another_backend_are_left_to_vllm(sampler: TritonSampler) -> None:
    assert sampler(torch.randn(4, VOCABULARY), batch_of()) == "vLLM's"
    select_backend("torch")
    assert sampler(torch.randn(3, VOCABULARY), batch_of()) == "vLLM's"


def runner_of(sampler: Any) -> Any:
    """vLLM's runner on a GPU: its dummy run calls its sampler."""
    runner = SimpleNamespace(sampler=sampler, rejection_sampler=None, device=SimpleNamespace(type="cuda"), ran=[])
    runner.model_config = SimpleNamespace(get_hidden_size=lambda: 8, dtype=torch.bfloat16)
    runner._dummy_sampler_run = lambda hidden: runner.ran.append((hidden.shape, runner.sampler))
    return runner


def test_a_sampler_as_read_is_replaced_and_keeps_its_attributes(
    sampler: TritonSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, base = runner_of(Sampler()), sampler.base
    assert why_not(runner) is None
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: zeros(*size, **kind | {"device": "cpu"}))
    assert attach_sampler(runner) is None
    assert isinstance(runner.sampler, TritonSampler)
    assert runner.ran == [((1, 8), runner.sampler)]  # compiled
    assert runner.sampler.add_request(3) == "added 3" and runner.sampler.sampling_states is not base.sampling_states
    assert attach_sampler(runner) == "it is a TritonSampler of qerl_pl.engines.vllm.sampler"  # ours already


OTHERS = "vLLM's has other logits processors than this package knows: "


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "it is set up with logprobs_mode"),
        ({"use_fp64_gumbel": True}, "it is set up with use_fp64_gumbel"),
        ({"return_sampling_mask": True}, "it is set up with return_sampling_mask"),
        ({"trace_replay_state": object()}, "it is set up with trace_replay_state"),
        ({"thinking_budget_state": SimpleNamespace(enabled=True)}, "it is set up with thinking_budget_state.enabled"),
        ({"watermark": None}, "vLLM's has attributes that this package does not know: watermark"),
        ({"penalties_state": None, "logits_processors": []}, f"{OTHERS}BadWordsState, LogitBiasState, PenaltiesState"),
        ({"logprob_token_ids_state": state("Renamed")}, f"{OTHERS}LogprobTokenIdsState"),
        ({"logits_processors": [*Sampler().logits_processors, state("Mine")]}, f"{OTHERS}Mine"),
    ],
)
def test_a_sampler_that_is_not_as_read_stays(changes: dict[str, Any], reason: str) -> None:
    base = Sampler()
    vars(base).update(changes)
    runner = runner_of(base)
    assert attach_sampler(runner) == reason
    assert runner.sampler is base


def test_other_runners_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is a dict of builtins" in str(why_not(runner_of({})))
    speculative = runner_of(Sampler())
    speculative.rejection_sampler = object()
    assert why_not(speculative) == "it decodes speculatively"
    on_cpu = runner_of(Sampler())
    on_cpu.device = torch.device("cpu")
    assert attach_sampler(on_cpu) == "it needs a GPU"
    monkeypatch.setattr("vllm.v1.worker.gpu.input_batch.get_num_sampled_and_rejected", lambda num_sampled, seq: None)
    assert "get_num_sampled_and_rejected(num_sampled, seq_lens," in str(why_not(runner_of(Sampler())))


def test_vllms_sampler_has_the_attributes_that_are_known() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler as Real

    held = set(re.findall(r"^        self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(Real.__init__), re.MULTILINE))
    assert {"sampling_states", "penalties_state"} <= held <= vllm_sampler._KNOWN
    assert ("logits_processors" in held) == (compat.random_numbers() == "murmur3")  # both since 0.31
    assert f"{Real.__module__}.{Real.__name__}" == compat.SAMPLER_CLASS
