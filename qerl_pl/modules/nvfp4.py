"""Frozen linear layers whose weight stays in four bits: in an own copy, or borrowed from the engine."""

import torch
from qerl_kernels import LoraFactors, MarlinTensor, marlin_alpha, marlin_linear, nvfp4_alpha, nvfp4_linear
from torch import Tensor, nn

from qerl_pl.engines.base import LentLinear

GROUP = 16
"""Weights along the input dimension that share one scale."""


class QuantizedLinear(nn.Module):
    """y = x W^T + b with W in NVFP4; W and b have no gradient, the input and an adapter have one.

    Args:
        in_features: K.
        out_features: N.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._alpha: float | None = None

    def forward(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's data type; with `lora` its product is added in place."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class NVFP4Linear(QuantizedLinear):
    """An own copy of the weight, as compressed-tensors' format `nvfp4-pack-quantized` stores it.

    W[n, k] = e2m1(code[n, k]) * scale[n, k // 16] / global_scale. The tensors are frozen parameters under the names
    that the checkpoint format gives them.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: Whether there is a bias [N].
        dtype: Data type of the bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features)
        groups = in_features // GROUP
        self.weight_packed = _frozen(torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.weight_scale = _frozen(torch.empty(out_features, groups, dtype=torch.float8_e4m3fn))
        self.weight_global_scale = _frozen(torch.empty(1, dtype=torch.float32))
        self.bias = _frozen(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's data type; with `lora` its product is added in place."""
        if self._alpha is None:
            self._alpha = nvfp4_alpha(self.weight_global_scale)
        weight = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return nvfp4_linear(x, *weight, self.bias, alpha=self._alpha, lora=lora)


class BorrowedLinear(QuantizedLinear):
    """The engine's own weight, in its Marlin layout: rows [start, stop) of a matrix that may hold several projections.

    The tensors stay the engine's: they are no parameters, so nothing moves, casts or saves them.

    Args:
        lent: What the engine lends.
        bias: Whether there is a bias [N]: an own copy, for the engine permutes its.
        dtype: Data type of the bias.
    """

    def __init__(self, lent: LentLinear, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(lent.in_features, lent.stop - lent.start)
        self._lent = lent
        self._weight = MarlinTensor(lent.weight, lent.scale, lent.global_scale)
        self.bias = _frozen(torch.empty(self.out_features, dtype=dtype)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The engine's packed weight; PEFT asks it for the device."""
        return self._lent.weight

    def forward(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's data type; with `lora` its product is added in place."""
        lent = self._lent
        if self._alpha is None:
            self._alpha = marlin_alpha(lent.global_scale)
        return marlin_linear(x, self._weight, self.bias, start=lent.start, stop=lent.stop, alpha=self._alpha, lora=lora)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
