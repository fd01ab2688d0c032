"""Edges of the 4-bit formats, worked by hand, and what each path of the log-probabilities costs and passes on."""

import plain_ops
import pytest
import torch
from qerl_kernels import MarlinRows, MarlinTensor, marlin, reference
from qerl_kernels.logprob import chunked_token_logprobs, default_chunk
from torch.utils._python_dispatch import TorchDispatchMode


def test_global_scales_by_hand():
    fives = torch.full((1, 16), 5.0)
    assert reference.nvfp4_global_scale(fives).item() == pytest.approx(537.6)  # 448 * 6 / 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_global_scale_that_is_not_finite_is_one(value, dtype):
    assert reference.nvfp4_global_scale(torch.full((1, 16), value, dtype=dtype)).tolist() == [1.0]


def test_weights_that_cannot_share_a_global_scale_are_refused():
    weight = torch.ones(1, 16)
    with pytest.raises(ValueError, match=r"one dtype, got \['torch.bfloat16', 'torch.float32'\]"):
        reference.nvfp4_global_scale(weight, weight.bfloat16())
    with pytest.raises(ValueError, match=r"one dtype, got \[\]"):
        reference.nvfp4_global_scale()


def test_a_block_beyond_its_global_scale_is_held_at_the_largest_scale():
    packed, scale, _ = reference.quantize_nvfp4(torch.full((1, 16), 12.0), torch.tensor([448.0]))
    assert scale.tolist() == [[448.0]] and packed.tolist() == [[0x77] * 8]  # sixes: 6 * 448 / 448


@pytest.mark.parametrize("quantize", [reference.quantize_nvfp4, reference.quantize_mxfp4])
def test_a_weight_quantized_in_parts_is_that_quantized_at_once(quantize, monkeypatch):
    weight = torch.linspace(-3, 3, 5 * 64).view(5, 64)
    full = quantize(weight)
    assert full.packed.dtype == torch.uint8 and full.packed.shape == (5, 32)
    monkeypatch.setattr(reference, "CPU_BLOCKS", 3)
    for part, expected in zip(quantize(weight), full, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("quantize", [reference.quantize_nvfp4, reference.quantize_mxfp4])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_weight_is_left_as_it_was(quantize, rows, monkeypatch):
    monkeypatch.setattr(reference, "CPU_BLOCKS", 3)  # of four blocks one is left for a part of its own
    weight = torch.linspace(-3, 3, rows * 32).view(rows, 32)[:, : 16 if quantize is reference.quantize_nvfp4 else 32]
    weight = weight.contiguous()
    before = weight.clone()
    quantize(weight)
    assert torch.equal(weight, before)


def test_mxfp4_refuses_by_its_own_name_and_gives_the_dtype_it_is_asked_for():
    with pytest.raises(ValueError, match=r"^MXFP4 needs a matrix whose columns are a multiple of 32"):
        reference.quantize_mxfp4(torch.zeros(2, 16))
    tensor = reference.quantize_mxfp4(torch.ones(2, 32))
    assert reference.dequantize_mxfp4(*tensor, torch.bfloat16).dtype == torch.bfloat16


def test_code_eight_is_minus_zero_and_scale_zero_the_smallest_power():
    assert torch.signbit(reference.e2m1_values(torch.tensor([0, 8]))).tolist() == [False, True]
    powers = reference.e8m0_values(torch.tensor([0, 1, 127, 254], dtype=torch.uint8))
    assert powers.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


def test_marlins_scales_by_hand():
    def scales(*values):
        return torch.tensor([values]).to(torch.float8_e4m3fn)

    # The largest goes up to at most 448 by powers of two; what stays below 2**-6 after that is zero.
    assert [plain_ops.scale_factor(scales(x)) for x in (448.0, 240.0, 224.0, 56.0, 0.0)] == [1.0, 1.0, 2.0, 8.0, 1.0]
    for given, seen in (((448.0, 2.0**-7), (448.0, 0.0)), ((448.0, 2.0**-6),) * 2, ((56.0, 2.0**-9),) * 2):
        held = plain_ops.marlin_scale(scales(*given))
        assert held.dtype == torch.float8_e4m3fn and held.float().tolist() == [list(seen)]
    assert marlin.marlin_alpha(None) == 1.0


def test_a_whole_marlin_weight_is_read_by_default_and_no_other_slice():
    tensor = reference.quantize_nvfp4(torch.linspace(-1, 1, 128 * 16).view(128, 16))
    words, scale, _ = plain_ops.to_marlin(tensor)
    full = reference.dequantize_nvfp4_unscaled(tensor.packed, tensor.scale, torch.float32)
    assert torch.equal(marlin.dequantize_marlin(words, scale, torch.float32), full)
    for start, stop in ((0, 100), (64, 64), (-64, 64), (64, 192), (32, 128)):
        for read in (
            lambda *rows: marlin.dequantize_marlin(words, scale, torch.float32, *rows),
            lambda *rows: MarlinRows(MarlinTensor(words, scale, None), *rows),
        ):
            with pytest.raises(ValueError, match=rf"multiples of 64 .*got \[{start}:{stop}\]; keep an own copy"):
                read(start, stop)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("trained", "entropy_gradient", "products"),
    [
        ((), False, 2),  # its gradient is made in forward
        ((), True, 3),  # the logits twice, and one product for the gradient
        (("head",), False, 4),
        (("head",), True, 4),
    ],
)
def test_each_path_passes_on_its_gradients_at_its_price(trained, entropy_gradient, products):
    torch.manual_seed(1)
    leaves = {"hidden": torch.randn(5, 6), "head": torch.randn(17, 6)}
    wanted = [leaves[name].requires_grad_() for name in ("hidden", *trained)]
    targets = torch.tensor([0, 3, 16, 3, 8])
    plain, plain_entropy = plain_ops.token_logprobs(leaves["hidden"], leaves["head"], targets, 0.7)
    expected = torch.autograd.grad(plain.sum() + entropy_gradient * plain_entropy.sum(), wanted)
    with Products() as products_made:
        logprob, entropy = chunked_token_logprobs(
            leaves["hidden"], leaves["head"], targets, 0.7, entropy_gradient=entropy_gradient
        )
        result = torch.autograd.grad(logprob.sum() + entropy_gradient * entropy.sum(), wanted)
    assert entropy.requires_grad == entropy_gradient and products_made.count == products
    torch.testing.assert_close(result, expected)


