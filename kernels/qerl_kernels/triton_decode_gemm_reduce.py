"""The second launch of a product of few tokens: what the first's programs found is added, and the adapter's part."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qerl_kernels.triton_activation import silu_times
from qerl_kernels.triton_marlin_tile import dot, to_bfloat16


@triton.jit
def program_of(step, longer, run):
    """Which program takes a step: `Plan.program`."""
    last = step - longer * (run + 1)
    return tl.where(last < 0, step // (run + 1), longer + last // tl.maximum(run, 1))


@triton.jit
def _sum(first, stride, count, COUNT: tl.constexpr):
    """What stands at the pointers `first` and at count - 1 strides beyond, at most COUNT in all."""
    acc = tl.zeros(first.shape, tl.float32)
    for p in tl.static_range(COUNT):  # no masks, which would be as many predicates: more loads are on their way
        some = tl.load(first + tl.minimum(p, count - 1) * stride)
        acc += tl.where(p < count, some, 0.0)
    return acc


@triton.jit
def _before(
    first, b, bias, alone, steps, longer, run,
    RANK: tl.constexpr, STARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Of the BLOCK rows from `first` on: how many programs shared them, the bias, and B with the ranks it is for."""
    n = first + tl.arange(0, BLOCK)
    shift, left, own = n, n, n
    if BIAS:
        shift = tl.load(bias + n).to(tl.float32)[:, None]
    if RANK > 0:  # only the ranks of the adapted part that these rows lie in; B is zero at others
        part = 0
        for i in tl.static_range(1, len(STARTS)):
            part += (first >= STARTS[i]).to(tl.int32)
        r = tl.arange(0, PADDED)
        own = part * RANK + r
        left = tl.load(b + n[:, None] * (RANK * len(STARTS)) + own[None, :], mask=(r < RANK)[None, :], other=0.0)
    step = tl.maximum(first - alone, 0) // ROWS * steps
    parts = program_of(step + steps - 1, longer, run) - program_of(step, longer, run) + 1
    return parts, shift, left, own


