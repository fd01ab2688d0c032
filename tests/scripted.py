"""An engine that says what a test makes it say, with a policy, tokenizer and rewards to match: no model, no trainer."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qerl_pl.algorithm import NormNoise
from qerl_pl.evaluation.evaluator import Evaluator, EvaluatorConfig
from qerl_pl.rollout.collector import CollectorConfig
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

SAMPLING = SamplingConfig(max_tokens=3, temperature=0.9, stop=("!",))
PROMPTS = [Prompt(f"p{index}", tuple(range(10, 11 + index)), f"question {index}", f"{index}") for index in range(6)]


def config_of(**changes: Any) -> CollectorConfig:
    given: dict[str, Any] = {"group_size": 4, "sampling": SAMPLING} | changes
    return CollectorConfig(scorer_of(given), **given)


def scorer_of(settings: dict[str, Any]) -> Scorer:
    """Take the rewards out of settings, and the name of the one that tells what is right."""
    return Scorer(settings.pop("rewards", [Even(), Long()]), settings.pop("accuracy_reward", None))


def evaluator_of(engine: Any, ranks: Communicator = SINGLE_PROCESS, **changes: Any) -> Evaluator:
    """With three samples a prompt at temperature 1, and training's token limit and stop strings."""
    given: dict[str, Any] = {"sampling": SamplingConfig(max_tokens=3, stop=("!",)), "samples": 3} | changes
    return Evaluator(EvaluatorConfig(scorer_of(given), **given), engine, Words(), 7, ranks)  # type: ignore[arg-type]


def nobody(key: Sequence[int | str], count: int, exclude: Collection[str]) -> list[Prompt]:
    raise AssertionError("nothing is to be replaced")


def said(prompt: Sequence[int], seed: int) -> list[int]:
    """One to three tokens, by prompt and seed."""
    return [(seed // 3 + position + len(prompt)) % 5 for position in range(1 + seed % 3)]


class Scripted:
    """An engine that records its calls, and samples the tokens of `said`.

    Args:
        error: Nats by which its log-probabilities are wrong.
        lost: Whether it never takes an adapter.
    """

    def __init__(self, error: float = 0.0, lost: bool = False) -> None:
        self.error = error
        self.lost = lost
        self.calls: list[Any] = []
        self.samples: list[list[int]] = []
        self.adapter = not lost

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def sync(self, weights: Any) -> float:
        self.calls.append(("sync", weights.version, weights.adapter is not None))
        self.adapter = weights.adapter is not None and not self.lost
        return 0.125

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        self.calls.append(("generate", [request.prompt_ids for request in requests], sampling))
        self.samples.append([len(request.seeds) for request in requests])
        groups = []
        for request in requests:
            tokens = [said(request.prompt_ids, seed) for seed in request.seeds]
            groups.append(
                [
                    Completion(
                        tuple(ids),
                        tuple(own(self.adapter, token) + self.error for token in ids),
                        "length" if len(ids) == sampling.max_tokens else "stop",
                    )
                    for ids in tokens
                ]
            )
        return groups


def own(adapter: bool, token: int) -> float:
    """Log-probability of a token: the policy's, or its reference's."""
    return -0.5 - 0.1 * token - 0.25 * adapter


class Watched:
    """A policy as the self-check sees it."""

    device = torch.device("cpu")
    full_finetuning = False

    def __init__(self) -> None:
        self.adapter = True
        self.probes: list[int] = []
        self.evaluates = False

    def weights(self, version: int, noise: NormNoise | None = None, *, reference: bool = False) -> Any:
        return SimpleNamespace(version=version, adapter=None if reference else {}, noise=noise)

    def token_values(
        self, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: float, *, reference: bool, routing: None
    ) -> tuple[Tensor, Tensor, None]:
        assert self.evaluates and not torch.is_grad_enabled() and temperature == 1.0
        assert lengths.tolist() == [int(row.nonzero().max()) + 1 for row in mask]
        values = [[own(self.adapter and not reference, int(token)) for token in row] for row in tokens]
        return torch.tensor(values), torch.zeros(mask.shape), None

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        self.probes.append(seed)
        yield

    def eval(self) -> None:
        self.evaluates = True


class Words:
    """A tokenizer of five words and a pad token."""

    pad_token_id: int | None = 9
    eos_token_id: int | None = None

    def batch_decode(
        self, rows: Sequence[Sequence[int]], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False
    ) -> list[str]:
        return [" ".join(str(token) for token in row) for row in rows]


class Even:
    """Right where the tokens' sum is even."""

    name = "even"
    weight = 1.0

    def __call__(self, samples: Any) -> list[float]:
        return [float(sum(map(int, sample.completion.split())) % 2 == 0) for sample in samples]


class Long:
    """A completion's tokens, those cut off a little more."""

    name = "long"
    weight = 0.5

    def __call__(self, samples: Any) -> list[float]:
        return [sample.num_tokens + 0.25 * sample.truncated for sample in samples]
