"""Products of few tokens with NVFP4 weights in vLLM's Marlin layout and with an adapter: two launches, repeatable bits.

Every program of the first launch takes an equal run of k, through one or two blocks of output features, so that no
processor waits for another; some multiply by the adapter's A instead. Where there are many blocks, each first takes as
many alone, and writes their part of the result. The second launch adds what programs found of the other blocks, in the
order of k, and the adapter's other product. Weights are the left operand of the tensor cores' product, so that few
tokens fill it, and come from registers: Marlin's words lie as these read them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from qerl_kernels.backend import interpreting
from qerl_kernels.decode_gemm_schedule import BLOCK, RANKS, SHRINK_COLUMNS, Plan, Tile, plan
from qerl_kernels.marlin import MarlinTensor
from qerl_kernels.triton_decode_gemm_reduce import combine_kernel, program_of, registers
from qerl_kernels.triton_marlin_tile import (
    columns_as_expanded,
    dot,
    expand,
    finish_products,
    rows_as_expanded,
    to_bfloat16,
)

_RANKS, _STEP = tl.constexpr(RANKS), tl.constexpr(SHRINK_COLUMNS)

_OPEN = ["tokens", "rank", "rounds", "workers", "shrinks", "longer", "run", "parts", "hidden_parts"]

"""Numbers of the first launch that it is not compiled for."""


@triton.jit
def _tokens(x, first, column, mask, COPIED: tl.constexpr):
    """Some of x's rows, from a column on: of pointers at its first columns, or of a descriptor from row `first` on."""
    if COPIED:
        return x.load([first, column])
    else:
        return tl.load(x + column, mask=mask, other=0.0)


