"""Data types of a training step: prompts, completions, rewards, experience.

Shapes, here and in every docstring: B completions in a batch, T token positions (prompt and completion, right-padded),
V vocabulary, r adapter rank. Token ids are Python ints until `Experience`, where they become tensors.
"""

import hashlib
import operator
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal

import torch
from torch import Tensor

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.errors import UserError

_SELF_DESCRIBING = (type(None), bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal)
"""Types whose `repr` is their value."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered."""

    id: str
    """Stable name of the row, such as "train-17"; equal in every run over the same data."""
    token_ids: tuple[int, ...]
    """The rendered chat prompt, generation prompt included."""
    text: str
    """The question as the user reads it."""
    reference: str
    """Reference answer, for the rewards; empty where the data has none."""
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, hash=False)
    """The conversation of a row that has one, in place of a question."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The row's other columns, for the rewards."""

    def fingerprint(self) -> str:
        """Text of the whole row, equal in every process; objects such as images are in it by a digest of their pickle.

        Raises:
            UserError: An object cannot be pickled.
        """
        columns = {}
        for name, value in self.columns.items():
            try:
                columns[name] = _described(value)
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # raised by pickle
                raise UserError(
                    "columns hold text, numbers or objects that pickle takes, by which a resumed run knows its data; "
                    f"{name} of row {self.id} is {value!r:.60} ({error}); give its name as text, or leave it out"
                ) from error
        unchanged = all(value is self.columns[name] for name, value in columns.items())
        return repr(self if unchanged else replace(self, columns=columns))


def _described(value: Any) -> Any:
    """The value, with a digest in place of objects whose `repr` has an address or leaves out items."""
    if type(value) in _SELF_DESCRIBING:
        return value
    if isinstance(value, Mapping):
        mapping = {key: _described(item) for key, item in value.items()}
        return value if all(mapping[key] is item for key, item in value.items()) else mapping
    if isinstance(value, list | tuple):
        items = [_described(item) for item in value]
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, set | frozenset):  # texts have another order in every process
        return sorted(repr(_described(item)) for item in value)
    if isinstance(value, Tensor):  # its pickle differs, too
        value = (str(value.dtype), value.shape, value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return f"{type(value).__qualname__} {hashlib.sha256(pickle.dumps(value, protocol=5)).hexdigest()}"


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters of training completions.

    Args:
        max_tokens: Most tokens of a completion; at this length it is truncated.
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
    """Sampling parameters of held-out prompts; a parameter that is null has training's value.

    Args:
        max_tokens: Most tokens of a completion; at this length it is truncated.
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
        _check_sampling("evaluation.sampling", self._overrides)

    @property
    def _overrides(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, training: SamplingConfig) -> SamplingConfig:
        """Training's sampling parameters, overridden by those set here."""
        return replace(training, **self._overrides)


def _check_sampling(owner: str, parameters: Mapping[str, Any]) -> None:
    for name, rule, holds in (
        ("max_tokens", "at least 1", lambda tokens: tokens >= 1),
        ("temperature", "0 or a number from 0.01 to 2", lambda value: value == 0 or 0.01 <= value <= 2),
        ("top_p", "above 0 and at most 1", lambda share: 0 < share <= 1),
        ("top_k", "at least 0", lambda count: count >= 0),
        ("min_p", "at least 0 and below 1", lambda share: 0 <= share < 1),
    ):
        value = parameters.get(name, 0)
        if name in parameters and not (isinstance(value, int | float) and holds(value)):
            raise UserError(f"{owner}.{name} must be {rule}; got {value}; leave it out if unsure")
    stop = parameters.get("stop", ())
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"{owner}.stop must be a list of strings, none of them empty; got {stop!r}; correct the list")


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt and the seeds of its completions."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One seed in [0, 2**63) for each completion to sample."""
    max_tokens: int | None = None
    """Most tokens of each completion, in place of the sampling parameters'."""


@dataclass(frozen=True)
class DialogueFacts:
    """What happened in a dialogue with an environment."""

    turns: int
    """Sampled turns."""
    calls: int
    """Tool calls, or steps of the environment."""
    failed_calls: int
    """Calls that were malformed, raised, or took too long."""
    tool_seconds: float
    """Time of all calls."""
    messages: tuple[Mapping[str, Any], ...]
    """Messages after the prompt: the policy's, with role assistant, and the environment's."""
    reward: float | None
    """The environment's own reward; None where it gives none."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion; with an environment, all of a dialogue after its prompt."""

    token_ids: tuple[int, ...]
    """Tokens after the prompt, including the end-of-sequence token if one was sampled."""
    logprobs: tuple[float, ...]
    """Natural log of each token's probability under the distribution it was sampled from, after temperature, top-p,
    top-k and min-p; 0 for a token that was not sampled. Greedy decoding reports the distribution at temperature 1."""
    finish_reason: Literal["stop", "length"]
    sampled: tuple[bool, ...] | None = None
    """Whether each token was sampled, and not written by an environment; None where all were."""
    prompt_ids: tuple[int, ...] | None = None
    """Prompt of a dialogue, with the environment's tools and observation; None for the row's own."""
    dialogue: DialogueFacts | None = None
    """Facts of a dialogue; None without an environment."""
    routing: Tensor | None = field(default=None, compare=False)
    """Experts that the sampler chose for each token of prompt and completion but the last one, which was not computed:
    int16 [tokens, layers, k]; None where they were not recorded."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that were sampled."""
        if self.sampled is None:
            return self.token_ids
        return tuple(token for token, own in zip(self.token_ids, self.sampled, strict=True) if own)

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended the completion."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class PolicyWeights:
    """Trained weights of the policy, for an engine's `sync`."""

    version: int
    """Number of updates so far."""
    adapter: Mapping[str, tuple[Tensor, Tensor]] | None
    """Linear module's name in the base model ("model.layers.0.self_attn.q_proj") -> (A [r, in], B [out, r]), detached.
    None samples from the base model with its adapter off."""
    scaling: float
    """The adapter adds scaling * B A."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Trained tensors of the base model by checkpoint name, detached: none, RMSNorm scales
    ("model.layers.0.input_layernorm.weight" -> [hidden]), or with full fine-tuning every weight."""
    noise: NormNoise | None = None
    """Noise of the sampler's norm scales; None samples without."""


