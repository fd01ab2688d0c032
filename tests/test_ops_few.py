"""The product of few tokens against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter.

Buffers start poisoned (deterministic mode fills them with NaN), so a part that no program writes is seen.
"""

import math

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import (
    MarlinTensor,
    decode_gemm_linear,
    decode_gemm_linear_reference,
    decode_gemm_supported,
    marlin,
    quantize_mxfp4,
    quantize_nvfp4,
    select_backend,
    silu_of_halves,
    triton_decode_gemm,
)
from torch.nn import functional

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 50 if DEVICE == "cuda" else 1
# Rows that fill no tile of 256, columns that the programs' runs do not divide.
SHAPES = [(64, 64), (192, 320), (320, 576)]
Tile = triton_decode_gemm.Tile
TILES = [
    Tile(64),
    Tile(64, tiles=2, programs=3),
    Tile(64, tiles=2, programs=3, copied=True),
    Tile(64, 32, tiles=2, copied=True),
    Tile(128, tiles=2),
    Tile(128, tiles=2, copied=True),
    Tile(128, 64, tiles=2, steps=2),
    Tile(128, 64, tiles=2, steps=2, full_finetuning=True, copied=True),
]
CASES = [(SHAPES[0], 2), (SHAPES[2], 9), *((SHAPES[1], tokens) for tokens in (1, 3, 8, 17, 64, 100))]
REAL = {"qkv": (4608, 3584, (0, 3584, 4096)), "o": (3584, 3584, (0,)), "gate_up": (37888, 3584, (0, 18944))}
REAL["down"] = (3584, 18944, (0,))


def linear(rows, columns, rank=0, starts=(0,), with_bias=False):
    """A weight, a bias and an adapter of `rank` for each of the parts that begin at `starts`."""
    torch.manual_seed(rows + columns + rank)
    source = torch.randn(rows, columns, device=DEVICE) * 0.05
    source[:, :16] *= 1e-5  # scales that Marlin reads as zero
    weight = marlin.to_marlin(quantize_nvfp4(source.bfloat16()))
    bias = torch.randn(rows, device=DEVICE).bfloat16() if with_bias else None
    if not rank:
        return weight, bias, None, None
    a = (torch.randn(len(starts) * rank, columns, device=DEVICE) * 0.05).bfloat16()
    b = torch.zeros(rows, len(starts) * rank, device=DEVICE)
    for part, (start, stop) in enumerate(zip(starts, (*starts[1:], rows), strict=True)):
        b[start:stop, part * rank : (part + 1) * rank] = torch.randn(stop - start, rank, device=DEVICE) * 0.2
    return weight, bias, a, b.bfloat16()


def tokens_of(count, columns):
    torch.manual_seed(count)
    return torch.randn(count, columns, device=DEVICE).bfloat16()


def exact(x, weight, bias, a, b):
    dense = marlin.dequantize_marlin(weight.weight, weight.scale, torch.float32).double()
    y = marlin.marlin_alpha(weight.global_scale) * (x.double() @ dense.T)
    y = y if bias is None else y + bias.double()
    return y if a is None else y + (x.double() @ a.double().T) @ b.double().T


def check(x, weight, bias, a, b, starts=(0,)):
    actual = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)
    for _ in range(REPEATS):
        assert torch.equal(actual, decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts))
    truth, plain = exact(x, weight, bias, a, b), decode_gemm_linear_reference(x, weight, bias, a, b)
    assert (actual.double() - truth).norm() <= 2 * (plain.double() - truth).norm()


@pytest.mark.parametrize(("shape", "tokens"), CASES)
def test_errs_at_most_twice_as_much_as_plain_bfloat16_and_repeats_its_bits(shape, tokens):
    check(tokens_of(tokens, shape[1]), *linear(*shape, rank=8, with_bias=True))


@pytest.mark.parametrize(("rank", "starts"), [(8, (0,)), (20, (0, 128)), (32, (64, 128, 192)), (64, (0, 100))])
def test_any_rank_and_any_adapted_parts_of_a_fused_projection(rank, starts):
    check(tokens_of(5, 192), *linear(256, 192, rank, starts), starts)


