"""The decode GEMM against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter.

Buffers start poisoned (deterministic mode fills them with NaN), so an element that no CTA writes is seen.
"""

import math

import plain_ops
import pytest
import torch
from poisoned import in_pytorch, triton_on_poisoned_memory
from qerl_kernels import (
    MarlinTensor,
    decode_gemm_linear,
    decode_gemm_linear_reference,
    decode_gemm_schedule,
    decode_gemm_supported,
    marlin,
    quantize_mxfp4,
    quantize_nvfp4,
    select_backend,
    triton_decode_gemm,
)

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 50 if DEVICE == "cuda" else 1
# Rows that fill no tile of 256, columns that the CTAs' iterations do not divide.
SHAPES = [(64, 64), (192, 320), (320, 576)]
Tile = triton_decode_gemm.Tile
TILES = [
    Tile(64),
    Tile(64, n_tiles=2, ctas_per_sm=3),
    Tile(64, n_tiles=2, ctas_per_sm=3, use_tma=True),
    Tile(64, 32, n_tiles=2, use_tma=True),
    Tile(128, n_tiles=2),
    Tile(128, n_tiles=2, use_tma=True),
    Tile(128, n_tiles=2, data_parallel=True, use_tma=True),
    Tile(128, 64, n_tiles=2, k_tiles=2),
    Tile(128, 64, n_tiles=2, k_tiles=2, data_parallel=True, use_tma=True),
    Tile(64, 32, warps=8, ctas_per_sm=1, data_parallel=True, use_tma=True),
    Tile(128, warps=8, ctas_per_sm=1, data_parallel=True, use_tma=True),
    Tile(128, 64, warps=8, ctas_per_sm=1, data_parallel=True, use_tma=True),
    Tile(256, n_tiles=2, warps=8, ctas_per_sm=1, data_parallel=True, use_tma=True),
    Tile(64, n_tiles=8, warps=8, ctas_per_sm=1, data_parallel=True, use_tma=True),
]
CASES = [(SHAPES[0], 2), (SHAPES[2], 9), *((SHAPES[1], tokens) for tokens in (1, 3, 8, 17, 64, 100))]
REAL = {"qkv": (4608, 3584, (0, 3584, 4096)), "o": (3584, 3584, (0,)), "gate_up": (37888, 3584, (0, 18944))}
REAL["down"] = (3584, 18944, (0,))


def linear(rows, columns, rank=0, starts=(0,), with_bias=False):
    """A weight, a bias and an adapter of `rank` for each of the slices that begin at `starts`."""
    torch.manual_seed(rows + columns + rank)
    source = torch.randn(rows, columns, device=DEVICE) * 0.05
    source[:, :16] *= 1e-5  # scales that Marlin reads as zero
    with in_pytorch():
        weight = plain_ops.to_marlin(quantize_nvfp4(source.bfloat16()))
    bias = torch.randn(rows, device=DEVICE).bfloat16() if with_bias else None
    if not rank:
        return weight, bias, None, None
    a = (torch.randn(len(starts) * rank, columns, device=DEVICE) * 0.05).bfloat16()
    b = torch.zeros(rows, len(starts) * rank, device=DEVICE)
    for slot, (start, stop) in enumerate(zip(starts, (*starts[1:], rows), strict=True)):
        b[start:stop, slot * rank : (slot + 1) * rank] = torch.randn(stop - start, rank, device=DEVICE) * 0.2
    return weight, bias, a, b.bfloat16()


def tokens_of(count, columns):
    torch.manual_seed(count)
    return torch.randn(count, columns, device=DEVICE).bfloat16()


def plain(x, weight, bias, a, b):
    with in_pytorch():
        return decode_gemm_linear_reference(x, weight, bias, a, b)


def exact(x, weight, bias, a, b):
    dense = marlin.dequantize_marlin(weight.weight, weight.scale, torch.float32).double()
    y = marlin.marlin_alpha(weight.global_scale) * (x.double() @ dense.T)
    y = y if bias is None else y + bias.double()
    return y if a is None else y + (x.double() @ a.double().T) @ b.double().T


def check(x, weight, bias, a, b, starts=(0,)):
    actual = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)
    for _ in range(REPEATS):
        assert torch.equal(actual, decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts))
    truth, expected = exact(x, weight, bias, a, b), plain(x, weight, bias, a, b)
    assert (actual.double() - truth).norm() <= 2 * (expected.double() - truth).norm()


