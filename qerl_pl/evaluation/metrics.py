"""What the answers to held-out prompts come to: accuracies, votes, and how far they would move with other prompts."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.types import EvaluatedPrompt, GradedAnswer

_SUBSETS = 256

"""Most subsets that a majority of k is averaged over."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k fresh samples (arXiv 2107.03374, section 2.1).

    Args:
        samples: n, at least k.
        correct: c, how many of them are right.
        k: at least 1.
    """
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - correct, k)) / ways


def majority_is_right(answers: Sequence[GradedAnswer]) -> float:
    """Whether the answer that most samples give is right; where several have as many votes, their share that is.

    Right answers vote together, however they are written, others by their text; who answers nothing does not vote.
    """
    votes = Counter((True, "") if one.correct else (False, one.answer) for one in answers if one.answer is not None)
    most = max(votes.values(), default=0)
    first = [right for (right, _), count in votes.items() if count == most]
    return sum(first) / len(first) if first else 0.0


def majority_at_k(answers: Sequence[GradedAnswer], k: int, seed: int) -> float:
    """Mean of `majority_is_right` over the subsets of k samples: all, or 256 drawn by a seed where there are more."""
    if math.comb(len(answers), k) <= _SUBSETS:
        subsets = list(itertools.combinations(answers, k))
    else:
        draw = random.Random(seed)
        subsets = [tuple(draw.sample(list(answers), k)) for _ in range(_SUBSETS)]
    return sum(map(majority_is_right, subsets)) / len(subsets)


def sizes(samples: int) -> list[int]:
    """The k of pass@k and maj@k: powers of two up to n, and n."""
    return [*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples]


def prompt_metrics(prompts: Sequence[EvaluatedPrompt], tells_answers: bool = True) -> dict[str, Tensor]:
    """Every metric of P prompts, float64 [P] each: its mean is the metric.

    Args:
        prompts: with S samples each.
        tells_answers: whether it is known what was answered, and not only whether it is right.

    Returns:
        "accuracy" of the greedy answers, and of the samples pass@k and, for k above 1, maj@k, "length_mean" in tokens,
        "truncated_frac", and "unanswered_frac", those in which no answer was found.
    """

    def of(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def share(name: str) -> Tensor:
        return of([sum(getattr(one, name) for one in prompt.samples) / len(prompt.samples) for prompt in prompts])

    metrics = {"accuracy": of([prompt.greedy.correct for prompt in prompts])}
    samples = len(prompts[0].samples) if prompts else 1
    for k in sizes(samples):
        right = [(len(prompt.samples), sum(one.correct for one in prompt.samples)) for prompt in prompts]
        metrics[f"pass@{k}"] = of([pass_at_k(*one, k) for one in right])
    for k in sizes(samples)[1:] if tells_answers else ():
        voted = (majority_at_k(one.samples, k, stream_seed("majority", one.prompt_id, k)) for one in prompts)
        metrics[f"maj@{k}"] = of(list(voted))
    metrics |= {"length_mean": share("tokens"), "truncated_frac": share("truncated")}
    if tells_answers:
        silent = (sum(one.answer is None for one in prompt.samples) / len(prompt.samples) for prompt in prompts)
        metrics["unanswered_frac"] = of(list(silent))
    return metrics


def evaluation_tag(stage: str, name: str, metric: str) -> str:
    """TensorBoard tag of a metric of held-out prompts.

    Args:
        stage: "val" or "test".
        name: of the set; empty where there is but one.
        metric: as `prompt_metrics` has it.
    """
    return "/".join(part for part in (stage, name, metric) if part)


def interval(values: Tensor, seed: int, resamples: int = 2000) -> tuple[float, float]:
    """95 % of the mean over prompts, by bootstrap: the 2.5 and 97.5 percentiles of means of P prompts drawn from these.

    Args:
        values: of each prompt, float64 [P].
        seed: of the draws.
        resamples: how many.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    means = [
        values[torch.randint(count, (count,), generator=generator)].mean() for _ in range(resamples)
    ]  # one by one: all at once would be P * resamples numbers
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
