"""`mixture_of_experts` against plain PyTorch, forward and backward, for every layout of frozen experts."""

from functools import partial
from typing import Any

import pytest
import torch
from plain_ops import mixture_reference, to_marlin
from qerl_kernels import (
    DenseStack,
    ExpertBiases,
    MarlinStack,
    MarlinTensor,
    MXFP4Stack,
    MXFP4Tensor,
    NVFP4Stack,
    NVFP4Tensor,
    StackedWeight,
    clamped_swiglu,
    clamped_swiglu_reference,
    dequantize_nvfp4,
    experts,
    mixture_of_experts,
    quantize_mxfp4,
    quantize_nvfp4,
    selective_checkpoint_contexts,
    silu_product,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

EXPERTS, HIDDEN, INNER, TOKENS, CHOSEN = 5, 128, 64, 23, 2


def matrices(rows: int, columns: int, seed: int) -> Tensor:
    """Weights [E, rows, columns] whose size differs by expert, so that global scales do."""
    weights = torch.randn(EXPERTS, rows, columns, generator=torch.Generator().manual_seed(seed))
    return weights * torch.logspace(-2, 0, EXPERTS)[:, None, None]


def stacks(layout: str, weights: Tensor) -> tuple[StackedWeight, Tensor]:
    """Weights in a layout, and what it holds in plain numbers [E, N, K]."""
    if layout == "dense":
        return DenseStack(weights), weights
    if layout == "mxfp4":
        packed, scale = (torch.stack(part) for part in zip(*map(quantize_mxfp4, weights), strict=True))
        stack = MXFP4Stack(MXFP4Tensor(packed, scale))
        return stack, stack.dense(0, EXPERTS, torch.float32)
    if layout == "padded":
        plain, tensors = stacks("mxfp4", weights)[1], map(quantize_mxfp4, weights)
        return padded_stack(*map(torch.stack, zip(*tensors, strict=True)), 64, 96), plain
    tensors = [quantize_nvfp4(weight) for weight in weights]
    plain = torch.stack([dequantize_nvfp4(*tensor, torch.float32) for tensor in tensors])
    if layout == "nvfp4":
        packed, scale, global_scale = (torch.stack(part) for part in zip(*tensors, strict=True))
        return NVFP4Stack(NVFP4Tensor(packed, scale, global_scale.flatten())), plain
    held = [to_marlin(tensor) for tensor in tensors]
    scales = torch.stack([tensor.scale.view(torch.uint8) for tensor in held])
    global_scales = torch.stack([tensor.global_scale for tensor in held if tensor.global_scale is not None])
    return MarlinStack(MarlinTensor(torch.stack([tensor.weight for tensor in held]), scales, global_scales)), plain


def padded_stack(packed: Tensor, scale: Tensor, more_rows: int, more_columns: int) -> MarlinStack:
    """MXFP4 weights [E, N, K] in Marlin's layout, padded with zeros at the end of rows and columns."""
    held = []
    for codes, scales in zip(packed, scale, strict=True):
        codes = torch.nn.functional.pad(codes, (0, more_columns // 2, 0, more_rows))
        held.append(
            to_marlin(MXFP4Tensor(codes, torch.nn.functional.pad(scales, (0, more_columns // 32, 0, more_rows))))
        )
    tensors = (torch.stack(part) for part in zip(*(tensor[:2] for tensor in held), strict=True))
    return MarlinStack(MarlinTensor(*tensors, None), packed.shape[1], 2 * packed.shape[2])


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, shares and experts; expert 3 has no token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    logits[:, 3] = -torch.inf
    topk_weights, topk_ids = logits.softmax(-1).topk(CHOSEN, dim=-1)
    return x.requires_grad_(), topk_weights.detach().requires_grad_(), topk_ids


LAYOUTS = ("dense", "nvfp4", "mxfp4", "marlin", "padded")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixture_and_its_gradients_are_those_of_plain_pytorch(
    layout: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grouped:  # two experts a group, and PyTorch's grouped product, which has a slow CPU version
        monkeypatch.setattr(experts, "_has_kernel", lambda rows: True)
        monkeypatch.setattr(experts, "GROUP_BYTES", 3 * 4 * HIDDEN * INNER)
    (gate_up, plain_gate_up), (down, plain_down) = (
        stacks(layout, matrices(*shape, seed)) for seed, shape in enumerate([(2 * INNER, HIDDEN), (HIDDEN, INNER)])
    )
    assert gate_up.shape == (EXPERTS, 2 * INNER, HIDDEN) and down.shape == (EXPERTS, HIDDEN, INNER)
    x, topk_weights, topk_ids = inputs()
    y = mixture_of_experts(x, topk_weights, topk_ids, gate_up, down, silu_product)
    expected = mixture_reference(x, topk_weights, topk_ids, plain_gate_up, plain_down, silu_product)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad(y, (x, topk_weights), direction)
    for ours, theirs in zip(found, torch.autograd.grad(expected, (x, topk_weights), direction), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("layout", ["dense", "mxfp4", "marlin", "padded"])
def test_biases_alternating_rows_and_a_clamped_activation_are_gpt_osss_experts(layout: str) -> None:
    """Against transformers' own layer, which has its weights transposed; Marlin's has scales by expert, too."""
    (gate_up, plain_gate_up), (down, plain_down) = (
        stacks(layout, 4 * matrices(*shape, seed)) for seed, shape in enumerate([(2 * INNER, HIDDEN), (HIDDEN, INNER)])
    )
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    theirs = GptOssExperts(GptOssConfig(**sizes, experts_implementation="eager"))
    theirs.limit = 2.0
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(plain_gate_up.transpose(1, 2))
        theirs.down_proj.copy_(plain_down.transpose(1, 2))
        for bias in (theirs.gate_up_proj_bias, theirs.down_proj_bias):
            bias.copy_(2 * torch.randn(bias.shape, generator=generator))
    biases = ExpertBiases(theirs.gate_up_proj_bias.detach(), theirs.down_proj_bias.detach())
    x, topk_weights, topk_ids = inputs()
    expected = theirs(x, topk_ids, topk_weights)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    gradients = torch.autograd.grad(expected, (x, topk_weights), direction)
    plain = (plain_gate_up, plain_down, partial(clamped_swiglu_reference, alpha=1.702, limit=2.0))
    packed = (gate_up, down, partial(clamped_swiglu, alpha=1.702, limit=2.0))
    for y in (
        mixture_reference(x, topk_weights, topk_ids, *plain, biases, interleaved=True),
        mixture_of_experts(x, topk_weights, topk_ids, *packed, biases, interleaved=True),
    ):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        for ours, other in zip(torch.autograd.grad(y, (x, topk_weights), direction), gradients, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_of_experts_is_a_slice_of_the_stack(layout: str) -> None:
    stack, plain = stacks(layout, matrices(128, 192, 0))
    alphas = torch.ones(EXPERTS) if stack.alphas is None else stack.alphas
    whole = stack.dense(0, EXPERTS, torch.float32) * alphas[:, None, None]
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(stack.dense(1, 4, torch.float32), stack.dense(0, EXPERTS, torch.float32)[1:4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpus_grouped_product_is_that_of_each_expert(layout: str, back: bool) -> None:
    stack, plain = stacks(layout, matrices(2 * INNER, HIDDEN, 0).cuda())
    sizes = torch.tensor([100, 0, 33, 1, 250])
    stops, bounds = sizes.cumsum(0).int().cuda(), [0, *sizes.cumsum(0).tolist()]
    rows = torch.randn(bounds[-1], 2 * INNER if back else HIDDEN, generator=torch.Generator().manual_seed(1))
    rows = rows.cuda().bfloat16()
    grouped = experts._by_groups(rows, stops, bounds, stack, back, None)
    loop = experts._by_experts(rows, bounds, stack, back)
    assert experts._has_kernel(rows) == (torch.cuda.get_device_capability()[0] >= 9)
    torch.testing.assert_close(grouped, loop, rtol=1.6e-2, atol=1e-2 * loop.abs().max().item())
    alphas = torch.ones(EXPERTS).cuda() if stack.alphas is None else stack.alphas
    owner = torch.arange(EXPERTS).repeat_interleave(sizes).cuda()
    weights = (plain if back else plain.transpose(1, 2)).bfloat16().float()  # as the product reads them
    expected = torch.stack([row.float() @ weights[expert] for row, expert in zip(rows, owner, strict=True)])
    found = grouped.float() * alphas[owner, None]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-3 * expected.abs().max().item())
    scaled = experts._by_groups(rows, stops, bounds, stack, back, alphas[owner, None])
    assert torch.equal(scaled, found.bfloat16())


def test_weights_follow_their_tensors_where_a_module_moves_them() -> None:
    """As it does from one device to another: it gives a parameter other data."""
    stack = stacks("nvfp4", matrices(64, 64, 0))[0]
    before, dense = stack.alphas, stack.dense(0, EXPERTS, torch.float32)
    assert before is not None
    tensors = stack.tensors()
    tensors["weight_global_scale"].data = tensors["weight_global_scale"] / 2
    tensors["weight_packed"].data = tensors["weight_packed"].roll(1, 0)
    assert stack.alphas is not None and torch.equal(stack.alphas, 2 * before)
    assert not torch.equal(stack.dense(0, EXPERTS, torch.float32), dense)


def test_backward_keeps_neither_dense_weights_nor_the_second_product() -> None:
    gate_up, down = (stacks("nvfp4", matrices(*shape, 0))[0] for shape in [(2 * INNER, HIDDEN), (HIDDEN, INNER)])
    saved: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixture_of_experts(*inputs(), gate_up, down, silu_product)
    rows = TOKENS * CHOSEN
    sizes = sorted(tensor.numel() for tensor in saved if tensor.is_floating_point())
    assert sizes == sorted([rows, rows * 2 * INNER])  # shares, gates and ups


@pytest.mark.parametrize("last_is_added", [False, True])
def test_selective_checkpointing_gives_the_same_bits_and_repeats_no_grouped_product(
    last_is_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = (stacks("nvfp4", matrices(*shape, 0))[0] for shape in [(2 * INNER, HIDDEN), (HIDDEN, INNER)])
    calls: list[bool] = []
    product = experts.grouped_gemm
    monkeypatch.setattr(
        experts,
        "grouped_gemm",
        lambda *args, back, **kwargs: (calls.append(back), product(*args, back, **kwargs))[1],
    )

    def block(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return x + mixture_of_experts(x, topk_weights, topk_ids, gate_up, down, silu_product)

    x, topk_weights, topk_ids = inputs()
    expected = torch.autograd.grad(block(x, topk_weights, topk_ids).square().sum(), (x, topk_weights))
    calls.clear()
    result = checkpoint(
        block,
        x,
        topk_weights,
        topk_ids,
        use_reentrant=False,
        context_fn=lambda: selective_checkpoint_contexts(last_is_added),
    )
    assert isinstance(result, Tensor)
    found = torch.autograd.grad(result.square().sum(), (x, topk_weights))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert calls == [False, False, True, True]
