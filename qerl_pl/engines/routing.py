"""Recording of the experts that the routers of a transformers model select."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from qerl_pl.models.families import Family

UNRECORDED = -1
"""In place of an expert id: the trainer's own router selects."""


class RoutingRecorder:
    """The experts that each router selected in the last forward pass.

    Args:
        model: Of transformers, a mixture of experts.
        family: Its family.
    """

    def __init__(self, model: nn.Module, family: Family) -> None:
        assert family.experts is not None
        config: Any = model.config
        self.layers = int(config.num_hidden_layers)
        self.top_k = int(getattr(config, family.experts.top_k))
        router = re.compile(rf"\.layers\.(\d+)\.{family.experts.module}\.{family.experts.router}$")
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
