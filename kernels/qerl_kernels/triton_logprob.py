"""Triton kernels over a chunk of logits: log-probability and entropy, and their gradient in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _logprob_kernel(logits, targets, logprob, lse, entropy, temperature, vocabulary: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * vocabulary
    top = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    energy = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        new = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # no logit yet but minus infinity
        keep, weight = tl.exp(top - shift), tl.exp(z - shift)
        mass = mass * keep + weight
        energy = energy * keep + weight * tl.where(weight > 0, z, 0.0)
        top = new
    total = tl.sum(mass, axis=0)
    log_total = top + tl.log(total)
    target = tl.load(base + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(lse + row, log_total)
    tl.store(logprob + row, target - log_total)
    tl.store(entropy + row, log_total - tl.sum(energy, axis=0) / total)


@triton.jit
def _logprob_backward_kernel(
    logits,
    targets,
    lse,
    entropy,
    grad_logprob,
    grad_entropy,
    temperature,
    vocabulary: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row.to(tl.int64) * vocabulary + v
    inside = v < vocabulary
    z = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    g, h = tl.load(grad_logprob + row), tl.load(grad_entropy + row)
    logp = z - tl.load(lse + row)
    # d logprob/dz = onehot - p and d entropy/dz = -p (log p + entropy).
    surprise = tl.where(logp == float("-inf"), 0.0, logp + tl.load(entropy + row))
    grad = tl.where(v == tl.load(targets + row), g, 0.0) - tl.exp(logp) * (g + h * surprise)
    tl.store(at, (grad / temperature).to(logits.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, log of the partition function and entropy of each row of logits [M, V]."""
    logprob, lse, entropy = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    outputs = (logprob, lse, entropy)
    _logprob_kernel[(len(logits),)](
        logits, targets.contiguous(), *outputs, temperature, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )
    return outputs


def gradient_(
    logits: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor,
    temperature: float,
) -> Tensor:  # fmt: skip
    """Replace logits [M, V] by the gradient of sum(grad_logprob * logprob + grad_entropy * entropy) to them."""
    # The gradient of a sum has stride 0.
    rows = [tensor.contiguous() for tensor in (targets, lse, entropy, grad_logprob, grad_entropy)]
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    _logprob_backward_kernel[grid](logits, *rows, temperature, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return logits
