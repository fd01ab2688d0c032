"""Linear layers on frozen 4-bit weights: dequantize, then one GEMM whose alpha is the global scale.

The dense weight lives as long as one GEMM and is dequantized again in backward, which gives gradients to the input and
to the adapter only. The adapter's product is added in place to the rounded base product, the engine's order of
roundings; one product with the adapter as further columns of the weight would save that pass, and round otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_kernels import ops
from qerl_kernels.marlin import MarlinTensor, check_rows, marlin_alpha


class LoraFactors(NamedTuple):
    """An adapter: the layer adds scaling * B A to its weight. Computed in the input's dtype."""

    a: Tensor
    """[r, K]."""
    b: Tensor
    """[N, r]."""
    scaling: float


def nvfp4_alpha(global_scale: Tensor) -> float:
    """Reciprocal of an NVFP4 global scale, rounded to float32 as engines round it; waits for the device."""
    return global_scale.float().reciprocal().item()


def nvfp4_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float | None = None,
    lora: LoraFactors | None = None,
) -> Tensor:
    """x W^T + bias (+ scaling * x A^T B^T) for W in NVFP4 in the compressed-tensors layout.

    Args:
        x: [..., K], bfloat16, float16 or float32; the product is computed in its dtype.
        packed: uint8 [N, K/2].
        scale: float8_e4m3fn [N, K/16].
        global_scale: float32 [1].
        bias: [N], frozen.
        alpha: What `nvfp4_alpha` gave for the global scale. None reads it from the device, which waits for it: pass it
            where speed matters.
        lora: The adapter; its factors get gradients in their own dtype.

    Returns:
        [..., N] in x's dtype.
    """
    alpha = nvfp4_alpha(global_scale) if alpha is None else alpha
    return _linear(x, _Rows(packed, scale), alpha, bias, lora)


def marlin_linear(
    x: Tensor,
    weight: MarlinTensor,
    bias: Tensor | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    alpha: float | None = None,
    lora: LoraFactors | None = None,
) -> Tensor:
    """The same for rows [start:stop) of a weight in Marlin's layout, NVFP4, or MXFP4 where it has no global scale.

    Args:
        x: [..., K].
        weight: The engine's tensors, borrowed.
        bias: [stop - start], in plain order, frozen.
        start: First row, a multiple of 64.
        stop: Row after the last, a multiple of 64; all if None.
        alpha: What `marlin_alpha` gave for the global scale; None reads it from the device.
        lora: The adapter of these rows.

    Raises:
        ValueError: A slice that is not at multiples of 64.
    """
    start, stop = check_rows(weight.weight, start, stop)
    alpha = marlin_alpha(weight.global_scale) if alpha is None else alpha
    return _linear(x, _Marlin(weight.weight, weight.scale, start, stop, weight.global_scale is None), alpha, bias, lora)


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lora: LoraFactors) -> Tensor:
    """The same for a frozen dense weight [N, K], cast to x's dtype: what the 4-bit layers are compared with."""
    return _linear(x, _Full(weight), 1.0, bias, lora)


class _Full(NamedTuple):
    weight: Tensor

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class _Rows(NamedTuple):
    packed: Tensor
    scale: Tensor

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_nvfp4_unscaled(self.packed, self.scale, dtype)


class _Marlin(NamedTuple):
    weight: Tensor
    scale: Tensor
    start: int
    stop: int
    mx: bool

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize_marlin_rows(self.weight, self.scale, self.start, self.stop, self.mx, dtype)


def _linear(
    x: Tensor, source: _Full | _Rows | _Marlin, alpha: float, bias: Tensor | None, lora: LoraFactors | None
) -> Tensor:
    if x.dim() != 2:  # autograd records each view
        flat = _linear(x.reshape(-1, x.shape[-1]), source, alpha, bias, lora)
        return flat.view(*x.shape[:-1], flat.shape[-1])
    # The packed tensors travel inside a closure: autograd neither saves them nor watches their versions.
    if lora is None:
        return _QuantizedLinear.apply(x, source.dense, alpha, bias)
    return _QuantizedLoraLinear.apply(x, source.dense, alpha, bias, lora.a, lora.b, lora.scaling)


Dense = Callable[[torch.dtype], Tensor]


def _product(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(x.new_empty(1), x, weight, beta=0, alpha=alpha)
    return torch.addmm(bias.to(x.dtype), x, weight, alpha=alpha)


def _add_product(y: Tensor, x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """y + alpha * x weight, into y's memory."""
    if torch.compiler.is_compiling():  # PyTorch 2.11 loses the input's gradient there if y changes in place
        return torch.addmm(y, x, weight, alpha=alpha)
    return y.addmm_(x, weight, alpha=alpha)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None) -> Tensor:
        ctx.dense, ctx.alpha = dense, alpha
        return _product(x, dense(x.dtype).t(), alpha, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = _product(grad, ctx.dense(grad.dtype), ctx.alpha, None) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _QuantizedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dense: Dense, alpha: float, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)
        hidden = torch.mm(x, low_a.t())
        y = _product(x, dense(x.dtype).t(), alpha, bias)
        y = _add_product(y, hidden, low_b.t(), scaling)
        ctx.save_for_backward(x, hidden, low_a, low_b)  # small beside x, and not rounded again in backward
        ctx.dense, ctx.alpha, ctx.scaling, ctx.dtypes = dense, alpha, scaling, (a.dtype, b.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, a, b = ctx.saved_tensors
        scaling, needed = ctx.scaling, ctx.needs_input_grad
        dx = da = db = None
        if needed[0] or needed[4]:
            inner = _product(grad, b, scaling, None)
        if needed[0]:
            dx = _add_product(torch.mm(inner, a), grad, ctx.dense(x.dtype), ctx.alpha)
        if needed[4]:
            da = torch.mm(inner.t(), x).to(ctx.dtypes[0])
        if needed[5]:
            db = _product(grad.t(), hidden, scaling, None).to(ctx.dtypes[1])
        return dx, None, None, None, da, db, None
