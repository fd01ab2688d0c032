"""The protocol of rollout engines, and the checks they share."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from qerl_kernels import FrozenWeight, StackedWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.models.families import names_match
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig


@dataclass(frozen=True)
class EngineSpec:
    """What an engine must know to load the policy's base model."""

    base: Path
    """Folder of the base model in Hugging Face format, in any base format."""
    dtype: torch.dtype
    """Data type of activations, embeddings and norms."""
    device: torch.device
    lora_rank: int
    """Rank of the adapter; 0 for none."""
    lora_targets: tuple[str, ...]
    """Ends of the adapted linears' names, such as "q_proj" or "mlp.up_proj"."""
    max_tokens: int
    """Longest sequence, prompt and completion together, that the run can ask for."""
    full_finetuning: bool = False
    """Every weight trains, without an adapter, and comes with each sync; needs a 16-bit base."""
    ranks: int = 1
    """Processes of the run, each with its own engine; they launch together."""
    record_routing: bool = False
    """Whether completions say which experts were chosen; needs a mixture of experts."""

    def adapts(self, linear: str) -> bool:
        """Whether the base's linear of this name has an adapter."""
        return self.lora_rank > 0 and names_match(linear, self.lora_targets)


@dataclass(frozen=True)
class SharedWeights:
    """Weights of the base model that engine and trainer share; valid as long as the engine lives."""

    linears: Mapping[str, FrozenWeight]
    """Linears by module name in the base model, such as "model.layers.0.self_attn.q_proj"."""
    tensors: Mapping[str, Tensor]
    """16-bit tensors by their checkpoint name: embeddings and lm_head, not the norms, which carry noise."""
    experts: Mapping[str, StackedWeight] = field(default_factory=dict)
    """Matrices of a layer's experts by module name, such as "model.layers.0.mlp.experts.gate_up_proj"."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from a policy; prompts and completions are token ids.

    The order of calls is `launch`, then any number of (`wake`, `sync`, `generate`..., `sleep`), then `close`.
    A sync takes effect for every later `generate`. A completion's tokens depend on the synced weights, its prompt and
    its seed, not on the rest of the batch (up to floating-point differences between batch shapes).
    """

    def launch(self, spec: EngineSpec) -> None:
        """Load the base model. Called once, before any other method."""

    def shared_weights(self) -> SharedWeights | None:
        """Weights of the base model for the trainer to use; None where it must load its own copy."""

    def sync(self, weights: PolicyWeights) -> float:
        """Load adapter, trained weights and noise.

        Noise is written as clean scale + noise, so repeated syncs never accumulate. A norm that is not among
        `weights.tensors` is reset to the base's; any other weight keeps its last value.

        Returns:
            Standard deviation of (the engine's scale - clean scale) over all elements of the norms that have noise.

        Raises:
            UserError: The engine has no such weight, or no room for such an adapter.
        """

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        """Sample len(request.seeds) completions for each request, in the requests' order.

        Raises:
            UserError: As `check_requests`.
        """

    def sleep(self) -> None:
        """Release memory that only generation needs."""

    def wake(self) -> None:
        """Allocate that memory again; a no-op when awake."""

    def memory_gib(self) -> Mapping[str, float]:
        """GiB of the engine: "weights", shared ones included, "adapter" if separate, "kv_cache" while sampling.

        Also "merged" of copies of weights with the adapter in them, "releasable", what `sleep` releases of these and
        of the cache, and "released", what it has. A size that the engine does
        not know is left out.
        """

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""


class RequestSource(Protocol):
    """A stream of requests, such as the turns of dialogues, which follow the replies of tools."""

    def take(self, wait: bool, gather: bool = False) -> Sequence[tuple[int, RolloutRequest]]:
        """Requests that are ready, each with its key and a single seed.

        Args:
            wait: Block until requests are ready; an empty result is then the end of the stream.
            gather: Block longer, within limits, until every request that can become ready is.
        """

    def put(self, key: int, completion: Completion) -> None:
        """The completion of a request that was taken, after which others may become ready."""


@runtime_checkable
class ContinuousEngine(Protocol):
    """A rollout engine that takes up requests while others run."""

    def generate_from(self, source: RequestSource, sampling: SamplingConfig) -> None:
        """Sample all requests of a source, each as soon as it is ready.

        Raises:
            UserError: As `check_requests`.
        """