def test_a_trained_head_on_frozen_hidden_states_costs_no_gradient_of_those():
    hidden, head = torch.randn(5, 6), torch.randn(17, 6, requires_grad=True)
    with Products() as products:
        chunked_token_logprobs(hidden, head, torch.arange(5))[0].sum().backward()
    assert products.count == 3  # the logits twice, and the head's


@pytest.mark.parametrize(("tokens", "chunk", "total"), [(512, 1, 256), (1542, 514, 768)])
def test_sums_over_chunks_keep_what_half_precision_would_lose(tokens, chunk, total):
    # Odds of 1 : 1, so that each token adds 1/2. In bfloat16 a half no longer adds to 128, and 257, what 514 tokens
    # add up to, is 256: a product of a chunk is bfloat16 all the same.
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_token_logprobs(hidden, head, torch.zeros(tokens, dtype=torch.int64), chunk=chunk)[0].sum().backward()
    assert head.grad.dtype == torch.bfloat16 and head.grad.tolist() == [[total], [-total]]


def test_without_a_gradient_there_is_one_product():
    hidden, head = torch.randn(5, 6), torch.randn(17, 6)
    for needs, enabled in ((False, True), (True, False)):
        with torch.set_grad_enabled(enabled), Products() as products:
            chunked_token_logprobs(hidden.requires_grad_(needs), head, torch.arange(5), entropy_gradient=False)
        assert products.count == 1


def test_log_probabilities_of_half_precision_are_float32():
    hidden, head = torch.randn(5, 6).bfloat16(), torch.randn(17, 6).bfloat16()
    assert [x.dtype for x in plain_ops.token_logprobs(hidden, head, torch.arange(5))] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("vocabulary", "chunk"), [(65536, 256), (81920, 256), (152064, 128), (10**6, 20), (4 * 10**7, 1)]
)
def test_a_chunk_fits_its_memory_by_hand(vocabulary, chunk):
    # 320 MiB hold 335544320 / (16 * vocabulary) tokens of float32: 320, 256, 137.9, 20.97 and 0.52.
    hidden, head = torch.empty(1, 8, device="meta"), torch.empty(vocabulary, 8, device="meta")
    assert default_chunk(hidden, head) == chunk
