"""Products of few tokens with NVFP4 weights in vLLM's Marlin layout and with an adapter: two launches, repeatable bits.

Every program of the first launch takes an equal run of k, through one or two blocks of output features, so that no
processor waits for another. Beside them some programs multiply by the adapter's A. The second launch adds what the
programs found, in the order of k, and the adapter's other product. Weights are the left operand of the tensor cores'
product, so that few tokens fill it, and come from registers: Marlin's words lie as the tensor cores read them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qerl_kernels.backend import interpreting
from qerl_kernels.marlin import MarlinTensor
from qerl_kernels.triton_marlin_tile import COLUMNS, KT, NT, ROWS, columns_as_expanded, dot, expand, to_bfloat16

STAGES = tl.constexpr(4)
RANKS, STEP = tl.constexpr(32), tl.constexpr(128)
"""Rows and columns of A in a step of the programs for the adapter."""
BLOCK = 64
"""Output features of a program of the second launch."""


@triton.jit
def _product_step(acc, words, scales, x, masks, WIDE: tl.constexpr, EVEN: tl.constexpr, REAL: tl.constexpr):
    if EVEN:
        word = tl.load(words, eviction_policy="evict_first")
        scale = tl.load(scales, eviction_policy="evict_first")
    else:
        word = tl.load(words, mask=masks[0], other=0)
        scale = tl.load(scales, mask=masks[1], other=0)
    right = tl.load(x, mask=masks[2], other=0.0)
    if not WIDE:
        right = columns_as_expanded(right, acc.shape[1])
    return dot(expand(word, scale, WIDE, REAL), tl.trans(right), acc, REAL)


@triton.jit
def _product(acc, words, scales, x, masks, strides, steps, EVEN: tl.constexpr, REAL: tl.constexpr):
    """acc [ROWS, TP] and what `steps` steps along k add to it, the pointers at the first."""
    WIDE: tl.constexpr = acc.shape[1] >= 16
    word_stride, scale_stride = strides
    if REAL:
        for i in tl.range(0, steps, num_stages=STAGES):
            at = words + i * word_stride, scales + i * scale_stride, x + i * COLUMNS
            acc = _product_step(acc, at[0], at[1], at[2], masks, WIDE, EVEN, REAL)
    else:  # the interpreter's ranges end at constants
        i = 0
        while i < steps:
            at = words + i * word_stride, scales + i * scale_stride, x + i * COLUMNS
            acc = _product_step(acc, at[0], at[1], at[2], masks, WIDE, EVEN, REAL)
            i += 1
    return acc


@triton.jit
def _shrink_step(acc, a, x, k, columns, masks, REAL: tl.constexpr):
    inside = (k < columns)[None, :]
    left = tl.load(a + k[None, :], mask=masks[0] & inside, other=0.0)
    right = tl.load(x + k[None, :], mask=masks[1] & inside, other=0.0)
    return dot(left, tl.trans(right), acc, REAL)


@triton.jit
def _shrink(x, a, hidden, block, part, steps, tokens, columns, rank, TP: tl.constexpr, REAL: tl.constexpr):
    """hidden[part, r, t] = what a run of columns adds to A x^T, for a block of ranks."""
    r, t = block * RANKS + tl.arange(0, RANKS), tl.arange(0, TP)
    masks = (r < rank)[:, None], (t < tokens)[:, None]
    a, x = a + r[:, None] * columns, x + t[:, None] * columns
    k = part * steps * STEP + tl.arange(0, STEP)
    acc = tl.zeros((RANKS, TP), tl.float32)
    if REAL:
        for i in tl.range(0, steps, num_stages=STAGES):
            acc = _shrink_step(acc, a, x, k + i * STEP, columns, masks, REAL)
    else:
        i = 0
        while i < steps:
            acc = _shrink_step(acc, a, x, k + i * STEP, columns, masks, REAL)
            i += 1
    tl.store(hidden + (part * rank + r)[:, None] * TP + t[None, :], acc, mask=masks[0])


@triton.jit(do_not_specialize=["tokens", "rank", "run", "parts", "hidden_parts"])
def _partial_kernel(
    x, words, scales, a, partial, hidden, tokens, columns, rows, rank, word_stride, scale_stride,
    run, parts, hidden_parts, token_blocks, TP: tl.constexpr, EVEN: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """partial[token block, part, n, t] = what the part-th of the programs that share n found of W x^T."""
    program, token_block = tl.program_id(0) // token_blocks, tl.program_id(0) % token_blocks
    if REAL:  # what the launch before wrote is there; the next one may start, and waits in turn
        gdc_wait()
        gdc_launch_dependents()
    x += token_block * TP * columns
    tokens -= token_block * TP
    rank_blocks = tl.cdiv(rank, RANKS)
    if program < rank_blocks * hidden_parts:  # first, for they take long
        steps = tl.cdiv(tl.cdiv(columns, STEP), hidden_parts)
        hidden += token_block * hidden_parts * rank * TP
        _shrink(x, a, hidden, program % rank_blocks, program // rank_blocks, steps, tokens, columns, rank, TP, REAL)
    else:
        worker = program - rank_blocks * hidden_parts
        t, m = tl.arange(0, TP), tl.arange(0, ROWS)
        n = (m // 16 % NT) * 64 + m // (16 * NT) * 16 + m % 16
        steps = columns // COLUMNS  # of a block of rows
        at, end = worker * run, min(worker * run + run, tl.cdiv(rows, ROWS) * steps)
        while at < end:
            tile = at // steps
            step = at - tile * steps
            count = min(steps - step, end - at)
            word = tile * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
            scale = tile * (ROWS // 4) + tl.arange(0, ROWS // 4)[None, :]
            masks = word < 2 * rows, scale < rows // 4, (t < tokens)[:, None]
            k = (step * KT + tl.arange(0, KT)).to(tl.int64)[:, None]
            right = x + t[:, None] * columns + step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            acc = _product(
                tl.zeros((ROWS, TP), tl.float32), words + k * word_stride + word, scales + k * scale_stride + scale,
                right, masks, (KT * word_stride, KT * scale_stride), count, EVEN, REAL,
            )  # fmt: skip
            part = token_block * parts + worker - tile * steps // run
            row = tile * ROWS + n
            out = partial + (part.to(tl.int64) * rows + row)[:, None] * TP + t[None, :]
            tl.store(out, acc, mask=(row < rows)[:, None])
            at += count


@triton.jit(do_not_specialize=["tokens", "run"])
def _combine_kernel(
    partial, hidden, b, bias, global_scale, y, tokens, columns, rows, run, token_blocks,
    RANK: tl.constexpr, STARTS: tl.constexpr, PADDED: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, HIDDEN_PARTS: tl.constexpr, BIAS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """y = bfloat16(bfloat16(alpha * sum of the parts + bias) + h B^T), h in bfloat16: the order of the plain way.

    What is read before the wait was complete before the first launch let this one start.
    """
    first, token_block = tl.program_id(0) // token_blocks * BLOCK, tl.program_id(0) % token_blocks
    n, t = first + tl.arange(0, BLOCK), tl.arange(0, TP)
    alpha = tl.load(global_scale) * 2.0**-112  # 2**-119, and the 2**-7 of `expand`
    if BIAS:
        shift = tl.load(bias + n).to(tl.float32)[:, None]
    if RANK > 0:  # only the ranks of the adapted part that these rows lie in; B is zero at others
        part = 0
        for i in tl.static_range(1, len(STARTS)):
            part += (first >= STARTS[i]).to(tl.int32)
        r = tl.arange(0, PADDED)
        own, ranks = part * RANK + r, RANK * len(STARTS)
        left = tl.load(b + n[:, None] * ranks + own[None, :], mask=(r < RANK)[None, :], other=0.0)
    if REAL:
        gdc_wait()
        gdc_launch_dependents()
    steps = columns // COLUMNS
    start = first // ROWS * steps // run
    parts = ((first // ROWS + 1) * steps - 1) // run - start + 1
    acc = tl.zeros((BLOCK, TP), tl.float32)
    for p in tl.static_range(PARTS):
        row = (token_block * PARTS + p).to(tl.int64) * rows + n
        acc += tl.load(partial + row[:, None] * TP + t[None, :], mask=p < parts, other=0.0)
    acc *= alpha
    if BIAS:
        acc += shift
    acc = to_bfloat16(acc, REAL).to(tl.float32)
    if RANK > 0:
        h = tl.zeros((PADDED, TP), tl.float32)
        for p in tl.static_range(HIDDEN_PARTS):
            row = (token_block * HIDDEN_PARTS + p) * ranks + own
            h += tl.load(hidden + row[:, None] * TP + t[None, :], mask=(r < RANK)[:, None], other=0.0)
        acc += dot(left, to_bfloat16(h, REAL), tl.zeros((BLOCK, TP), tl.float32), REAL)
    token = token_block * TP + t
    tl.store(
        y + token[None, :].to(tl.int64) * rows + n[:, None], to_bfloat16(acc, REAL), mask=(token < tokens)[None, :]
    )


class Plan(NamedTuple):
    """How the work is cut: fixed by the shapes and the device's number of processors, so that bits repeat."""

    tokens: int
    """Of a block, with those that pad it."""
    token_blocks: int
    run: int
    """Steps of a program."""
    workers: int
    """Programs that multiply by the weight, for each block of tokens."""
    parts: int
    """Programs that share a block of rows, at most."""
    hidden_parts: int
    """Runs that A's columns are cut into."""


