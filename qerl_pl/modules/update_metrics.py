"""Metrics of an update, from sums over the tokens of all micro-batches, steps and ranks."""

import math
from collections.abc import Mapping

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


def update_metrics(totals: Mapping[str, float], steps: int) -> dict[str, float]:
    """Means per token and per optimizer step by TensorBoard tag; NaN where no token trained.

    Args:
        totals: Sums by name, of `LossOutputs.metrics`, and over steps of grad_norm, loss and lr.
        steps: Optimizer steps.
    """
    tokens = totals["tokens"] or math.nan
    metrics = {tag: totals[name] / tokens for tag, name in TOKEN_METRICS.items() if name in totals}
    metrics["mismatch/chi2"] = totals["mismatch_ratio_squared"] / tokens - 1
    metrics["mismatch/ess"] = totals["is_weight"] ** 2 / (tokens * totals["is_weight_squared"] or math.nan)
    return metrics | {f"optim/{name}": totals[name] / steps for name in ("grad_norm", "loss", "lr")}
