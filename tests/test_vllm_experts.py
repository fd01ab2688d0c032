"""Experts of vLLM's model that the trainer shares or adapts: found, compared, and refused where they lie otherwise.

On a CPU, where neither Marlin nor Triton runs, plain versions of the two kernels of vLLM that the engine calls compute
the adapter's products.
"""

from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qerl_kernels import (
    ExpertBiases,
    ExpertLora,
    LoraFactors,
    MarlinStack,
    MXFP4Tensor,
    clamped_swiglu,
    clamped_swiglu_reference,
    experts,
    mixture_of_experts,
    mixture_reference,
    quantize_mxfp4,
    silu_product,
)
from qerl_kernels.marlin import to_marlin
from test_ops_experts import EXPERTS, HIDDEN, INNER, matrices, padded_stack, stacks
from torch import Tensor, nn
from transformers import GptOssConfig

from qerl_pl.engines.vllm import expert_adapters
from qerl_pl.engines.vllm.fused_experts import kernel_names, shared_experts
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import family_of
from qerl_pl.formats.mxfp4 import MXFP4Format, MXFP4StacksFormat

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

    def apply(self, layer: Any, x: Tensor, share: Tensor, chosen: Tensor, *shared_experts: None) -> Tensor:
        y = mixture_reference(x.float(), share, chosen.long(), self.gate_up, self.down, silu_product)
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

    def apply(self, layer: Any, x: Tensor, share: Tensor, chosen: Tensor, *shared_experts: None) -> Tensor:
        assert x.shape[1] == PADDED[0]
        plain = [torch.empty_like(bias).view(-1, 32) for bias in (layer.w13_bias, layer.w2_bias)]
        for bias, held in zip(plain, (layer.w13_bias, layer.w2_bias), strict=True):
            bias[:, BIAS_ORDER] = held.view(-1, 32)
        first, second = (bias.view(EXPERTS, -1).float() for bias in plain)
        y = torch.zeros(x.shape)
        for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(chosen.shape[1])).tolist():
            expert = int(chosen[token, slot])
            rows = (self.gate_up[expert] @ x[token].float() + first[expert]).bfloat16().float()
            gate, up = rows.chunk(2) if self.above else (rows[::2], rows[1::2])
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            inner = ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).bfloat16().float()
            y[token] += share[token, slot] * (self.down[expert] @ inner + second[expert])
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
    share, chosen = torch.randn(20, EXPERTS, generator=generator).softmax(-1).topk(2, dim=-1)
    share = share.detach().requires_grad_()
    results = [
        mixture_of_experts(
            x, share, chosen, gate_up, down, partial(clamped_swiglu, alpha=ALPHA, limit=LIMIT), biases, alternating=True
        ),
        mixture_reference(
            x, share, chosen, *layer.plain, partial(clamped_swiglu_reference, alpha=ALPHA, limit=LIMIT), biases, True
        ),
    ]
    direction = torch.randn(x.shape, generator=generator)
    ours, expected = ((y, *torch.autograd.grad(y, (x, share), direction)) for y in results)
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


def test_published_experts_run_by_marlin_where_they_are_shared() -> None:
    published, packed = MXFP4StacksFormat(), MXFP4Format()
    asked = [("marlin", True), ("marlin", False), ("auto", True)]
    assert [published.vllm_moe_backend(*each) for each in asked] == ["marlin", None, None]
    assert [packed.vllm_moe_backend(*each) for each in asked] == ["marlin", "marlin", "auto"]
    assert {published.vllm_linear_backend(name) for name, _ in asked} == {None}  # its linears have 16 bits


# Adapters -------------------------------------------------------------------------------------------------------------

RANK, CHOSEN = 3, 2
CONFIG = {"rank": RANK, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MODEL_CONFIG = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(model_type="qwen3_moe"))


