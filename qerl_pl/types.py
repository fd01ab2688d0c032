"""The values that travel along the data's path: prompts -> completions -> rewards -> experience.

Shapes, here and in every docstring: B completions in a batch, T token positions (prompt and completion, right-padded),
V vocabulary, r adapter rank. Token ids are Python ints until `Experience`, where they become tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data module."""

    id: str
    """Stable name of the row, equal in every run over the same data, such as "train-17"."""
    token_ids: tuple[int, ...]
    """The rendered chat prompt, generation prompt included."""
    text: str
    """The question as the user reads it."""
    reference: str
    """What the rewards compare with."""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled.

    Args:
        max_tokens: Most tokens of a completion; one that reaches it is truncated.
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Keep the smallest set of tokens whose probability is at least this.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Drop tokens below this fraction of the most likely token's probability.
        stop: Strings that end a completion when they appear in its text.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_sampling("sampling", vars(self))


@dataclass(frozen=True)
class EvalSampling:
    """How samples of held-out prompts are drawn; what is null, or left out, is as in training.

    Args:
        max_tokens: Most tokens of a completion; one that reaches it is truncated.
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Keep the smallest set of tokens whose probability is at least this.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Drop tokens below this fraction of the most likely token's probability.
        stop: Strings that end a completion when they appear in its text.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check_sampling("eval_sampling", self._given)

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, training: SamplingConfig) -> SamplingConfig:
        """Training's sampling with what is given here in its place."""
        return replace(training, **self._given)


def _check_sampling(owner: str, given: Mapping[str, Any]) -> None:
    for name, rule, holds in (
        ("max_tokens", "at least 1", lambda tokens: tokens >= 1),
        ("temperature", "0 or a number of at least 0.01", lambda heat: heat == 0 or 0.01 <= heat < math.inf),
        ("top_p", "above 0 and at most 1", lambda share: 0 < share <= 1),
        ("top_k", "at least 0", lambda count: count >= 0),
        ("min_p", "at least 0 and below 1", lambda share: 0 <= share < 1),
    ):
        if name in given and not holds(given[name]):
            raise UserError(f"{owner}.{name} must be {rule}; found {given[name]}; leave it out if unsure")
    stop = given.get("stop", ())
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"{owner}.stop must be a list of strings, none of them empty; found {stop!r}; correct the list")


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt and the random streams of its completions."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One seed in [0, 2**63) a completion; as many completions are sampled as there are seeds."""


@dataclass(frozen=True)
class Completion:
    """What the sampler wrote."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the end-of-sequence token included where one was sampled."""
    logprobs: tuple[float, ...]
    """Natural log of each token's probability under the distribution it was sampled from: temperature and, where set,
    top-p, top-k and min-p included. Greedy decoding reports the distribution at temperature 1."""
    finish_reason: Literal["stop", "length"]

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended the completion."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class PolicyWeights:
    """What the trainer hands the engine at a sync: everything of the policy that changes."""

    version: int
    """How many updates the policy has had; 0 before the first."""
    adapter: Mapping[str, tuple[Tensor, Tensor]] | None
    """Linear module's name in the base model ("model.layers.0.self_attn.q_proj") -> (A [r, in], B [out, r]), detached;
    None samples from the base model with its adapter off."""
    scaling: float
    """The adapter adds scaling * B A."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the base that are trained whole, by checkpoint name, detached: none, RMSNorm scales
    ("model.layers.0.input_layernorm.weight" -> [hidden]), or every weight, where there is no adapter."""
    noise: NormNoise | None = None
    """Noise of the sampler's norm scales; None samples without."""


@dataclass(frozen=True)
class SyncReport:
    """What the engine runs with after a sync."""

    version: int
    noise_std: float
    """Standard deviation of (scale the engine holds now - clean scale) over all elements of the noisy norms."""


@dataclass(frozen=True)
class GradedAnswer:
    """What a held-out prompt was answered."""

    correct: bool
    answer: str | None
    """What the accuracy reward took for the answer, equal for equal answers; None where it found or tells none."""
    tokens: int = 0
    """Sampled tokens, the end-of-sequence token included."""
    truncated: bool = False
    """Whether the token limit ended it."""


@dataclass(frozen=True)
class EvaluatedPrompt:
    """All answers to one held-out prompt: what accuracy, pass@k and majority votes are computed from."""

    prompt_id: str
    greedy: GradedAnswer
    samples: Sequence[GradedAnswer]
    """S of them, at temperature 1 unless something else was asked for."""


@dataclass(frozen=True)
class Evaluation:
    """How a batch of P held-out prompts went."""

    prompts: Sequence[EvaluatedPrompt]
    name: str = ""
    """Of the set that they belong to; empty where there is but one."""
    tells_answers: bool = True
    """Whether the accuracy reward tells what was answered, and not only whether it is right."""

    @property
    def greedy_correct(self) -> Tensor:
        """1 where the greedy completion is right, else 0, float32 [P]."""
        return torch.tensor([float(prompt.greedy.correct) for prompt in self.prompts])

    @property
    def sampled_correct(self) -> Tensor:
        """Share of the S samples that are right, float32 [P]: its mean is pass@1."""
        return torch.tensor([[float(one.correct) for one in prompt.samples] for prompt in self.prompts]).mean(dim=1)