@triton.jit
def _parts_added(
    first, parts, partial, token_block, t, rows, alone,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The sum of what the programs that shared those rows found; zero where one took them alone."""
    n, shared = first + tl.arange(0, BLOCK), rows - alone
    at = partial + (token_block * PARTS).to(tl.int64) * shared * WIDTH + (n - alone)[:, None] * WIDTH + t[None, :]
    if WHOLE:
        acc = tl.zeros(at.shape, tl.float32)
        if first >= alone:
            acc = _sum(at, shared * WIDTH, parts, PARTS)
    else:
        acc = _sum(at, shared * WIDTH, parts, PARTS)
    return acc


@triton.jit
def _hidden_added(
    own, hidden, token_block, t,
    RANK: tl.constexpr, STARTS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN_PARTS: tl.constexpr,
):  # fmt: skip
    """h^T at those ranks."""
    h = t
    if RANK > 0:
        ranks: tl.constexpr = RANK * len(STARTS)
        at = hidden + token_block * HIDDEN_PARTS * ranks * WIDTH
        own = tl.minimum(own, ranks - 1)  # beyond, some number that meets a zero of `left`
        h = _sum(at + own[:, None] * WIDTH + t[None, :], ranks * WIDTH, HIDDEN_PARTS, HIDDEN_PARTS)
    return h


@triton.jit
def _finished(
    acc, base, h, left, shift, alpha, alone,
    RANK: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The rows of the product, in bfloat16."""
    acc *= alpha
    if BIAS:
        acc += shift
    acc = to_bfloat16(acc, REAL).to(tl.float32)
    if WHOLE:
        acc = tl.where(alone, base.to(tl.float32), acc)
    if RANK > 0:
        acc += dot(left, to_bfloat16(h, REAL), tl.zeros(acc.shape, tl.float32), REAL)
    return to_bfloat16(acc, REAL)


@triton.jit(do_not_specialize=["tokens", "alone", "longer", "run"])
def combine_kernel(
    partial, hidden, b, bias, global_scale, y, out, tokens, columns, rows, alone, longer, run, token_blocks,
    RANK: tl.constexpr, STARTS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, TC: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, HIDDEN_PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """out = bfloat16(bfloat16(alpha * sum of the parts + bias) + h B^T), h in bfloat16: the order of the plain way.

    If GATED, a program forms the same rows of the product's first half and of its second, and out is silu(the former) *
    the latter. If WHOLE, the first `alone` rows of y hold what h B^T is added to; without an adapter no program comes
    to them, unless GATED. Rows are taken from the last on, for those of several parts take longest.
    What is read before the wait was complete before the first launch let this one start.
    """
    blocks = token_blocks * (WIDTH // TC)
    own_rows = rows // 2 if GATED else rows
    first, block = own_rows - BLOCK - tl.program_id(0) // blocks * BLOCK, tl.program_id(0) % blocks
    token_block, t = block // (WIDTH // TC), block % (WIDTH // TC) * TC + tl.arange(0, TC)
    alpha = tl.load(global_scale) * 2.0**-112  # 2**-119, and the 2**-7 of `expand`
    steps = columns // COLUMNS
    parts, shift, left, own = _before(
        first, b, bias, alone, steps, longer, run, RANK, STARTS, PADDED, BLOCK, ROWS, BIAS
    )
    if GATED:
        second = first + own_rows
        parts2, shift2, left2, own2 = _before(
            second, b, bias, alone, steps, longer, run, RANK, STARTS, PADDED, BLOCK, ROWS, BIAS
        )
    if REAL:
        gdc_wait()
        gdc_launch_dependents()
    n, token = first + tl.arange(0, BLOCK), token_block * WIDTH + t
    own_y = y + token[None, :].to(tl.int64) * rows + n[:, None]
    # every load before the first wait for a sum, and where there are branches, before these
    EARLY: tl.constexpr = GATED and WHOLE
    base, base2 = t, t
    if WHOLE:
        base = tl.load(own_y, mask=(token < tokens)[None, :] & (first < alone), other=0.0)
    if EARLY:
        base2 = tl.load(own_y + own_rows, mask=(token < tokens)[None, :] & (second < alone), other=0.0)
        h = _hidden_added(own, hidden, token_block, t, RANK, STARTS, WIDTH, HIDDEN_PARTS)
        h2 = _hidden_added(own2, hidden, token_block, t, RANK, STARTS, WIDTH, HIDDEN_PARTS)
    acc = _parts_added(first, parts, partial, token_block, t, rows, alone, WIDTH, BLOCK, PARTS, WHOLE)
    if not EARLY:
        h = _hidden_added(own, hidden, token_block, t, RANK, STARTS, WIDTH, HIDDEN_PARTS)
    if GATED:
        acc2 = _parts_added(second, parts2, partial, token_block, t, rows, alone, WIDTH, BLOCK, PARTS, WHOLE)
        if not EARLY:
            h2 = _hidden_added(own2, hidden, token_block, t, RANK, STARTS, WIDTH, HIDDEN_PARTS)
    result = _finished(acc, base, h, left, shift, alpha, first < alone, RANK, BIAS, WHOLE, REAL)
    if GATED:
        up = _finished(acc2, base2, h2, left2, shift2, alpha, second < alone, RANK, BIAS, WHOLE, REAL)
        result = silu_times(result, up, tl.bfloat16, REAL)
        own_y = out + token[None, :].to(tl.int64) * own_rows + n[:, None]
    mask = (token < tokens)[None, :]  # formed before the sums, it would hold a register that they lack if GATED
    tl.store(own_y, result, mask=mask)


def registers(programs: int, processors: int, width: int, gated: bool) -> int:
    """Of a thread of the second launch: told how many it may use, the compiler spends them on more loads at a time."""
    if programs <= 2 * processors:
        return 128
    if width > 16:
        return 64
    return 48 if gated else 32  # beside few tokens' first launch all fit, and wait there: half as many if gated