def aligned(topk_ids: Tensor, block_size: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of tokens and experts by expert, each expert's padded to blocks, as vLLM's `moe_align_block_size`."""
    pairs, experts = [], []
    for expert in range(num_experts):
        own = (topk_ids.flatten() == expert).nonzero()[:, 0].tolist()
        own += [topk_ids.numel()] * (-len(own) % block_size)
        pairs += own
        experts += [expert] * (len(own) // block_size)
    rest = torch.full((3 * block_size,), -7)  # is not read
    return torch.cat((torch.tensor(pairs), rest)), torch.tensor(experts), torch.tensor([len(pairs)])


def plain_kernel(
    A: Tensor, B: Tensor, C: Tensor, A_scale: None, B_scale: None, topk_weights: Tensor | None,
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, mul_routed_weight: bool, top_k: int,
    config: dict[str, int], compute_type: Any, use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool,
    use_int4_w4a16: bool, per_channel_quant: bool,
) -> None:  # fmt: skip
    """As vLLM's grouped Triton kernel, with its arguments: each pair's row of A times its expert's B^T, into C."""
    assert not any((use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant))
    block, flat = config["BLOCK_SIZE_M"], C.view(-1, C.shape[2])
    for start in range(0, int(num_tokens_post_padded), block):
        pairs = sorted_token_ids[start : start + block]
        pairs = pairs[pairs < len(A) * top_k]
        rows = A[pairs // top_k].float() @ B[expert_ids[start // block]].float().t()
        if mul_routed_weight:
            assert topk_weights is not None
            rows = rows * topk_weights.flatten()[pairs, None]
        flat[pairs] = rows.to(C.dtype)


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, RoutedExperts]:
    """vLLM's model with one layer whose experts go the way of vLLM's Marlin experts, in its mixin's order."""
    from vllm.model_executor.layers.fused_moe import fused_moe, moe_align_block_size
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.triton_utils import tl

    monkeypatch.setattr(tl, "bfloat16", "bfloat16", raising=False)  # vLLM's stand-in for Triton on a CPU has none
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_triton_kernel", plain_kernel)
    monkeypatch.setattr(moe_align_block_size, "moe_align_block_size", aligned)

    class FusedExperts(LoRAExpertsMixin):
        def multiply(self, layer: Any, method: Method, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
            tokens, own = len(x), chosen.flatten().long()
            packed = {"w1": layer.w13_weight, "w2": layer.w2_weight, "num_tokens": tokens, "top_k_num": CHOSEN}
            pairs = x.float().repeat_interleave(CHOSEN, 0)
            hidden = torch.einsum("rk,rnk->rn", pairs, method.gate_up[own]).to(x.dtype)
            context: Any = self._lora_context
            if context is not None:
                rows = self.apply_w13_lora(
                    context, y=hidden, x=x, topk_ids=chosen, topk_weights=share, expert_map=None, **packed
                )
            inner = silu_product(*hidden.chunk(2, -1))
            y = torch.einsum("rk,rnk->rn", inner.float(), method.down[own]) * share.view(-1, 1)
            y = y.to(x.dtype).view(tokens, CHOSEN, -1)
            if context is not None:
                names = (
                    "sorted_token_ids_lora",
                    "expert_ids_lora",
                    "num_tokens_post_padded_lora",
                    "token_lora_mapping",
                )
                given = dict(zip(names, rows, strict=True))
                self.apply_w2_lora(context, y=y, x=inner, topk_weights=share, **given, **packed)
            return y.sum(1)

    class LoraMethod(Method):
        def __init__(self, base: Method) -> None:
            super().__init__(base.gate_up, base.down)
            self.moe_kernel = SimpleNamespace(fused_experts=FusedExperts())

        def apply(self, layer: Any, x: Tensor, share: Tensor, chosen: Tensor, *shared_experts: None) -> Tensor:
            result: Tensor = self.moe_kernel.fused_experts.multiply(layer, self, x, share, chosen)
            return result

    whole, experts = model()
    experts.quant_method = LoraMethod(experts.quant_method)
    return whole, experts


@pytest.mark.vllm
@pytest.mark.parametrize("tokens", [7, 200])  # blocks of 16 rows, and of 64
def test_the_adapter_enters_marlins_fused_experts_before_the_activation_and_the_sum(
    adapted: tuple[nn.Module, RoutedExperts], tokens: int
) -> None:
    whole, experts = adapted
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    share, chosen = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(CHOSEN, dim=-1)
    before = experts.quant_method.apply(experts, x, share, chosen)
    buffers = expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG)
    assert torch.equal(experts.quant_method.apply(experts, x, share, chosen), before)
    shapes = {name: [tuple(factor.shape) for factor in pair] for name, pair in buffers.items()}
    assert shapes == {
        f"{NAME}.gate_up_proj": [(EXPERTS, RANK, HIDDEN), (EXPERTS, 2 * INNER, RANK)],
        f"{NAME}.down_proj": [(EXPERTS, RANK, INNER), (EXPERTS, HIDDEN, RANK)],
    }
    for pair in buffers.values():
        for factor in pair:
            factor.copy_(0.5 * torch.randn(factor.shape, generator=generator) / factor.shape[2] ** 0.5)
    lora = [LoraFactors(a.float(), b.float(), 1.0) for a, b in buffers.values()]
    weights = experts.quant_method.gate_up, experts.quant_method.down, silu_product
    for given in (ExpertLora(*lora), ExpertLora(lora[0], None)):
        if given.down is None:
            buffers[f"{NAME}.down_proj"][1].zero_()
        expected = mixture_reference(x.float(), share, chosen, *weights, lora=given)
        found = experts.quant_method.apply(experts, x, share, chosen).float()
        assert (found - expected).norm() < 0.01 * expected.norm() < 0.5 * (before.float() - expected).norm()


@pytest.mark.vllm
def test_one_adapted_stack_is_enough(adapted: tuple[nn.Module, RoutedExperts]) -> None:
    whole, _ = adapted
    buffers = expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG | {"target_parameters": ["experts.down_proj"]})
    assert list(buffers) == [f"{NAME}.down_proj"]
    expert_adapters.check(whole, 100)
    assert not any(factor.any() for factor in buffers[f"{NAME}.down_proj"])  # it starts at zero again


