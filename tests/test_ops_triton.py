"""The Triton kernels against the reference: on a GPU, or on a CPU in Triton's interpreter.

Output buffers start poisoned (deterministic mode fills them with NaN), so an element that no kernel writes is seen.
"""

from typing import Any

import plain_ops
import pytest
import torch
import triton
import triton.language as tl
from poisoned import ruled_out, triton_on_poisoned_memory
from qerl_kernels import (
    AdaptedWeight,
    DenseWeight,
    LoraFactors,
    MarlinRows,
    NVFP4Weight,
    chunked_token_logprobs,
    dequantize_marlin,
    dequantize_mxfp4,
    dequantize_nvfp4_unscaled,
    frozen_linear,
    frozen_linears,
    marlin,
    quantize_mxfp4,
    quantize_nvfp4,
    reference,
    selected_backend,
    triton_dequantize,
    triton_launch,
)
from qerl_kernels.backend import triton_available
from qerl_kernels.logprob import default_chunk

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 32), (3, 96), (130, 160), (64, 3584)]
MARLIN_SHAPES = [(64, 32), (128, 96), (192, 224), (512, 256)]
if DEVICE == "cuda":  # too slow in the interpreter: a 7B model's layers
    REAL = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]
    SHAPES, MARLIN_SHAPES = SHAPES + REAL, MARLIN_SHAPES + REAL
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tuned(op, *args, **options):
    """What the launch that was kept writes: on a GPU, the first call of a size tries every choice on its output."""
    if DEVICE == "cuda":
        op(*args, **options)
    return op(*args, **options)