@pytest.mark.parametrize("with_bias", [False, True])
def test_without_an_adapter_it_is_the_base_product(with_bias):
    check(tokens_of(9, 320), *linear(192, 320, with_bias=with_bias))


def test_rows_of_a_larger_weight():
    full_finetuning, _, _, _ = linear(320, 128)
    part = MarlinTensor(
        full_finetuning.weight[:, 2 * 64 : 2 * 256], full_finetuning.scale[:, 64:256], full_finetuning.global_scale
    )
    x = tokens_of(4, 128)
    assert torch.equal(decode_gemm_linear(x, part), decode_gemm_linear(x, full_finetuning)[:, 64:256])


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
    weight, bias, a, b = linear(320, 128, rank=8, with_bias=True)
    x = tokens_of(tile.width + 5, 128)
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, (0,), tile)
    expected = decode_gemm_linear_reference(x, weight, bias, a, b)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


SINGLE_PROCESS = Tile(
    64, tiles=1, programs=1, full_finetuning=True
)  # as few programs as small weights have row blocks for


@pytest.mark.parametrize(
    ("tile", "shape", "starts", "cut"),
    [
        (SINGLE_PROCESS, (576, 320), (0, 320), (1, 256, 1, 1, 8)),  # four blocks alone, five among all
        (SINGLE_PROCESS, (704, 384), (0,), (2, 512, 1, 0, 6)),  # eight alone, three among all but who multiplies by A
        (SINGLE_PROCESS, (512, 384), (0,), (2, 512, 3, 0, 0)),  # nothing is left to share
        (SINGLE_PROCESS, (320, 320), (0,), (0, 0, 1, 1, 8)),  # too little would be
        (SINGLE_PROCESS._replace(more=32), (576, 320), (0,), (1, 256, 3, 0, 25)),
    ],
)
def test_row_blocks_that_one_program_takes_and_those_that_are_shared(tile, shape, starts, cut):
    tokens = tile.width - 7
    plan = triton_decode_gemm.plan(tokens, *shape, 8 * len(starts), 4, tile)  # the interpreter's processors
    assert (plan.rounds, plan.alone, plan.shrinks, plan.longer, plan.run) == cut
    weight, bias, a, b = linear(*shape, 8, starts, with_bias=True)
    x = tokens_of(tokens, shape[1])
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile)
    expected = decode_gemm_linear_reference(x, weight, bias, a, b)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


@pytest.mark.parametrize(("rows", "alone"), [(512, 512), (576, 256)])
def test_rows_of_one_program_without_an_adapter_need_no_second_launch(rows, alone):
    weight, _, _, _ = linear(rows, 384)
    x = tokens_of(70, 384)  # two blocks of tokens: two programs each
    tile = SINGLE_PROCESS._replace(programs=2)
    assert triton_decode_gemm.plan(70, rows, 384, 0, 4, tile).alone == alone
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, None, None, None, (0,), tile)
    expected = decode_gemm_linear_reference(x, weight, None, None, None)
    assert (actual - expected).float().norm() <= 4e-3 * expected.float().norm()


GATED = [  # rows of gate and up; alone, where programs take row blocks alone
    (1, None, (384, 128), 8, 0),
    (8, None, (256, 128), 32, 0),
    (40, None, (256, 128), 8, 0),
    (64, None, (384, 64), 0, 0),
    (150, Tile(64, tiles=1), (256, 64), 32, 0),
    (100, Tile(128, tiles=1), (256, 64), 8, 0),  # one block of 128 tokens
    (
        24,
        Tile(32, tiles=1, steps=2, programs=1, full_finetuning=True),
        (640, 256),
        8,
        512,
    ),  # gate's all and some of up's
    (24, Tile(32, tiles=1, steps=2, programs=1, full_finetuning=True), (640, 128), 0, 256),  # some of gate's
    (192, Tile(128, 64, tiles=1, programs=1, full_finetuning=True), (512, 64), 8, 512),
]


