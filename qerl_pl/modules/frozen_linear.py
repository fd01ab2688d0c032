"""A frozen linear layer whose weight stays as it is held: in an own copy, or borrowed from the engine."""

from qerl_kernels import AdaptedWeight, FrozenWeight, LoraFactors, frozen_linear
from torch import Tensor, nn


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