@pytest.mark.vllm
@pytest.mark.parametrize("wrong", ["weights", "order", "large blocks", None])
def test_adapters_that_a_kernel_would_multiply_otherwise_are_refused(
    adapted: tuple[nn.Module, RoutedExperts], wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    @wraps(plain_kernel)
    def kernel(a: Tensor, b: Tensor, *rest: Any, **flags: Any) -> None:
        changed = list(rest)
        if wrong == "weights":
            changed[7] = False
        wrong_order = wrong == "order" or wrong == "large blocks" and changed[9]["BLOCK_SIZE_M"] == 64
        plain_kernel(a, b.roll(1, 0) if wrong_order else b, *changed, **flags)

    monkeypatch.setattr(fused_moe, "invoke_fused_moe_triton_kernel", kernel)
    whole, experts = adapted
    expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG)
    if wrong is None:
        expert_adapters.check(whole, 100)
        return
    tokens = 81 if wrong == "large blocks" else 16
    with pytest.raises(
        UserError, match=rf"those of {NAME} differ by .* for {tokens} tokens: leave .*target_parameters"
    ):
        expert_adapters.check(whole, 100)


@pytest.mark.vllm
def test_adapters_of_other_kernels_and_of_experts_with_biases_are_refused(
    adapted: tuple[nn.Module, RoutedExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, experts = adapted
    message = "needs Marlin's fused experts, in bfloat16, without biases or padding; vLLM runs {} on qwen3_moe"
    experts.moe_config.has_bias = True
    with pytest.raises(UserError, match=message.format("MarlinExperts")):
        expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG)
    experts.moe_config.has_bias = False
    experts.quant_method.experts_cls = type("TritonExperts", (), {})
    with pytest.raises(UserError, match=message.format("TritonExperts")):
        expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG)
    monkeypatch.setattr(expert_adapters.compat, "missing_names", lambda feature: ("vllm.some.name",))
    with pytest.raises(UserError, match="relies on names that this vLLM lacks, vllm.some.name: leave"):
        expert_adapters.attach_on_gpu(whole, MODEL_CONFIG, CONFIG)
