"""Layers of a transformers model whose adapter, or scale with noise, is written before each rollout."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from qerl_kernels import ExpertBiases, ExpertLora, LoraFactors, clamped_swiglu_reference, mixture_reference
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.formats.architecture import DOWN, GATE_UP, Experts
from qerl_pl.formats.norm import Float32RMSNorm


class SyncedLoraLinear(nn.Module):
    """base(x) + B A x, with the adapter's scaling folded into B; A [r, in], B [out, r] in the base's data type."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.enabled = False
        self.register_buffer("a", base.weight.new_zeros(rank, base.in_features))
        self.register_buffer("b", base.weight.new_zeros(base.out_features, rank))
        self.a: Tensor
        self.b: Tensor

    @torch.no_grad()
    def write(self, a: Tensor, b: Tensor, scaling: float) -> None:
        """Copy an adapter's A [r, in] and B [out, r]."""
        self.a.copy_(a)
        self.b.copy_(b * scaling)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        out: Tensor = self.base(x)
        return out + F.linear(F.linear(x, self.a), self.b) if self.enabled else out


class SyncedLoraExperts(nn.Module):
    """A layer's experts with their adapters, the scaling folded into B; A [E, r, in], B [E, out, r].

    Args:
        base: Transformers' submodule with the stacks.
        experts: Of the family.
        adapted: Which of `gate_up_proj` and `down_proj` have an adapter.
        rank: Of the adapters.
    """

    def __init__(self, base: nn.Module, experts: Experts, adapted: Iterable[str], rank: int) -> None:
        super().__init__()
        self.base, self._experts = base, experts
        self._enabled: set[str] = set()
        for matrix in adapted:
            count, rows, columns = self._weight(matrix).shape
            weight = base.get_parameter(matrix)
            self.register_buffer(f"{matrix}_a", weight.new_zeros(count, rank, columns))
            self.register_buffer(f"{matrix}_b", weight.new_zeros(count, rows, rank))

    @torch.no_grad()
    def write(self, matrix: str, factors: tuple[Tensor, Tensor] | None, scaling: float) -> None:
        """Copy an adapter's A and B; None switches it off."""
        self._enabled.discard(matrix)
        if factors is not None:
            self.get_buffer(f"{matrix}_a").copy_(factors[0])
            self.get_buffer(f"{matrix}_b").copy_(factors[1] * scaling)
            self._enabled.add(matrix)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden_states [S, hidden], the experts of each and their weights [S, k] -> [S, hidden]."""
        base: Any = self.base
        product: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: base.act_fn(gate) * up  # noqa: E731
        if self._experts.clamped:
            product = partial(clamped_swiglu_reference, alpha=base.alpha, limit=base.limit)
        stored = self._experts.stored_in_stacks
        biases = ExpertBiases(base.gate_up_proj_bias, base.down_proj_bias) if stored else None
        weights = self._weight(GATE_UP), self._weight(DOWN)
        lora = ExpertLora(self._lora(GATE_UP), self._lora(DOWN))
        return mixture_reference(hidden_states, topk_weights, topk_ids, *weights, product, biases, stored, lora)

    def _weight(self, matrix: str) -> Tensor:
        """[E, out, in]."""
        weight = self.base.get_parameter(matrix)
        return weight.transpose(1, 2) if self._experts.stored_in_stacks else weight

    def _lora(self, matrix: str) -> LoraFactors | None:
        if matrix not in self._enabled:
            return None
        return LoraFactors(self.get_buffer(f"{matrix}_a"), self.get_buffer(f"{matrix}_b"), 1.0)


class SyncedRMSNorm(Float32RMSNorm):
    """RMSNorm whose weight is a clean weight plus noise, both in float32."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__(weight, eps, offset)
        self.register_buffer("base", self.weight.detach().clone())
        self.register_buffer("clean", self.base.clone())
        self.base: Tensor
        self.clean: Tensor

    @property
    def scale(self) -> Tensor:
        """[hidden], float32: clean weight plus noise."""
        return self.weight.data

    @torch.no_grad()
    def write(self, clean: Tensor, noise: Tensor | None) -> None:
        """Set the weight [hidden] to a clean weight + noise."""
        self.clean.copy_(clean)
        self.scale.copy_(self.clean if noise is None else self.clean + noise.to(self.clean.device))