@triton.jit
def _product_step(
    acc, acc2, words, scales, x, x2, first, column, masks,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = acc.shape[1] >= 16
    if REAL and WIDE:
        finish_products()
    if EVEN:
        word = tl.load(words, eviction_policy="evict_first")
        scale = tl.load(scales, eviction_policy="evict_first")
    else:
        word = tl.load(words, mask=masks[0], other=0)
        scale = tl.load(scales, mask=masks[1], other=0)
    right = _tokens(x, first, column, masks[2], COPIED)
    if not WIDE:
        right = columns_as_expanded(right)
    left = expand(word, scale, SPLIT, WIDE, REAL)
    acc = dot(left, tl.trans(right), acc, REAL)
    if acc2.shape[1] > 1:
        acc2 = dot(left, tl.trans(_tokens(x2, first + acc.shape[1], column, masks[3], COPIED)), acc2, REAL)
    return acc, acc2


@triton.jit
def _product(
    words, scales, x, x2, first, column, masks, strides, steps, TP: tl.constexpr, TP2: tl.constexpr,
    COLUMNS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Products [ROWS, tokens] of `steps` steps along k with the tokens of x and of x2; words and scales at the first.

    The tokens are those from `first` on, and `column` is x's of the first step.
    """
    ROWS: tl.constexpr = words.shape[1] // 2
    acc, acc2 = tl.zeros((ROWS, TP), tl.float32), tl.zeros((ROWS, TP2), tl.float32)
    if REAL:
        for i in tl.range(0, steps, num_stages=STAGES):
            acc, acc2 = _product_step(
                acc, acc2, words + i * strides[0], scales + i * strides[1], x, x2, first, column + i * COLUMNS, masks,
                SPLIT, EVEN, COPIED, REAL,
            )  # fmt: skip
    else:  # the interpreter's ranges end at constants
        i = 0
        while i < steps:
            acc, acc2 = _product_step(
                acc, acc2, words + i * strides[0], scales + i * strides[1], x, x2, first, column + i * COLUMNS, masks,
                SPLIT, EVEN, COPIED, REAL,
            )  # fmt: skip
            i += 1
    return acc, acc2


@triton.jit
def _shrink_step(acc, a, x, k, columns, masks, REAL: tl.constexpr):
    inside = (k < columns)[None, :]
    left = tl.load(a + k[None, :], mask=masks[0] & inside, other=0.0)
    right = tl.load(x + k[None, :], mask=masks[1] & inside, other=0.0)
    return dot(left, tl.trans(right), acc, REAL)


@triton.jit
def _shrink(
    x, a, hidden, block, part, steps, tokens, columns, rank, width, TC: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """hidden[part, r, t] = what a run of columns adds to A x^T, for a block of ranks and TC tokens of `width`."""
    r, t = block * _RANKS + tl.arange(0, _RANKS), tl.arange(0, TC)
    masks = (r < rank)[:, None], (t < tokens)[:, None]
    a, x = a + r[:, None] * columns, x + t[:, None] * columns
    k = part * steps * _STEP + tl.arange(0, _STEP)
    acc = tl.zeros((_RANKS, TC), tl.float32)
    if REAL:
        for i in tl.range(0, steps, num_stages=4):
            acc = _shrink_step(acc, a, x, k + i * _STEP, columns, masks, REAL)
    else:
        i = 0
        while i < steps:
            acc = _shrink_step(acc, a, x, k + i * _STEP, columns, masks, REAL)
            i += 1
    tl.store(hidden + (part * rank + r)[:, None] * width + t[None, :], acc, mask=masks[0])


@triton.jit
def _store_alone(y, acc, n, t, tokens, rows, alpha, bias, BIAS: tl.constexpr, REAL: tl.constexpr):
    acc *= alpha
    if BIAS:
        acc += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    mask = (n < rows)[:, None] & (t < tokens)[None, :]
    tl.store(y + t[None, :].to(tl.int64) * rows + n[:, None], to_bfloat16(acc, REAL), mask=mask)


@triton.jit
def _store_part(out, acc, acc2, n, t, t2, rows, TP: tl.constexpr, WIDTH: tl.constexpr):
    at = out + n[:, None] * WIDTH
    tl.store(at + t[None, :], acc, mask=(n < rows)[:, None])
    if TP < WIDTH:
        tl.store(at + TP + t2[None, :], acc2, mask=(n < rows)[:, None])


@triton.jit(do_not_specialize=_OPEN)
def _partial_kernel(
    x, copies, copies2, words, scales, a, bias, global_scale, y, partial, hidden, tokens, columns, rows, rank,
    word_stride, scale_stride, rounds, workers, shrinks, longer, run, parts, hidden_parts, token_blocks,
    TP: tl.constexpr, TP2: tl.constexpr, TC: tl.constexpr, NT: tl.constexpr, KT: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, COPIED: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """partial[token block, part, n, t] = what the part-th of the programs that share n found of W x^T.

    Tokens of a block are TP, and TP2 more if that is not 1; if COPIED, `copies` and `copies2` describe x for them. If
    WHOLE, y holds the base product's first rows, and the rows of `partial` are those after them.
    """
    ROWS: tl.constexpr = 64 * NT
    COLUMNS: tl.constexpr = 16 * KT
    WIDTH: tl.constexpr = TP + (TP2 if TP2 > 1 else 0)
    program, token_block = tl.program_id(0) // token_blocks, tl.program_id(0) % token_blocks
    if REAL:  # what the launch before wrote is there; the next one may start, and waits in turn
        gdc_wait()
        gdc_launch_dependents()
    x += token_block * WIDTH * columns
    tokens -= token_block * WIDTH
    if program < shrinks:
        rank_blocks = tl.cdiv(rank, _RANKS)
        own, first = program % (rank_blocks * hidden_parts), program // (rank_blocks * hidden_parts) * TC
        shrunk = hidden + token_block * hidden_parts * rank * WIDTH + first
        length = tl.cdiv(tl.cdiv(columns, _STEP), hidden_parts)
        _shrink(
            x + first * columns, a, shrunk, own % rank_blocks, own // rank_blocks, length, tokens - first, columns,
            rank, WIDTH, TC, REAL,
        )  # fmt: skip
    t, t2, n = tl.arange(0, TP), tl.arange(0, TP2), rows_as_expanded(NT, SPLIT)
    steps = columns // COLUMNS  # of a block of rows
    later = program - shrinks
    at = tl.maximum(later, 0) * run + tl.maximum(tl.minimum(later, longer), 0)
    end = at + tl.where(later < 0, 0, run + (later < longer).to(tl.int32))
    start, begin = at, 0
    if WHOLE:
        at -= rounds * steps  # those of its own blocks, before the ones that programs share
        begin = rounds * workers
        alpha = tl.load(global_scale) * 2.0**-112  # 2**-119, and the 2**-7 of `expand`
        y += token_block.to(tl.int64) * WIDTH * rows
    while at < end:
        shared = at // steps
        tile, step = shared + begin, at - shared * steps
        count = min(steps - step, end - at)
        if WHOLE:
            alone = at < start
            tile = tl.where(alone, (program + 1) * rounds - (start - at) // steps, tile)
            step, count = tl.where(alone, 0, step), tl.where(alone, steps, count)
        word = tile * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
        scale = tile * (ROWS // 4) + tl.arange(0, ROWS // 4)[None, :]
        masks = word < 2 * rows, scale < rows // 4, (t < tokens)[:, None], (TP + t2 < tokens)[:, None]
        k = (step * KT + tl.arange(0, KT)).to(tl.int64)[:, None]
        right, right2 = copies, copies2
        if not COPIED:
            right = x + t[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
            right2 = x + (TP + t2)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
        acc, acc2 = _product(
            words + k * word_stride + word, scales + k * scale_stride + scale, right, right2, token_block * WIDTH,
            step * COLUMNS, masks, (KT * word_stride, KT * scale_stride), count, TP, TP2, COLUMNS, SPLIT, STAGES, EVEN,
            COPIED, REAL,
        )  # fmt: skip
        row, first = tile * ROWS, begin * ROWS
        part = token_block * parts + later - program_of(shared * steps, longer, run)
        out = partial + (part.to(tl.int64) * (rows - first) + row - first) * WIDTH
        if not WHOLE:
            _store_part(out, acc, acc2, n, t, t2, rows - row, TP, WIDTH)
        elif at >= start:
            _store_part(out, acc, acc2, n, t, t2, rows - row, TP, WIDTH)
        else:
            _store_alone(y, acc, row + n, t, tokens, rows, alpha, bias, BIAS, REAL)
            if TP2 > 1:
                _store_alone(y, acc2, row + n, TP + t2, tokens, rows, alpha, bias, BIAS, REAL)
        at += count


@functools.cache
def _processors(device: int) -> int:
    return 4 if interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


def sizes(weight: MarlinTensor, rank: int, up_to: int, gated: bool) -> list[int]:
    """The smallest number of tokens of each plan, up to `up_to`."""
    (k_tiles, words), processors = weight.weight.shape, _processors(weight.weight.get_device())
    plans: dict[Plan, int] = {}
    for tokens in range(1, up_to + 1):
        plans.setdefault(plan(tokens, words // 2, 16 * k_tiles, rank, processors, None, gated), tokens)
    return list(plans.values())


def decode_gemm_linear(
    x: Tensor,
    weight: MarlinTensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    tile: Tile | None = None,
    gated: bool = False,
) -> Tensor:
    """What `few.decode_gemm_linear` gives, for what `few.decode_gemm_supported` allows; with a tile of one's own.

    If `gated`, each half of the rows divides into BLOCK.
    """
    (tokens, columns), rows = x.shape, weight.weight.shape[1] // 2
    rank = 0 if a is None else len(a)
    cut = plan(tokens, rows, columns, rank, _processors(x.get_device()), tile, gated)
    tile, real = cut.tile, not interpreting()
    y = x.new_empty((tokens, rows)) if cut.rounds or not gated else x  # rows of one program
    partial = x.new_empty((cut.token_blocks, cut.parts, max(0, rows - cut.alone), tile.width), dtype=torch.float32)
    hidden = x.new_empty((cut.token_blocks, cut.hidden_parts, rank, tile.width), dtype=torch.float32)
    scales = weight.scale.view(torch.int32)
    options: dict[str, int] = {"launch_pdl": True, "maxnreg": tile.registers} if real else {}
    copies, copies2 = _described(x, tile)
    _partial_kernel[(cut.workers * cut.token_blocks,)](
        x, copies, copies2, weight.weight, scales, x if a is None else a, x if bias is None else bias,
        weight.global_scale, y, partial, hidden, tokens, columns, rows, rank, weight.weight.stride(0),
        scales.stride(0), cut.rounds, cut.workers, cut.shrinks, cut.longer, cut.run, cut.parts, cut.hidden_parts,
        cut.token_blocks, TP=tile.tokens, TP2=max(1, tile.more), TC=tile.chunk, NT=tile.tiles, KT=tile.steps,
        SPLIT=tile.warps // tile.tiles, STAGES=tile.stages, EVEN=rows % tile.rows == 0, WHOLE=cut.rounds > 0,
        BIAS=bias is not None, COPIED=tile.copied, REAL=real, num_warps=tile.warps, **options,
    )  # fmt: skip
    out = x.new_empty((tokens, rows // 2)) if gated else y
    if any(start % BLOCK for start in starts):
        starts = (0,)
    own, combined = rank // len(starts), rows // 2 if gated else rows if rank else max(0, rows - cut.alone)
    programs = combined // BLOCK * cut.token_blocks * (tile.width // cut.chunk)
    if not programs:
        return out
    if real:
        options["maxnreg"] = registers(programs, _processors(x.get_device()), tile.width, gated)
    combine_kernel[(programs,)](
        partial, hidden, x if b is None else b, x if bias is None else bias, weight.global_scale, y, out, tokens,
        columns, rows, cut.alone, cut.longer, cut.run, cut.token_blocks, RANK=own, STARTS=tuple(starts),
        PADDED=max(16, triton.next_power_of_2(own)), WIDTH=tile.width, TC=cut.chunk, BLOCK=BLOCK, PARTS=cut.parts,
        HIDDEN_PARTS=cut.hidden_parts, ROWS=tile.rows, COLUMNS=tile.columns, WHOLE=cut.rounds > 0,
        BIAS=bias is not None, GATED=gated, REAL=real, num_warps=8, **options,
    )  # fmt: skip
    return out


def _described(x: Tensor, tile: Tile) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """x for TMA, in blocks of the tile's tokens and of those beside them."""
    if not tile.copied:
        return None, None
    if x.data_ptr() % 16:  # it reads from there on
        x = x.clone()
    first, second = [[tokens, tile.columns] for tokens in (tile.tokens, tile.more)]
    return TensorDescriptor.from_tensor(x, first), TensorDescriptor.from_tensor(x, second) if tile.more else None