def weight(rows, columns, dtype=torch.bfloat16):
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * 0.05
    weight[:, :32] *= 1e-5  # scales at and below E4M3's subnormals
    weight[rows // 2, -32:] = 0
    weight[-1, -16:] = torch.arange(-8, 8) * 0.0125  # ties
    return weight.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_for_bit_the_references(shape, dtype):
    packed, scale, _ = reference.quantize_nvfp4(weight(*shape))
    expected = reference.dequantize_nvfp4_unscaled(packed, scale, dtype)
    assert torch.equal(tuned(dequantize_nvfp4_unscaled, packed, scale, dtype), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_mxfp4_is_bit_for_bit_the_references(shape):
    packed, scale = quantize_mxfp4(weight(*shape))
    expected = reference.dequantize_mxfp4(packed, scale, torch.bfloat16)
    assert torch.equal(tuned(dequantize_mxfp4, packed, scale, torch.bfloat16), expected)
    scale[0, 0] = 0  # the subnormal 2**-127
    expected = reference.dequantize_mxfp4(packed, scale, torch.float32)
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float32), expected)


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("shape", MARLIN_SHAPES)
def test_dequantize_marlin_is_bit_for_bit_the_references(shape, mx):
    source = weight(*shape)
    words, scale, _ = plain_ops.to_marlin(quantize_mxfp4(source) if mx else reference.quantize_nvfp4(source))
    for start in range(0, shape[0], max(64, shape[0] // 192 * 64)):
        expected = marlin.dequantize_marlin(words, scale, torch.bfloat16, start, mx=mx)
        assert torch.equal(tuned(dequantize_marlin, words, scale, torch.bfloat16, start, mx=mx), expected)
    expected = marlin.dequantize_marlin(words, scale, torch.float32, 0, 64, mx=mx)
    assert torch.equal(dequantize_marlin(words, scale, torch.float32, 0, 64, mx=mx), expected)


CHOICES = [("_rows", choice) for choice in triton_dequantize._rows._choices]
CHOICES += [("_marlin", choice) for choice in triton_dequantize._marlin._choices]


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize(("kernel", "choice"), CHOICES)
def test_every_choice_of_tiles_gives_the_same_bits(monkeypatch, kernel, choice, mx):
    function = getattr(triton_dequantize, kernel)._kernel
    monkeypatch.setattr(triton_dequantize, kernel, triton_launch.Tuned(function, [choice]))
    tensor = (quantize_mxfp4 if mx else reference.quantize_nvfp4)(weight(128, 352))
    if kernel == "_rows":
        op, truth = (
            (dequantize_mxfp4, reference.dequantize_mxfp4)
            if mx
            else (dequantize_nvfp4_unscaled, reference.dequantize_nvfp4_unscaled)
        )
        inputs, options = tensor[:2], {}
    else:
        op, truth = dequantize_marlin, marlin.dequantize_marlin
        inputs, options = plain_ops.to_marlin(tensor)[:2], {"mx": mx}
    actual = tuned(op, *inputs, torch.bfloat16, **options)
    assert torch.equal(actual, truth(*inputs, torch.bfloat16, **options))


def writing(*values: float, rows: int = 4) -> Any:
    """A launch that writes values into the first rows of its result, in place of a kernel."""
    return lambda source, out, count: out[:rows].copy_(torch.tensor(values, dtype=out.dtype, device=out.device))


RIGHT, WRONG, OTHER = writing(1.0, -0.0), writing(1.0, 0.0), writing(2.0, 0.0)
HALF = writing(1.0, -0.0, rows=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("launches", "kept"),
    [
        ([RIGHT, RIGHT, RIGHT], [0, 1, 2]),
        ([RIGHT, WRONG, RIGHT], [0, 2]),
        ([WRONG, RIGHT, OTHER, RIGHT], [1, 3]),
        ([RIGHT, HALF], [0]),  # what it does not write was written by the one before
        ([HALF, RIGHT, RIGHT], [1, 2]),
        ([writing(float("nan"), 1.0), RIGHT, RIGHT], [1, 2]),
        ([RIGHT, OTHER], [0]),
    ],
)
def test_only_choices_with_the_result_of_most_are_tuned(caplog, launches, kept, dtype):
    out = torch.zeros(4, 2, dtype=dtype, device=DEVICE)
    found = triton_launch.agreeing(launches, (torch.zeros(3, device=DEVICE), out, 7))
    assert [id(launch) for launch in found] == [id(launches[index]) for index in kept]
    assert ("some give other results" in caplog.text) == (len(kept) < len(launches))


@triton.jit
def _halved_kernel(source, out, count, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """out = source / 2, of the first WRITE elements of each block."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < count) & (tl.arange(0, BLOCK) < WRITE)
    tl.store(out + i, tl.load(source + i, mask=inside) * 0.5, mask=inside)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_choice_is_not_taken_though_it_is_the_fastest(wrong):
    choices = [({"WRITE": 1024, "BLOCK": 1024}, warps) for warps in (4, 8)]
    choices.insert(wrong, ({"WRITE": 1, "BLOCK": 1024}, 4))
    kernel = triton_launch.Tuned(_halved_kernel, choices)
    source, out = torch.randn(1 << 22, device=DEVICE), torch.empty(1 << 22, device=DEVICE)
    kernel.tune("key", (source, out, len(out)), lambda meta: (triton.cdiv(len(out), meta["BLOCK"]), 1, 1))
    assert torch.equal(out, source / 2)
    out.zero_()
    kernel.get("key")(source.data_ptr(), out.data_ptr(), len(out))
    assert torch.equal(out, source / 2)


def test_every_code_and_every_scale_expands_as_the_reference():
    scale = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).reshape(127, 1)
    packed = torch.arange(8, dtype=torch.uint8, device=DEVICE) * 0x22 + 0x10
    packed = packed.expand(127, 8).contiguous()
    expected = reference.dequantize_nvfp4_unscaled(packed, scale, torch.bfloat16)
    assert torch.equal(dequantize_nvfp4_unscaled(packed, scale, torch.bfloat16), expected)


def test_linear_runs_on_the_kernels():
    torch.manual_seed(0)
    tensor = quantize_nvfp4(weight(128, 96, torch.float32))
    x = torch.randn(5, 96, device=DEVICE, requires_grad=True)
    y = frozen_linear(x, NVFP4Weight(tensor))
    expected = x @ reference.dequantize_nvfp4(*tensor, torch.float32).T
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


def head(dtype, tokens, vocabulary, width=32):
    torch.manual_seed(1)
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    lm_head = torch.randn(vocabulary, width, device=DEVICE).to(dtype).requires_grad_()
    return hidden, lm_head, torch.randint(vocabulary, (tokens,), device=DEVICE)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(("tokens", "vocabulary", "chunk"), [(1, 17, 8), (9, 5000, 4), (7, 4096, 7)])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_log_probabilities_and_gradients_equal_the_plain_ones(tokens, vocabulary, chunk, temperature, soft_cap):
    hidden, lm_head, targets = head(torch.float32, tokens, vocabulary)
    plain = plain_ops.token_logprobs(hidden, lm_head, targets, temperature, soft_cap)
    ours = chunked_token_logprobs(hidden, lm_head, targets, temperature, chunk=chunk, soft_cap=soft_cap)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    torch.manual_seed(2)
    weights = torch.randn(2, 1, device=DEVICE)  # broadcast: gradients arrive with stride 0
    expected = torch.autograd.grad((torch.stack(plain) * weights).sum(), (hidden, lm_head))
    actual = torch.autograd.grad((torch.stack(ours) * weights).sum(), (hidden, lm_head))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_ruled_out_block_of_tokens_leaves_the_others_finite():
    x, lm_head, targets = head(torch.float32, 3, 5000)
    hidden, lm_head = ruled_out(x, lm_head, range(4200))  # the whole first block and more
    targets[:] = 4500
    plain = plain_ops.token_logprobs(hidden, lm_head, targets)
    ours = chunked_token_logprobs(hidden, lm_head, targets)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert bool(torch.isfinite(torch.autograd.grad(sum(o.sum() for o in ours), x)[0]).all())


def test_a_chunk_of_log_probabilities_holds_nothing_beside_its_logits():
    hidden, lm_head = (torch.empty(rows, 8, dtype=torch.bfloat16, device=DEVICE) for rows in (1, 81920))
    assert default_chunk(hidden, lm_head) == 2048  # 320 MiB / (2 * 81920)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_half_precision_log_probabilities_err_at_most_twice_as_much_as_the_plain_way(soft_cap):
    hidden, lm_head, targets = head(torch.bfloat16, 16, 700)
    lm_head = lm_head.detach()
    results = []
    for op, cast, options in (
        (plain_ops.token_logprobs, torch.float64, {}),
        (plain_ops.token_logprobs, torch.bfloat16, {}),
        (chunked_token_logprobs, torch.bfloat16, {"chunk": 5}),
        (chunked_token_logprobs, torch.bfloat16, {"chunk": 5, "entropy_gradient": False}),
    ):
        x = hidden.detach().to(cast).requires_grad_()
        logprob, entropy = op(x, lm_head.to(cast), targets, 0.9, soft_cap=soft_cap, **options)
        results.append([t.double() for t in (logprob, entropy, torch.autograd.grad(logprob.sum(), x)[0])])
    truth, low, *ours = results
    for result in ours:
        for actual, plain_low, exact in zip(result, low, truth, strict=True):
            assert (actual - exact).norm() <= 2 * (plain_low - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_log_probabilities_of_a_real_vocabulary_take_bounded_memory():
    hidden, lm_head, targets = head(torch.bfloat16, 4096, 152064, width=3584)
    lm_head = lm_head.detach() * 0.02
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprob, entropy = chunked_token_logprobs(hidden, lm_head, targets, entropy_gradient=False)
    logprob.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
    truth, exact = plain_ops.token_logprobs(hidden[:64].float(), lm_head.float(), targets[:64])
    torch.testing.assert_close(logprob[:64], truth, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(entropy[:64], exact, rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(4608, 3584), (3584, 18944)])
def test_a_real_layers_gradients_err_at_most_twice_as_much_as_plain_bfloat16(shape):
    tensor = quantize_nvfp4(weight(*shape))
    own, engines = NVFP4Weight(tensor), MarlinRows(plain_ops.to_marlin(tensor))
    factors = [torch.randn(32, shape[1], device=DEVICE) * 0.02, torch.randn(shape[0], 32, device=DEVICE) * 0.02]
    x0, g0 = torch.randn(512, shape[1], device=DEVICE), torch.randn(512, shape[0], device=DEVICE)

    def plain(x, a, b):
        dense = reference.dequantize_nvfp4(*tensor, torch.float32).to(x.dtype)
        return x @ dense.T + 2 * (x @ a.to(x.dtype).T) @ b.to(x.dtype).T

    ops = [
        (plain, torch.float64),
        (plain, torch.bfloat16),
        (lambda x, a, b: frozen_linear(x, own, lora=LoraFactors(a, b, 2.0)), torch.bfloat16),
        (lambda x, a, b: frozen_linear(x, engines, lora=LoraFactors(a, b, 2.0)), torch.bfloat16),
    ]
    results = []
    for op, dtype in ops:
        x, a, b = (t.detach().clone().requires_grad_() for t in (x0.to(dtype), *factors))
        y = op(x, a, b)
        results.append([t.double() for t in (y, *torch.autograd.grad(y, (x, a, b), g0.to(dtype)))])
    truth, low, *ours = results
    for result in ours:
        for actual, plain_low, exact in zip(result, low, truth, strict=True):
            assert (actual - exact).norm() <= 2 * (plain_low - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [(3584, 512, 512), (18944, 18944)])
@pytest.mark.parametrize("rank", [4, 32])
def test_a_real_layers_linears_on_one_input_err_no_more_than_one_by_one(rows, rank, tokens=512, columns=3584):
    held = [DenseWeight(weight(count, columns)) for count in rows]
    factors = [torch.randn(rank, columns, device=DEVICE) * 0.02 for _ in rows]
    factors += [torch.randn(count, rank, device=DEVICE) * 0.02 for count in rows]
    x0, g0 = (torch.randn(tokens, count, device=DEVICE) for count in (columns, sum(rows)))

    def one_by_one(x, a, b):
        return [frozen_linear(x, w, lora=LoraFactors(*ab, 2.0)) for w, *ab in zip(held, a, b, strict=True)]

    def together(x, a, b):
        return frozen_linears(x, a, [AdaptedWeight(w, None, one, 2.0) for w, one in zip(held, b, strict=True)])

    results = []
    for op, dtype in ((one_by_one, torch.float64), (one_by_one, torch.bfloat16), (together, torch.bfloat16)):
        x, *ab = (t.detach().clone().requires_grad_() for t in (x0.to(dtype), *factors))
        y = op(x, ab[: len(rows)], ab[len(rows) :])
        found = torch.autograd.grad(y, (x, *ab), g0.to(dtype).split(rows, 1))
        results.append([t.double() for t in (*found, *y)])
    truth, alone, ours = results
    for index, (actual, before, exact) in enumerate(zip(ours, alone, truth, strict=True)):
        assert (actual - exact).norm() <= (0.97 if index == 0 else 1.05) * (before - exact).norm()


def test_the_backend_is_what_was_selected():
    assert selected_backend() == "triton" and triton_available()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_quantizing_on_a_gpu_writes_the_bytes_of_a_cpu():
    x = weight(4608, 3584)
    for ours, theirs in zip(quantize_nvfp4(x), quantize_nvfp4(x.cpu()), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
