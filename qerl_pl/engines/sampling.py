"""Sampling of one token a row from logits, with a random number of the row's own stream."""

import torch
from torch import Tensor

from qerl_pl.types import SamplingConfig


def uniforms(seed: int, count: int) -> Tensor:
    """The random numbers of one completion, one a token: float64 [count] in [0, 1) on the CPU."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sampling_log_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities of the distribution that tokens are sampled from.

    The filters apply in the order temperature, min-p, top-k, top-p, each to what the one before has left. Temperature
    0 gives the distribution at temperature 1 without filters: what greedy decoding reports.

    Args:
        logits: [B, V], any floating-point type.
        sampling: Temperature and filters.

    Returns:
        float32 [B, V]; -inf where a filter drops the token.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        limit = logits.amax(-1, keepdim=True) + torch.tensor(sampling.min_p).log().item()
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        limit = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        drop = (before >= sampling.top_p).index_fill(1, torch.zeros(1, dtype=torch.long, device=logits.device), False)
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return logits.log_softmax(-1)


def pick_tokens(log_probs: Tensor, uniform: Tensor | None) -> Tensor:
    """One token a row by inverting the cumulative distribution, or the most likely one.

    Args:
        log_probs: [B, V].
        uniform: float64 [B] in [0, 1); None decodes greedily.

    Returns:
        int64 [B].
    """
    if uniform is None:
        return log_probs.argmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    # Below the total, so that rounding never reaches past the last token of positive probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
