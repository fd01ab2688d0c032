"""The second launch of a product of few tokens: what the first's programs found is added, and the adapter's part."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qerl_kernels.triton_marlin_tile import dot, to_bfloat16


@triton.jit
def program_of(step, shrinks, short, longer, run):
    """Which program takes a step: `Plan.program`."""
    beyond = step - shrinks * short
    last = beyond - longer * (run + 1)
    later = tl.where(last < 0, beyond // (run + 1), longer + last // tl.maximum(run, 1))
    return tl.where(beyond < 0, step // tl.maximum(short, 1), shrinks + later)


@triton.jit
def _sum(first, stride, count, COUNT: tl.constexpr):
    """What stands at the pointers `first` and at count - 1 strides beyond, at most COUNT in all."""
    acc = tl.zeros(first.shape, tl.float32)
    for p in tl.static_range(COUNT):  # no masks, which would be as many predicates: more loads are on their way
        some = tl.load(first + tl.minimum(p, count - 1) * stride)
        acc += tl.where(p < count, some, 0.0)
    return acc


@triton.jit(do_not_specialize=["tokens", "alone", "shrinks", "short", "longer", "run"])
def combine_kernel(
    partial, hidden, b, bias, global_scale, y, tokens, columns, rows, alone, shrinks, short, longer, run, token_blocks,
    RANK: tl.constexpr, STARTS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, TC: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, HIDDEN_PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """y = bfloat16(bfloat16(alpha * sum of the parts + bias) + h B^T), h in bfloat16: the order of the plain way.

    If WHOLE, the first `alone` rows of y hold what h B^T is added to; without an adapter no program comes to them. Rows
    are taken from the last on, for those of several parts take longest.
    What is read before the wait was complete before the first launch let this one start.
    """
    blocks = token_blocks * (WIDTH // TC)
    first, block = rows - BLOCK - tl.program_id(0) // blocks * BLOCK, tl.program_id(0) % blocks
    token_block = block // (WIDTH // TC)
    n, t = first + tl.arange(0, BLOCK), block % (WIDTH // TC) * TC + tl.arange(0, TC)
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
    steps = columns // COLUMNS
    step = tl.maximum(first - alone, 0) // ROWS * steps
    last = program_of(step + steps - 1, shrinks, short, longer, run)
    parts = last - program_of(step, shrinks, short, longer, run) + 1
    if REAL:
        gdc_wait()
        gdc_launch_dependents()
    token = token_block * WIDTH + t
    own_y, mask = y + token[None, :].to(tl.int64) * rows + n[:, None], (token < tokens)[None, :]
    # every load before the first wait for a sum
    shared = rows - alone
    at = partial + (token_block * PARTS).to(tl.int64) * shared * WIDTH + (n - alone)[:, None] * WIDTH + t[None, :]
    if WHOLE:
        base = tl.load(own_y, mask=mask & (first < alone), other=0.0)
        acc = tl.zeros((BLOCK, TC), tl.float32)
        if first >= alone:
            acc = _sum(at, shared * WIDTH, parts, PARTS)
    else:
        acc = _sum(at, shared * WIDTH, parts, PARTS)
    if RANK > 0:
        at = hidden + token_block * HIDDEN_PARTS * ranks * WIDTH
        own = tl.minimum(own, ranks - 1)  # beyond, some number that meets a zero of `left`
        h = _sum(at + own[:, None] * WIDTH + t[None, :], ranks * WIDTH, HIDDEN_PARTS, HIDDEN_PARTS)
    acc *= alpha
    if BIAS:
        acc += shift
    acc = to_bfloat16(acc, REAL).to(tl.float32)
    if WHOLE:
        acc = tl.where(first < alone, base.to(tl.float32), acc)
    if RANK > 0:
        acc += dot(left, to_bfloat16(h, REAL), tl.zeros((BLOCK, TC), tl.float32), REAL)
    tl.store(own_y, to_bfloat16(acc, REAL), mask=mask)
