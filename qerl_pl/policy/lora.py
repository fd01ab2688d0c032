"""LoRA layers over frozen linears, in PEFT's conventions, and their settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from qerl_kernels import AdaptedWeight, DenseWeight, FrozenWeight, LoraFactors, frozen_linear, frozen_linears
from torch import Tensor, nn

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.models.families import PROJECTIONS, find_family, names_match


def parameter_name(name: str) -> str:
    """Parameter name of a checkpoint tensor, which may contain dots ("weight.absmax")."""
    return name.replace(".", "_")


class FrozenLinear(nn.Module):
    """y = x W^T + b with frozen W and b; the input and an adapter have gradients.

    Args:
        weight: W [N, K].
        bias: b [N], never shared with an engine, which may permute its copy.
        own: Whether the weight's tensors are registered as parameters, under the checkpoint's names. Tensors shared
            with an engine are not: nothing moves, casts or saves them.
    """

    def __init__(self, weight: FrozenWeight, bias: nn.Parameter | None, own: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = weight
        self.bias = bias
        if own:
            for name, tensor in weight.tensors().items():
                assert isinstance(tensor, nn.Parameter)
                self.register_parameter(parameter_name(name), tensor)

    @property
    def qweight(self) -> Tensor:
        """A tensor of the weight; PEFT reads its device under this name."""
        return next(iter(self.packed.tensors().values()))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's data type."""
        return frozen_linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{type(self.packed).__name__}, in_features={self.in_features}, out_features={self.out_features}"


ADAPTER = "default"


@dataclass(frozen=True)
class LoraSpec:
    """A low-rank adapter with all of its settings known; `LoraConfig` explains them."""

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = PROJECTIONS
    use_rslora: bool = False
    dropout: float = 0.0

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class LoraConfig:
    """The trainable low-rank adapter. Null takes the value of `model.policy.adapter`, or without one the default.

    Args:
        rank: Rank r of the adapter's matrices A [r, in] and B [out, r]; 16 by default.
        alpha: The adapter adds alpha / rank * B A to a weight; 16 by default. A power-of-two ratio is exact in 16 bits.
        dropout: Probability of dropping an input of A in training.
        targets: Names of the adapted linears within their layer; all projections by default, or with `all-linear`, as
            PEFT has it.
        use_rslora: Add alpha / sqrt(rank) * B A instead (rank-stabilized LoRA); false by default.
    """

    rank: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    use_rslora: bool | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"model.policy.lora.rank": self.rank})
        if self.alpha is not None and not 0.0 < self.alpha < math.inf:
            raise UserError(
                f"LoRA needs a finite alpha > 0; got {self.alpha}; set model.policy.lora.alpha, to 2 * rank, say"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"LoRA needs 0 <= dropout < 1; got {self.dropout}; set model.policy.lora.dropout")
        if isinstance(self.targets, str) and self.targets != "all-linear":  # one name, as PEFT has it
            object.__setattr__(self, "targets", (self.targets,))
        if self.targets is not None and not self.targets:
            raise UserError("LoRA needs linears to adapt; got no targets; set model.policy.lora.targets")

    def spec(self, default: LoraSpec) -> LoraSpec:
        """The settings, those of `default` where they are null."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(default, **given)


class LoraLinear(nn.Module):
    """base(x) + scaling * B(A(dropout(x))), computed in x's data type from float32 master weights.

    `PeftLoraLinear` is the layer, whose attributes PEFT sets.
    """

    base_layer: nn.Module
    disable_adapters: bool
    r: dict[str, int]
    scaling: dict[str, float]
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    lora_dropout: nn.ModuleDict
    low_precision_factors: tuple[Tensor, Tensor] | None = None
    """Low-precision copies of A and B, set by `LoraAdapter.low_precision_copies` for one forward pass. Linears that
    `can_fuse_lora` share one A: theirs, concatenated by rows."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """The adapter's matrices A [r, in] and B [out, r], the trained parameters themselves."""
        return self.lora_A[ADAPTER].get_parameter("weight"), self.lora_B[ADAPTER].get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.disable_adapters:
            return self._base(x)
        a, b = self.factors_for(x)
        if len(a) != self.r[ADAPTER]:  # the fused A of several linears, but this one runs alone
            a, b = self.factors()
        scaling = self.scaling[ADAPTER]
        if not self.drops:
            return self._base(x, LoraFactors(a, b, scaling))
        hidden = nn.functional.linear(self.lora_dropout[ADAPTER](x), a.to(x.dtype))
        return self._base(x) + nn.functional.linear(hidden, b.to(x.dtype)) * scaling

    @property
    def drops(self) -> bool:
        """Whether dropout is active."""
        return self.training and not isinstance(self.lora_dropout[ADAPTER], nn.Identity)

    def factors_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`low_precision_factors` in x's data type, else the trained parameters."""
        copies = self.low_precision_factors
        return copies if copies is not None and copies[0].dtype == x.dtype else self.factors()

    def adapted(self, b: Tensor) -> AdaptedWeight:
        """Weight, bias and the adapter's B [N, r], for `frozen_linears`."""
        return AdaptedWeight(*self._frozen(), b, self.scaling[ADAPTER])

    def _base(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        return frozen_linear(x, *self._frozen(), lora)

    def _frozen(self) -> tuple[FrozenWeight, Tensor | None]:
        """Weight and bias."""
        base = self.base_layer
        assert isinstance(base, nn.Linear | FrozenLinear)
        return (base.packed if isinstance(base, FrozenLinear) else DenseWeight(base.weight)), base.bias


def can_fuse_lora(linears: Sequence[nn.Module]) -> TypeGuard[Sequence[LoraLinear]]:
    """Whether `frozen_linears` can compute linears on one input: all have an enabled adapter and no dropout."""
    return all(
        isinstance(linear, LoraLinear)
        and type(linear.base_layer) in (FrozenLinear, nn.Linear)
        and not (linear.disable_adapters or linear.drops)
        for linear in linears
    )


def shared_input_linears(linears: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Outputs of linears on one input x [..., in], with fused LoRA products where they `can_fuse_lora`."""
    if not can_fuse_lora(linears):
        return tuple(linear(x) for linear in linears)
    factors = [linear.factors_for(x) for linear in linears]
    a = {id(a): a for a, _ in factors}.values()  # a single A if it is already concatenated
    adapted = [linear.adapted(b) for linear, (_, b) in zip(linears, factors, strict=True)]
    return frozen_linears(x, list(a), adapted)


def check_targets(model: nn.Module, config: LoraSpec) -> None:
    """Raise UserError if a target of an adapter matches no linear of the model (the output layer takes no adapter), or
    its rank exceeds the smaller side of a weight, but for a gated delta net's linears of few rows."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    family = find_family(model.config.model_type)  # type: ignore[union-attr, arg-type]
    narrow = () if family is None else family.dense_linears
    linears = {
        name: min(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | FrozenLinear) and module is not head
    }
    for target in config.targets:
        sides = {name: side for name, side in linears.items() if names_match(name, [target])}
        if not sides:
            names = sorted({name.rsplit(".", 1)[-1] for name in linears})
            raise UserError(
                f"every LoRA target must name linears of the model; {target!r} matches none; "
                f"choose model.policy.lora.targets among {', '.join(names)}"
                + ("; experts and router are frozen" if family is not None and family.experts is not None else "")
            )
        wide = {name: side for name, side in sides.items() if not names_match(name, narrow)}
        smallest, side = min(wide.items(), key=lambda pair: pair[1], default=("", config.rank))
        if config.rank > side:
            raise UserError(
                f"a LoRA rank must not be above the smaller side of a weight; got rank {config.rank} for {smallest} "
                f"with {side}; lower model.policy.lora.rank, or leave {target} out of its targets"
            )
