"""Adapters of the experts of vLLM's model, which are written in place as those of its linears are.

On a GPU the frozen product stays Marlin's fused kernel. vLLM lets a LoRA implementation add to its first product before
the activation, and to its second before the sum over a token's experts (`MoELoRAContext`); here that are products of
vLLM's own grouped Triton kernel, which takes A and B for unquantized experts. Nothing waits for the device, so that
CUDA graphs capture it. vLLM's LoRA kernels would serve many adapters and sum with atomics.

vLLM's CPU build has both products in one kernel, on weights in a layout of its own. There the experts are computed as
in the trainer, by the checkpoint's weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import ExpertBiases, ExpertLora, LoraFactors, StackedWeight, mixture_of_experts
from torch import Tensor

from qerl_pl.engines.vllm import compat, fused_experts
from qerl_pl.engines.vllm.linear_methods import LoraBuffers
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import DOWN, GATE_UP, Family, family_of, names_match
from qerl_pl.formats.base import format_of
from qerl_pl.formats.model_folder import TensorFiles
from qerl_pl.formats.stored_experts import BIASES, StoredExperts

REMEDY = "leave model.policy.lora.target_parameters out, or use TransformersEngine"


def _add_buffers(module: Any, name: str, config: Mapping[str, Any], dtype: torch.dtype, device: Any) -> LoraBuffers:
    """Give the module with a layer's experts zero adapters, as buffers; they are returned by the stack's base name."""
    experts, hidden, inner = _sizes(module)
    buffers: LoraBuffers = {}
    for matrix, rows, columns in ((GATE_UP, 2 * inner, hidden), (DOWN, hidden, inner)):
        if names_match(f"{name}.{matrix}", config["target_parameters"]):
            for factor, shape in (("a", (config["rank"], columns)), ("b", (rows, config["rank"]))):
                zeros = torch.zeros(experts, *shape, dtype=dtype, device=device)
                module.register_buffer(f"{matrix}_qerl_{factor}", zeros, False)
            buffers[f"{name}.{matrix}"] = _factors(module, matrix)
    return buffers


def _sizes(module: Any) -> tuple[int, int, int]:
    """Experts, hidden size and width of vLLM's experts."""
    config = module.moe_config
    return config.num_experts, config.hidden_dim, config.intermediate_size_per_partition


def _factors(module: Any, matrix: str) -> tuple[Tensor, Tensor]:
    return module.get_buffer(f"{matrix}_qerl_a"), module.get_buffer(f"{matrix}_qerl_b")


def _lora(module: Any) -> ExpertLora:
    """The buffers as the trainer's product takes them; B has the scaling."""
    held = dict(module.named_buffers(recurse=False))
    pairs = ((held.get(f"{matrix}_qerl_a"), held.get(f"{matrix}_qerl_b")) for matrix in (GATE_UP, DOWN))
    return ExpertLora(*(None if a is None or b is None else LoraFactors(a, b, 1.0) for a, b in pairs))


# On a CPU -------------------------------------------------------------------------------------------------------------


class PlainExpertsMethod:
    """The `quant_method` of vLLM's experts on a CPU: the trainer's product, adapter included.

    Args:
        base: vLLM's, which answers all other questions.
        family: Of the model.
        config: Of transformers.
        weights: Gates and ups, and downs.
        biases: Of both; None where there are none.
    """

    def __init__(
        self, base: Any, family: Family, config: Any, weights: tuple[StackedWeight, StackedWeight], biases: Any
    ) -> None:
        self.base, self._weights, self._biases = base, weights, biases
        self._product, self._alternating = fused_experts.computation_of(family, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: None = None,
        shared_experts_input: None = None,
    ) -> Tensor:
        """x [tokens, hidden] -> the same shape; the families have no shared experts."""
        settings = (*self._weights, self._product, self._biases, self._alternating)
        return mixture_of_experts(x, topk_weights.float(), topk_ids.long(), *settings, _lora(layer))


