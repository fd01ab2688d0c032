"""Experts of vLLM's model, which it multiplies by in one fused kernel: what the trainer can share of them.

Read in vLLM 0.25.1: Marlin's fused kernel has gates above ups in `w13_weight` int32 [E, K/16, 2N], and `w2_weight`,
each with block scales, and for NVFP4 a global scale for each expert; each expert's matrix lies as a linear's does.
"""

from typing import Any

import torch
from qerl_kernels import ExpertLora, MarlinStack, MarlinTensor, StackedWeight, mixture_of_experts, silu_product
from torch import Tensor

from qerl_pl.engines.vllm.linear_methods import relative_difference
from qerl_pl.errors import UserError

TOLERANCE = 0.02
"""Largest relative difference between two ways to compute a mixture: rounding makes a few 1e-3, another layout 1."""
PROBES = 16
"""Tokens that both ways are compared on."""
_FUSED = "RoutedExperts"
_SUFFIX = ".routed_experts"


def layers(model: Any, subclasses: bool = False) -> dict[str, Any]:
    """Modules with a layer's experts, by the name of the base model's ("model.layers.0.mlp.experts").

    Args:
        model: vLLM's.
        subclasses: Whether modules of a family's own class, as gpt-oss has, are among them.
    """
    return {
        name.removesuffix(_SUFFIX): module
        for name, module in model.named_modules()
        if _FUSED in [cls.__name__ for cls in type(module).__mro__[: None if subclasses else 1]]
        and hasattr(module, "w13_weight")
    }


def kernel_names(model: Any) -> list[str]:
    """Class names of the kernels that multiply by a model's experts."""
    return sorted({kernel_name(module) for module in layers(model).values()})


def kernel_name(module: Any) -> str:
    """Class name of the kernel that multiplies by a layer's experts, or of its method where that has none."""
    method = module.quant_method
    return (getattr(method, "experts_cls", None) or type(method)).__name__


def shared_experts(model: Any) -> dict[str, StackedWeight] | None:
    """Frozen weights of all experts that the trainer can use, by name in the base model.

    Returns:
        Empty for a model without experts; None where they are in another layout than Marlin's, or padded.

    Raises:
        UserError: The trainer would compute something else with them than vLLM does.
    """
    shared: dict[str, StackedWeight] = {}
    for name, module in layers(model).items():
        stacks = marlin_stacks(module)
        if stacks is None:
            return None
        if not shared:  # all layers are laid out alike
            _check(name, module, *stacks)
        shared |= {f"{name}.gate_up_proj": stacks[0], f"{name}.down_proj": stacks[1]}
    return shared


def marlin_stacks(module: Any) -> tuple[StackedWeight, StackedWeight] | None:
    """Gates and ups, and downs; None where they are in another layout than Marlin's, or padded."""
    if "Marlin" not in kernel_name(module) or module.w13_weight.dtype != torch.int32:
        return None
    config = module.moe_config
    experts, hidden, inner = config.num_experts, config.hidden_dim, config.intermediate_size_per_partition
    stacks = tuple(
        MarlinStack(
            MarlinTensor(
                getattr(module, f"{matrix}_weight").data,
                getattr(module, f"{matrix}_weight_scale").data,
                _data(getattr(module, f"{matrix}_weight_scale_2", None)),
            )
        )
        for matrix in ("w13", "w2")
    )
    fit = [stack.shape for stack in stacks] == [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    return (stacks[0], stacks[1]) if fit else None


def _data(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.data


def _check(name: str, module: Any, gate_up: StackedWeight, down: StackedWeight) -> None:
    """Compare vLLM's fused product with that of the dequantized weights.

    Raises:
        UserError: They differ.
    """
    found = difference(module, gate_up, down, PROBES)
    if not found <= TOLERANCE:
        raise UserError(
            f"Marlin's fused experts and the dequantized ones must give the same product; those of {name} differ by "
            f"{found:.2g} of its size, so this vLLM lays experts out otherwise: set share_weights to false"
        )


@torch.inference_mode()
def difference(
    module: Any, gate_up: StackedWeight, down: StackedWeight, tokens: int, lora: ExpertLora | None = None
) -> float:
    """Relative difference between vLLM's fused product and that of the dequantized weights.

    Args:
        module: vLLM's, with an adapter's buffers where `lora` has them.
        gate_up: Its gates and ups.
        down: Its downs.
        tokens: Number of tokens.
        lora: The adapter.
    """
    experts, hidden, _ = down.shape
    generator, device = torch.Generator().manual_seed(0), module.w13_weight.device
    x = torch.randn(tokens, hidden, generator=generator, device="cpu").to(device, torch.bfloat16)
    logits = torch.randn(tokens, experts, generator=generator, device="cpu").to(device)
    share, chosen = logits.softmax(-1).topk(module.moe_config.experts_per_token, dim=-1)
    expected = mixture_of_experts(x, share, chosen, gate_up, down, silu_product, lora=lora)
    actual: Tensor = module.quant_method.apply(module, x.clone(), share, chosen.int(), None, None)
    return relative_difference(actual, expected)
