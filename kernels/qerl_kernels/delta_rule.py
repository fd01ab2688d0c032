"""Gated delta nets of packed sequences: the convolution and the recurrence (arXiv 2412.06464), each sequence by itself.

PyTorch's batched products are the reference, and the implementation where fla-core is absent. Results and gradients
repeat bit for bit with PyTorch's deterministic algorithms: no kernel is chosen by timing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl_kernels import flash_linear_attention
from qerl_kernels.backend import runs_triton
from qerl_kernels.pointwise import rms_norm

DELTA_CHUNK = 64
"""Tokens that the gated delta rule computes at once."""
TOLERANCE = 0.05
"""Largest relative difference of fla-core's results in bfloat16 from PyTorch's in float32; a wrong kernel makes 1."""
_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


def gated_delta_rule(
    mixed: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    key_heads: int,
    key_size: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """A gated delta net's convolution and recurrence (arXiv 2412.06464) of packed sequences, each by itself.

    Queries, keys and values are SiLU of a causal convolution of each channel; queries and keys have the length 1. With
    k_t, v_t, beta_t and log decay g_t of a token, each head's state S [key size, value size], at first 0, becomes
    exp(g_t) S, then S + beta_t k_t (v_t - S^T k_t)^T; the result is S^T q_t / sqrt(key size). Several value heads share
    a key head. On a GPU fla-core computes it (`flash_linear_attention`); in PyTorch the sequences are padded at their
    end, where nothing reaches them.

    Args:
        mixed: Queries, keys and values before the convolution, [S, channels].
        weight: Of the convolution, [channels, width].
        log_decay: float32 [S, value heads], at most 0.
        beta: [S, value heads].
        key_heads: Heads of the queries, and of the keys.
        key_size: Their elements.
        cu_seqlens: Cumulative lengths of the B sequences, int32 [B + 1].
        max_seqlen: Tokens of the longest one.

    Returns:
        [S, value heads, value size] in the dtype of `mixed`; the state is float32, in PyTorch its products, too.
    """
    sequences, heads = len(cu_seqlens) - 1, log_decay.shape[1]
    rows = torch.arange(len(mixed), device=mixed.device)
    sequence = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    positions = rows - cu_seqlens[sequence]
    convolved = causal_convolution(mixed, weight, positions)
    keys = key_heads * key_size
    q, k, v = convolved.split([keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
    q, k, v = (x.unflatten(-1, (count, -1)) for x, count in ((q, key_heads), (k, key_heads), (v, heads)))
    if mixed.element_size() == 2 and runs_triton(mixed) and flash_linear_attention.available(mixed.device.type):
        unit = torch.full((key_size,), key_size**-0.5, device=mixed.device)
        q, k = (rms_norm(x, unit, _EPS / key_size) for x in (q, k))
        return flash_linear_attention.delta_rule(q, k, v, log_decay, beta, cu_seqlens)
    length = -(-max_seqlen // DELTA_CHUNK) * DELTA_CHUNK
    columns = torch.arange(length, device=mixed.device)
    real = columns < cu_seqlens.diff()[:, None]
    to_packed = (sequence * length + positions, (cu_seqlens[:-1, None] + columns).where(real, -1).flatten())

    def chunked(x: Tensor) -> Tensor:
        """[S, heads, ...] -> [chunks of a sequence, sequences * heads, tokens of a chunk, ...], float32."""
        padded = _SelectedRows.apply(x, to_packed[1], to_packed[0]).unflatten(0, (sequences, -1, DELTA_CHUNK))
        wide = padded.to(torch.promote_types(x.dtype, torch.float32))
        return wide.movedim((1, 3), (0, 2)).flatten(1, 2)

    q, k = (_unit_length(x) for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, dim=1) for x in (q * key_size**-0.5, k))
    out = delta_rule_by_chunks(*(chunked(x) for x in (q, k, v, log_decay, beta)))
    padded = out.to(mixed.dtype).unflatten(1, (sequences, heads)).movedim((0, 2), (1, 3)).flatten(0, 2)
    return _SelectedRows.apply(padded, *to_packed)


def check_flash_linear_attention(device: torch.device) -> None:
    """Compare fla-core's results and gradients on two short sequences with PyTorch's, and do without it if they differ.

    Call it before the first forward pass: in one that is recomputed its saved tensors would be counted.
    """
    if not flash_linear_attention.available(device.type):
        return
    generator, bounds = torch.Generator().manual_seed(0), torch.tensor([0, 70, 75], dtype=torch.int32, device=device)
    sizes = ((75, 512), (512, 4), (75, 2), (75, 2), (75, 2, 128))
    drawn = (torch.randn(size, generator=generator, device="cpu") for size in sizes)  # Lightning sets another default
    mixed, weight, decay, beta, grad = (x.to(device) for x in drawn)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.requires_grad_() for x in (mixed.to(dtype), -decay.exp(), beta.sigmoid().to(dtype))]
        with torch.enable_grad():
            out = gated_delta_rule(given[0], weight.to(dtype), given[1], given[2], 1, 128, bounds, 70)
            results.append([out, *torch.autograd.grad(out, given, grad.to(dtype))])
    errors = [((b.float() - a).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    if not all(error <= TOLERANCE for error in errors):  # nor where one is no number
        flash_linear_attention.refuse(f"fla-core's results differ by {', '.join(f'{error:.2g}' for error in errors)}")


class _SelectedRows(torch.autograd.Function):
    """Rows of x by `index`, zeros for -1; `inverse` has each row's place in the result: both directions only read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, index)
        return _select(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _select(grad, ctx.saved_tensors[0]), None, None


def _select(x: Tensor, index: Tensor) -> Tensor:
    found = x.index_select(0, index.clamp(min=0))
    return found.masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0)


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """SiLU of a causal convolution of each channel, computed in float32, within each packed sequence.

    Triton computes it on a GPU, unless the weight requires gradients.

    Args:
        x: [S, channels].
        weight: [channels, width].
        positions: Of each token in its sequence, int64 [S].

    Returns:
        As x.
    """
    if runs_triton(x) and not weight.requires_grad:
        return _Convolution.apply(x, weight, positions)
    width, wide = weight.shape[1], x.to(torch.promote_types(x.dtype, torch.float32))
    summed = weight[:, -1] * wide
    for back in range(1, width):
        before = functional.pad(wide, (0, 0, back, 0))[: len(x)]
        summed = summed + weight[:, -1 - back] * before.masked_fill((positions < back)[:, None], 0)
    return functional.silu(summed).to(x.dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        from qerl_kernels import triton_convolution

        x = x.contiguous()
        ctx.save_for_backward(x, weight, positions)
        return triton_convolution.convolution(x, weight, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from qerl_kernels import triton_convolution

        return triton_convolution.convolution_gradient(grad.contiguous(), *ctx.saved_tensors), None, None


def _unit_length(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)


def delta_rule_by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The recurrence of `gated_delta_rule`, `DELTA_CHUNK` tokens at a time.

    With G the sums of g in a chunk, u = beta (v - S^T k) of its tokens solves a triangular system: u_t + sum over s < t
    of beta_t exp(G_t - G_s) (k_t . k_s) u_s = beta_t (v_t - exp(G_t) S^T k_t), S being the state before the chunk.
    Its inverse times beta v and beta exp(G) k is computed for all chunks at once; only the states wait for each other.

    Args:
        q: [chunks, sequences * heads, DELTA_CHUNK, key size]; float32, as are the others.
        k: As q.
        v: [chunks, sequences * heads, DELTA_CHUNK, value size].
        g: Log decays [chunks, sequences * heads, DELTA_CHUNK].
        b: Betas, as g.

    Returns:
        As v.
    """
    causal = torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=q.device).tril()
    total = (g.unsqueeze(-2) * causal).sum(-1)  # cumsum has no deterministic gradient on a GPU
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    since, b = total.exp().unsqueeze(-1), b.unsqueeze(-1)
    until = (total[..., -1:] - total).exp().unsqueeze(-1)
    system = b * decay * (k @ k.transpose(-1, -2))
    identity = torch.eye(DELTA_CHUNK, dtype=q.dtype, device=q.device).expand(system.shape)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    states, update = _States.apply(inverse @ (b * v), inverse @ (b * since * k), until * k, since[..., -1:, :])
    return since * (q @ states) + (decay * (q @ k.transpose(-1, -2))) @ update


class _States(torch.autograd.Function):
    """States S before each chunk and updates u: u = first - read S, the next S = decay S + write^T u; at first S = 0.

    Its own backward pass: autograd's would copy every tensor once for each chunk.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, read: Tensor, write: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """first [chunks, N, tokens, values], read and write [chunks, N, tokens, keys], decay [chunks, N, 1, 1]."""
        states, update = first.new_zeros(*read.shape[:2], read.shape[-1], first.shape[-1]), torch.empty_like(first)
        written = write.transpose(-1, -2)
        for n in range(len(first)):
            torch.baddbmm(first[n], read[n], states[n], alpha=-1, out=update[n])
            if n + 1 < len(first):
                torch.baddbmm(decay[n] * states[n], written[n], update[n], out=states[n + 1])
        ctx.save_for_backward(read, write, decay, states, update)
        return states, update

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor, of_update: Tensor) -> Sequence[Tensor]:
        read, write, decay, states, update = ctx.saved_tensors
        # Gradients of the states after each chunk, and of its updates, from the last chunk to the first.
        after, of_first, reading = torch.zeros_like(states), torch.empty_like(update), read.transpose(-1, -2)
        for n in reversed(range(len(states))):
            torch.baddbmm(of_update[n], write[n], after[n], out=of_first[n])
            if n:
                carried = torch.addcmul(of_states[n], decay[n], after[n])
                torch.baddbmm(carried, reading[n], of_first[n], alpha=-1, out=after[n - 1])
        of_read = -(of_first @ states.transpose(-1, -2))
        of_decay = (after * states).sum((-1, -2), keepdim=True)
        return of_first, of_read, update @ after.transpose(-1, -2), of_decay
