"""The Triton sampler in vLLM's GPU runner, for batches whose requests set nothing but temperatures.

vLLM copies the logits to float32 and reads them four more times; `sample_tokens` reads them once, and draws the same
tokens. Read in vLLM 0.25.1 to 0.33.0: they divide a float32 copy of the logits by temperatures other than 0 and 1 (from
0.30.0 on none is made where no request has another), and draw by `compat.random_numbers`.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from qerl_kernels import sample_tokens, selected_backend
from torch import Tensor

from qerl_pl.engines.vllm import compat

_ROWS = (  # of an array with an entry for each request: vLLM's class, and the array's path in it
    ("PenaltiesState", "use_penalty"),
    ("LogitBiasState", "use_logit_bias"),
    ("BadWordsState", "num_bad_words.np"),
    ("LogprobTokenIdsState", "num_token_ids.np"),
    ("SamplingStates", "min_p.np"),
    ("SamplingStates", "top_k.np"),
    ("SamplingStates", "top_p.np"),
    ("SamplingStates", "num_logprobs"),
)

_SETTINGS = {"logprobs_mode": "processed_logprobs", "compute_nans": False, "use_fp64_gumbel": False}

_OPTIONAL_SETTINGS = {"trace_replay_state": None, "return_sampling_mask": False, "thinking_budget_state.enabled": False}
"""Settings that releases after 0.25 have."""

_PROCESSORS = "logits_processors"
"""A list, since 0.31, of states that were attributes before, and of a user's own processors."""
_STATES = {"penalties_state", "logit_bias_state", "bad_words_state", "logprob_token_ids_state", "sampling_states"}
_UNUSED = {"req_states", "num_speculative_tokens", "use_flashinfer", "use_xpu_sampler", "needs_logits_processing"}

_KNOWN = {path.partition(".")[0] for path in (*_SETTINGS, *_OPTIONAL_SETTINGS)} | _STATES | _UNUSED | {_PROCESSORS}
"""Attributes of vLLM's sampler: one that is not among them may change what is sampled."""


def _states(sampler: Any) -> dict[str, Any]:
    """What vLLM's sampler holds, its logits processors included, by the name of its class."""
    held = vars(sampler)
    return {type(state).__name__: state for state in (*held.values(), *held.get(_PROCESSORS, ()))}


def attach_sampler(runner: Any) -> str | None:
    """Have vLLM's GPU runner sample by the Triton kernel, and compile it.

    After vLLM has measured its memory, so that the measure stays what it was: its own sampler needs the most.

    Returns:
        Why vLLM's sampler stays; None where the Triton sampler draws the tokens.
    """
    if runner.device.type != "cuda":
        return "it needs a GPU"
    if reason := why_not(runner):
        return reason
    runner.sampler = TritonSampler(runner.sampler, runner.device)
    config = runner.model_config
    with torch.inference_mode():
        runner._dummy_sampler_run(torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=runner.device))
    return None


def why_not(runner: Any) -> str | None:
    """Why a runner keeps vLLM's sampler; None where it need not."""
    if missing := compat.missing_names(compat.SAMPLER):
        return f"this vLLM lacks {', '.join(missing)}"
    sampler = runner.sampler
    if f"{type(sampler).__module__}.{type(sampler).__name__}" != compat.SAMPLER_CLASS:
        return f"it is a {type(sampler).__name__} of {type(sampler).__module__}"
    if runner.rejection_sampler is not None:
        return "it decodes speculatively"
    if unknown := sorted(set(vars(sampler)) - _KNOWN):
        return f"vLLM's has attributes that this package does not know: {', '.join(unknown)}"
    known, own = {name for name, _ in _ROWS}, {type(one).__name__ for one in vars(sampler).get(_PROCESSORS, ())}
    if differing := sorted((known - set(_states(sampler))) | (own - known)):
        return f"vLLM's has other logits processors than this package knows: {', '.join(differing)}"
    later = {path: value for path, value in _OPTIONAL_SETTINGS.items() if path.partition(".")[0] in vars(sampler)}
    settings = _SETTINGS | later
    other = [path for path, value in settings.items() if operator.attrgetter(path)(sampler) != value]
    return f"it is set up with {', '.join(other)}" if other else None


class TritonSampler:
    """A sampler with the attributes of vLLM's `Sampler`, which it calls for batches that it does not serve.

    The rank of a token, which vLLM reports beside its log-probability and this package does not read, is always 0.
    """

    def __init__(self, base: Any, device: torch.device) -> None:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        self.base = base
        states = _states(base)
        self.arrays = [operator.attrgetter(path)(states[name]) for name, path in _ROWS]
        self.generator = compat.random_numbers()
        self.ranks = torch.zeros(len(base.sampling_states.num_logprobs), dtype=torch.int64, device=device)
        self.num_sampled_and_rejected: Callable[..., Any] = get_num_sampled_and_rejected
        self.logprobs: Callable[..., Any] = LogprobsTensors
        self.output: Callable[..., Any] = SamplerOutput

    def __getattr__(self, name: str) -> Any:
        """What vLLM's runner uses of its sampler beside the call."""
        return getattr(self.base, name)

    def serves(self, logits: Tensor, batch: Any) -> bool:
        """Whether a batch sets nothing but temperatures, and wants no log-probabilities but the sampled tokens'.

        Read from arrays in the host's memory.
        """
        rows, states = batch.idx_mapping_np, self.base.sampling_states
        if selected_backend() != "triton" or not len(logits) == len(rows) <= len(self.ranks):
            return False
        *off, top_k, top_p, logprobs = (array[rows] for array in self.arrays)
        if any(array.any() for array in off):
            return False
        return bool((top_k == states.vocab_size).all() and (top_p == 1.0).all() and (logprobs <= 0).all())

    def __call__(self, logits: Tensor, batch: Any) -> Any:
        """vLLM's `SamplerOutput` from logits [requests, V] of its `InputBatch`."""
        if not self.serves(logits, batch):
            return self.base(logits, batch)
        states, indices = self.base.sampling_states, batch.expanded_idx_mapping
        temperatures, seeds = states.temperature.gpu, states.seeds.gpu
        # int64 in vLLM's batches, int32 in its dummy one: the warm-up has to compile the kernel that rollouts use.
        last = batch.logits_indices.long()
        tokens, logprobs = sample_tokens(
            logits, temperatures, seeds, batch.positions, requests=indices, last=last, generator=self.generator
        )
        reported = None
        if (states.num_logprobs[batch.idx_mapping_np] == 0).any():
            reported = self.logprobs(tokens[:, None], logprobs[:, None], self.ranks[: len(tokens)])
        # A request in prefill has no sampled token yet.
        sampled, rejected = self.num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.base.req_states.prefill_len.gpu,
        )
        return self.output(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=reported,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )
