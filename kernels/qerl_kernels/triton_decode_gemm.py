"""Decode GEMM: NVFP4 weights in vLLM's Marlin layout, bfloat16 activations, fused LoRA. Two kernels, repeatable bits.

The Stream-K kernel gives every CTA the same number of K iterations over one or two output tiles; some CTAs compute the
LoRA shrink x A^T instead. In data-parallel waves a CTA also computes full tiles and stores them. The reduce kernel the
splits of the other tiles in the order of K and adds the LoRA expand. Weights are the left operand of the tensor cores'
product, so that few tokens fill it, and come from registers: Marlin's words lie as these read them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from qerl_kernels.backend import interpreting
from qerl_kernels.decode_gemm_schedule import (
    BLOCK,
    RANKS,
    SHRINK_COLUMNS,
    Schedule,
    Tile,
    schedule,
    tile_without_measurement,
)
from qerl_kernels.marlin import MarlinTensor
from qerl_kernels.triton_marlin_tile import (
    columns_as_expanded,
    dot,
    expand,
    finish_products,
    rows_as_expanded,
    to_bfloat16,
)

_RANKS, _STEP = tl.constexpr(RANKS), tl.constexpr(SHRINK_COLUMNS)
_WGMMA_TOKENS = tl.constexpr(8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 16)
"""Fewest tokens that Triton multiplies by wgmma on Hopper, whose left operands have the weight's order of columns."""

_UNSPECIALIZED = [
    "tokens", "rank", "waves", "ctas", "shrink_ctas", "big_ctas", "iterations", "splits", "shrink_splits",
]  # fmt: skip


@triton.jit
def _load_x(x, first, column, mask, USE_TMA: tl.constexpr):
    """A tile of x from a column on: from pointers at its first columns, or from row `first` of a TMA descriptor."""
    if USE_TMA:
        return x.load([first, column])
    else:
        return tl.load(x + column, mask=mask, other=0.0)


@triton.jit
def _iteration(
    acc, acc2, words, scales, x, x2, first, column, masks,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, USE_TMA: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    ON_GPU: tl.constexpr = ARCH > 0
    WIDE: tl.constexpr = acc.shape[1] >= _WGMMA_TOKENS and (ARCH == 0 or ARCH == 90)
    if ON_GPU and WIDE:
        finish_products()
    if EVEN:
        word = tl.load(words, eviction_policy="evict_first")
        scale = tl.load(scales, eviction_policy="evict_first")
    else:
        word = tl.load(words, mask=masks[0], other=0)
        scale = tl.load(scales, mask=masks[1], other=0)
    right = _load_x(x, first, column, masks[2], USE_TMA)
    if not WIDE:
        right = columns_as_expanded(right)
    left = expand(word, scale, SPLIT, WIDE, ARCH)
    acc = dot(left, tl.trans(right), acc, ON_GPU)
    if acc2.shape[1] > 1:
        acc2 = dot(left, tl.trans(_load_x(x2, first + acc.shape[1], column, masks[3], USE_TMA)), acc2, ON_GPU)
    return acc, acc2


@triton.jit
def _mainloop(
    words, scales, x, x2, first, column, masks, strides, count, TOKENS: tl.constexpr, EXTRA: tl.constexpr,
    COLUMNS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, USE_TMA: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """Accumulators [ROWS, TOKENS] and [ROWS, EXTRA] of `count` K iterations, from token `first` and `column` on."""
    ROWS: tl.constexpr = words.shape[1] // 2
    acc, acc2 = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, EXTRA), tl.float32)
    if ARCH > 0:
        for i in tl.range(0, count, num_stages=STAGES):
            acc, acc2 = _iteration(
                acc, acc2, words + i * strides[0], scales + i * strides[1], x, x2, first, column + i * COLUMNS, masks,
                SPLIT, EVEN, USE_TMA, ARCH,
            )  # fmt: skip
    else:  # the interpreter's ranges end at constants
        i = 0
        while i < count:
            acc, acc2 = _iteration(
                acc, acc2, words + i * strides[0], scales + i * strides[1], x, x2, first, column + i * COLUMNS, masks,
                SPLIT, EVEN, USE_TMA, ARCH,
            )  # fmt: skip
            i += 1
    return acc, acc2


@triton.jit
def _shrink_iteration(acc, a, x, k, columns, masks, ON_GPU: tl.constexpr):
    inside = (k < columns)[None, :]
    left = tl.load(a + k[None, :], mask=masks[0] & inside, other=0.0)
    right = tl.load(x + k[None, :], mask=masks[1] & inside, other=0.0)
    return dot(left, tl.trans(right), acc, ON_GPU)


