"""Metrics of an update, from sums over the tokens of all micro-batches, steps and ranks."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

TOKEN_METRICS = {
    "policy/ratio_mean": "ratio",
    "policy/clip_frac_low": "clip_low",
    "policy/clip_frac_high": "clip_high",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "distill/kl": "teacher_kl",
    "mismatch/logprob_abs_mean": "logprob_abs",
    "mismatch/is_weight_mean": "is_weight",
    "mismatch/k3": "mismatch_k3",
    "mismatch/rejected_frac": "rejected",
    "mismatch/capped_frac": "capped",
}
"""TensorBoard tag of each metric that the objective sums over tokens."""

QUARTILE_METRICS = {
    "mismatch/k3": "mismatch_k3",
    "mismatch/rejected_frac": "rejected",
    "policy/clip_frac": "clipped",
}
"""The same of those that the objective sums over each completion; tags end in _q1, the shortest quarter, to _q4."""

QUARTILES = 4


def length_quartiles(token_counts: Tensor) -> Tensor:
    """Quarter of the completions to which each belongs by its length, from 0 for the shortest, int64 [N].

    Args:
        token_counts: Tokens that train of each completion of all ranks [N]; those without any are in no quarter, and
            marked 0. Ties are broken by index.
    """
    order = torch.argsort(token_counts, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    empty = int((token_counts == 0).sum())
    return ((rank - empty) * QUARTILES // max(len(order) - empty, 1)).clamp(min=0)


def quartile_sums(completion_sums: Mapping[str, Tensor], quartiles: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Sums over the completions of each quarter, by name: tokens_q1 and so on.

    Args:
        completion_sums: Sums over each completion's tokens by name, [B] each.
        quartiles: Quarter of each completion, int64 [B].
    """
    members = torch.arange(QUARTILES, device=quartiles.device)[:, None] == quartiles
    for name, sums in completion_sums.items():
        for quarter, total in enumerate(torch.where(members, sums, 0.0).sum(dim=1), start=1):
            yield f"{name}_q{quarter}", total


def update_metrics(totals: Mapping[str, float], steps: int) -> dict[str, float]:
    """Means per token and per optimizer step by TensorBoard tag; NaN where no token trained.

    Args:
        totals: Sums by name, of `LossOutputs.metrics`, `quartile_sums`, and over steps of grad_norm, loss and lr.
        steps: Optimizer steps.
    """
    tokens = totals["tokens"] or math.nan
    metrics = {tag: totals[name] / tokens for tag, name in TOKEN_METRICS.items() if name in totals}
    metrics["mismatch/chi2"] = totals["mismatch_ratio_squared"] / tokens - 1
    metrics["mismatch/ess"] = totals["is_weight"] ** 2 / (tokens * totals["is_weight_squared"] or math.nan)
    for quarter in range(1, QUARTILES + 1):
        of_quarter = totals.get(f"tokens_q{quarter}") or math.nan
        for tag, name in QUARTILE_METRICS.items():
            metrics[f"{tag}_q{quarter}"] = totals.get(f"{name}_q{quarter}", math.nan) / of_quarter
    return metrics | {f"optim/{name}": totals[name] / steps for name in ("grad_norm", "loss", "lr")}
