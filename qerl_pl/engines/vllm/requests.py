"""A completion as vLLM is asked for it, and as it gives it back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from qerl_pl.engines.base import RequestSource
from qerl_pl.errors import UserError
from qerl_pl.types import Completion, RolloutRequest, SamplingConfig


class BatchSource(RequestSource):
    """The requests of a batch, one for each seed; waiting ones are admitted several at a time.

    A step with a prefill has no full CUDA graph and, for small models, takes several times as long as a decode step.
    Admitting a request after each completion would add a prefill to almost every step.

    Args:
        requests: Requests of any number of seeds.
        max_num_seqs: Most running requests.
    """

    ADMITTED_FRACTION = 1 / 8
    """Waiting requests are admitted when this fraction of `max_num_seqs` is free."""

    def __init__(self, requests: Sequence[RolloutRequest], max_num_seqs: int) -> None:
        self._requests = [replace(request, seeds=(seed,)) for request in requests for seed in request.seeds]
        self._max_num_seqs, self._taken, self._running = max_num_seqs, 0, 0
        self._completions: dict[int, Completion] = {}

    @property
    def completions(self) -> list[Completion]:
        """Completions in the order of the requests, once all have finished."""
        return [self._completions[key] for key in range(len(self._requests))]

    def take(self, wait: bool, gather: bool = False) -> Sequence[tuple[int, RolloutRequest]]:
        """See `RequestSource`; nothing blocks."""
        free = self._max_num_seqs - self._running
        if self._running and free < self._max_num_seqs * self.ADMITTED_FRACTION:
            return []
        first, self._taken = self._taken, min(self._taken + free, len(self._requests))
        self._running += self._taken - first
        return list(enumerate(self._requests[first : self._taken], first))

    def put(self, key: int, completion: Completion) -> None:
        """See `RequestSource`."""
        self._completions[key] = completion
        self._running -= 1


def request_params(sampling: SamplingConfig, seed: int, ends: Sequence[int], max_tokens: int | None = None) -> Any:
    """vLLM's `SamplingParams` of a completion.

    Args:
        sampling: Settings of the call.
        seed: The completion's own seed.
        ends: Token ids that end it.
        max_tokens: Most tokens; None takes those of the settings.

    Raises:
        UserError: vLLM does not take these settings.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError  # a ValueError in old releases only
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=list(sampling.stop),
            stop_token_ids=list(ends),
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # a stop string may be one
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,  # lists for each request: an object for each token would slow small models down
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, VLLMValidationError) as error:
        raise UserError(f"vLLM refuses the sampling settings: {' '.join(str(error).split())}") from error


@contextmanager
def processed_once(processor: Any) -> Iterator[None]:
    """Have vLLM's `OutputProcessor` process each request once, when it has finished, with all its tokens.

    It takes 4 microseconds of Python for each token, a fifth of the host's time; a large batch waits for the host. What
    is kept until then takes a quarter of that. Not for requests with stop strings, which it looks for in every token.

    Args:
        processor: Of vLLM's `LLMEngine`. All its requests give nothing before their end (`FINAL_ONLY`).
    """
    process, kept = processor.process_outputs, dict[str, tuple[list[int], list[int], list[float]]]()

    def of_finished(outputs: Sequence[Any], *args: Any, **settings: Any) -> Any:
        finished = []
        for output in outputs:
            found = kept.get(output.request_id)
            if found is None:
                found = kept[output.request_id] = ([], [], [])
            tokens, logprob_ids, logprobs = found
            tokens += output.new_token_ids
            if output.new_logprobs is not None:  # the sampled token comes first
                logprob_ids += output.new_logprobs.logprob_token_ids[:, 0].tolist()
                logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                output.new_token_ids, output.new_logprobs = tokens, None
                finished.append(output)
        processed = process(finished, *args, **settings)
        for output, request in zip(finished, processed.request_outputs, strict=True):
            _, logprob_ids, logprobs = kept.pop(output.request_id)
            flat = request.outputs[0].logprobs
            flat.token_ids += logprob_ids
            flat.logprobs += logprobs
        return processed

    processor.process_outputs = of_finished
    try:
        yield
    finally:
        del processor.process_outputs


@contextmanager
def allocated_by_block(engine: Any) -> Iterator[None]:
    """Have vLLM's scheduler allocate KV cache blocks only at decode steps whose token is the first of a block.

    Within a block nothing is allocated, and the call takes half of the scheduler's time, 4 microseconds a token. With
    several KV cache groups (sliding windows, states) the scheduler calls as before.

    Args:
        engine: vLLM's `LLMEngine`, in this process.
    """
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    group, *others = manager.coordinator.single_type_managers
    if others:
        yield
        return
    allocate = manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, **settings: Any) -> Any:
        # The scheduler's call for a running request; for a waiting one it passes more.
        decodes = num_new_tokens == 1 and settings == {"num_lookahead_tokens": 0}
        if decodes and request.num_computed_tokens % group.block_size:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **settings)

    manager.allocate_slots = allocate_slots
    try:
        yield
    finally:
        del manager.allocate_slots


def completion_of(output: Any, prompt_length: int | None = None) -> Completion:
    """The completion of vLLM's output, whose last token ends it or completes a stop string.

    Args:
        output: vLLM's.
        prompt_length: Tokens of the prompt, where the chosen experts were recorded.
    """
    tokens = tuple(output.token_ids)
    if tokens != tuple(output.logprobs.token_ids):
        raise RuntimeError(f"vLLM must give the log-probabilities of the {len(tokens)} sampled tokens; it gave others'")
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM must finish every completion; it ended one with {output.finish_reason!r}")
    routing = None
    if prompt_length is not None:
        recorded = output.routed_experts
        if recorded is None or len(recorded) != prompt_length + len(tokens) - 1:
            raise RuntimeError(
                f"vLLM must say which experts {prompt_length} + {len(tokens)} - 1 tokens had; it told those of "
                f"{0 if recorded is None else len(recorded)}: set model.policy.replay_routing to false"
            )
        routing = torch.from_numpy(recorded.astype("int16"))
    return Completion(tokens, tuple(output.logprobs.logprobs), output.finish_reason, routing=routing)
