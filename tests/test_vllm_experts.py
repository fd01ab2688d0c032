"""Experts of vLLM's model that the trainer shares or adapts: found, compared, and refused where they lie otherwise.

On a CPU, where neither Marlin nor Triton runs, plain versions of the two kernels of vLLM that the engine calls compute
the adapter's products.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_ops import mixture_reference, to_marlin
from qerl_kernels import (
    ExpertBiases,
    MarlinStack,
    MXFP4Tensor,
    clamped_swiglu,
    clamped_swiglu_reference,
    experts,
    mixture_of_experts,
    quantize_mxfp4,
    silu_product,
)
from test_ops_experts import EXPERTS, HIDDEN, INNER, matrices, padded_stack, stacks
from torch import Tensor, nn
from transformers import GptOssConfig

from qerl_pl.engines.vllm.fused_experts import kernel_names, shared_experts
from qerl_pl.errors import UserError
from qerl_pl.models.families import family_of

NAME = "model.layers.0.mlp.experts"
QWEN = family_of("qwen3_moe"), None
GPT_OSS = family_of("gpt_oss"), GptOssConfig()


class MarlinExperts:
    """Named as vLLM's kernel; the name is what decides."""


class Method:
    """Multiplies as vLLM's fused kernel does, by plain weights."""

    experts_cls: type = MarlinExperts

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up, self.down = gate_up, down

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared_experts: None) -> Tensor:
        y = mixture_reference(x.float(), topk_weights, topk_ids.long(), self.gate_up, self.down, silu_product)
        return y.to(x.dtype)


class RoutedExperts(nn.Module):
    """Named as vLLM's module with a layer's experts."""

    def __init__(self) -> None:
        super().__init__()
        plain = []
        for matrix, shape in (("w13", (2 * INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
            stack, weights = stacks("marlin", matrices(*shape, 0))
            plain.append(weights)
            for name, tensor in stack.tensors().items():
                setattr(self, f"{matrix}_{name}", nn.Parameter(tensor, requires_grad=False))
        self.quant_method = Method(*plain)
        self.moe_config = moe_config(HIDDEN, INNER)


def moe_config(hidden: int, inner: int, padded: tuple[int, int] | None = None) -> SimpleNamespace:
    """vLLM's settings of a layer's experts, with the sizes that its kernel rounds up to."""
    rounded_hidden, rounded_inner = padded or (hidden, inner)
    return SimpleNamespace(
        num_experts=EXPERTS, hidden_dim=rounded_hidden, intermediate_size_per_partition=rounded_inner,
        hidden_dim_unpadded=hidden, intermediate_size_per_partition_unpadded=inner, experts_per_token=2, has_bias=False,
    )  # fmt: skip


def model(experts: "RoutedExperts | None" = None) -> tuple[nn.Module, RoutedExperts]:
    """vLLM's model with one layer, and its experts."""
    whole, experts = nn.Module(), RoutedExperts() if experts is None else experts
    holder: Any = whole
    for part in NAME.split("."):
        holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.add_module("routed_experts", experts)
    return whole, experts


def test_the_trainer_multiplies_by_the_engines_memory() -> None:
    whole, experts = model()
    assert kernel_names(whole) == ["MarlinExperts"] and kernel_names(nn.Linear(2, 2)) == []
    shared = shared_experts(whole, *QWEN)
    assert shared is not None and set(shared) == {f"{NAME}.gate_up_proj", f"{NAME}.down_proj"}
    for matrix, stack in (("w13", shared[f"{NAME}.gate_up_proj"]), ("w2", shared[f"{NAME}.down_proj"])):
        assert isinstance(stack, MarlinStack)
        assert stack.tensors()["weight"].data_ptr() == getattr(experts, f"{matrix}_weight").data_ptr()
    assert shared_experts(nn.Linear(2, 2), *QWEN) == {}


def test_experts_in_another_layout_or_padded_are_not_shared() -> None:
    whole, experts = model()
    experts.moe_config.intermediate_size_per_partition = INNER - 16  # the tensors have other sizes
    assert shared_experts(whole, *QWEN) is None
    whole, experts = model()
    experts.moe_config.intermediate_size_per_partition_unpadded = INNER - 16  # between gates and ups
    assert shared_experts(whole, *QWEN) is None
    whole, experts = model()
    experts.quant_method.experts_cls = type("CutlassExpertsFp4", (), {})
    assert shared_experts(whole, *QWEN) is None


def test_experts_that_multiply_otherwise_are_refused() -> None:
    whole, experts = model()
    experts.quant_method.gate_up = experts.quant_method.gate_up.flip(1)
    with pytest.raises(UserError, match=rf"those of {NAME} differ by .* set share_weights to false"):
        shared_experts(whole, *QWEN)


# gpt-oss --------------------------------------------------------------------------------------------------------------

WIDTH, WIDE, ALPHA, LIMIT = 160, 96, 1.702, 7.0
PADDED = (256, 128)
"""What vLLM rounds WIDTH up to, a multiple of 256, and WIDE, one of 128."""
BIAS_ORDER = [8 * tile + pair + lane for pair in range(0, 8, 2) for tile in range(4) for lane in range(2)]
"""Of 32 biases, as vLLM's `marlin_permute_bias` puts them."""


def padded_to(tensor: Tensor, *sizes: int) -> Tensor:
    """The tensor with zeros after its last rows and columns."""
    out = tensor.new_zeros(len(tensor), *sizes)
    out[(slice(None), *map(slice, tensor.shape[1:]))] = tensor
    return out


class GptOssMethod:
    """vLLM's fused product of gpt-oss's experts by Marlin, each token's pair by itself.

    Args:
        gate_up: Padded weights [E, 2 * 128, 256], gates and ups interleaved.
        down: [E, 256, 128].
        alpha: Of the activation.
        above: Whether it takes gates above ups.
    """

    experts_cls: type = MarlinExperts

    def __init__(self, gate_up: Tensor, down: Tensor, alpha: float = ALPHA, above: bool = False) -> None:
        self.gate_up, self.down, self.alpha, self.above = gate_up, down, alpha, above

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared_experts: None) -> Tensor:
        assert x.shape[1] == PADDED[0]
        plain = [torch.empty_like(bias).view(-1, 32) for bias in (layer.w13_bias, layer.w2_bias)]
        for bias, held in zip(plain, (layer.w13_bias, layer.w2_bias), strict=True):
            bias[:, BIAS_ORDER] = held.view(-1, 32)
        first, second = (bias.view(EXPERTS, -1).float() for bias in plain)
        y = torch.zeros(x.shape)
        for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(topk_ids.shape[1])).tolist():
            expert = int(topk_ids[token, slot])
            rows = (self.gate_up[expert] @ x[token].float() + first[expert]).bfloat16().float()
            gate, up = rows.chunk(2) if self.above else (rows[::2], rows[1::2])
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            inner = ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).bfloat16().float()
            y[token] += topk_weights[token, slot] * (self.down[expert] @ inner + second[expert])
        return y.to(x.dtype)