@pytest.mark.parametrize(("shape", "tokens"), CASES)
def test_errs_at_most_twice_as_much_as_plain_bfloat16_and_repeats_its_bits(shape, tokens):
    check(tokens_of(tokens, shape[1]), *linear(*shape, rank=8, with_bias=True))


@pytest.mark.parametrize(("rank", "starts"), [(8, (0,)), (20, (0, 128)), (32, (64, 128, 192)), (64, (0, 100))])
def test_any_rank_and_any_adapted_slices_of_a_fused_projection(rank, starts):
    check(tokens_of(5, 192), *linear(256, 192, rank, starts), starts)


@pytest.mark.parametrize("with_bias", [False, True])
def test_without_an_adapter_it_is_the_base_product(with_bias):
    check(tokens_of(9, 320), *linear(192, 320, with_bias=with_bias))


def test_rows_of_a_larger_weight():
    full, _, _, _ = linear(320, 128)
    part = MarlinTensor(full.weight[:, 2 * 64 : 2 * 256], full.scale[:, 64:256], full.global_scale)
    x = tokens_of(4, 128)
    assert torch.equal(decode_gemm_linear(x, part), decode_gemm_linear(x, full)[:, 64:256])


@pytest.mark.parametrize("tokens", [8, 64])
def test_every_code_with_every_scale_is_the_weight(tokens):
    # Row i of the identity picks the weight's column i; with a power of two as alpha, bfloat16 holds the products.
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (4, 1024), dtype=torch.int64).int().to(DEVICE)
    scale = torch.cat([torch.arange(0x80, 0xF7), torch.zeros(9)]).to(torch.uint8).repeat(16).view(4, 512).to(DEVICE)
    weight = MarlinTensor(words, scale.view(torch.float8_e4m3fn), torch.tensor(2.0**112, device=DEVICE))
    dense = marlin.dequantize_marlin(words, weight.scale, torch.bfloat16) * 2.0**-7
    identity = torch.eye(64, device=DEVICE).bfloat16()
    for first in range(0, 64, tokens):
        some = slice(first, first + tokens)
        assert torch.equal(decode_gemm_linear(identity[some], weight), dense.t()[some])


def test_the_products_are_rounded_where_the_plain_way_rounds():
    # 1 + 2**-9, the base product as well as A x, rounds to 1, and 1 + 2**-8 to the even 1; without either of the two
    # roundings the sum is more than that, and rounds to 1 + 2**-7.
    ones = torch.full((4, 512), 0x22222222, dtype=torch.int32, device=DEVICE), torch.full((4, 256), 0xB0, device=DEVICE)
    weight = MarlinTensor(ones[0], ones[1].to(torch.uint8), torch.tensor(2.0**119, device=DEVICE))
    x, a, b = torch.zeros(1, 64), torch.zeros(8, 64), torch.zeros(256, 8)
    x[0, 0], x[0, 1], a[0], b[:, 0] = 1, 2**-9, 1, 2**-8
    x, a, b = (tensor.bfloat16().to(DEVICE) for tensor in (x, a, b))
    assert torch.equal(decode_gemm_linear(x, weight, a=a, b=b), torch.ones(1, 256, device=DEVICE).bfloat16())
    assert torch.equal(
        decode_gemm_linear_reference(x, weight, None, a, b), torch.ones(1, 256, device=DEVICE).bfloat16()
    )


def test_tokens_of_a_block_do_not_see_each_other():
    weight, bias, a, b = linear(192, 320, rank=8, with_bias=True)
    x = tokens_of(8, 320)
    alone = decode_gemm_linear(x[:3], weight, bias, a=a, b=b)
    x[3:] = torch.inf
    assert torch.equal(decode_gemm_linear(x, weight, bias, a=a, b=b)[:3], alone)


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_of_any_form_gives_the_same_product(tile):
    weight, bias, a, b = linear(192, 128, rank=8, with_bias=True)
    x = tokens_of(tile.width + 5, 128)
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, (0,), tile)
    expected = plain(x, weight, bias, a, b)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


