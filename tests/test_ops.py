"""The kernels' reference: bit for bit compressed-tensors' NVFP4 and MXFP4, and log-probabilities with gradients."""

import os
import subprocess
import sys

import plain_ops
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from poisoned import ruled_out
from qerl_kernels import (
    chunked_token_logprobs,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_nvfp4_unscaled,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
    select_backend,
    selected_backend,
)

NVFP4 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
)
MXFP4 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
)


def compressed(weight, scheme, fused=()):
    """What compressed-tensors stores for `weight`, whose global scale is shared with `fused`."""
    args, nvfp4 = scheme.weights, scheme is NVFP4
    group = torch.cat([weight, *fused])
    state = {"weight": weight}
    if nvfp4:
        state["weight_global_scale"] = generate_gparam(group.amin(), group.amax())
    blocks = weight.unflatten(1, (-1, args.group_size))
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    compressor = NVFP4PackedCompressor if nvfp4 else MXFP4PackedCompressor
    return compressor, compressor.compress(state, scheme)


def weights(kind, dtype, rows, columns):
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * 0.05
    if kind == "zeros":
        weight[: rows // 2] = 0
    elif kind == "underflow":  # most block scales round to zero beside one large weight
        weight *= 1e-3
        weight[0, 0] = 500.0
    elif kind == "ties":  # quarters of 6 hit every rounding boundary and -0.0
        weight = torch.randint(-24, 25, (rows, columns)) * 0.25
        weight[:, ::16] = 6.0
        weight[:, 1::16] = -0.0
    return weight.to(dtype)


SHAPES = [(1, 32), (7, 96), (64, 64), (130, 1056)]
KINDS = ["normal", "zeros", "underflow", "ties"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_is_bit_for_bit_that_of_compressed_tensors(shape, kind, dtype):
    weight = weights(kind, dtype, *shape)
    compressor, theirs = compressed(weight, NVFP4)
    ours = quantize_nvfp4(weight)
    assert torch.equal(ours.global_scale, theirs["weight_global_scale"])
    assert torch.equal(ours.scale.view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.packed, theirs["weight_packed"])
    dense = compressor.decompress(theirs, NVFP4)["weight"]
    assert torch.equal(dequantize_nvfp4(*ours, torch.bfloat16), dense)


def test_small_float16_weights_have_a_global_scale_above_the_range_of_float16():
    """llm-compressor divides in float16, where 2688 / amax overflows below 0.041, and stores 1: most codes are 0."""
    weight = weights("normal", torch.float16, 64, 64) / 20
    assert weight.abs().max() < 0.011
    ours, exact = quantize_nvfp4(weight), quantize_nvfp4(weight.float())
    assert torch.equal(ours.global_scale, exact.global_scale)
    error = (dequantize_nvfp4(*ours, torch.float32) - weight).square().sum() / weight.square().sum()
    assert error < 0.01
    assert nvfp4_global_scale(torch.zeros(1, 16, dtype=torch.float16)).tolist() == [1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_projections_share_the_global_scale_of_their_largest_weight(dtype):
    q, k = weights("normal", dtype, 32, 64), weights("normal", dtype, 16, 64) * 3
    _, theirs = compressed(q, NVFP4, fused=[k])
    shared = nvfp4_global_scale(q, k)
    assert torch.equal(shared, theirs["weight_global_scale"])
    assert shared < nvfp4_global_scale(q)
    ours = quantize_nvfp4(q, shared)
    assert torch.equal(ours.packed, theirs["weight_packed"])
    assert torch.equal(ours.scale.float(), theirs["weight_scale"].float())


def test_nvfp4_worked_by_hand():
    block = [0.25, -0.25, 0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0, -6.0, 0.26, -0.1, 0.0, -0.0, 3.0, 4.0]
    ours = quantize_nvfp4(torch.tensor([block]))
    # amax 6 gives the divisor 2688 / 6 and the scale 448: one unit is 1, ties go to the even code.
    assert ours.global_scale.tolist() == [448.0] and ours.scale.float().tolist() == [[448.0]]
    assert ours.packed.tolist() == [[0x80, 0x22, 0x44, 0x6E, 0xF7, 0x81, 0x00, 0x65]]
    rounded = [0, -0.0, 1, 1, 2, 2, -4, 4, 6, -6, 0.5, -0.0, 0, 0, 3, 4]
    assert dequantize_nvfp4(*ours, torch.float32).tolist() == [rounded]
    assert dequantize_nvfp4_unscaled(ours.packed, ours.scale, torch.float32).tolist() == [[448 * v for v in rounded]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_unscaled_weight_is_exact_in_sixteen_bits(kind, dtype):
    ours = quantize_nvfp4(weights(kind, torch.bfloat16, 32, 128))
    exact = dequantize_nvfp4_unscaled(ours.packed, ours.scale, torch.float32)
    assert torch.equal(dequantize_nvfp4_unscaled(ours.packed, ours.scale, dtype).float(), exact)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_bit_for_bit_that_of_compressed_tensors(shape, kind, dtype):
    weight = weights(kind, dtype, *shape)
    compressor, theirs = compressed(weight, MXFP4)
    ours = quantize_mxfp4(weight)
    assert torch.equal(ours.scale, theirs["weight_scale"])
    assert torch.equal(ours.packed, theirs["weight_packed"])
    assert torch.equal(dequantize_mxfp4(*ours, torch.bfloat16), compressor.decompress(theirs, MXFP4)["weight"])


@pytest.mark.parametrize("shape", [(4, 24), (16,), (2, 4, 16)])
def test_a_weight_that_does_not_divide_into_blocks_is_refused(shape):
    with pytest.raises(ValueError, match="NVFP4 needs a matrix .*16, got shape .*leave"):
        quantize_nvfp4(torch.zeros(shape))


def head_inputs(dtype, tokens=11, hidden=6, vocabulary=17):
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    return x, head, torch.randint(vocabulary, (tokens,))


def test_log_probability_and_entropy_worked_by_hand():
    # Logits (ln 1, ln 3) / 1 at one position give probabilities 1/4 and 3/4.
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0986123]])
    for op in (plain_ops.token_logprobs, chunked_token_logprobs):
        logprob, entropy = op(hidden, head, torch.tensor([1]))
        assert logprob.item() == pytest.approx(-0.2876821, abs=1e-6)
        assert entropy.item() == pytest.approx(0.5623351, abs=1e-6)
        # At temperature 1/2 the odds 1 : 3 become 1 : 9.
        assert op(hidden, head, torch.tensor([1]), 0.5)[0].item() == pytest.approx(-0.1053605, abs=1e-6)
        # tanh(ln 3) is 0.8: with a soft cap of 1 the odds become 1 : e^0.8.
        capped = op(hidden, head, torch.tensor([1]), soft_cap=1.0)[0].item()
        assert capped == pytest.approx(-0.3711007, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_chunked_log_probabilities_and_gradients_equal_the_plain_ones(chunk, soft_cap):
    x, head, targets = head_inputs(torch.float64)
    plain = plain_ops.token_logprobs(x, head, targets, 0.7, soft_cap)
    chunked = chunked_token_logprobs(x, head, targets, 0.7, chunk=chunk, soft_cap=soft_cap)
    torch.testing.assert_close(chunked, plain)
    torch.manual_seed(2)
    weights = torch.randn(2, 11, dtype=torch.float64)
    expected = torch.autograd.grad((torch.stack(plain) * weights).sum(), (x, head))
    actual = torch.autograd.grad((torch.stack(chunked) * weights).sum(), (x, head))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_chunked_log_probabilities_pass_gradcheck(soft_cap):
    x, head, targets = head_inputs(torch.float64, tokens=5)
    options = {"chunk": 2, "soft_cap": soft_cap}
    assert torch.autograd.gradcheck(lambda x, head: chunked_token_logprobs(x, head, targets, 1.3, **options), (x, head))


def test_a_token_that_is_ruled_out_leaves_the_others_finite():
    x, head, targets = head_inputs(torch.float32)
    targets[:] = 3
    hidden, weight = ruled_out(x, head, [5])
    logprob, entropy = chunked_token_logprobs(hidden, weight, targets, 1.0, chunk=4)
    (logprob + entropy).sum().backward()
    assert bool(torch.isfinite(torch.cat([logprob, entropy, x.grad.flatten(), head.grad.flatten()])).all())
    torch.testing.assert_close((logprob, entropy), plain_ops.token_logprobs(hidden, weight, targets))


def test_half_precision_gradients_are_as_good_as_the_plain_way():
    x, head, targets = head_inputs(torch.float32, tokens=64, hidden=32, vocabulary=200)
    truth = torch.autograd.grad(sum(o.sum() for o in plain_ops.token_logprobs(x, head, targets)), x)[0]
    low = [t.detach().bfloat16().requires_grad_() for t in (x, head)]
    errors = []
    for op in (plain_ops.token_logprobs, chunked_token_logprobs):
        gradient = torch.autograd.grad(sum(o.sum() for o in op(*low, targets)), low[0])[0]
        errors.append((gradient.float() - truth).norm() / truth.norm())
    assert errors[1] <= 2 * errors[0]


def test_temperature_zero_is_refused():
    x, head, targets = head_inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        chunked_token_logprobs(x, head, targets, 0.0)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_without_the_entropys_gradient_the_log_probabilitys_is_the_same(soft_cap):
    x, head, targets = head_inputs(torch.float64)
    head = head.detach()
    options = {"chunk": 4, "entropy_gradient": False, "soft_cap": soft_cap}
    logprob, entropy = chunked_token_logprobs(x, head, targets, 0.7, **options)
    plain, plain_entropy = plain_ops.token_logprobs(x, head, targets, 0.7, soft_cap)
    torch.testing.assert_close((logprob, entropy), (plain, plain_entropy))
    assert not entropy.requires_grad
    weights = torch.linspace(-1, 1, 11, dtype=torch.float64)
    expected = torch.autograd.grad((plain * weights).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((logprob * weights).sum(), x), expected)


def test_the_package_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import qerl_kernels as ops
tensor = ops.quantize_nvfp4(torch.ones(2, 16))
assert ops.frozen_linear(torch.ones(1, 16), ops.NVFP4Weight(tensor)).tolist() == [[16.0, 16.0]]
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_a_backend_that_cannot_run_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="'triton' needs the package triton and a GPU .*select the backend 'torch'"):
        select_backend("triton")
    assert selected_backend() == "torch"