class GptOssRoutedExperts(RoutedExperts):
    """Of a class of its own, as in vLLM 0.30."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(8)
        self.plain: list[Tensor] = []
        self.packed: dict[str, tuple[Tensor, Tensor]] = {}
        padded = []
        for matrix, rows, columns, sizes in (
            ("w13", 2 * WIDE, WIDTH, (2 * PADDED[1], PADDED[0])), ("w2", WIDTH, WIDE, PADDED)
        ):  # fmt: skip
            weights = torch.randn(EXPERTS, rows, columns, generator=generator) * (0.5 if matrix == "w13" else 0.1)
            packed, scale = map(torch.stack, zip(*map(quantize_mxfp4, weights), strict=True))
            stack = padded_stack(packed, scale, sizes[0] - rows, sizes[1] - columns)
            self.packed[matrix] = packed, scale
            self.plain.append(stacks("mxfp4", weights)[1])
            padded.append(padded_to(self.plain[-1], *sizes))
            bias = padded_to(3 * torch.randn(EXPERTS, rows, generator=generator), sizes[0]).bfloat16()
            held = stack.tensors() | {"bias": bias.view(-1, 32)[:, BIAS_ORDER].view(EXPERTS, -1)}
            for name, tensor in held.items():
                setattr(self, f"{matrix}_{name}", nn.Parameter(tensor, requires_grad=False))
        self.quant_method: Any = GptOssMethod(*padded)
        self.moe_config = moe_config(WIDTH, WIDE, PADDED)
        self.moe_config.has_bias = True


@pytest.mark.parametrize("grouped", [False, True])
def test_the_trainer_multiplies_by_the_engines_padded_memory_as_without_padding(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grouped:  # two experts a group, and PyTorch's grouped product, which has a slow CPU version
        monkeypatch.setattr(experts, "_has_kernel", lambda rows: True)
        monkeypatch.setattr(experts, "GROUP_BYTES", 2 * 4 * 2 * WIDE * WIDTH)
    layer = GptOssRoutedExperts()
    whole, _ = model(layer)
    assert kernel_names(whole) == ["MarlinExperts"]
    before = [bias.clone() for bias in (layer.w13_bias, layer.w2_bias)]
    shared = shared_experts(whole, *GPT_OSS)
    assert shared is not None and all(map(torch.equal, before, (layer.w13_bias, layer.w2_bias)))
    gate_up, down = (shared[f"{NAME}.{matrix}"] for matrix in ("gate_up_proj", "down_proj"))
    assert (gate_up.shape, down.shape) == ((EXPERTS, 2 * WIDE, WIDTH), (EXPERTS, WIDTH, WIDE))
    assert gate_up.tensors()["weight"].data_ptr() == layer.w13_weight.data_ptr()
    assert down.tensors()["weight_scale"].data_ptr() == layer.w2_weight_scale.data_ptr()
    generator = torch.Generator().manual_seed(9)
    biases = ExpertBiases(*(torch.randn(EXPERTS, size, generator=generator) for size in (2 * WIDE, WIDTH)))
    x = torch.randn(20, WIDTH, generator=generator).requires_grad_()
    topk_weights, topk_ids = torch.randn(20, EXPERTS, generator=generator).softmax(-1).topk(2, dim=-1)
    topk_weights = topk_weights.detach().requires_grad_()
    results = [
        mixture_of_experts(
            x,
            topk_weights,
            topk_ids,
            gate_up,
            down,
            partial(clamped_swiglu, alpha=ALPHA, limit=LIMIT),
            biases,
            interleaved=True,
        ),
        mixture_reference(
            x,
            topk_weights,
            topk_ids,
            *layer.plain,
            partial(clamped_swiglu_reference, alpha=ALPHA, limit=LIMIT),
            biases,
            True,
        ),
    ]
    direction = torch.randn(x.shape, generator=generator)
    ours, expected = ((y, *torch.autograd.grad(y, (x, topk_weights), direction)) for y in results)
    for found, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("wrong", ["gates above ups", "padding between gates and ups", "activation"])
def test_gpt_osss_experts_that_lie_or_multiply_otherwise_are_refused(wrong: str) -> None:
    layer = GptOssRoutedExperts()
    method = layer.quant_method
    if wrong == "gates above ups":
        method.above = True
    elif wrong == "activation":
        method.alpha = 1.0
    else:  # vLLM's own product stays what it was
        method.above, method.gate_up = True, gates_first(method.gate_up)
        sizes = ((2 * PADDED[1], PADDED[0] // 2), (2 * PADDED[1], PADDED[0] // 32))
        codes = (gates_first(padded_to(part, *size)) for part, size in zip(layer.packed["w13"], sizes, strict=True))
        for name, tensor in padded_stack(*codes, 0, 0).tensors().items():
            setattr(layer, f"w13_{name}", nn.Parameter(tensor, requires_grad=False))
    with pytest.raises(UserError, match=rf"those of {NAME} differ by .* set share_weights to false"):
        shared_experts(model(layer)[0], *GPT_OSS)


@pytest.mark.vllm
def test_vllm_puts_padded_experts_of_gpt_oss_into_the_layout_that_the_trainer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own preparation, but for its repacking of one matrix, which is a CUDA kernel."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    def repack(b_q_weight: Tensor, size_k: int, size_n: int, **settings: Any) -> Tensor:
        codes = b_q_weight.t().contiguous().view(torch.uint8)
        assert codes.shape == (size_n, size_k // 2)
        return to_marlin(MXFP4Tensor(codes, torch.zeros(size_n, size_k // 32, dtype=torch.uint8))).weight

    monkeypatch.setattr(marlin_utils_fp4.ops, "gptq_marlin_repack", repack, raising=False)
    layer, generator = GptOssRoutedExperts(), torch.Generator().manual_seed(3)
    sizes = {"w13": (2 * PADDED[1], PADDED[0]), "w2": PADDED}
    codes, scales = (
        [padded_to(layer.packed[matrix][part], rows, columns // block) for matrix, (rows, columns) in sizes.items()]
        for part, block in ((0, 2), (1, 32))
    )
    biases = [torch.randn(EXPERTS, rows, generator=generator).bfloat16() for rows, _ in sizes.values()]
    holder = SimpleNamespace(params_dtype=torch.bfloat16)
    found = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(holder, *codes, *scales, *biases)
    held = [getattr(layer, f"{matrix}_{name}") for name in ("weight", "weight_scale") for matrix in sizes]
    held += [bias.view(-1, 32)[:, BIAS_ORDER].view(EXPERTS, -1) for bias in biases]
    for ours, theirs in zip(held, found, strict=True):
        assert ours.shape == theirs.shape and ours.element_size() == theirs.element_size()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def gates_first(rows: Tensor) -> Tensor:
    """Rows [E, 2 I, ...] of interleaved gates and ups as gates above ups."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
