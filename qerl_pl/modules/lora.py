"""LoRA over any frozen linear, in PEFT's conventions, so that PEFT saves, loads and switches it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import peft
from peft.tuners.lora import LoraLayer
from qerl_kernels import (
    AdaptedWeight,
    FrozenWeight,
    LoraFactors,
    dense_linear,
    frozen_linear,
    frozen_linears,
    saves_products,
)
from torch import Tensor, nn

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import LAYER_NORMS


def parameter_name(part: str) -> str:
    """A layer's name for a part of its weight: that of the checkpoint, but for dots ("weight.absmax")."""
    return part.replace(".", "_")


class FrozenLinear(nn.Module):
    """y = x W^T + b; W and b have no gradient, the input and an adapter have one.

    Args:
        weight: W [N, K].
        bias: b [N], the trainer's own in any case, for an engine may permute its.
        own: The weight's tensors, frozen parameters then, become the layer's, under the names that the checkpoint
            format gives them. Otherwise they stay the engine's: nothing moves, casts or saves them.
    """

    def __init__(self, weight: FrozenWeight, bias: nn.Parameter | None, own: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self.bias = bias
        if own:
            for name, tensor in weight.tensors().items():
                assert isinstance(tensor, nn.Parameter)
                self.register_parameter(parameter_name(name), tensor)

    @property
    def qweight(self) -> Tensor:
        """One of the weight's tensors; PEFT asks it for the device, by the name that quantized layers have there."""
        return next(iter(self._weight.tensors().values()))

    def forward(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's data type; with `lora` its product is added in place."""
        return frozen_linear(x, self._weight, self.bias, lora)

    def adapted(self, b: Tensor, scaling: float) -> AdaptedWeight:
        """Itself with an adapter's B [N, r], for `frozen_linears`."""
        return AdaptedWeight(self._weight, self.bias, b, scaling)

    def extra_repr(self) -> str:
        return f"{type(self._weight).__name__}, in_features={self.in_features}, out_features={self.out_features}"


ADAPTER = "default"

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """The trainable low-rank adapter.

    Args:
        rank: Rank r of the adapter's matrices A [r, in] and B [out, r].
        alpha: The adapter adds alpha / rank * B A to a weight. A power-of-two ratio keeps it exact in 16 bits.
        dropout: Probability of dropping an input of A, in training.
        targets: Last parts of the names of the linears that get an adapter.
    """

    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"LoRA needs rank >= 1; found {self.rank}; set model.policy.lora.rank")
        if not 0.0 < self.alpha < math.inf:
            raise UserError(
                f"LoRA needs a finite alpha > 0; found {self.alpha}; set model.policy.lora.alpha, to 2 * rank, say"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"LoRA needs 0 <= dropout < 1; found {self.dropout}; set model.policy.lora.dropout")
        if not self.targets:
            raise UserError("LoRA needs linears to adapt; found no targets; set model.policy.lora.targets")

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


class LoraLinear(nn.Module, LoraLayer):
    """base(x) + scaling * B(A(dropout(x))), the adapter computed in x's data type from float32 masters.

    PEFT builds these when it wraps a model; its switches (adapter off, active adapter) are obeyed.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: peft.LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.rounded: tuple[Tensor, Tensor] | None = None
        """Copies of the factors for one forward pass, which `LoraAdapter.rounded` makes and takes away. In place of A
        is the A of all linears that `can_fuse_lora`, one above the other, where this is one of them."""
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.Linear | FrozenLinear)
        return module.in_features, module.out_features

    def factors(self) -> tuple[Tensor, Tensor]:
        """The adapter's matrices A [r, in] and B [out, r], the trained parameters themselves."""
        return self.lora_A[ADAPTER].get_parameter("weight"), self.lora_B[ADAPTER].get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.disable_adapters:
            return self._base(x)
        a, b = self._factors_for(x)
        scaling = self.scaling[ADAPTER]
        if isinstance(self.base_layer, FrozenLinear) and not self.drops:
            return self.base_layer(x, LoraFactors(a, b, scaling))
        hidden = nn.functional.linear(self.lora_dropout[ADAPTER](x), a.to(x.dtype))
        return self._base(x) + nn.functional.linear(hidden, b.to(x.dtype)) * scaling

    @property
    def drops(self) -> bool:
        """Whether an input of A may be dropped just now."""
        return self.training and not isinstance(self.lora_dropout[ADAPTER], nn.Identity)

    def copies_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`rounded` where it is of x's data type, else the trained parameters."""
        copies = self.rounded
        return copies if copies is not None and copies[0].dtype == x.dtype else self.factors()

    def _factors_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.copies_for(x)
        return (a, b) if len(a) == self.r[ADAPTER] else self.factors()

    def _base(self, x: Tensor) -> Tensor:
        if saves_products() and isinstance(self.base_layer, nn.Linear):
            return dense_linear(x, self.base_layer.weight, self.base_layer.bias)
        return self.base_layer(x)


def can_fuse_lora(linears: Sequence[nn.Module]) -> TypeGuard[Sequence[LoraLinear]]:
    """Whether linears on one input share the products of their adapters: all have one, on and without dropout, over
    weights that `FrozenLinear` itself multiplies by.
    """
    return all(
        isinstance(linear, LoraLinear)
        and type(linear.base_layer) is FrozenLinear
        and not (linear.disable_adapters or linear.drops)
        for linear in linears
    )


def shared_input_linears(linears: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """What each of several linears gives for x [..., in], in fewer products where they `can_fuse_lora`."""
    if not can_fuse_lora(linears):
        return tuple(linear(x) for linear in linears)
    factors = [linear.copies_for(x) for linear in linears]
    a = {id(a): a for a, _ in factors}.values()  # one, where it is all of them already
    adapted = [
        linear.base_layer.adapted(b, linear.scaling[ADAPTER])  # type: ignore[operator]
        for linear, (_, b) in zip(linears, factors, strict=True)
    ]
    return frozen_linears(x, list(a), adapted)


def check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Refuse an adapter that a model has no place for.

    Args:
        model: The base; one without weights will do.
        config: Its adapter.

    Raises:
        UserError: A target matches no linear of the model's layers (the one to the vocabulary takes no adapter), or the
            adapter could hold any change of the smallest one's weight, and more.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: min(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | FrozenLinear) and module is not head
    }
    for target in config.targets:
        sides = {name: side for name, side in linears.items() if re.fullmatch(rf"(.*\.)?{re.escape(target)}", name)}
        if not sides:
            found = sorted({name.rsplit(".", 1)[-1] for name in linears})
            raise UserError(
                f"every LoRA target must name linears of the model; {target!r} matches none; "
                f"choose model.policy.lora.targets among {', '.join(found)}"
            )
        smallest = min(sides, key=lambda name: sides[name])
        if config.rank > sides[smallest]:
            raise UserError(
                f"a LoRA rank must not be above the smaller side of a weight; found rank {config.rank} for {smallest} "
                f"with {sides[smallest]}; lower model.policy.lora.rank, or leave {target} out of its targets"
            )


def attach_lora(model: nn.Module, config: LoraConfig, train_norms: bool = False) -> peft.PeftModel:
    """Wrap the target linears of a causal LM with adapters (A random, B zero: the policy starts as its base).

    Args:
        model: The frozen base.
        config: Rank, scaling, targets.
        train_norms: Also train copies of the layers' norms, which PEFT saves with the adapter.

    Raises:
        UserError: As `check_targets`.
    """
    check_targets(model, config)
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
        modules_to_save=list(LAYER_NORMS) if train_norms else None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    peft_config._register_custom_module(dict.fromkeys((FrozenLinear, nn.Linear), LoraLinear))
    # autocast_adapter_dtype keeps the factors in float32 over a 16-bit base: AdamW steps are below bf16's resolution.
    return peft.PeftModelForCausalLM(model, peft_config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
