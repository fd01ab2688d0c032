"""The adapter of vLLM's linears by itself: its operator and its blocks in a fused projection."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qerl_pl.engines.vllm.linear_methods import LoraMethod, attach_adapter


class Base:
    """A linear's product, as vLLM's methods compute it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


def fused() -> Any:
    """Three outputs from two inputs; rows 0 and 1 are one linear of the base model, row 2 is another."""
    linear: Any = nn.Linear(2, 3, bias=False)
    linear.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    linear.input_size_per_partition, linear.output_size_per_partition = 2, 3
    linear.quant_method = Base()
    return linear


@pytest.mark.parametrize("compiled", [False, True])
def test_each_slice_of_a_fused_projection_gets_its_own_adapter(compiled: bool) -> None:
    linear = fused()
    buffers = attach_adapter(linear, [("gate", 0, 2), ("up", 2, 3)], 1, torch.float32)
    assert isinstance(linear.quant_method, LoraMethod)

    def forward(x: Tensor) -> Tensor:
        result: Tensor = linear.quant_method.apply(linear, x)
        return result

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    x = torch.tensor([[1.0, 2.0]])
    with torch.inference_mode():
        assert torch.equal(run(x), torch.tensor([[1.0, 2.0, 3.0]]))  # an adapter of zeros
        buffers["gate"][0].copy_(torch.tensor([[3.0, -1.0]]))  # x A^T = 1
        buffers["gate"][1].copy_(torch.tensor([[1.0], [-2.0]]))
        buffers["up"][0].copy_(torch.tensor([[0.0, 2.0]]))  # x A^T = 4
        buffers["up"][1].copy_(torch.tensor([[0.5]]))
        assert torch.equal(run(x), torch.tensor([[2.0, 0.0, 5.0]]))


def test_the_adapters_product_is_added_to_the_bases_own_output() -> None:
    linear = fused()
    attach_adapter(linear, [("all", 0, 3)], 1, torch.float32)
    held: list[Tensor] = []

    class Remembering(Base):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            held.append(super().apply(layer, x, bias))
            return held[-1]

    linear.quant_method.base = Remembering()
    with torch.no_grad():
        assert linear.quant_method.apply(linear, torch.ones(1, 2)) is held[0]