@dataclass(frozen=True)
class CompletionRecord:
    """One completion with its rewards, as text, for logs."""

    prompt_id: str
    prompt: str
    completion: str
    reference: str
    rewards: dict[str, float | None]
    """Each reward by name, before its weight, and their weighted sum under "total"; None where one does not apply."""
    truncated: bool
    tokens: int
    trained: bool = True
    """False if dynamic sampling dropped the completion's group."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Messages of a dialogue with an environment, of which those of role assistant train; None without one."""
    extra: Mapping[str, Any] | None = None
    """What reward functions log of it, by column; None without any."""


@dataclass(frozen=True)
class TeacherStates:
    """Hidden states and output layer that give a teacher's next-token distributions at the M tokens that train."""

    hidden: Tensor
    """The teacher's last hidden states [M, D] at the positions that predict these tokens, row by row."""
    index: Tensor
    """Row of `hidden` for each token, int64 [B, T]; -1 for those that do not train."""
    head: Tensor
    """The teacher's output layer [V, D]."""
    soft_cap: float | None = None
    """Soft cap of the teacher's logits; None for none."""


@dataclass(frozen=True)
class Experience:
    """The completions of one rollout that this rank trains on, the G of each prompt next to each other; B may be 0."""

    version: int
    """Policy version that sampled them."""
    tokens: Tensor
    """Prompt and completion, right-padded, int64 [B, T]."""
    lengths: Tensor
    """Tokens of each row without padding, int64 [B]."""
    mask: Tensor
    """Sampled tokens, bool [B, T]."""
    sampler_logprobs: Tensor
    """The sampler's own log-probabilities, float32 [B, T]; 0 outside the mask."""
    advantages: Tensor
    """float32 [B]."""
    truncated: Tensor
    """Whether the token limit ended the completion, bool [B]."""
    sampled_tokens: int
    """Tokens of all completions of all ranks, dropped groups included."""
    seconds: float
    """Time of sampling and scoring, checks and syncs included."""
    temperature: float
    """The sampler's temperature; the trainer divides its logits by it too."""
    max_tokens: int
    """Token limit of a completion."""
    teacher_logprobs: Tensor | None = None
    """Log-probabilities by the teacher of on-policy distillation, float32 [B, T]; 0 outside the tokens that train."""
    teacher_states: TeacherStates | None = None
    """From which the teacher's distributions are computed, if the objective needs them in place of `teacher_logprobs`.
    """
    indices: Tensor | None = None
    """Index of each row among the completions of all ranks, int64 [B], on the CPU; None for 0 to B - 1."""
    routing: Tensor | None = None
    """Experts that the sampler chose, int16 [B, T, layers, k], -1 for none, on the CPU: of many long completions they
    are GiBs. None where the trainer's router chooses."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The rollout's metrics, by TensorBoard tag."""
    records: Sequence[CompletionRecord] = ()
    """Every sampled completion of all ranks, dropped groups included."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "Experience":
        """A copy with the tensors of the update on `device`; others stay on the CPU."""
        names = ("tokens", "lengths", "mask", "sampler_logprobs", "advantages", "truncated")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class GradedAnswer:
    """One graded answer to a held-out prompt."""

    correct: bool
    answer: str | None
    """Answer extracted by the accuracy reward, equal for equal answers; None if it extracts none."""
    tokens: int = 0
    """Sampled tokens, the end-of-sequence token included."""
    truncated: bool = False
    """Whether the token limit ended it."""
    rewards: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    """Each reward by name, before its weight, and their weighted sum under "total"; None where one does not apply."""


@dataclass(frozen=True)
class EvaluatedPrompt:
    """All graded answers to one held-out prompt."""

    prompt_id: str
    greedy: GradedAnswer
    samples: Sequence[GradedAnswer]
    """S samples."""


@dataclass(frozen=True)
class Evaluation:
    """Graded answers to a batch of P held-out prompts."""

    prompts: Sequence[EvaluatedPrompt]
    name: str = ""
    """Name of the prompts' set; empty if there is only one set."""
    extracts_answers: bool = True
    """Whether the accuracy reward extracts answers, and not only grades completions."""


@dataclass
class PromptBatch:
    """A batch of prompts as a data loader yields it; callbacks fill in the rest before the step reads it."""

    prompts: Sequence[Prompt]
    """The prompts of all ranks."""
    experience: Experience | None = None
    """Completions to train on; set by `RolloutCallback` before `training_step`."""
    evaluation: Evaluation | None = None
    """Graded answers; set by `RolloutCallback` before `validation_step` and `test_step`."""
    noise: NormNoise | None = None
    """Noise of the sampler; set by `AdaptiveQuantizationNoise` before the rollout."""