def generate_from(engine: RolloutEngine, source: RequestSource, sampling: SamplingConfig) -> None:
    """Sample all requests of a source: continuously with a `ContinuousEngine`, else batch by batch.

    Raises:
        UserError: As `check_requests`.
    """
    if isinstance(engine, ContinuousEngine):
        engine.generate_from(source, sampling)
        return
    while ready := source.take(wait=True, gather=True):
        completions = engine.generate([request for _, request in ready], sampling)
        for (key, _), (completion,) in zip(ready, completions, strict=True):
            source.put(key, completion)


def token_limit(request: RolloutRequest, sampling: SamplingConfig) -> int:
    """Most tokens of each of the request's completions."""
    return sampling.max_tokens if request.max_tokens is None else request.max_tokens


def check_targets(spec: EngineSpec, linears: Collection[str]) -> None:
    """Reject LoRA targets that match none of the base's linears.

    Raises:
        UserError: The spec has an adapter, and no linear matches its targets.
    """
    if spec.lora_rank and spec.lora_targets and not any(spec.adapts(name) for name in linears):
        choices = sorted({name.rpartition(".")[2] for name in linears} - {"lm_head"})  # which takes no adapter
        raise UserError(
            f"LoRA targets must name linears of the base; {', '.join(spec.lora_targets)} match none: choose "
            f"model.policy.lora.targets among {', '.join(choices)}"
        )


def check_requests(
    requests: Sequence[RolloutRequest], sampling: SamplingConfig, spec: EngineSpec, has_tokenizer: bool
) -> None:
    """Reject requests that no engine can sample.

    Raises:
        UserError: A prompt is empty, prompt and new tokens exceed `EngineSpec.max_tokens`, or there are stop strings
            without a tokenizer to detect them.
    """
    max_tokens = spec.max_tokens
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise UserError(f"a prompt needs at least one token; prompt {index} of the batch has none: drop such rows")
        limit = token_limit(request, sampling)
        if length + limit > max_tokens:
            raise UserError(
                f"prompt and completion together may have {max_tokens} tokens; prompt {index} of the batch has {length}"
                f" and sampling.max_tokens is {limit}: raise the engine's length or shorten one of them"
            )
    if sampling.stop and not has_tokenizer:
        raise UserError(f"stop strings need a tokenizer; {spec.base} has none: leave sampling.stop empty")


def regroup(requests: Sequence[RolloutRequest], completions: Sequence[Completion]) -> list[list[Completion]]:
    """Completions in the order of (request, seed), as a list for each request."""
    iterator = iter(completions)
    return [[next(iterator) for _ in request.seeds] for request in requests]


def check_tensor(name: str, target: Tensor | None, tensor: Tensor) -> Tensor:
    """The engine's weight that a trained weight is copied into.

    Args:
        name: Checkpoint name.
        target: The engine's weight of that name, if any.
        tensor: The trained weight.

    Raises:
        UserError: The engine has no such weight, or one of another shape.
    """
    if target is None or target.shape != tensor.shape:
        shape = "none" if target is None else str(tuple(target.shape))
        raise UserError(
            f"a trained weight must be the engine's too; {name} {tuple(tensor.shape)} is {shape} there; train an "
            "adapter instead"
        )
    return target


def check_adapter(
    adapter: Mapping[str, tuple[Tensor, Tensor]], shapes: Mapping[str, tuple[int, int]], rank: int
) -> None:
    """Reject an adapter that does not fit the engine's.

    Args:
        adapter: `PolicyWeights.adapter`.
        shapes: (out, in) of each adapted linear of the engine by name.
        rank: `EngineSpec.lora_rank`.

    Raises:
        UserError: The adapter names another linear, or a matrix has another shape.
    """
    for name, (a, b) in adapter.items():
        if name not in shapes:
            raise UserError(
                f"the adapter may hold the engine's LoRA targets only; it also has {name}: give engine and policy the "
                "same targets"
            )
        out_features, in_features = shapes[name]
        expected = (rank, in_features), (out_features, rank)
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise UserError(
                f"A and B of {name} must have shapes {expected[0]} and {expected[1]}; got "
                f"{tuple(a.shape)} and {tuple(b.shape)}: give engine and policy the same rank"
            )
