"""Metrics of held-out prompts: accuracy, pass@k, maj@k, rewards, and bootstrap confidence intervals."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_pl.seeds import stream_seed
from qerl_pl.types import EvaluatedPrompt, GradedAnswer

_MAX_SUBSETS = 256
"""Most subsets that maj@k averages over."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, include a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k fresh samples (arXiv 2107.03374, section 2.1).

    Args:
        samples: n, at least k.
        correct: c, the number of right samples.
        k: At least 1.
    """
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - correct, k)) / ways


def majority_is_right(answers: Sequence[GradedAnswer]) -> float:
    """Whether the most frequent answer is right; with ties, the share of tied answers that are right.

    All right answers count as the same, however they are written; samples without an answer do not vote.
    """
    votes = Counter(
        (True, "") if sample.correct else (False, sample.answer) for sample in answers if sample.answer is not None
    )
    most = max(votes.values(), default=0)
    winners = [right for (right, _), count in votes.items() if count == most]
    return sum(winners) / len(winners) if winners else 0.0


def majority_at_k(answers: Sequence[GradedAnswer], k: int, seed: int) -> float:
    """Mean of `majority_is_right` over all subsets of k samples, or over 256 random ones if there are more."""
    if math.comb(len(answers), k) <= _MAX_SUBSETS:
        subsets = list(itertools.combinations(answers, k))
    else:
        draw = random.Random(seed)
        subsets = [tuple(draw.sample(list(answers), k)) for _ in range(_MAX_SUBSETS)]
    return sum(map(majority_is_right, subsets)) / len(subsets)


def k_values(samples: int) -> list[int]:
    """The k of pass@k and maj@k: powers of two below n, and n."""
    return [*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples]


def prompt_metrics(prompts: Sequence[EvaluatedPrompt], extracts_answers: bool = True) -> dict[str, Tensor]:
    """Metrics of each of P prompts, float64 [P]; averaged over prompts they are the metrics of the set.

    A reward has fewer than P values, or no metric, if it applies to no sample of some prompts, or of any.

    Args:
        prompts: With S samples each.
        extracts_answers: Whether answers were extracted; without them there is neither maj@k nor "unanswered_frac".

    Returns:
        "accuracy" of the greedy answers; of the samples pass@k, maj@k for k above 1, "reward_mean" of the weighted sum
        and, of several rewards, "reward_<name>" of each before its weight, "length_mean" in tokens, "truncated_frac",
        and "unanswered_frac", the share without an answer.
    """

    def mean(name: str) -> Tensor:
        return _column([sum(getattr(one, name) for one in prompt.samples) / len(prompt.samples) for prompt in prompts])

    metrics = {"accuracy": _column([prompt.greedy.correct for prompt in prompts])}
    ks = k_values(len(prompts[0].samples) if prompts else 1)
    counts = [(len(prompt.samples), sum(sample.correct for sample in prompt.samples)) for prompt in prompts]
    for k in ks:
        metrics[f"pass@{k}"] = _column([pass_at_k(samples, correct, k) for samples, correct in counts])
    for k in ks[1:] if extracts_answers else ():
        metrics[f"maj@{k}"] = _column(
            [majority_at_k(one.samples, k, stream_seed("majority", one.prompt_id, k)) for one in prompts]
        )
    metrics |= _reward_means([prompt.samples for prompt in prompts])
    metrics |= {"length_mean": mean("tokens"), "truncated_frac": mean("truncated")}
    if extracts_answers:
        metrics["unanswered_frac"] = _column(
            [sum(sample.answer is None for sample in one.samples) / len(one.samples) for one in prompts]
        )
    return metrics


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _reward_means(groups: Sequence[Sequence[GradedAnswer]]) -> dict[str, Tensor]:
    """Mean of the total and of each of several rewards, by prompt, over the samples and prompts that it applies to."""
    names = list(groups[0][0].rewards) if groups else []
    metrics = {}
    for name in names[-1:] + (names[:-1] if len(names) > 2 else []):  # the total is the last
        values = [[value for sample in samples if (value := sample.rewards[name]) is not None] for samples in groups]
        if means := [sum(applied) / len(applied) for applied in values if applied]:
            metrics["reward_mean" if name == "total" else f"reward_{name}"] = _column(means)
    return metrics


def evaluation_tag(stage: str, name: str, metric: str) -> str:
    """TensorBoard tag of a metric, such as val/gsm8k/accuracy.

    Args:
        stage: "val" or "test".
        name: Name of the set; empty if there is only one set.
        metric: Key of `prompt_metrics`.
    """
    return "/".join(filter(None, (stage, name, metric)))


def bootstrap_interval(values: Tensor, seed: int, fractions: bool = False) -> tuple[float, float]:
    """95 % confidence interval of a mean over prompts: percentiles 2.5 and 97.5 of 2000 means of resampled prompts.

    Args:
        values: Metric of each prompt, float64 [P].
        seed: Seed of the resampling.
        fractions: Whether values are fractions. If all are 0, or all 1, resamples are too, and the interval is that of
            Clopper and Pearson for P trials.
    """
    if fractions and values.unique().tolist() in ([0.0], [1.0]):
        bound = 0.025 ** (1 / len(values))
        return (bound, 1.0) if values[0] else (0.0, 1.0 - bound)
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    # A loop: a single draw would hold 2000 P indices.
    means = [values[torch.randint(count, (count,), generator=generator)].mean() for _ in range(2000)]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
