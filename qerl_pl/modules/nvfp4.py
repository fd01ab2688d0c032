"""A frozen linear layer whose weight stays in four bits."""

import torch
from qerl_kernels import dequantize_nvfp4
from torch import Tensor, nn

GROUP = 16
"""Weights along the input dimension that share one scale."""


class NVFP4Linear(nn.Module):
    """y = x W^T + b with W in NVFP4, as compressed-tensors' format `nvfp4-pack-quantized` stores it.

    The weight is W[n, k] = e2m1(code[n, k]) * scale[n, k // 16] / global_scale. It has no gradient; the input has one.
    The tensors are frozen parameters under the names that the checkpoint format gives them.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: Whether there is a bias [N].
        dtype: Data type of the bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        groups = in_features // GROUP
        self.weight_packed = _frozen(torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.weight_scale = _frozen(torch.empty(out_features, groups, dtype=torch.float8_e4m3fn))
        self.weight_global_scale = _frozen(torch.empty(1, dtype=torch.float32))
        self.bias = _frozen(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's data type."""
        weight = dequantize_nvfp4(self.weight_packed, self.weight_scale, self.weight_global_scale, x.dtype)
        return nn.functional.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
