"""Marlin's layout and the linear layers on 4-bit weights, against plain references."""

import pytest
import torch
from plain_ops import marlin_scale, to_marlin
from qerl_kernels import (
    AdaptedWeight,
    DenseWeight,
    LoraFactors,
    MarlinRows,
    MXFP4Weight,
    NVFP4Weight,
    dequantize_marlin,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_nvfp4_unscaled,
    frozen_linear,
    frozen_linears,
    marlin_alpha,
    quantize_mxfp4,
    quantize_nvfp4,
    selective_checkpoint_contexts,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def weight(rows, columns, seed=0):
    torch.manual_seed(seed)
    return (torch.randn(rows, columns) * 0.05).bfloat16()


def repacked(packed):
    """Marlin's words by vLLM's own steps: 16 x 16 tiles, each 4 of them permuted, eight codes a word."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1).T.long()  # [K, N]
    k, n = codes.shape
    tiles = codes.reshape(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(k // 16, -1)
    order = []
    for lane in range(32):
        rows = [2 * (lane % 4) + r for r in (0, 1, 8, 9)]
        base = [16 * row + lane // 4 + 8 * half for half in (0, 1) for row in rows]
        order += [b + 256 * tile for tile in range(4) for b in base]
    order = torch.tensor(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    tiles = tiles.reshape(-1, len(order))[:, order].reshape(k // 16, -1, 8)
    words = sum(tiles[..., i] << 4 * i for i in range(8))
    return (words - ((words >> 31) << 32)).int()


def permuted(scale):
    """Marlin's order of scales by vLLM's own steps."""
    order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    columns = scale.T.reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]]
    return columns.reshape(scale.shape[1], scale.shape[0])


@pytest.mark.parametrize("shape", [(64, 16), (192, 80), (128, 256)])
def test_marlin_words_and_scales_are_those_of_vllm(shape):
    tensor = quantize_nvfp4(weight(*shape))
    marlin = to_marlin(tensor)
    assert torch.equal(marlin.weight, repacked(tensor.packed))
    stored = (permuted(tensor.scale.half()) * 2.0**7).view(torch.int16) >> 7  # the largest scale is 448: factor 1
    assert torch.equal(marlin.scale.view(torch.uint8), stored.to(torch.uint8))


@pytest.mark.parametrize("rows", [(0, 192), (64, 192), (64, 128)])
def test_row_slices_of_marlins_layout_are_the_weight(rows):
    tensor = quantize_nvfp4(weight(192, 80))
    marlin = to_marlin(tensor)
    dense = dequantize_marlin(marlin.weight, marlin.scale, torch.bfloat16, *rows)
    assert torch.equal(dense, dequantize_nvfp4_unscaled(tensor.packed, tensor.scale, torch.bfloat16)[slice(*rows)])
    assert MarlinRows(marlin, *rows).alpha == marlin_alpha(marlin.global_scale) == NVFP4Weight(tensor).alpha


def test_marlin_scales_weights_up_and_drops_scales_it_cannot_hold():
    tensor = quantize_nvfp4(weight(64, 64))
    small = tensor.scale.float() * 0.125  # the largest is 56, so the factor is 8
    small[0, :2] = torch.tensor([2.0**-9, 2.0**-8])  # eight times these is 2**-6, which stays, and 2**-5
    tensor = tensor._replace(scale=small.to(torch.float8_e4m3fn))
    marlin = to_marlin(tensor)
    seen = dequantize_nvfp4_unscaled(tensor.packed, marlin_scale(tensor.scale), torch.float32)
    scaled = dequantize_marlin(marlin.weight, marlin.scale, torch.float32) * marlin_alpha(marlin.global_scale)
    torch.testing.assert_close(scaled, seen * NVFP4Weight(tensor).alpha, rtol=0, atol=0)
    full = quantize_nvfp4(weight(64, 64))
    fine = full.scale.clone()
    fine[3, 1] = 2.0**-7
    assert marlin_scale(fine)[3, 1].float() == 0 and fine[3, 1].float() == 2.0**-7
    lost = to_marlin(full._replace(scale=fine))
    assert dequantize_marlin(lost.weight, lost.scale, torch.float32)[3, 16:32].abs().max() == 0


def test_mxfp4_reads_alike_from_both_layouts():
    tensor = quantize_mxfp4(weight(128, 96))
    marlin = to_marlin(tensor)
    assert torch.equal(marlin.weight, repacked(tensor.packed))
    assert torch.equal(marlin.scale, permuted(tensor.scale))
    dense = dequantize_marlin(marlin.weight, marlin.scale, torch.bfloat16, 64, mx=True)
    assert torch.equal(dense, dequantize_mxfp4(tensor.packed, tensor.scale, torch.bfloat16)[64:])


def layer(dtype, bias=True, tokens=(3, 5), rows=128, columns=96, rank=4):
    tensor = quantize_nvfp4(weight(rows, columns))
    torch.manual_seed(1)
    x = torch.randn(*tokens, columns, dtype=dtype, requires_grad=True)
    a = torch.randn(rank, columns, requires_grad=True)
    b = torch.randn(rows, rank, requires_grad=True)
    return tensor, x, torch.randn(rows, dtype=dtype) if bias else None, LoraFactors(a, b, 0.5)


def plain(x, tensor, bias, lora):
    dense = dequantize_nvfp4(*tensor, torch.float32).to(x.dtype)
    y = torch.nn.functional.linear(x, dense, bias)
    if lora is None:
        return y
    return y + lora.scaling * (x @ lora.a.to(x.dtype).T) @ lora.b.to(x.dtype).T


def run(source, x, tensor, bias, lora):
    held = {
        "rows": NVFP4Weight,
        "marlin": lambda tensor: MarlinRows(to_marlin(tensor)),
        "dense": lambda tensor: DenseWeight(dequantize_nvfp4(*tensor, torch.float32)),
    }
    return frozen_linear(x, held[source](tensor), bias, lora)


LAYOUTS = {
    "dense": (DenseWeight, lambda w: w, lambda w: w.float()),
    "NVFP4": (NVFP4Weight, quantize_nvfp4, lambda w: dequantize_nvfp4(*quantize_nvfp4(w), torch.float32)),
    "MXFP4": (MXFP4Weight, quantize_mxfp4, lambda w: dequantize_mxfp4(*quantize_mxfp4(w), torch.float32)),
    "Marlin": (
        lambda tensor: MarlinRows(tensor, 64, 192),
        lambda w: to_marlin(quantize_nvfp4(w)),
        lambda w: dequantize_nvfp4(*quantize_nvfp4(w), torch.float32)[64:192],
    ),
    "Marlin's MXFP4": (
        lambda tensor: MarlinRows(tensor, 0, 64),
        lambda w: to_marlin(quantize_mxfp4(w)),
        lambda w: dequantize_mxfp4(*quantize_mxfp4(w), torch.float32)[:64],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_weight_is_alpha_times_its_dense_matrix_and_names_what_it_holds(layout):
    make, hold, truth = LAYOUTS[layout]
    matrix = weight(192, 96)
    held = hold(matrix)
    frozen = make(held)
    expected = truth(matrix)
    assert frozen.shape == expected.shape
    torch.testing.assert_close(frozen.alpha * frozen.dense(torch.float32), expected, rtol=3e-7, atol=0)
    tensors = [held] if layout == "dense" else [tensor for tensor in held if tensor is not None]
    assert [tensor.data_ptr() for tensor in frozen.tensors().values()] == [tensor.data_ptr() for tensor in tensors]
    assert all(name.startswith("weight") for name in frozen.tensors())
    x = torch.randn(5, 96)
    torch.testing.assert_close(frozen_linear(x, frozen), x @ expected.T)


def gradients(y, x, lora):
    torch.manual_seed(2)
    inputs = (x,) if lora is None else (x, lora.a, lora.b)
    return torch.autograd.grad(y, inputs, torch.randn(y.shape).to(y.dtype))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_lora", [True, False])
@pytest.mark.parametrize("source", ["rows", "marlin", "dense"])
def test_linear_and_its_gradients_equal_the_dense_layers(source, with_lora, with_bias):
    tensor, x, bias, lora = layer(torch.float32, with_bias)
    lora = lora if with_lora else None
    expected, actual = plain(x, tensor, bias, lora), run(source, x, tensor, bias, lora)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, x, lora), gradients(expected, x, lora))


@pytest.mark.parametrize("with_lora", [True, False])
@pytest.mark.parametrize("tokens", [(), (7,), (2, 3, 5), (0, 5)])
def test_inputs_of_any_dimensions_and_strides(tokens, with_lora):
    tensor, x, bias, lora = layer(torch.float32, tokens=tokens)
    lora = lora if with_lora else None
    for turn in (lambda t: t, lambda t: t.transpose(0, 1) if t.dim() > 2 else t):
        expected, actual = turn(plain(turn(x), tensor, bias, lora)), turn(run("rows", turn(x), tensor, bias, lora))
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(actual, x, lora), gradients(expected, x, lora))


@pytest.mark.parametrize("with_lora", [True, False])
def test_the_graph_has_one_node_a_layer(with_lora):
    tensor, x, bias, lora = layer(torch.bfloat16)
    node = run("rows", x, tensor, bias, lora if with_lora else None).grad_fn
    assert all(type(child).__name__ == "AccumulateGrad" for child, _ in node.next_functions if child is not None)


class Casts(TorchDispatchMode):
    """Counts conversions to another data type."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_a_recomputation_that_takes_saved_products_casts_no_factor():
    _, x, _, lora = layer(torch.bfloat16)
    weight = DenseWeight(torch.randn(128, 96).bfloat16())
    counts = []
    for context in ({}, {"context_fn": lambda: selective_checkpoint_contexts(last_is_added=False)}):
        y = checkpoint(frozen_linear, x, weight, None, lora, use_reentrant=False, **context)
        with Casts() as casts:
            gradients(y, x, lora)
        counts.append(casts.count)
    assert counts == [5, 3]  # of three only two belong to the layer: its gradients; the third is of `gradients`


@pytest.mark.parametrize("source", ["rows", "marlin"])
def test_linear_in_bfloat16_errs_at_most_twice_as_much_as_plain_bfloat16(source):
    tensor, x, bias, lora = layer(torch.bfloat16, tokens=(64,))
    results = []
    for op, inputs in ((plain, x.float()), (plain, x), (lambda *args: run(source, *args), x)):
        y = op(inputs, tensor, bias if inputs.dtype == x.dtype else bias.float(), lora)
        results.append([t.float() for t in (y, *gradients(y, inputs, lora))])
    truth, low, ours = results
    for reference, plain_low, actual in zip(truth, low, ours, strict=True):
        assert (actual - reference).norm() <= 2 * (plain_low - reference).norm()


def test_borrowed_and_own_tensors_give_the_same_bits():
    tensor, x, bias, lora = layer(torch.bfloat16)
    own, shared = run("rows", x, tensor, bias, lora), run("marlin", x, tensor, bias, lora)
    assert torch.equal(own, shared)
    for ours, theirs in zip(gradients(own, x, lora), gradients(shared, x, lora), strict=True):
        assert torch.equal(ours, theirs)


def test_the_layer_saves_no_dense_weight():
    tensor, x, bias, lora = layer(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        run("rows", x, tensor, bias, lora)
    assert sum(saved) == x.numel() + 15 * 4 + lora.a.numel() + lora.b.numel()


def test_overwriting_the_packed_tensors_between_forward_and_backward_is_allowed():
    tensor, x, bias, lora = layer(torch.float32)
    y = run("rows", x, tensor, bias, lora)
    expected = gradients(y, x, lora)
    y = run("rows", x, tensor, bias, lora)
    tensor.packed.copy_(tensor.packed.clone())  # as an engine that reloads the same weights does
    torch.testing.assert_close(gradients(y, x, lora), expected)


@pytest.mark.parametrize("source", ["rows", "marlin"])
def test_gradient_checkpointing_changes_nothing(source):
    tensor, x, bias, lora = layer(torch.float32)
    y = run(source, x, tensor, bias, lora)
    again = checkpoint(run, source, x, tensor, bias, lora, use_reentrant=False)
    assert torch.equal(again, y)
    for ours, theirs in zip(gradients(again, x, lora), gradients(y, x, lora), strict=True):
        assert torch.equal(ours, theirs)


def test_two_linears_on_one_input_by_hand():
    """h = (1 + 2, 1 - 2); y = (1 + 2 * 3, 2 + 0.5 * 3 * -1); 2 and 1.5 of each gradient come through the adapters."""
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    a = [torch.tensor([[1.0, 1.0]], requires_grad=True), torch.tensor([[1.0, -1.0]], requires_grad=True)]
    b = [torch.tensor([[2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    weights = [DenseWeight(torch.tensor([row])) for row in ([1.0, 0.0], [0.0, 1.0])]
    linears = [AdaptedWeight(*fields) for fields in zip(weights, (None, None), b, (1.0, 0.5), strict=True)]
    y = frozen_linears(x, a, linears)
    assert [one.tolist() for one in y] == [[[7.0]], [[0.5]]]
    result = torch.autograd.grad(sum(y), (x, *a, *b))
    assert [one.tolist() for one in result] == [[[4.5, 1.5]], [[2.0, 4.0]], [[1.5, 3.0]], [[3.0]], [[-0.5]]]


def several(dtype, tokens=(3, 5), ranks=(4, 3, 6)):
    """An input, and linears of several sizes on it, each with its alpha, bias, adapter and scaling."""
    specs, scalings = [], (0.5, 2.0, 0.25)
    for rows, rank, scaling, size in zip((128, 64, 64), ranks, scalings, (1, 3, 0.2), strict=True):
        tensor = quantize_nvfp4(size * weight(rows, 96, seed=rows + rank))
        bias = None if rank == 3 else torch.randn(rows, dtype=dtype)
        a, b = (torch.randn(shape).mul_(0.2).requires_grad_() for shape in ((rank, 96), (rows, rank)))
        specs.append((tensor, bias, LoraFactors(a, b, scaling)))
    return torch.randn(*tokens, 96, dtype=dtype, requires_grad=True), specs


def one_by_one(x, specs, compute=lambda *args: run("rows", *args)):
    return [compute(x, *part) for part in specs]


def together(x, specs, joined=False):
    """With their A as they are, or one above the other from the start."""
    a = [lora.a for *_, lora in specs]
    linears = [AdaptedWeight(NVFP4Weight(tensor), bias, lora.b, lora.scaling) for tensor, bias, lora in specs]
    return frozen_linears(x, [torch.cat(a)] if joined else a, linears)


def gradients_of_all(ys, x, specs):
    torch.manual_seed(3)
    inputs = [x, *(lora.a for *_, lora in specs), *(lora.b for *_, lora in specs)]
    return torch.autograd.grad(ys, inputs, [torch.randn(y.shape).to(y.dtype) for y in ys])


@pytest.mark.parametrize("tokens", [(), (7,), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_linears_on_one_input_are_the_dense_layers_one_by_one(tokens, joined, turned):
    x, specs = several(torch.float32, tokens)
    seen = x.transpose(0, 1) if turned and x.dim() > 2 else x
    expected, result = one_by_one(seen, specs, plain), together(seen, specs, joined)
    torch.testing.assert_close(list(result), expected)
    torch.testing.assert_close(gradients_of_all(result, x, specs), gradients_of_all(expected, x, specs))


def test_linears_on_one_input_err_in_bfloat16_no_more_than_one_by_one():
    """The input's gradient is rounded four times on its way, once by once eight; all else is rounded as often."""
    x, specs = several(torch.bfloat16, (64,))
    results = []
    for inputs, compute in ((x.float(), one_by_one), (x, one_by_one), (x, together)):
        inputs = inputs.detach().requires_grad_()
        exact = [(tensor, bias if bias is None else bias.to(inputs.dtype), lora) for tensor, bias, lora in specs]
        ys = compute(inputs, exact)
        results.append([t.float() for t in (*gradients_of_all(ys, inputs, exact), *ys)])
    errors = [[(one - true).norm() for one, true in zip(result, results[0], strict=True)] for result in results[1:]]
    for index, (alone, ours) in enumerate(zip(*errors, strict=True)):
        assert 0 < ours <= (0.97 if index == 0 else 1.01) * alone


def test_where_the_a_lie_and_what_is_saved_changes_no_bit_of_linears_on_one_input():
    x, specs = several(torch.bfloat16)
    expected = together(x, specs)
    expected = [*expected, *gradients_of_all(expected, x, specs)]
    kinds = [{}, {"context_fn": lambda: selective_checkpoint_contexts(last_is_added=False)}]
    ways = [lambda: together(x, specs, True)]
    ways += [lambda kind=kind: checkpoint(together, x, specs, use_reentrant=False, **kind) for kind in kinds]
    for way in ways:
        result = way()
        for ours, theirs in zip([*result, *gradients_of_all(result, x, specs)], expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("last_is_added", [False, True])
def test_a_retained_graph_has_a_second_backward_pass(last_is_added):
    weights = [DenseWeight(torch.randn(96, 96, generator=torch.Generator().manual_seed(seed))) for seed in range(2)]

    def block(x):
        return x + frozen_linear(torch.nn.functional.silu(frozen_linear(x, weights[0])), weights[1])

    x = torch.linspace(-1, 1, 4 * 96).view(4, 96).requires_grad_()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    y = checkpoint(block, x, use_reentrant=False, context_fn=lambda: selective_checkpoint_contexts(last_is_added))
    for again in (True, False):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=again)[0], expected)


@pytest.mark.parametrize("wanted", range(7))
def test_each_gradient_of_linears_on_one_input_can_be_had_alone(wanted):
    x, specs = several(torch.float32)
    inputs = [x, *(lora.a for *_, lora in specs), *(lora.b for *_, lora in specs)]
    expected = gradients_of_all(together(x, specs), x, specs)[wanted]
    for index, one in enumerate(inputs):
        one.requires_grad_(index == wanted)
    ys = together(x, specs)
    torch.manual_seed(3)
    (result,) = torch.autograd.grad(ys, [inputs[wanted]], [torch.randn(y.shape) for y in ys])
    assert torch.equal(result, expected)


def test_linears_on_one_input_save_it_once_and_no_dense_weight():
    x, specs = several(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        ys = together(x, specs)
    assert sum(saved) == x.numel() + sum(15 * len(lora.a) + lora.a.numel() + lora.b.numel() for *_, lora in specs)
    assert len({y.grad_fn for y in ys}) == 1
    (ys[0].sum() + ys[2].sum()).backward()  # nothing asks for the second
    assert not specs[1][2].a.grad.any() and specs[0][2].a.grad.any() and x.grad.any()