@triton.jit
def _shrink(
    x, a, hidden, block, split, count, tokens, columns, rank, width, CHUNK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """hidden[split, r, t] = A x^T over one split of K, for a block of ranks and CHUNK of `width` tokens."""
    r, t = block * _RANKS + tl.arange(0, _RANKS), tl.arange(0, CHUNK)
    masks = (r < rank)[:, None], (t < tokens)[:, None]
    a, x = a + r[:, None] * columns, x + t[:, None] * columns
    k = split * count * _STEP + tl.arange(0, _STEP)
    acc = tl.zeros((_RANKS, CHUNK), tl.float32)
    if ON_GPU:
        for i in tl.range(0, count, num_stages=4):
            acc = _shrink_iteration(acc, a, x, k + i * _STEP, columns, masks, ON_GPU)
    else:
        i = 0
        while i < count:
            acc = _shrink_iteration(acc, a, x, k + i * _STEP, columns, masks, ON_GPU)
            i += 1
    tl.store(hidden + (split * rank + r)[:, None] * width + t[None, :], acc, mask=masks[0])


@triton.jit
def _store_result(y, acc, n, t, tokens, rows, alpha, bias, BIAS: tl.constexpr, ON_GPU: tl.constexpr):
    """Epilogue of a data-parallel tile."""
    acc *= alpha
    if BIAS:
        acc += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    mask = (n < rows)[:, None] & (t < tokens)[None, :]
    tl.store(y + t[None, :].to(tl.int64) * rows + n[:, None], to_bfloat16(acc, ON_GPU), mask=mask)


@triton.jit
def _store_partial(out, acc, acc2, n, t, t2, rows, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Epilogue of a Stream-K split."""
    at = out + n[:, None] * WIDTH
    tl.store(at + t[None, :], acc, mask=(n < rows)[:, None])
    if TOKENS < WIDTH:
        tl.store(at + TOKENS + t2[None, :], acc2, mask=(n < rows)[:, None])


@triton.jit
def _cta_of(iteration, big_ctas, iterations):
    """`Schedule.cta_of`."""
    rest = iteration - big_ctas * (iterations + 1)
    return tl.where(rest < 0, iteration // (iterations + 1), big_ctas + rest // tl.maximum(iterations, 1))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def decode_gemm_stream_k_kernel(
    x, x_tma, x_tma2, words, scales, a, bias, global_scale, y, partial, hidden, tokens, columns, rows, rank,
    word_stride, scale_stride, waves, ctas, shrink_ctas, big_ctas, iterations, splits, shrink_splits, token_blocks,
    TOKENS: tl.constexpr, EXTRA: tl.constexpr, CHUNK: tl.constexpr, N_TILES: tl.constexpr, K_TILES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DATA_PARALLEL: tl.constexpr, BIAS: tl.constexpr,
    USE_TMA: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """partial[token block, split, n, t] = W x^T over the split's K iterations.

    A token block has TOKENS tokens, and EXTRA more if that is not 1; x_tma and x_tma2 are their TMA descriptors. With
    DATA_PARALLEL waves y receives the base product's first rows, and `partial` begins after them. ARCH is the GPU's
    compute capability, as 90 for 9.0; 0 in the interpreter.
    """
    ON_GPU: tl.constexpr = ARCH > 0
    ROWS: tl.constexpr = 64 * N_TILES
    COLUMNS: tl.constexpr = 16 * K_TILES
    WIDTH: tl.constexpr = TOKENS + (EXTRA if EXTRA > 1 else 0)
    cta, token_block = tl.program_id(0) // token_blocks, tl.program_id(0) % token_blocks
    if ARCH >= 90:  # programmatic dependent launch: the previous kernel's writes are visible after the wait
        gdc_wait()
        gdc_launch_dependents()
    x += token_block * WIDTH * columns
    tokens -= token_block * WIDTH
    if cta < shrink_ctas:
        rank_blocks = tl.cdiv(rank, _RANKS)
        own, first = cta % (rank_blocks * shrink_splits), cta // (rank_blocks * shrink_splits) * CHUNK
        shrunk = hidden + token_block * shrink_splits * rank * WIDTH + first
        length = tl.cdiv(tl.cdiv(columns, _STEP), shrink_splits)
        _shrink(
            x + first * columns, a, shrunk, own % rank_blocks, own // rank_blocks, length, tokens - first, columns,
            rank, WIDTH, CHUNK, ON_GPU,
        )  # fmt: skip
    t, t2, n = tl.arange(0, TOKENS), tl.arange(0, EXTRA), rows_as_expanded(N_TILES, SPLIT)
    per_tile = columns // COLUMNS  # K iterations
    later = cta - shrink_ctas
    at = tl.maximum(later, 0) * iterations + tl.maximum(tl.minimum(later, big_ctas), 0)
    end = at + tl.where(later < 0, 0, iterations + (later < big_ctas).to(tl.int32))
    start, begin = at, 0
    if DATA_PARALLEL:
        at -= waves * per_tile  # the CTA's data-parallel tiles come before its Stream-K iterations
        begin = waves * ctas
        alpha = tl.load(global_scale) * 2.0**-112  # 2**-119, and the 2**-7 of `expand`
        y += token_block.to(tl.int64) * WIDTH * rows
    while at < end:
        shared = at // per_tile
        tile, step = shared + begin, at - shared * per_tile
        count = min(per_tile - step, end - at)
        if DATA_PARALLEL:
            alone = at < start
            tile = tl.where(alone, (cta + 1) * waves - (start - at) // per_tile, tile)
            step, count = tl.where(alone, 0, step), tl.where(alone, per_tile, count)
        word = tile * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
        scale = tile * (ROWS // 4) + tl.arange(0, ROWS // 4)[None, :]
        masks = word < 2 * rows, scale < rows // 4, (t < tokens)[:, None], (TOKENS + t2 < tokens)[:, None]
        k = (step * K_TILES + tl.arange(0, K_TILES)).to(tl.int64)[:, None]
        right, right2 = x_tma, x_tma2
        if not USE_TMA:
            right = x + t[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
            right2 = x + (TOKENS + t2)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
        acc, acc2 = _mainloop(
            words + k * word_stride + word, scales + k * scale_stride + scale, right, right2, token_block * WIDTH,
            step * COLUMNS, masks, (K_TILES * word_stride, K_TILES * scale_stride), count, TOKENS, EXTRA, COLUMNS,
            SPLIT, STAGES, EVEN, USE_TMA, ARCH,
        )  # fmt: skip
        row, first = tile * ROWS, begin * ROWS
        split = token_block * splits + later - _cta_of(shared * per_tile, big_ctas, iterations)
        out = partial + (split.to(tl.int64) * (rows - first) + row - first) * WIDTH
        if not DATA_PARALLEL:
            _store_partial(out, acc, acc2, n, t, t2, rows - row, TOKENS, WIDTH)
        elif at >= start:
            _store_partial(out, acc, acc2, n, t, t2, rows - row, TOKENS, WIDTH)
        else:
            _store_result(y, acc, row + n, t, tokens, rows, alpha, bias, BIAS, ON_GPU)
            if EXTRA > 1:
                _store_result(y, acc2, row + n, TOKENS + t2, tokens, rows, alpha, bias, BIAS, ON_GPU)
        at += count


@triton.jit
def _sum(first, stride, count, COUNT: tl.constexpr):
    """Sum of `count`, at most COUNT, tensors that lie `stride` apart."""
    acc = tl.zeros(first.shape, tl.float32)
    for p in tl.static_range(COUNT):  # no masks, which would be as many predicates: more loads are in flight
        some = tl.load(first + tl.minimum(p, count - 1) * stride)
        acc += tl.where(p < count, some, 0.0)
    return acc


@triton.jit(do_not_specialize=["tokens", "alone", "big_ctas", "iterations"])
def decode_gemm_reduce_kernel(
    partial, hidden, b, bias, global_scale, y, tokens, columns, rows, alone, big_ctas, iterations, token_blocks,
    RANK: tl.constexpr, STARTS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SHRINK_SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DATA_PARALLEL: tl.constexpr, BIAS: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """y = bfloat16(bfloat16(alpha * sum of the splits + bias) + h B^T), h in bfloat16.

    With DATA_PARALLEL waves the first `alone` rows of y hold the base product already; without an adapter no CTA
    visits them. Rows are taken from the last on, for those of several splits take longest. What is read before the wait
    was complete before the Stream-K kernel let this one start.
    """
    ON_GPU: tl.constexpr = ARCH > 0
    blocks = token_blocks * (WIDTH // CHUNK)
    first, block = rows - BLOCK - tl.program_id(0) // blocks * BLOCK, tl.program_id(0) % blocks
    token_block, t = block // (WIDTH // CHUNK), block % (WIDTH // CHUNK) * CHUNK + tl.arange(0, CHUNK)
    alpha = tl.load(global_scale) * 2.0**-112  # 2**-119, and the 2**-7 of `expand`
    per_tile = columns // COLUMNS
    n = first + tl.arange(0, BLOCK)
    if BIAS:
        shift = tl.load(bias + n).to(tl.float32)[:, None]
    ranks: tl.constexpr = RANK * len(STARTS)
    if RANK > 0:  # only the ranks of the adapter that these rows belong to; B is zero at others
        adapter = 0
        for i in tl.static_range(1, len(STARTS)):
            adapter += (first >= STARTS[i]).to(tl.int32)
        r = tl.arange(0, PADDED)
        own = adapter * RANK + r
        left = tl.load(b + n[:, None] * ranks + own[None, :], mask=(r < RANK)[None, :], other=0.0)
    at = tl.maximum(first - alone, 0) // ROWS * per_tile
    splits = _cta_of(at + per_tile - 1, big_ctas, iterations) - _cta_of(at, big_ctas, iterations) + 1
    if ARCH >= 90:
        gdc_wait()
        gdc_launch_dependents()
    token, shared = token_block * WIDTH + t, rows - alone
    own_y = y + token[None, :].to(tl.int64) * rows + n[:, None]
    # All loads come before the first wait for a sum.
    if DATA_PARALLEL:
        base = tl.load(own_y, mask=(token < tokens)[None, :] & (first < alone), other=0.0)
    block_partial = partial + (token_block * SPLITS).to(tl.int64) * shared * WIDTH
    own_partial = block_partial + (n - alone)[:, None] * WIDTH + t[None, :]
    if DATA_PARALLEL:
        acc = tl.zeros(own_partial.shape, tl.float32)
        if first >= alone:
            acc = _sum(own_partial, shared * WIDTH, splits, SPLITS)
    else:
        acc = _sum(own_partial, shared * WIDTH, splits, SPLITS)
    if RANK > 0:
        own = tl.minimum(own, ranks - 1)  # beyond, some number that meets a zero of `left`
        own_hidden = hidden + token_block * SHRINK_SPLITS * ranks * WIDTH + own[:, None] * WIDTH + t[None, :]
        h = _sum(own_hidden, ranks * WIDTH, SHRINK_SPLITS, SHRINK_SPLITS)
    acc *= alpha
    if BIAS:
        acc += shift
    acc = to_bfloat16(acc, ON_GPU).to(tl.float32)
    if DATA_PARALLEL:
        acc = tl.where(first < alone, base.to(tl.float32), acc)
    if RANK > 0:
        acc += dot(left, to_bfloat16(h, ON_GPU), tl.zeros(acc.shape, tl.float32), ON_GPU)
    tl.store(own_y, to_bfloat16(acc, ON_GPU), mask=(token < tokens)[None, :])


def stream_k_registers(tile: Tile) -> int:
    """Registers per thread, in steps of 8, at which an SM holds `ctas_per_sm` and, if narrow, reduce CTAs beside.

    With fewer the compiler would let each wgmma of 8 tokens wait for the one before.
    """
    sixteenths = 16 if tile.tokens > 8 else 7 if tile.tokens >= _WGMMA_TOKENS.value else 6
    return min(255, 2**16 // 16 * sixteenths // (32 * tile.warps * tile.ctas_per_sm) // 8 * 8)


def reduce_registers(ctas: int, sms: int, width: int, rank: int) -> int:
    """Registers per thread of the reduce kernel: with a limit the compiler keeps more loads in flight."""
    if ctas <= 2 * sms:
        return 128
    limit = 64 if width > 16 else 32  # narrow: all fit beside the Stream-K kernel's CTAs, and wait there
    return max(limit, min(128, rank // 2))  # a CTA holds BLOCK rows of B: with fewer registers it would spill them


@functools.cache
def _sms(device: int) -> int:
    return 4 if interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _arch(device: int) -> int:
    """Compute capability, as 90 for 9.0; 0 in the interpreter."""
    if interpreting():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _tile(tokens: int, device: int) -> Tile | None:
    """None where the schedule has measured ones."""
    return None if _arch(device) in (0, 90) else tile_without_measurement(tokens)


def sizes(weight: MarlinTensor, rank: int, up_to: int) -> list[int]:
    """The smallest number of tokens of each schedule, up to `up_to`."""
    (k_tiles, words), device = weight.weight.shape, weight.weight.get_device()
    schedules: dict[Schedule, int] = {}
    for tokens in range(1, up_to + 1):
        plan = schedule(tokens, words // 2, 16 * k_tiles, rank, _sms(device), _tile(tokens, device))
        schedules.setdefault(plan, tokens)
    return list(schedules.values())


def decode_gemm_linear(
    x: Tensor,
    weight: MarlinTensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    tile: Tile | None = None,
    compile_only: bool = False,
) -> Tensor:
    """`decode_gemm.decode_gemm_linear` of a weight that `decode_gemm_supported` accepts, with any tile.

    With `compile_only` nothing runs, and the result is undefined.
    """
    (tokens, columns), rows = x.shape, weight.weight.shape[1] // 2
    rank, sms, arch = 0 if a is None else len(a), _sms(x.get_device()), _arch(x.get_device())
    plan = schedule(tokens, rows, columns, rank, sms, tile or _tile(tokens, x.get_device()))
    tile, alone = plan.tile, plan.data_parallel_rows
    y = x.new_empty((tokens, rows))
    partial = x.new_empty((plan.token_blocks, plan.splits, max(0, rows - alone), tile.width), dtype=torch.float32)
    hidden = x.new_empty((plan.token_blocks, plan.shrink_splits, rank, tile.width), dtype=torch.float32)
    scales = weight.scale.view(torch.int32)
    options: dict[str, int] = {"launch_pdl": arch >= 90, "maxnreg": stream_k_registers(tile)} if arch else {}
    _launch(decode_gemm_stream_k_kernel, plan.ctas * plan.token_blocks, compile_only)(
        x, *_descriptors(x, tile), weight.weight, scales, x if a is None else a, x if bias is None else bias,
        weight.global_scale, y, partial, hidden, tokens, columns, rows, rank, weight.weight.stride(0),
        scales.stride(0), plan.waves, plan.ctas, plan.shrink_ctas, plan.big_ctas, plan.iterations, plan.splits,
        plan.shrink_splits, plan.token_blocks, TOKENS=tile.tokens, EXTRA=max(1, tile.extra_tokens),
        CHUNK=tile.shrink_tokens, N_TILES=tile.n_tiles, K_TILES=tile.k_tiles, SPLIT=tile.warps // tile.n_tiles,
        STAGES=tile.stages, EVEN=rows % tile.rows == 0, DATA_PARALLEL=plan.waves > 0, BIAS=bias is not None,
        USE_TMA=tile.use_tma, ARCH=arch, num_warps=tile.warps, **options,
    )  # fmt: skip
    if any(start % BLOCK for start in starts):
        starts = (0,)
    own, reduced = rank // len(starts), rows if rank else max(0, rows - alone)
    ctas = reduced // BLOCK * plan.token_blocks * (tile.width // plan.reduce_tokens)
    if not ctas:
        return y
    if arch:
        options["maxnreg"] = reduce_registers(ctas, sms, tile.width, own)
    _launch(decode_gemm_reduce_kernel, ctas, compile_only)(
        partial, hidden, x if b is None else b, x if bias is None else bias, weight.global_scale, y, tokens, columns,
        rows, alone, plan.big_ctas, plan.iterations, plan.token_blocks, RANK=own, STARTS=tuple(starts),
        PADDED=max(16, triton.next_power_of_2(own)), WIDTH=tile.width, CHUNK=plan.reduce_tokens, BLOCK=BLOCK,
        SPLITS=plan.splits, SHRINK_SPLITS=plan.shrink_splits, ROWS=tile.rows, COLUMNS=tile.columns,
        DATA_PARALLEL=plan.waves > 0, BIAS=bias is not None, ARCH=arch, num_warps=8, **options,
    )  # fmt: skip
    return y


def _launch(kernel, ctas: int, compile_only: bool):
    return functools.partial(kernel.warmup, grid=(ctas,)) if compile_only else kernel[(ctas,)]


def compile_at_once(products: Iterable[tuple[Any, ...]]) -> None:
    """See `decode_gemm.compile_decode_gemm`."""
    if interpreting() or not hasattr(triton, "AsyncCompileMode"):  # older releases
        return
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for tokens, weight, bias, a, b, starts in products:
            x = weight.weight.new_empty((tokens, 16 * len(weight.weight)), dtype=torch.bfloat16)
            decode_gemm_linear(x, weight, bias, a, b, starts, compile_only=True)


def _descriptors(x: Tensor, tile: Tile) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """TMA descriptors of x, in blocks of the tile's tokens and of its extra tokens."""
    if not tile.use_tma:
        return None, None
    if x.data_ptr() % 16:  # TMA needs aligned addresses
        x = x.clone()
    first, second = (
        TensorDescriptor.from_tensor(x, [tokens, tile.columns]) if tokens else None
        for tokens in (tile.tokens, tile.extra_tokens)
    )
    return first, second