def attach_on_cpu(model: Any, model_config: Any, config: Mapping[str, Any]) -> LoraBuffers:
    """Give vLLM's experts adapters on a CPU, where `model_config.model` is a folder that is still there.

    Args:
        model: vLLM's, loaded.
        model_config: vLLM's.
        config: Of `worker.engine_config`: `rank` and `target_parameters`.

    Returns:
        The buffers that adapters are written into.

    Raises:
        UserError: vLLM's experts choose for themselves.
    """
    folder, family, dtype = Path(model_config.model), family_of(model_config.hf_config.model_type), model_config.dtype
    base_format, tensors = format_of(folder), TensorFiles(folder)
    buffers: LoraBuffers = {}
    for name, module in fused_experts.layers(model).items():
        if module.quant_method.is_monolithic:
            raise UserError(
                "an adapter of experts needs vLLM's router apart from its experts; this vLLM has both in one: " + REMEDY
            )
        assert family.experts is not None
        stored = StoredExperts(family.experts, base_format, tensors, name, module.moe_config.num_experts)
        gate_up, down = (stored.weight(matrix, dtype, lambda tensor: tensor) for matrix in (GATE_UP, DOWN))
        held = stored.biases(dtype, lambda tensor: tensor)
        biases = ExpertBiases(*map(held.__getitem__, BIASES)) if held else None
        method = PlainExpertsMethod(module.quant_method, family, model_config.hf_config, (gate_up, down), biases)
        del module.quant_method  # a module in some releases, which only a module could replace
        module.quant_method = method
        for weight in (module.w13_weight, module.w2_weight):
            weight.data = weight.data.new_empty(0)
        buffers |= _add_buffers(module, name, config, dtype, "cpu")
    return buffers


# On a GPU -------------------------------------------------------------------------------------------------------------


class GroupedLora:
    """The methods of vLLM's `PunicaWrapperBase` that its fused experts call, for one adapter.

    The names of arguments are vLLM's; those after `sorted_ids` and `w2` are not used.
    """

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        a: tuple[Tensor, ...],
        b: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        *unused: object,
        **others: object,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Add to gates and ups y [tokens * k, 2 I] the adapter's product of x [tokens, hidden].

        Returns:
            The rows sorted by expert, for `add_lora_w2`.
        """
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        rows = moe_align_block_size(topk_ids, _block_rows(topk_ids.numel(), len(w1)), len(w1))
        if a:
            tokens, count = topk_ids.shape
            low = _grouped(x, a[0], rows, count, (tokens, count))
            y.view(tokens, count, -1).add_(_grouped(low.flatten(0, 1), b[0], rows, 1, (tokens, count)))
        return (*rows, None)

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        a: tuple[Tensor, ...],
        b: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_ids: Tensor,
        expert_ids: Tensor,
        padded: Tensor,
        *unused: object,
        **others: object,
    ) -> None:
        """Add to the weighted results y [tokens, k, hidden] the adapter's weighted product of x [tokens * k, I]."""
        if a:
            rows, (tokens, count, _) = (sorted_ids, expert_ids, padded), y.shape
            low = _grouped(x, a[0], rows, 1, (tokens, count))
            y.add_(_grouped(low.flatten(0, 1), b[0], rows, 1, (tokens, count), topk_weights))


SMALL_BLOCK_ROWS = 32
"""Rows of an expert, on average, up to which small blocks multiply them."""


def _block_rows(rows: int, experts: int) -> int:
    """Rows of an expert that a thread block multiplies."""
    return 16 if rows <= SMALL_BLOCK_ROWS * experts else 64


