"""Experts of vLLM's model, which it multiplies by in one fused kernel: what the trainer can share of them.

Read in vLLM 0.25.1: Marlin's fused kernel has gates above ups in `w13_weight` int32 [E, K/16, 2N], and `w2_weight`,
each with block scales, and for NVFP4 a global scale for each expert; each expert's matrix lies as a linear's does.

gpt-oss's gates and ups are interleaved there, too, as its checkpoints have them. Its matrices are padded with zeros,
below the last row and right of the last column: the hidden size to a multiple of 256, an expert's width to one of 128.
Each token is padded before the product, and its result cut off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from qerl_kernels import (
    MarlinStack,
    MarlinTensor,
    StackedWeight,
    clamped_swiglu,
    mixture_of_experts,
    silu_product,
)
from qerl_kernels.experts import Activation
from torch import Tensor
from torch.nn import functional

from qerl_pl.engines.vllm.linear_methods import relative_difference
from qerl_pl.errors import UserError
from qerl_pl.models.families import Family

TOLERANCE = 0.02
"""Largest relative difference between two ways to compute a mixture: rounding makes a few 1e-3, another layout 1."""
PROBES = 16
"""Tokens that both ways are compared on."""
_FUSED = "RoutedExperts"
_SUFFIX = ".routed_experts"


def layers(model: Any) -> dict[str, Any]:
    """Modules with a layer's experts, of a family's own class, too, by the base model's name "….mlp.experts"."""
    return {
        name.removesuffix(_SUFFIX): module
        for name, module in model.named_modules()
        if _FUSED in [cls.__name__ for cls in type(module).__mro__] and hasattr(module, "w13_weight")
    }


def kernel_names(model: Any) -> list[str]:
    """Class names of the kernels that multiply by a model's experts."""
    return sorted({kernel_name(module) for module in layers(model).values()})


def kernel_name(module: Any) -> str:
    """Class name of the kernel that multiplies by a layer's experts, or of its method where that has none."""
    method = module.quant_method
    return (getattr(method, "experts_cls", None) or type(method)).__name__


def computation_of(family: Family, config: Any) -> tuple[Activation, bool]:
    """act(gate) * up as vLLM's model of a family computes it, and whether rows of gates and ups are interleaved."""
    if family.experts is None or not family.experts.clamped:
        return silu_product, family.experts is not None and family.experts.stored_in_stacks
    constants: Any = family.fixed_in_vllm(config)
    activation = partial(clamped_swiglu, alpha=constants["swiglu_alpha"], limit=constants["swiglu_limit"])
    return activation, family.experts.stored_in_stacks


def shared_experts(model: Any, family: Family, config: Any) -> dict[str, StackedWeight] | None:
    """Frozen weights of all experts that the trainer can use, by name in the base model.

    Returns:
        Empty for a model without experts; None where they are in another layout than Marlin's, or padded between gates
        and ups.

    Raises:
        UserError: The trainer would compute something else with them than vLLM does.
    """
    shared: dict[str, StackedWeight] = {}
    activation, interleaved = computation_of(family, config)
    for name, module in layers(model).items():
        stacks = marlin_stacks(module, interleaved)
        if stacks is None:
            return None
        if not shared:  # all layers are laid out alike
            _check(name, module, *stacks, activation, interleaved)
        shared |= {f"{name}.gate_up_proj": stacks[0], f"{name}.down_proj": stacks[1]}
    return shared


def marlin_stacks(module: Any, interleaved: bool = False) -> tuple[StackedWeight, StackedWeight] | None:
    """Gates and ups, and downs, without their padding.

    Args:
        module: vLLM's.
        interleaved: Rows of gates and ups are interleaved, so that padding follows both; otherwise it follows each.

    Returns:
        None where they are in another layout than Marlin's, or padded and not interleaved.
    """
    if "Marlin" not in kernel_name(module) or module.w13_weight.dtype != torch.int32:
        return None
    config = module.moe_config
    experts, padded = config.num_experts, (config.hidden_dim, config.intermediate_size_per_partition)
    hidden, intermediate = real = (config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded)
    if real != padded and not interleaved:
        return None
    tensors = [
        MarlinTensor(
            getattr(module, f"{matrix}_weight").data,
            getattr(module, f"{matrix}_weight_scale").data,
            _data(getattr(module, f"{matrix}_weight_scale_2", None)),
        )
        for matrix in ("w13", "w2")
    ]
    expected = [(experts, 2 * padded[1], padded[0]), (experts, padded[0], padded[1])]
    if [MarlinStack(tensor).shape for tensor in tensors] != expected:
        return None
    return MarlinStack(tensors[0], 2 * intermediate, hidden), MarlinStack(tensors[1], hidden, intermediate)


def _data(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.data


def _check(
    name: str, module: Any, gate_up: StackedWeight, down: StackedWeight, activation: Activation, interleaved: bool
) -> None:
    """Refuse a fused product of vLLM that is not that of the dequantized weights."""
    found = difference(module, gate_up, down, PROBES, activation, interleaved)
    if not found <= TOLERANCE:
        raise UserError(
            f"Marlin's fused experts and the dequantized ones must give the same product; those of {name} differ by "
            f"{found:.2g} of its size, so this vLLM lays experts out otherwise: set share_weights to false"
        )


@torch.inference_mode()
def difference(
    module: Any,
    gate_up: StackedWeight,
    down: StackedWeight,
    tokens: int,
    activation: Activation = silu_product,
    interleaved: bool = False,
) -> float:
    """Relative difference between vLLM's fused product and that of the dequantized weights, both without biases."""
    experts, hidden, _ = down.shape
    generator, device = torch.Generator().manual_seed(0), module.w13_weight.device
    x = torch.randn(tokens, hidden, generator=generator, device="cpu").to(device, torch.bfloat16)
    logits = torch.randn(tokens, experts, generator=generator, device="cpu").to(device)
    topk_weights, topk_ids = logits.softmax(-1).topk(module.moe_config.experts_per_token, dim=-1)
    expected = mixture_of_experts(x, topk_weights, topk_ids, gate_up, down, activation, interleaved=interleaved)
    padded = functional.pad(x, (0, module.moe_config.hidden_dim - hidden))
    with _without_biases(module):
        actual: Tensor = module.quant_method.apply(module, padded, topk_weights, topk_ids.int(), None, None)[:, :hidden]
    return relative_difference(actual, expected)


@contextmanager
def _without_biases(module: Any) -> Iterator[None]:
    """Zero the biases of a layer's experts in place, as vLLM's kernel has references to them; then restore them.

    They are in an order of Marlin's own. The trainer has its own in plain order.
    """
    found = (getattr(module, f"{matrix}_bias", None) for matrix in ("w13", "w2"))
    biases = [bias.data for bias in found if bias is not None]
    kept = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias.zero_()
        yield
    finally:
        for bias, values in zip(biases, kept, strict=True):
            bias.copy_(values)
