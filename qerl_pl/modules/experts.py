"""Layers with a mixture of experts, whose frozen weights stay packed: `qerl_kernels.mixture_of_experts` multiplies."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from qerl_kernels import StackedWeight, mixture_of_experts
from torch import Tensor, nn
from torch.nn import functional

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import Experts, Family
from qerl_pl.formats.base import BaseFormat
from qerl_pl.formats.model_folder import TensorFiles
from qerl_pl.modules.lora import parameter_name
from qerl_pl.modules.packed_layers import ACTIVATIONS

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class PackedExperts(nn.Module):
    """A mixture of frozen experts with the router of transformers' block, which it replaces under the same names.

    The shares of the chosen experts stay in float32, as in vLLM.

    Args:
        block: Of transformers; its router is kept.
        experts: Of the family.
        weights: `gate_up_proj` and `down_proj` of all experts, by those names.
        own: Whether the weights' tensors are registered as parameters; those of an engine are not.
        product: Of `ACTIVATIONS`.
    """

    def __init__(
        self,
        block: nn.Module,
        experts: Experts,
        weights: Mapping[str, StackedWeight],
        own: bool,
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self._router = experts.router
        self.add_module(experts.router, block.get_submodule(experts.router))
        self._gate_up, self._down, self._product = weights[GATE_UP], weights[DOWN], product
        self.replayed: Tensor | None = None
        """Experts of the tokens of the next forward pass, int64 [S, k], -1 where the router chooses."""
        if own:
            for name, tensor in own_parameters(weights).items():
                assert isinstance(tensor, nn.Parameter)
                self.register_parameter(name, tensor)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden] -> the same shape."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        share, chosen = self.route(x)
        return mixture_of_experts(x, share, chosen, self._gate_up, self._down, self._product).view_as(hidden_states)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares float32 [S, k] and numbers int64 [S, k] of the experts of tokens x [S, hidden]."""
        router: Any = self.get_submodule(self._router)
        probabilities = functional.linear(x, router.get_parameter("weight")).softmax(-1, dtype=torch.float32)
        chosen = probabilities.topk(router.top_k, dim=-1).indices
        if self.replayed is not None:
            chosen = torch.where(self.replayed < 0, chosen, self.replayed)
        share = probabilities.gather(-1, chosen)
        if router.norm_topk_prob:
            share = share / share.sum(-1, keepdim=True)
        return share, chosen


def hand_over_routing(model: nn.Module) -> None:
    """Have each layer's attention, which knows the `Packing`, hand replayed experts over to the layer's mixture.

    A hook of the attention runs whenever the layer is recomputed, one of the layer itself does not with all releases of
    transformers. Call it after `use_packed_attention`.
    """
    for name, experts in model.named_modules():
        if isinstance(experts, PackedExperts):
            layer = model.get_submodule(name.rpartition(".")[0])
            attention = layer.get_submodule("self_attn")
            attention.register_forward_pre_hook(partial(_hand_over, experts, _number(name)), with_kwargs=True)


def _number(name: str) -> int:
    """A layer's, from the name of one of its modules."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    assert match is not None
    return int(match[1])


def _hand_over(
    experts: PackedExperts, layer: int, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    routing = kwargs["packing"].routing
    experts.replayed = None if routing is None else routing[layer]


def own_parameters(weights: Mapping[str, StackedWeight]) -> dict[str, Tensor]:
    """The tensors of a layer's experts by the name of their parameter."""
    return {
        f"{matrix}_{parameter_name(name)}": tensor
        for matrix, weight in weights.items()
        for name, tensor in weight.tensors().items()
    }


def use_packed_experts(
    model: nn.Module,
    family: Family,
    base_format: BaseFormat,
    tensors: TensorFiles,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
    shared: Mapping[str, StackedWeight],
) -> tuple[dict[str, Tensor], set[str]]:
    """Replace the mixtures of experts of a model on the meta device by `PackedExperts`, in place.

    Args:
        model: Of transformers.
        family: Its family.
        base_format: Of the checkpoint.
        tensors: The checkpoint.
        dtype: Of weights that are not quantized.
        place: Makes a tensor a frozen parameter on its device.
        shared: Weights of an engine by module name and matrix, "model.layers.0.mlp.experts.gate_up_proj".

    Returns:
        The loaded tensors by parameter name, and the names of the checkpoint's tensors that they, or the engine's, are.

    Raises:
        UserError: The experts' activation is unknown, or the format stores no experts.
    """
    if family.experts is None:
        return {}, set()
    state: dict[str, Tensor] = {}
    loaded: set[str] = set()
    for name, block in list(model.named_modules()):
        if type(block).__name__ != f"{family.classes}SparseMoeBlock":
            continue
        stacked = f"{name}.{family.experts.stacked}"
        inner = block.get_submodule(family.experts.stacked)
        count = inner.get_parameter(GATE_UP).shape[0]
        members: dict[str, Sequence[Sequence[str]]] = {
            GATE_UP: [(f"{stacked}.{expert}.gate_proj", f"{stacked}.{expert}.up_proj") for expert in range(count)],
            DOWN: [(f"{stacked}.{expert}.down_proj",) for expert in range(count)],
        }
        names = [linear for experts in members.values() for linears in experts for linear in linears]
        loaded |= {tensor for linear in names for tensor in base_format.tensor_names(linear)}
        weights = {matrix: shared[key] for matrix in members if (key := f"{stacked}.{matrix}") in shared}
        own = not weights
        if own:
            for matrix, linears in members.items():
                weights[matrix] = base_format.stacked_weight(linears, tensors, dtype, place)
            state |= {f"{name}.{key}": tensor for key, tensor in own_parameters(weights).items()}
        activation = type(inner.act_fn).__name__
        if activation not in ACTIVATIONS:
            raise UserError(
                f"experts must have an activation of {', '.join(ACTIVATIONS)}; {name} has {activation}: take another "
                "model"
            )
        product = ACTIVATIONS[activation]
        model.set_submodule(name, PackedExperts(block, family.experts, weights, own, product))
    return state, loaded
