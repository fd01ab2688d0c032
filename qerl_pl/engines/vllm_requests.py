"""Between this package's requests and completions and vLLM's."""

from collections.abc import Sequence
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.types import Completion, SamplingConfig


def request_params(sampling: SamplingConfig, seed: int, ends: Sequence[int]) -> Any:
    """vLLM's `SamplingParams` of one completion.

    Args:
        sampling: What was asked for.
        seed: The completion's own seed.
        ends: Token ids that end it.

    Raises:
        UserError: vLLM does not take these settings.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError  # a ValueError in old releases only

    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=list(sampling.stop),
            stop_token_ids=list(ends),
            detokenize=bool(sampling.stop),
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,  # in lists of a request: no object a token, which takes time that small models wait for
        )
    except (ValueError, VLLMValidationError) as error:
        raise UserError(f"vLLM refuses the sampling settings: {' '.join(str(error).split())}") from error


def completion_of(output: Any) -> Completion:
    """vLLM's output of one request, which has the end token or the token that completed a stop string as its last."""
    tokens = tuple(output.token_ids)
    if tokens != tuple(output.logprobs.token_ids):
        raise RuntimeError(f"vLLM must give the log-probabilities of the {len(tokens)} sampled tokens; it gave others'")
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM must finish every completion; it ended one with {output.finish_reason!r}")
    return Completion(tokens, tuple(output.logprobs.logprobs), output.finish_reason)
