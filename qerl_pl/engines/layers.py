"""Layers of `TransformersEngine`: adapters and scales written before each rollout; a recorder of selected experts."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.families import Family


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


UNRECORDED = -1
"""Expert id of tokens without a recorded routing: the trainer's own router selects their experts."""


class RoutingRecorder:
    """The experts that each router selected in the last forward pass."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        assert family.experts is not None
        config: Any = model.config
        self.layers = int(config.num_hidden_layers)
        self.top_k = int(config.num_experts_per_tok)
        router = re.compile(rf"\.layers\.(\d+)\.mlp\.{family.experts.router}$")
        self._last: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            if (match := router.search(name)) is not None:
                module.register_forward_hook(self._hook(int(match[1])))

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._last[layer] = output[2]

        return record

    def take(self, rows: int, tokens: int) -> Tensor:
        """Expert ids, int16 [rows, tokens, layers, k]; UNRECORDED in layers without experts."""
        shape = rows, tokens, self.layers, self.top_k
        device = next(iter(self._last.values())).device
        routing = torch.full(shape, UNRECORDED, dtype=torch.int16, device=device)
        for layer, topk_ids in self._last.items():
            routing[:, :, layer] = topk_ids.view(rows, tokens, -1).to(torch.int16)
        self._last.clear()
        return routing
