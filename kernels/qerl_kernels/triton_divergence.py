"""Triton kernels over chunks of two policies' logits: the reverse KL divergence, and its gradient in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _statistics_kernel(own, theirs, kl, lse, their_lse, temperature, vocabulary: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base, their_base = own + row.to(tl.int64) * vocabulary, theirs + row.to(tl.int64) * vocabulary
    top = tl.full((), float("-inf"), tl.float32)
    their_top = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    their_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        y = tl.load(their_base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        new, their_new = tl.maximum(top, tl.max(z, axis=0)), tl.maximum(their_top, tl.max(y, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # no logit yet but minus infinity
        their_shift = tl.where(their_new == float("-inf"), 0.0, their_new)
        mass = mass * tl.exp(top - shift) + tl.exp(z - shift)
        their_mass = their_mass * tl.exp(their_top - their_shift) + tl.exp(y - their_shift)
        top, their_top = new, their_new
    log_mass, their_log_mass = tl.log(tl.sum(mass, axis=0)), tl.log(tl.sum(their_mass, axis=0))
    # A second pass, relative to the largest logit: the difference of two cross entropies, or logs of the partition
    # functions that are rounded as such, would lose the digits of a small divergence.
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        y = tl.load(their_base + v, mask=v < vocabulary, other=0.0).to(tl.float32) / temperature
        logp = (z - top) - log_mass
        p = tl.exp(logp)
        total += tl.where(p > 0, p * (logp - ((y - their_top) - their_log_mass)), 0.0)
    tl.store(kl + row, tl.sum(total, axis=0))
    tl.store(lse + row, top + log_mass)
    tl.store(their_lse + row, their_top + their_log_mass)


@triton.jit
def _gradient_kernel(
    own, theirs, kl, lse, their_lse, factor, temperature, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocabulary
    at = row.to(tl.int64) * vocabulary + v
    logp = tl.load(own + at, mask=inside, other=float("-inf")).to(tl.float32) / temperature - tl.load(lse + row)
    logq = tl.load(theirs + at, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(their_lse + row)
    p = tl.exp(logp)
    # d KL/dz = p (log p - log q - KL).
    grad = tl.where(p > 0, p * (logp - logq - tl.load(kl + row)), 0.0) * (tl.load(factor + row) / temperature)
    tl.store(own + at, grad.to(own.dtype.element_ty), mask=inside)


def statistics(own: Tensor, theirs: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """KL(own || theirs) of each row of logits [M, V], and the logs of both partition functions."""
    kl, lse, their_lse = (own.new_empty(len(own), dtype=torch.float32) for _ in range(3))
    outputs = (kl, lse, their_lse)
    _statistics_kernel[(len(own),)](own, theirs, *outputs, temperature, own.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return outputs


def gradient_(
    own: Tensor, theirs: Tensor, kl: Tensor, lse: Tensor, their_lse: Tensor, factor: Tensor, temperature: float
) -> Tensor:
    """Replace the logits `own` [M, V] by the gradient of sum(factor * KL) to them."""
    # The gradient of a sum has stride 0.
    rows = [tensor.contiguous() for tensor in (kl, lse, their_lse, factor)]
    grid = (len(own), triton.cdiv(own.shape[1], BLOCK))
    _gradient_kernel[grid](own, theirs, *rows, temperature, own.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return own
