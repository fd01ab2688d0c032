"""Triton kernels over chunks of logits: log-probability and entropy, or reverse KL divergence; gradients in place."""
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


@triton.jit
def _divergence_kernel(
    policy, teacher, kl, lse, teacher_lse, temperature, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    base, teacher_base = policy + row.to(tl.int64) * vocabulary, teacher + row.to(tl.int64) * vocabulary
    top = tl.full((), float("-inf"), tl.float32)
    teacher_top = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    teacher_mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        y = tl.load(teacher_base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        new, teacher_new = tl.maximum(top, tl.max(z, axis=0)), tl.maximum(teacher_top, tl.max(y, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # no logit yet but minus infinity
        teacher_shift = tl.where(teacher_new == float("-inf"), 0.0, teacher_new)
        mass = mass * tl.exp(top - shift) + tl.exp(z - shift)
        teacher_mass = teacher_mass * tl.exp(teacher_top - teacher_shift) + tl.exp(y - teacher_shift)
        top, teacher_top = new, teacher_new
    log_mass, teacher_log_mass = tl.log(tl.sum(mass, axis=0)), tl.log(tl.sum(teacher_mass, axis=0))
    # A second pass, relative to the largest logit: the difference of two cross entropies, or logs of the partition
    # functions that are rounded as such, would lose the digits of a small divergence.
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(base + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        y = tl.load(teacher_base + v, mask=v < vocabulary, other=0.0).to(tl.float32) / temperature
        logp = (z - top) - log_mass
        p = tl.exp(logp)
        total += tl.where(p > 0, p * (logp - ((y - teacher_top) - teacher_log_mass)), 0.0)
    tl.store(kl + row, tl.sum(total, axis=0))
    tl.store(lse + row, top + log_mass)
    tl.store(teacher_lse + row, teacher_top + teacher_log_mass)


@triton.jit
def _divergence_backward_kernel(
    policy, teacher, kl, lse, teacher_lse, factor, temperature, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocabulary
    at = row.to(tl.int64) * vocabulary + v
    logp = tl.load(policy + at, mask=inside, other=float("-inf")).to(tl.float32) / temperature - tl.load(lse + row)
    logq = tl.load(teacher + at, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(teacher_lse + row)
    p = tl.exp(logp)
    # d KL/dz = p (log p - log q - KL).
    grad = tl.where(p > 0, p * (logp - logq - tl.load(kl + row)), 0.0) * (tl.load(factor + row) / temperature)
    tl.store(policy + at, grad.to(policy.dtype.element_ty), mask=inside)


def divergence(policy: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """KL(policy || teacher) of each row of logits [M, V], and the logs of both partition functions."""
    kl, lse, teacher_lse = (policy.new_empty(len(policy), dtype=torch.float32) for _ in range(3))
    outputs = (kl, lse, teacher_lse)
    _divergence_kernel[(len(policy),)](
        policy, teacher, *outputs, temperature, policy.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )
    return outputs


def divergence_gradient_(
    policy: Tensor, teacher: Tensor, kl: Tensor, lse: Tensor, teacher_lse: Tensor, factor: Tensor, temperature: float
) -> Tensor:
    """Replace the logits `policy` [M, V] by the gradient of sum(factor * KL) to them."""
    # The gradient of a sum has stride 0.
    rows = [tensor.contiguous() for tensor in (kl, lse, teacher_lse, factor)]
    grid = (len(policy), triton.cdiv(policy.shape[1], BLOCK))
    _divergence_backward_kernel[grid](
        policy, teacher, *rows, temperature, policy.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )
    return policy