def _grouped(
    x: Tensor,
    weight: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    count: int,
    shape: tuple[int, int],
    topk_weights: Tensor | None = None,
) -> Tensor:
    """x W_e^T of each pair of a token and its expert e, by vLLM's grouped Triton kernel.

    Args:
        x: [tokens, K], or a row of each pair, bfloat16.
        weight: W [E, N, K].
        rows: Of `moe_align_block_size`.
        count: Pairs of a row of x.
        shape: Tokens, and experts of each.
        topk_weights: They multiply the result where they are given, float32 [tokens, k].

    Returns:
        [tokens, k, N].
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    out = x.new_empty(*shape, weight.shape[1])
    block = _block_rows(shape[0] * shape[1], len(weight))
    sizes = (min(64, max(16, 1 << (size - 1).bit_length())) for size in weight.shape[1:])
    config = {"BLOCK_SIZE_M": block, **dict(zip(("BLOCK_SIZE_N", "BLOCK_SIZE_K"), sizes, strict=True))}
    config |= {"GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
    weighted = topk_weights is not None
    quantized = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)
    invoke_fused_moe_triton_kernel(
        *(x, weight, out, None, None, topk_weights, *rows, weighted, count, config, tl.bfloat16),
        **quantized,
        per_channel_quant=False,
    )
    return out


def attach_on_gpu(model: Any, model_config: Any, config: Mapping[str, Any]) -> LoraBuffers:
    """Give vLLM's fused Marlin experts adapters; arguments and result as `attach_on_cpu`.

    Raises:
        UserError: Other kernels run, experts have biases or are padded, or this vLLM lacks a name.
    """
    if missing := compat.missing_names(compat.EXPERT_LORA):
        raise UserError(f"an adapter of experts relies on names that this vLLM lacks, {missing[0]}: {REMEDY}")
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

    buffers: LoraBuffers = {}
    for name, module in fused_experts.layers(model).items():
        if fused_experts.marlin_stacks(module) is None or module.moe_config.has_bias:
            raise UserError(
                "on a GPU an adapter of experts needs Marlin's fused experts, in bfloat16, without biases or padding; "
                f"vLLM runs {fused_experts.kernel_name(module)} on {model_config.hf_config.model_type}: {REMEDY}"
            )
        buffers |= _add_buffers(module, name, config, model_config.dtype, module.w13_weight.device)
        first, second = (([pair[0]], [pair[1]]) if pair else ([], []) for pair in _lora(module))
        context = MoELoRAContext(
            *(tuple(factors) for factors in (*first, *second)),
            adapter_enabled=torch.ones(1, dtype=torch.int32, device=module.w13_weight.device),
            max_loras=1,
            top_k=module.moe_config.experts_per_token,
            w13_num_slices=1,
            fully_sharded=False,
            tp_rank=0,
            tp_size=1,
            local_num_experts=module.moe_config.num_experts,
            punica_wrapper=GroupedLora(),
            use_tuned_config=False,
        )
        module.quant_method.moe_kernel.fused_experts.set_lora_context(context)
    return buffers


@torch.inference_mode()
def check(model: Any, max_tokens: int) -> None:
    """Compare vLLM's fused product with adapters, random and as large as the weights, with the trainer's.

    All layers are laid out alike, so one is compared, for few tokens and for many.

    Args:
        model: vLLM's, after `attach_on_gpu`.
        max_tokens: Of a forward pass: vLLM has no workspace for more.

    Raises:
        UserError: They differ.
    """
    layers = fused_experts.layers(model)
    name, module = next((name, module) for name, module in layers.items() if any(_lora(module)))
    stacks, lora = fused_experts.marlin_stacks(module), _lora(module)
    assert stacks is not None
    for weight, factors in zip(stacks, lora, strict=True):
        if factors is not None:
            dense = weight.dense(0, 1, torch.float32) * (1.0 if weight.alphas is None else weight.alphas[0])
            size = dense.square().mean().sqrt() / factors.a.shape[1] ** 0.5
            generator = torch.Generator(dense.device).manual_seed(0)
            factors.a.normal_(generator=generator).mul_(size)
            factors.b.normal_(generator=generator)
    config = module.moe_config
    many = SMALL_BLOCK_ROWS * config.num_experts // config.experts_per_token + 1
    for tokens in (fused_experts.PROBES, many):
        tokens = min(tokens, max_tokens)
        difference = fused_experts.difference(module, *stacks, tokens, lora=lora)
        if not difference <= fused_experts.TOLERANCE:
            raise UserError(
                f"fused experts with an adapter must give the dequantized experts' product; those of {name} differ by "
                f"{difference:.2g} of its size for {tokens} tokens: {REMEDY}"
            )
    for factors in lora:
        if factors is not None:
            factors.a.zero_()
            factors.b.zero_()