@pytest.mark.parametrize(("tokens", "tile", "shape", "rank", "alone"), GATED)
def test_folded_into_the_product_the_activation_has_the_bits_that_it_has_after_it(tokens, tile, shape, rank, alone):
    starts = (0, shape[0] // 2)
    weight, bias, a, b = linear(*shape, rank, starts, with_bias=tokens != 40)
    assert DEVICE == "cuda" or triton_decode_gemm.plan(tokens, *shape, 2 * rank, 4, tile, True).alone == alone
    x = tokens_of(tokens, shape[1])
    actual = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile, gated=True)
    y = triton_decode_gemm.decode_gemm_linear(x, weight, bias, a, b, starts, tile)
    assert torch.equal(actual, silu_of_halves(y))
    expected = decode_gemm_linear_reference(x, weight, bias, a, b, gated=True)
    assert (actual - expected).float().norm() <= 8e-3 * expected.float().norm()


@pytest.mark.parametrize("starts", [(0,), (128,), (0, 100)])
def test_gate_or_up_alone_may_have_an_adapter_and_parts_begin_anywhere(starts):
    weight, bias, a, b = linear(256, 128, 8, starts, with_bias=True)
    x = tokens_of(5, 128)
    actual = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts, gated=True)
    assert torch.equal(actual, silu_of_halves(decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts)))


def test_halves_that_no_program_can_take_together_are_activated_after_the_product():
    weight, bias, a, b = linear(192, 128, 8, (0, 96), with_bias=True)
    x = tokens_of(5, 128)
    actual = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=(0, 96), gated=True)
    assert torch.equal(actual, silu_of_halves(decode_gemm_linear(x, weight, bias, a=a, b=b, starts=(0, 96))))