def test_the_tile_is_that_of_the_most_similar_weight_and_number_of_tokens(monkeypatch):
    small, wide = Tile(64, k_tiles=8, use_tma=True), Tile(128, use_tma=True)
    measured = [
        decode_gemm_schedule._Measured(1024, 1024, ((128, small), (256, wide))),
        decode_gemm_schedule._Measured(8192, 1024, ((64, small), (512, wide))),
    ]
    monkeypatch.setattr(decode_gemm_schedule, "_measured", lambda: measured)
    best_tile = decode_gemm_schedule.best_tile.__wrapped__  # without its cache
    assert best_tile(100, 1536, 1024) == best_tile(128, 1536, 1024) == small and best_tile(129, 1536, 1024) == wide
    assert best_tile(100, 4096, 1024) == wide  # nearer to 8192 than to 1024, by the ratio
    assert best_tile(5000, 1024, 1024) == wide  # beyond what was measured
    assert best_tile(64, 1024, 1088) == small._replace(k_tiles=4)  # 128 columns do not divide 1088
    assert best_tile(9, 1024, 1024) == Tile(16)


ONE_CTA_PER_SM = Tile(
    64, n_tiles=1, ctas_per_sm=1, data_parallel=True
)  # as few CTAs as small weights have row blocks for


@pytest.mark.parametrize(
    ("tile", "shape", "starts", "cut"),
    [
        (ONE_CTA_PER_SM, (576, 320), (0, 320), (1, 256, 1, 1, 8)),  # four blocks alone, five among all
        (ONE_CTA_PER_SM, (704, 384), (0,), (2, 512, 1, 0, 6)),  # eight alone, three among all but who multiplies by A
        (ONE_CTA_PER_SM, (512, 384), (0,), (2, 512, 3, 0, 0)),  # nothing is left to share
        (ONE_CTA_PER_SM, (320, 320), (0,), (0, 0, 1, 1, 8)),  # too little would be
        (ONE_CTA_PER_SM._replace(extra_tokens=32), (576, 320), (0,), (0, 0, 3, 1, 11)),  # all share, not one CTA alone
    ],
)
def test_data_parallel_waves_and_tiles_that_are_split(tile, shape, starts, cut):
    tokens = tile.width - 7
    plan = triton_decode_gemm.schedule(tokens, *shape, 8 * len(starts), 4, tile)  # the interpreter's sms
    assert (plan.waves, plan.data_parallel_rows, plan.shrink_ctas, plan.big_ctas, plan.iterations) == cut
    weight, bias, a, b = linear(*shape, 8, starts, with_bias=True)
    x = tokens_of(tokens, shape[1])
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile)
    expected = plain(x, weight, bias, a, b)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