@functools.cache
def plan(tokens: int, rows: int, columns: int, rank: int, processors: int) -> Plan:
    """Measured on an H200 with 7B's shapes: two programs a processor, but few parts where rows are few."""
    padded = max(8, min(64, triton.next_power_of_2(tokens)))
    token_blocks = max(1, triton.cdiv(tokens, padded))
    a_steps = triton.cdiv(columns, STEP.value)
    hidden_parts = min(triton.cdiv(columns, 1024), 8 if padded <= 16 else 4)
    hidden_parts = triton.cdiv(a_steps, triton.cdiv(a_steps, hidden_parts)) if rank else 0
    programs = processors * (1 if padded == 64 and rows <= 8192 else 2) // token_blocks
    if padded > 16:  # two fill a processor
        programs -= triton.cdiv(rank, RANKS.value) * hidden_parts
    steps = columns // COLUMNS.value
    total = triton.cdiv(rows, ROWS.value) * steps
    run = max(min(4, steps), triton.cdiv(total, max(programs, 1)))
    return Plan(padded, token_blocks, run, triton.cdiv(total, run), (steps + run - 2) // run + 1, hidden_parts)


@functools.cache
def _processors(device: int) -> int:
    return 4 if interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


def sizes(weight: MarlinTensor, rank: int, up_to: int) -> list[int]:
    """The smallest number of tokens of each plan, up to `up_to`."""
    (k_tiles, words), processors = weight.weight.shape, _processors(weight.weight.get_device())
    plans: dict[Plan, int] = {}
    for tokens in range(1, up_to + 1):
        plans.setdefault(plan(tokens, words // 2, 16 * k_tiles, rank, processors), tokens)
    return list(plans.values())


def few_tokens_linear(
    x: Tensor, weight: MarlinTensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, starts: Sequence[int]
) -> Tensor:
    """What `few.few_tokens_linear` gives, for what `few.few_tokens_supported` allows."""
    (tokens, columns), rows = x.shape, weight.weight.shape[1] // 2
    rank = 0 if a is None else len(a)
    cut = plan(tokens, rows, columns, rank, _processors(x.get_device()))
    real = not interpreting()
    launch = {"launch_pdl": True} if real else {}
    y = x.new_empty((tokens, rows))
    partial = x.new_empty((cut.token_blocks, cut.parts, rows, cut.tokens), dtype=torch.float32)
    hidden = x.new_empty((cut.token_blocks, cut.hidden_parts, rank, cut.tokens), dtype=torch.float32)
    scales = weight.scale.view(torch.int32)
    programs = cut.workers + triton.cdiv(rank, RANKS.value) * cut.hidden_parts
    _partial_kernel[(programs * cut.token_blocks,)](
        x, weight.weight, scales, x if a is None else a, partial, hidden, tokens, columns, rows, rank,
        weight.weight.stride(0), scales.stride(0), cut.run, cut.parts, cut.hidden_parts, cut.token_blocks,
        TP=cut.tokens, EVEN=rows % ROWS.value == 0, REAL=real, num_warps=4, **launch,
    )  # fmt: skip
    if any(start % BLOCK for start in starts):
        starts = (0,)
    own = rank // len(starts)
    _combine_kernel[(rows // BLOCK * cut.token_blocks,)](
        partial, hidden, x if b is None else b, x if bias is None else bias, weight.global_scale, y, tokens, columns,
        rows, cut.run, cut.token_blocks, RANK=own, STARTS=tuple(starts),
        PADDED=max(16, triton.next_power_of_2(own)), TP=cut.tokens, BLOCK=BLOCK, PARTS=cut.parts,
        HIDDEN_PARTS=cut.hidden_parts, BIAS=bias is not None, REAL=real, num_warps=8, **launch,
    )  # fmt: skip
    return y