def test_a_program_of_two_row_blocks_takes_half_the_tokens():
    tokens = (8, 16, 32, 64, 100, 192, 256)
    chunks = [triton_decode_gemm.plan(count, 37888, 3584, 64, 132, gated=True).chunk for count in tokens]
    assert chunks == [8, 16, 16, 32, 64, 32, 32]


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "rounds"), [(22016, 2048, 0), (37888, 3584, 1), (27648, 5120, 0), (55296, 5120, 1)]
)
def test_cuts_of_real_layers_give_every_program_as_much(rows, columns, rounds, rank):
    tile = triton_decode_gemm.plan(192, rows, columns, 2 * rank, 132).tile
    assert tile.full_finetuning and tile.width == 192
    plan = triton_decode_gemm.plan(192, rows, columns, 2 * rank, 132)
    assert plan.rounds == rounds and plan.workers == 2 * 132
    steps, total = columns // 32, -(-rows // 128) * (columns // 32)
    a_steps = math.ceil(math.ceil(columns / 128) / plan.hidden_parts)
    longest = plan.rounds * steps + max(plan.run + (plan.longer > 0), 3 * a_steps // 4 + 2)
    assert longest <= 1.05 * (total + plan.shrinks * (3 * a_steps // 4 + 2)) / plan.workers
    assert plan.hidden_parts <= 4


def test_tokens_of_an_address_that_cannot_be_copied_from_give_the_same_product():
    weight, bias, a, b = linear(192, 320, 8, with_bias=True)
    x = tokens_of(70, 320)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    tile = Tile(64, tiles=2, copied=True)
    actual, expected = (
        triton_decode_gemm.decode_gemm_linear(one, weight, bias, a, b, (0,), tile) for one in (shifted, x)
    )
    assert shifted.data_ptr() % 16 and torch.equal(actual, expected)


@pytest.mark.parametrize("processors", [1, 4, 132])
@pytest.mark.parametrize("tile", [None, *TILES])
def test_a_plan_covers_the_weight_and_its_parts_fit(processors, tile):
    shapes = [(*shape, 24) for shape in SHAPES] + [(rows, columns, 32 * len(s)) for rows, columns, s in REAL.values()]
    for rows, columns, rank in shapes:
        for tokens in (1, 8, 17, 64, 65, 256):
            plan = triton_decode_gemm.plan(tokens, rows, columns, rank, processors, tile)
            steps, tiles = columns // plan.tile.columns, -(-rows // plan.tile.rows) - plan.rounds * plan.workers
            assert plan.tile.width * plan.token_blocks >= tokens and tiles >= 0
            assert plan.alone == plan.rounds * plan.workers * plan.tile.rows
            runs = [plan.run + 1] * plan.longer + [plan.run] * (plan.workers - plan.shrinks - plan.longer)
            takers = [program for program, run in enumerate(runs) for _ in range(run)]
            assert takers == [plan.program(step) for step in range(tiles * steps)]
            shared = [len(set(takers[first : first + steps])) for first in range(0, len(takers), steps)]
            assert max(shared, default=1) == plan.parts
            a_steps = math.ceil(columns / 128)
            assert plan.hidden_parts * math.ceil(a_steps / plan.hidden_parts) >= a_steps


def test_compiles_once_for_any_number_of_tokens():
    weight, bias, a, b = linear(128, 128, rank=8, with_bias=True)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def layer(x):
        y = decode_gemm_linear(x * 2, weight, bias, a=a, b=b) + 1
        return y, decode_gemm_linear(x * 2, weight, bias, a=a, b=b, gated=True)

    for tokens in (3, 9, 33):
        x = tokens_of(tokens, 128)
        y, activated = layer(x)
        assert torch.equal(y, decode_gemm_linear(x * 2, weight, bias, a=a, b=b) + 1)
        assert torch.equal(activated, decode_gemm_linear(x * 2, weight, bias, a=a, b=b, gated=True))
    assert len(graphs) == 1
    for gated in (False, True):
        arguments = (tokens_of(3, 128), *weight, bias, a, b, [0], gated)
        torch.library.opcheck(torch.ops.qerl.decode_gemm_linear.default, arguments, test_utils="test_faketensor")


def test_no_tokens_give_none():
    assert decode_gemm_linear(tokens_of(0, 64), *linear(64, 64)[:2]).shape == (0, 64)
    assert decode_gemm_linear(tokens_of(0, 64), linear(128, 64)[0], gated=True).shape == (0, 64)


def test_other_weights_types_and_backends_take_the_plain_way():
    mx = marlin.to_marlin(quantize_mxfp4((torch.randn(64, 64) * 0.05).bfloat16().to(DEVICE)))
    nv, _, _, _ = linear(64, 64)
    x = tokens_of(2, 64)
    assert decode_gemm_supported(nv) and not decode_gemm_supported(mx)
    assert torch.equal(decode_gemm_linear(x, mx), decode_gemm_linear_reference(x, mx, None, None, None))
    y = decode_gemm_linear(x.float(), nv)
    assert y.dtype == torch.float32 and torch.equal(y, decode_gemm_linear_reference(x.float(), nv, None, None, None))
    select_backend("torch")
    assert not decode_gemm_supported(nv)
    assert torch.equal(decode_gemm_linear(x, nv), decode_gemm_linear_reference(x, nv, None, None, None))
    gated = functional.silu(decode_gemm_linear(x, nv)[:, :32]) * decode_gemm_linear(x, nv)[:, 32:]
    assert torch.equal(decode_gemm_linear(x, nv, gated=True), gated)


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
    expected = decode_gemm_linear_reference(x, weight, bias, a, b)
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
@pytest.mark.parametrize("rank", [32, 0])
def test_a_real_mlp_is_activated_to_the_bits_of_its_product_and_pytorchs_activation(rank):
    rows, columns, starts = REAL["gate_up"]
    weight, bias, a, b = linear(rows, columns, rank, starts)
    for tokens in (1, 8, 16, 33, 64, 128, 192, 256):
        x = tokens_of(tokens, columns)
        gate, up = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts).chunk(2, dim=-1)
        for _ in range(REPEATS):
            actual = decode_gemm_linear(x, weight, bias, a=a, b=b, starts=starts, gated=True)
            assert torch.equal(actual, functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [8, 64, 192])
def test_a_product_that_starts_while_an_activation_is_written_waits_for_it(tokens):
    (rows, columns, starts), x = REAL["gate_up"], tokens_of(tokens, 3584)
    gate_up, _, a, b = linear(rows, columns, 32, starts)
    down, _, a2, b2 = linear(*REAL["down"][:2], 32)
    activated = decode_gemm_linear(x, gate_up, a=a, b=b, starts=starts, gated=True)
    torch.cuda.synchronize()
    expected = decode_gemm_linear(activated, down, a=a2, b=b2)
    for _ in range(REPEATS):
        activated = decode_gemm_linear(x, gate_up, a=a, b=b, starts=starts, gated=True)
        assert torch.equal(decode_gemm_linear(activated, down, a=a2, b=b2), expected)


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
