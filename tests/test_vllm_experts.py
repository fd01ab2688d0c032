"""Experts of vLLM's model that the trainer shares: found, compared, and refused where they lie otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest
from qerl_kernels import MarlinStack, mixture_reference, silu_product
from test_ops_experts import EXPERTS, HIDDEN, INNER, matrices, stacks
from torch import Tensor, nn

from qerl_pl.engines.vllm.fused_experts import kernel_names, shared_experts
from qerl_pl.errors import UserError

NAME = "model.layers.0.mlp.experts"


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
        self.moe_config = SimpleNamespace(
            num_experts=EXPERTS, hidden_dim=HIDDEN, intermediate_size_per_partition=INNER, experts_per_token=2
        )


def model() -> tuple[nn.Module, RoutedExperts]:
    """vLLM's model with one layer, and its experts."""
    whole, experts = nn.Module(), RoutedExperts()
    holder: Any = whole
    for part in NAME.split("."):
        holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.add_module("routed_experts", experts)
    return whole, experts


def test_the_trainer_multiplies_by_the_engines_memory() -> None:
    whole, experts = model()
    assert kernel_names(whole) == ["MarlinExperts"] and kernel_names(nn.Linear(2, 2)) == []
    shared = shared_experts(whole)
    assert shared is not None and set(shared) == {f"{NAME}.gate_up_proj", f"{NAME}.down_proj"}
    for matrix, stack in (("w13", shared[f"{NAME}.gate_up_proj"]), ("w2", shared[f"{NAME}.down_proj"])):
        assert isinstance(stack, MarlinStack)
        assert stack.tensors()["weight"].data_ptr() == getattr(experts, f"{matrix}_weight").data_ptr()
    assert shared_experts(nn.Linear(2, 2)) == {}


def test_experts_in_another_layout_or_padded_are_not_shared() -> None:
    whole, experts = model()
    experts.moe_config.intermediate_size_per_partition = INNER - 16
    assert shared_experts(whole) is None
    whole, experts = model()
    experts.quant_method.experts_cls = type("CutlassExpertsFp4", (), {})
    assert shared_experts(whole) is None


def test_experts_that_multiply_otherwise_are_refused() -> None:
    whole, experts = model()
    experts.quant_method.gate_up = experts.quant_method.gate_up.flip(1)
    with pytest.raises(UserError, match=rf"those of {NAME} differ by .* set share_weights to false"):
        shared_experts(whole)
