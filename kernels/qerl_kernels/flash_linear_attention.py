"""The recurrence of gated delta nets by the Triton kernels of the package `fla-core`, on a GPU.

The package's own function refuses its backward pass on Hopper GPUs with Triton 3.4 to 3.7.0, which compile one of its
kernels wrongly: here PyTorch computes what that kernel would. It is imported on a GPU alone, at the first use.
"""

import functools
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)
CHUNK = 64
"""Tokens of a chunk."""
VERSION = "0.6.0"
"""Of the package, whose functions for a single step of the computation are not public."""
MODULES = (
    *("common.chunk_delta_h", "common.chunk_o", "gated_delta_rule.chunk_fwd", "gated_delta_rule.wy_fast"),
    "utils.cumsum",
)
"""Those of its kernels that run."""


_refused: list[str] = []


def refuse(reason: str) -> None:
    """Have `available` be false from now on."""
    log.warning("PyTorch computes gated delta nets: %s", reason)
    _refused.append(reason)


def available(device_type: str) -> bool:
    """Whether `delta_rule` runs on a kind of device; says on a GPU, once, that the package is missing."""
    return device_type == "cuda" and not _refused and _importable()


@functools.cache
def _importable() -> bool:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        log.info("PyTorch computes gated delta nets, more slowly than fla-core %s would; found %s", VERSION, found)
        return False
    from qerl_kernels.triton_launch import pin_tiles

    try:
        pin_tiles(f"fla.ops.{module}" for module in MODULES)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # versions that do not go together
        log.warning("PyTorch computes gated delta nets: fla-core cannot be imported (%s)", error)
        return False
    return True


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The recurrence of `qerl_kernels.gated_delta_rule` after its convolution; products are rounded to 16 bits.

    Args:
        q: Queries of length 1 [S, key heads, key size], in 16 bits.
        k: Keys, as q.
        v: [S, value heads, value size].
        log_decay: float32 [S, value heads].
        beta: [S, value heads].
        cu_seqlens: int32 [B + 1].

    Returns:
        As v.
    """
    return _DeltaRule.apply(*(x.unsqueeze(0).contiguous() for x in (q, k, v, log_decay, beta)), cu_seqlens)[0]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Any:
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
        from fla.ops.utils.index import prepare_chunk_indices

        chunks = {"cu_seqlens": cu_seqlens, "chunk_indices": prepare_chunk_indices(cu_seqlens, CHUNK)}
        scale = q.shape[-1] ** -0.5
        total, out, inverse, *_ = chunk_gated_delta_rule_fwd(q, k, v, log_decay, beta, scale, None, False, **chunks)
        ctx.save_for_backward(q, k, v, total, beta, inverse)
        ctx.chunks, ctx.scale = chunks, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
        from fla.ops.utils.cumsum import chunk_local_cumsum

        q, k, v, total, beta, inverse = ctx.saved_tensors
        grad, scale, chunks = grad.contiguous(), ctx.scale, ctx.chunks
        read, first = recompute_w_u_fwd(k, v, beta, inverse, total, **chunks)
        states, update, _ = chunk_gated_delta_rule_fwd_h(k, read, first, total, **chunks)
        of_update = chunk_bwd_dv_local(q, k, grad, total, scale=scale, **chunks)
        of_states, _, of_update = chunk_gated_delta_rule_bwd_dhu(
            q, k, read, grad, of_update, total, scale=scale, **chunks
        )
        tensors = (x[0] for x in (q, k, update, total, grad, of_update, states, of_states))
        of_q, of_k, of_read, of_total = _within_chunks(*tensors, scale=scale, **chunks)
        more_k, of_v, of_beta, more_total = prepare_wy_repr_bwd(
            k, v, beta, inverse, of_read.to(k.dtype).unsqueeze(0), of_update, total, **chunks
        )
        of_decay = chunk_local_cumsum(of_total.unsqueeze(0) + more_total, CHUNK, reverse=True, **chunks)
        of_k = of_k.unsqueeze(0) + more_k
        return of_q.to(q.dtype).unsqueeze(0), of_k.to(k.dtype), of_v, of_decay, of_beta, None


def _within_chunks(
    q: Tensor,
    k: Tensor,
    update: Tensor,
    total: Tensor,
    grad: Tensor,
    of_update: Tensor,
    states: Tensor,
    of_states: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, what reads the states, and total decays (base 2): float32 [S, ...].

    q and k are [S, key heads, key size]; update, grad and of_update [S, value heads, value size]; total, sums of log
    decays in a chunk, base 2, [S, value heads]; states before each chunk, and gradients of those after it, [chunks,
    value heads, key size, value size]; chunk_indices, sequence and number of each chunk in it, [chunks, 2].
    """
    starts = cu_seqlens[chunk_indices[:, 0]] + CHUNK * chunk_indices[:, 1]
    rows = starts[:, None] + torch.arange(CHUNK, device=q.device)
    last = cu_seqlens[chunk_indices[:, 0] + 1, None] - 1
    real, rows = rows <= last, torch.minimum(rows, last)  # a last chunk is filled by its last token
    ends = real & ((rows == last) | (torch.arange(CHUNK, device=q.device) == CHUNK - 1))

    def chunked(x: Tensor) -> Tensor:
        return x[rows].transpose(1, 2).float()  # [chunks, heads, tokens, ...]

    heads = states.shape[1] // q.shape[1]
    q, k = (chunked(x).repeat_interleave(heads, dim=1) for x in (q, k))
    update, grad, of_update = (chunked(x) * real[:, None, :, None] for x in (update, grad, of_update))
    total, by_value = chunked(total), states.float().transpose(-1, -2)
    final = total[..., -1:]
    of_q = grad @ by_value * (scale * total.exp2()).unsqueeze(-1)
    of_k = update @ of_states.float().transpose(-1, -2) * (final - total).exp2().unsqueeze(-1)
    of_final = (states.float() * of_states).sum((-1, -2)).unsqueeze(-1) * final.exp2()
    of_final = of_final + (of_k * k).sum((-1, -2)).unsqueeze(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp2()
    scores = grad @ update.transpose(-1, -2) * decay * scale
    of_q, of_k = of_q + scores @ k, of_k + scores.transpose(-1, -2) @ q
    of_total = (of_q * q).sum(-1) - (of_k * k).sum(-1) + of_final * ends[:, None]
    kept = real.flatten().nonzero().squeeze(1)
    of_q, of_k, of_read, of_total = (
        x.transpose(1, 2).flatten(0, 1)[kept] for x in (of_q, of_k, -(of_update @ by_value), of_total)
    )
    of_q, of_k = (x.unflatten(1, (-1, heads)).sum(2) for x in (of_q, of_k))
    return of_q, of_k, of_read, of_total