@pytest.mark.parametrize(("rows", "alone"), [(512, 512), (576, 256)])
def test_data_parallel_rows_without_an_adapter_need_no_reduce_kernel(rows, alone):
    weight, _, _, _ = linear(rows, 384)
    x = tokens_of(70, 384)  # two blocks of tokens: two CTAs each
    tile = ONE_CTA_PER_SM._replace(ctas_per_sm=2)
    assert triton_decode_gemm.schedule(70, rows, 384, 0, 4, tile).data_parallel_rows == alone
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, None, None, None, (0,), tile)
    expected = plain(x, weight, None, None, None)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "waves"), [(22016, 2048, 0), (37888, 3584, 1), (27648, 5120, 0), (55296, 5120, 1)]
)
def test_cuts_of_real_layers_give_every_cta_as_much(rows, columns, waves, rank):
    tile = decode_gemm_schedule.best_tile(192, 37888, 3584)
    assert tile.data_parallel and tile.width == 192
    plan = triton_decode_gemm.schedule(192, rows, columns, 2 * rank, 132, tile)
    assert plan.waves == waves and plan.ctas == 2 * 132
    steps, total = columns // 32, -(-rows // 128) * (columns // 32)
    a_steps = math.ceil(math.ceil(columns / 128) / plan.shrink_splits)
    longest = plan.waves * steps + max(plan.iterations + (plan.big_ctas > 0), 3 * a_steps // 4 + 2)
    assert longest <= 1.05 * (total + plan.shrink_ctas * (3 * a_steps // 4 + 2)) / plan.ctas
    assert plan.shrink_splits <= 4


OF_3B = {"qkv": (2560, 2048, 3), "o": (2048, 2048, 1), "gate_up": (22016, 2048, 2), "down": (2048, 11008, 1)}


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("rank", [1, 16, 32, 64, 65, 96, 128, 192, 256])
def test_an_adapter_of_any_rank_at_most_doubles_the_iterations_of_the_busiest_cta(rank, sms):
    layers = [*OF_3B.values(), *((rows, columns, len(starts)) for rows, columns, starts in REAL.values())]
    for rows, columns, slices in layers:
        for tokens in (1, 8, 17, 33, 64, 65, 128, 193, 256, 384, 385, 512, 577, 768, 898, 1024):
            plan = triton_decode_gemm.schedule(tokens, rows, columns, slices * rank, sms)
            steps, total = columns // plan.tile.columns, -(-rows // plan.tile.rows) * (columns // plan.tile.columns)
            busiest = plan.waves * steps + plan.iterations + (plan.big_ctas > 0)
            # Where there is little to do, a CTA has four iterations.
            assert busiest <= 2 * max(4, total / max(1, sms * plan.tile.ctas_per_sm // plan.token_blocks))
            if plan.waves:  # the grid that the waves are cut for
                assert plan.ctas == sms * plan.tile.ctas_per_sm // plan.token_blocks


def test_up_to_rank_32_a_schedule_fills_the_sms_and_no_more():
    for rows, columns, starts in REAL.values():
        for tokens in range(33, 1025, 31):
            plan = triton_decode_gemm.schedule(tokens, rows, columns, 32 * len(starts), 132)
            assert 0 < plan.shrink_ctas < plan.ctas <= 132 * plan.tile.ctas_per_sm // plan.token_blocks


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "splits"),
    [(37888, 3584, 64, 4), (37888, 3584, 256, 1), (4608, 3584, 768, 2), (3584, 3584, 256, 2), (3584, 18944, 256, 5)],
)
def test_few_sequences_of_a_high_rank_leave_few_splits_to_the_reduce_kernel(rows, columns, rank, splits):
    """A layer of rank 256 takes 101 microseconds on an H200, and 126 with the splits of rank 32."""
    assert triton_decode_gemm.schedule(8, rows, columns, rank, 132).shrink_splits == splits


@pytest.mark.parametrize(("rank", "starts", "tokens"), [(128, (0,), 34), (96, (0, 128), 66), (256, (0, 64), 3)])
def test_a_rank_whose_shrink_fills_the_sms_gives_the_same_product(rank, starts, tokens):
    plan = triton_decode_gemm.schedule(tokens, 192, 128, rank * len(starts), 4)  # the interpreter's sms
    assert plan.shrink_ctas > plan.ctas - plan.shrink_ctas
    check(tokens_of(tokens, 128), *linear(192, 128, rank, starts, with_bias=True), starts)


def test_tokens_of_an_address_that_cannot_be_copied_from_give_the_same_product():
    weight, bias, a, b = linear(192, 320, 8, with_bias=True)
    x = tokens_of(70, 320)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    tile = Tile(64, n_tiles=2, use_tma=True)
    actual, expected = (
        triton_decode_gemm.decode_gemm_linear(one, weight, bias, a, b, (0,), tile) for one in (shifted, x)
    )
    assert shifted.data_ptr() % 16 and torch.equal(actual, expected)


@pytest.mark.parametrize("sms", [1, 4, 132])
@pytest.mark.parametrize("tile", [None, *TILES])
def test_a_schedule_covers_the_weight_and_its_splits_fit(sms, tile):
    shapes = [(*shape, 24) for shape in SHAPES] + [(rows, columns, 32 * len(s)) for rows, columns, s in REAL.values()]
    for rows, columns, rank in shapes:
        for tokens in (1, 8, 17, 64, 65, 256, 385, 896):
            plan = triton_decode_gemm.schedule(tokens, rows, columns, rank, sms, tile)
            steps, tiles = columns // plan.tile.columns, -(-rows // plan.tile.rows) - plan.waves * plan.ctas
            assert plan.tile.width * plan.token_blocks >= tokens and tiles >= 0
            assert plan.data_parallel_rows == plan.waves * plan.ctas * plan.tile.rows
            others = plan.ctas - plan.shrink_ctas - plan.big_ctas
            counts = [plan.iterations + 1] * plan.big_ctas + [plan.iterations] * others
            takers = [cta for cta, count in enumerate(counts) for _ in range(count)]
            assert takers == [plan.cta_of(step) for step in range(tiles * steps)]
            shared = [len(set(takers[first : first + steps])) for first in range(0, len(takers), steps)]
            assert max(shared, default=1) == plan.splits
            a_steps = math.ceil(columns / 128)
            assert plan.shrink_splits * math.ceil(a_steps / plan.shrink_splits) >= a_steps


def test_no_tokens_give_none():
    assert decode_gemm_linear(tokens_of(0, 64), *linear(64, 64)[:2]).shape == (0, 64)


def test_other_weights_types_and_backends_take_the_plain_way():
    mx = plain_ops.to_marlin(quantize_mxfp4((torch.randn(64, 64) * 0.05).bfloat16().to(DEVICE)))
    nv, _, _, _ = linear(64, 64)
    x = tokens_of(2, 64)
    assert decode_gemm_supported(nv) and not decode_gemm_supported(mx)
    assert torch.equal(decode_gemm_linear(x, mx), decode_gemm_linear_reference(x, mx, None, None, None))
    y = decode_gemm_linear(x.float(), nv)
    assert y.dtype == torch.float32 and torch.equal(y, decode_gemm_linear_reference(x.float(), nv, None, None, None))
    select_backend("torch")
    assert not decode_gemm_supported(nv)
    assert torch.equal(decode_gemm_linear(x, nv), decode_gemm_linear_reference(x, nv, None, None, None))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["qkv", "down"])
@pytest.mark.parametrize("tile", TILES)
def test_a_real_layer_in_a_tile_of_any_form_gives_the_same_product(name, tile):
    rows, columns, starts = REAL[name]
    weight, bias, a, b = linear(rows, columns, 32, starts, with_bias=name == "qkv")
    x = tokens_of(192, columns)
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile)
    for _ in range(REPEATS):
        assert torch.equal(actual, triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile))
    expected = plain(x, weight, bias, a, b)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", REAL)
def test_a_real_layer_errs_at_most_twice_as_much_as_plain_bfloat16(name):
    rows, columns, starts = REAL[name]
    tensors = linear(rows, columns, 32, starts, with_bias=name == "qkv")
    for tokens in (1, 8, 16, 33, 64, 128, 192):
        check(tokens_of(tokens, columns), *tensors, starts)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rank", [128, 256])
@pytest.mark.parametrize("name", REAL)
def test_a_real_layer_with_an_adapter_of_high_rank(name, rank):
    rows, columns, starts = REAL[name]
    tensors = linear(rows, columns, rank, starts)
    for tokens in (16, 64, 384, 1024):
        check(tokens_of(tokens, columns), *tensors, starts)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [8, 64, 192])
def test_a_kernel_that_starts_while_its_input_is_written_waits_for_it(tokens):
    down, _, a, b = linear(*REAL["down"][:2], 32)
    o, _, a2, b2 = linear(*REAL["o"][:2], 32)
    x = tokens_of(tokens, REAL["down"][1])
    hidden = decode_gemm_linear(x, down, a=a, b=b)
    torch.cuda.synchronize()
    expected = decode_gemm_linear(hidden, o, a=a2, b=b2)
    for _ in range(REPEATS):
        hidden = decode_gemm_linear(x, down, a=a, b=b)
        assert torch.equal(decode_gemm_linear(hidden, o, a=a2, b=b2), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [8, 64, 192])  # from 33 on the graph holds where to copy from
def test_a_cuda_graph_repeats_the_same_bits_on_new_tokens(tokens):
    rows, columns, starts = REAL["qkv"]
    weight, bias, a, b = linear(rows, columns, 32, starts, with_bias=True)
    x = tokens_of(tokens, columns)
    decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)
    graph = torch.cuda.CUDAGraph()
    torch.use_deterministic_algorithms(False)  # its filling of memory cannot be captured on every version
    with torch.cuda.graph(graph):
        first = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)
        second = decode_gemm_linear(first[:, :columns].contiguous(), weight, bias, a=a, b=b, starts=starts)
    x.copy_(tokens_of(tokens + 1, columns)[:tokens])
    for _ in range(3):
        graph.replay()
    expected = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)
    assert torch.equal(first, expected)
    expected = decode_gemm_linear(expected[:, :columns].contiguous(), weight, bias, a=a, b=b, starts=starts)
    assert torch.equal(second, expected)
