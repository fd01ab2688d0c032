"""Layers with a mixture of experts, whose frozen weights stay packed: `qerl_kernels.mixture_of_experts` multiplies."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from qerl_kernels import ExpertBiases, StackedWeight, clamped_swiglu, last_addend, mixture_of_experts
from torch import Tensor, nn
from torch.nn import functional

from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BIASES, BaseFormat, Place, StoredExperts
from qerl_pl.models.families import DOWN, GATE_UP, Experts, Family, expert_blocks
from qerl_pl.models.folder import TensorFiles
from qerl_pl.policy.delta_net import PackedDeltaNet
from qerl_pl.policy.lora import parameter_name, shared_input_linears
from qerl_pl.policy.packed_layers import ACTIVATIONS, GatedMLP, PackedAttention


class SharedExpert(GatedMLP):
    """The MLP of a mixture that all tokens are given to; never in tiles.

    Its factor is multiplied before down, whose product is an addend of the layer's result then: no gradient needs it.
    """

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] and a factor of the result [tokens, 1] -> as x."""
        product = self._activation(*shared_input_linears(self.shared_input, x))
        with last_addend():
            result: Tensor = self.down_proj(product if factor is None else product * factor)
        return result


class PackedExperts(nn.Module):
    """A mixture of frozen experts with the router of transformers' block, which it replaces under the same names.

    The top-k weights stay in float32, as in vLLM.

    Args:
        block: The mixture as transformers computes it; its router is used.
        experts: Names and rules of the family's mixture.
        weights: `gate_up_proj` and `down_proj` of all experts, by those names.
        own: Whether the weights' tensors are registered as parameters; those of an engine are not.
        activation: act(gate) * up.
        biases: Frozen parameters by the names in `BIASES`; empty where there are none.
    """

    def __init__(
        self,
        block: nn.Module,
        experts: Experts,
        weights: Mapping[str, StackedWeight],
        own: bool,
        activation: Callable[[Tensor, Tensor], Tensor],
        biases: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._experts = experts
        self.add_module(experts.router, block.get_submodule(experts.router))
        if experts.shared is not None:
            self.add_module(experts.shared, SharedExpert(block.get_submodule(experts.shared), activation))
            gate = dict(block.get_submodule(f"{experts.shared}_gate").named_parameters())
            self.add_module(f"{experts.shared}_gate", nn.ParameterDict(gate))  # takes no adapter
        self._gate_up, self._down, self._activation = weights[GATE_UP], weights[DOWN], activation
        self.replayed: Tensor | None = None
        """Experts of the tokens of the next forward pass, int64 [S, k], -1 where the router selects."""
        self._has_biases = bool(biases)
        for name, tensor in {**(own_parameters(weights) if own else {}), **biases}.items():
            assert isinstance(tensor, nn.Parameter)
            self.register_parameter(name, tensor)

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states [..., hidden] -> the same shape, and the top-k weights if transformers' block returns them."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        topk_weights, topk_ids = self.route(x)
        biases = ExpertBiases(*map(self.get_parameter, BIASES)) if self._has_biases else None
        weights = self._gate_up, self._down
        interleaved = self._experts.stored_in_stacks
        with last_addend():
            out = mixture_of_experts(x, topk_weights, topk_ids, *weights, self._activation, biases, interleaved)
        if (shared := self._experts.shared) is not None:
            gate = functional.linear(x, self.get_parameter(f"{shared}_gate.weight"))
            out = out + self.get_submodule(shared)(x, gate.sigmoid())
        out = out.view_as(hidden_states)
        return (out, topk_weights) if self._experts.returns_topk_weights else out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k weights float32 [S, k] and expert ids int64 [S, k] of tokens x [S, hidden]."""
        router: Any = self.get_submodule(self._experts.router)
        weight = router.get_parameter("weight")
        if self._experts.softmax_after_topk:
            scores = functional.linear(x, weight, dict(router.named_parameters()).get("bias"))
            topk_ids = self._replayed(scores.topk(router.top_k, dim=-1).indices)
            return scores.gather(-1, topk_ids).softmax(-1, dtype=torch.float32), topk_ids
        probabilities = functional.linear(x, weight).softmax(-1, dtype=torch.float32)
        topk_ids = self._replayed(probabilities.topk(router.top_k, dim=-1).indices)
        topk_weights = probabilities.gather(-1, topk_ids)
        if router.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_weights, topk_ids

    def _replayed(self, topk_ids: Tensor) -> Tensor:
        """The sampler's experts, or the router's where none are replayed."""
        return topk_ids if self.replayed is None else torch.where(self.replayed < 0, topk_ids, self.replayed)


def attach_routing_replay(model: nn.Module) -> None:
    """Set each mixture's replayed experts by a hook of its layer's packed attention, or gated delta net.

    Such a hook runs whenever the layer is recomputed, one of the layer itself does not with all releases of
    transformers.
    """
    for name, experts in model.named_modules():
        if isinstance(experts, PackedExperts):
            layer = name.rpartition(".")[0]  # model.layers.0
            parts, index = model.get_submodule(layer).children(), int(layer.rpartition(".")[2])
            mixer = next(part for part in parts if isinstance(part, PackedAttention | PackedDeltaNet))
            mixer.register_forward_pre_hook(partial(_set_replayed, experts, index), with_kwargs=True)


def _set_replayed(
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
    place: Place,
    shared: Mapping[str, StackedWeight],
) -> tuple[dict[str, Tensor], set[str]]:
    """Replace the mixtures of experts of a model on the meta device by `PackedExperts`, in place.

    Args:
        model: A decoder of transformers.
        family: Its family.
        base_format: Format of the checkpoint.
        tensors: The checkpoint.
        dtype: Data type of weights that are not quantized.
        place: Makes a tensor a frozen parameter on its device.
        shared: Weights of an engine by module name and matrix, "model.layers.0.mlp.experts.gate_up_proj".

    Returns:
        The loaded tensors by parameter name, and the names of the checkpoint's tensors that they, or the engine's, are.
    """
    if family.experts is None:
        return {}, set()
    state: dict[str, Tensor] = {}
    loaded: set[str] = set()
    for name, block in expert_blocks(model, family).items():
        stacked = f"{name}.experts"
        all_experts = block.get_submodule("experts")
        activation = _activation(family.experts, all_experts, name)
        count = all_experts.get_parameter(GATE_UP).shape[0]
        stored = StoredExperts(family.experts, base_format, tensors, stacked, count)
        loaded |= stored.names()
        weights = {matrix: shared[key] for matrix in (GATE_UP, DOWN) if (key := f"{stacked}.{matrix}") in shared}
        own = not weights
        if own:
            weights = {matrix: stored.weight(matrix, dtype, place) for matrix in (GATE_UP, DOWN)}
            state |= {f"{name}.{key}": tensor for key, tensor in own_parameters(weights).items()}
        biases = stored.biases(dtype, place)
        state |= {f"{name}.{key}": tensor for key, tensor in biases.items()}
        model.set_submodule(name, PackedExperts(block, family.experts, weights, own, activation, biases))
    return state, loaded


def _activation(experts: Experts, stacked: Any, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """act(gate) * up of transformers' experts `stacked` of the mixture `name`."""
    if experts.clamped:
        return partial(clamped_swiglu, alpha=stacked.alpha, limit=stacked.limit)
    activation = type(stacked.act_fn).__name__
    if activation not in ACTIVATIONS:
        raise UserError(
            f"experts must have an activation of {', '.join(ACTIVATIONS)}; {name} has {activation}: take another model"
        )
    return ACTIVATIONS[activation]
