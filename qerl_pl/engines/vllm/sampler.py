"""Sampling in vLLM's GPU runner by this package's kernel, where a batch asks for no more than temperatures.

vLLM copies the logits to float32 and reads them four more times; `sample_tokens` reads them once, and gives the same
tokens. Read in vLLM 0.25.1 and 0.30.0, which both divide a float32 copy of the logits by the temperature unless that is
0 or 1 (0.30.0 makes none where no request has another) and draw by the same random numbers.
"""

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from qerl_kernels import sample_tokens, selected_backend
from torch import Tensor

from qerl_pl.engines.vllm.compat import imported, look_up, takes

log = logging.getLogger(__name__)

OWN_SAMPLER = True

"""Whether an engine that starts samples by this package's kernel; for comparisons."""

_SAMPLER = ("vllm.v1.worker.gpu.sample.sampler", "Sampler")

_ROWS = (  # of an array with an entry a request
    "penalties_state.use_penalty",
    "logit_bias_state.use_logit_bias",
    "bad_words_state.num_bad_words.np",
    "logprob_token_ids_state.num_token_ids.np",
    "sampling_states.min_p.np",
    "sampling_states.top_k.np",
    "sampling_states.top_p.np",
    "sampling_states.num_logprobs",
)

_NEEDED = (
    *_ROWS,
    "sampling_states.vocab_size",
    "sampling_states.temperature.gpu",
    "sampling_states.seeds.gpu",
    "req_states.prefill_len.gpu",
)

_SETTINGS = {"logprobs_mode": "processed_logprobs", "compute_nans": False, "use_fp64_gumbel": False}

_OF_LATER = {"trace_replay_state": None, "return_sampling_mask": False, "thinking_budget_state.enabled": False}

_OTHERS = {"num_speculative_tokens", "use_flashinfer", "needs_logits_processing"}

_KNOWN = {path.partition(".")[0] for path in (*_NEEDED, *_SETTINGS, *_OF_LATER)} | _OTHERS

_CALLED = {
    "vllm.v1.worker.gpu.input_batch.get_num_sampled_and_rejected": (
        "num_sampled",
        "seq_lens",
        "cu_num_logits",
        "idx_mapping",
        "prefill_len",
    ),
    "vllm.v1.outputs.LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    "vllm.v1.worker.gpu.sample.output.SamplerOutput": (
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
    ),
}


def attach_sampler(runner: Any) -> bool:
    """Let a runner of vLLM's sample by this package's kernel, and compile that.

    After vLLM has measured its memory, so that the measure stays what it was: its own sampler needs the most.

    Returns:
        Whether it does; what vLLM has remains where it is not as read, or set up for something else.
    """
    if not OWN_SAMPLER or look_up(runner, "device.type") != "cuda":
        return False
    if reason := why_not(runner):
        log.info("vLLM's own sampler draws the tokens: %s", reason)
        return False
    runner.sampler = TemperatureSampler(runner.sampler, runner.device)
    config = runner.model_config
    with torch.inference_mode():
        runner._dummy_sampler_run(torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=runner.device))
    return True


def why_not(runner: Any) -> str | None:
    """Why a runner keeps vLLM's sampler; None where it need not."""
    sampler = look_up(runner, "sampler")
    if (type(sampler).__module__, type(sampler).__name__) != _SAMPLER:
        return f"it is a {type(sampler).__name__} of {type(sampler).__module__}"
    if look_up(runner, "rejection_sampler") is not None:
        return "it decodes speculatively"
    missing = [path for path in _NEEDED if look_up(sampler, path) is None]
    missing += [name for name in ("_dummy_sampler_run", "model_config.get_hidden_size") if not look_up(runner, name)]
    missing += [path for path, names in _CALLED.items() if not takes(imported(path), names)]
    if missing:
        return f"this vLLM lacks {', '.join(missing)}"
    if unknown := sorted(set(vars(sampler)) - _KNOWN):
        return f"this vLLM's has what this package does not know: {', '.join(unknown)}"
    wanted = _SETTINGS | {path: value for path, value in _OF_LATER.items() if path.partition(".")[0] in vars(sampler)}
    other = [path for path, value in wanted.items() if operator.attrgetter(path)(sampler) != value]
    return f"it is set up with {', '.join(other)}" if other else None


class TemperatureSampler:
    """Stands in for vLLM's `Sampler`, whose attributes it has, and calls it for batches that it does not serve.

    A token's rank among all, which vLLM reports beside its log-probability and nobody here reads, is always 0.
    """

    def __init__(self, base: Any, device: torch.device) -> None:
        self.base = base
        self.arrays: list[Callable[[Any], Any]] = [operator.attrgetter(path) for path in _ROWS]
        self.ranks = torch.zeros(len(base.sampling_states.num_logprobs), dtype=torch.int64, device=device)
        self.count_rejected, self.logprobs, self.output = map(imported, _CALLED)

    def __getattr__(self, name: str) -> Any:
        """What vLLM's runner uses of its sampler beside the call."""
        return getattr(self.base, name)

    def serves(self, logits: Tensor, batch: Any) -> bool:
        """Whether all that a batch asks for are temperatures and log-probabilities of the tokens that are sampled.

        Known from arrays in the host's memory.
        """
        rows, states = batch.idx_mapping_np, self.base.sampling_states
        if selected_backend() != "triton" or not len(logits) == len(rows) <= len(self.ranks):
            return False
        *off, top_k, top_p, logprobs = (array(self.base)[rows] for array in self.arrays)
        if any(array.any() for array in off):
            return False
        return bool((top_k == states.vocab_size).all() and (top_p == 1.0).all() and (logprobs <= 0).all())

    def __call__(self, logits: Tensor, batch: Any) -> Any:
        """vLLM's `SamplerOutput` from logits [requests, V] of its `InputBatch`."""
        if not self.serves(logits, batch):
            return self.base(logits, batch)
        states, places = self.base.sampling_states, batch.expanded_idx_mapping
        temperatures, seeds = states.temperature.gpu, states.seeds.gpu
        tokens, logprobs = sample_tokens(
            logits, temperatures, seeds, batch.positions, requests=places, last=batch.logits_indices
        )
        kept = None
        if (states.num_logprobs[batch.idx_mapping_np] == 0).any():
            kept = self.logprobs(tokens[:, None], logprobs[:, None], self.ranks[: len(tokens)])
        # None of a request whose prompt is still being read.
        sampled, rejected = self.count_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.base.req_states.prefill_len.gpu,
        )
        return self.output(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=kept,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )
