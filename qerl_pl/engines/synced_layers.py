"""Layers of a transformers model whose adapter, or scale with noise, is written before each rollout."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
