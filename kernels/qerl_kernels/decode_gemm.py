"""A linear layer on an NVFP4 weight in Marlin's layout for the few tokens of a decode step, with its adapter.

One PyTorch operator, opaque to torch.compile, whose number of tokens stays open. It does what the trainer does, in the
same order of roundings: the base product in bfloat16, the adapter's added to it.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_kernels import ops
from qerl_kernels.activation import plain_silu_of_halves, silu_of_halves
from qerl_kernels.backend import interpreting, runs_triton
from qerl_kernels.decode_gemm_schedule import BLOCK
from qerl_kernels.marlin import MarlinTensor, marlin_alpha

DECODE_GEMM_MAX_TOKENS = 256

"""Up to here the kernels were measured to be ahead of Marlin and of the dequantized product; they take any number."""

_library = torch.library.Library("qerl", "FRAGMENT")

_library.define(
    "decode_gemm_linear(Tensor x, Tensor weight, Tensor scale, Tensor? global_scale, Tensor? bias, "
    "Tensor? a, Tensor? b, int[] starts, bool gated=False) -> Tensor"
)


def decode_gemm_linear(
    x: Tensor,
    weight: MarlinTensor,
    bias: Tensor | None = None,
    *,
    a: Tensor | None = None,
    b: Tensor | None = None,
    starts: Sequence[int] = (0,),
    gated: bool = False,
) -> Tensor:
    """x W^T + bias + (x A^T) B^T, rounded to bfloat16 before the adapter's product is added; activated, if `gated`.

    Without gradients. Nothing is read back to the host, so that a CUDA graph can hold it. How the sums are cut follows
    from the shapes alone: the same call gives the same bits.

    Args:
        x: bfloat16 [tokens, K]; other types take the plain way.
        weight: NVFP4, the engine's tensors, borrowed.
        bias: [N], in plain order.
        a: The adapter's A, bfloat16 [r, K]; those of a fused projection's parts one below the other.
        b: Its B times its scaling, bfloat16 [N, r]; each part's in the block of its rows and ranks, zero elsewhere.
        starts: First row of each part that `a` holds, ascending; each has the same rank.
        gated: Whether the first half of the rows is an MLP's gate and the second its up projection: then the result is
            `silu_product` of the two, with the same bits as if it were taken of the product.

    Returns:
        bfloat16 [tokens, N], or [tokens, N/2] if `gated`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.qerl.decode_gemm_linear(x, *weight, bias, a, b, list(starts), gated)
    return _few_tokens_linear(x, *weight, bias, a, b, starts, gated)


def decode_gemm_supported(weight: MarlinTensor) -> bool:
    """Whether the kernels take this weight here; where not, `decode_gemm_linear` is plain PyTorch and slow.

    They need the Triton backend, a Hopper GPU, and NVFP4. It depends on the layer alone, not on the tokens.
    """
    if weight.global_scale is None or not runs_triton(weight.weight):
        return False
    return len(weight.weight) % 4 == 0 and (interpreting() or _hopper(weight.weight.get_device()))


def decode_gemm_sizes(weight: MarlinTensor, rank: int, up_to: int, gated: bool = False) -> list[int]:
    """Numbers of tokens that, run once, have everything compiled that `decode_gemm_linear` needs up to `up_to` tokens.

    Args:
        weight: One that `decode_gemm_supported` allows.
        rank: Rows of the adapter's A, all parts together.
        up_to: Tokens.
        gated: As for `decode_gemm_linear`.
    """
    from qerl_kernels import triton_decode_gemm

    return triton_decode_gemm.sizes(weight, rank, up_to, gated)


def decode_gemm_linear_reference(
    x: Tensor, weight: MarlinTensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, gated: bool = False
) -> Tensor:
    """The truth: dequantize, then three products, then the activation if `gated`. Waits for the device."""
    dense = ops.dequantize_marlin(weight.weight, weight.scale, x.dtype, mx=weight.global_scale is None)
    alpha = marlin_alpha(weight.global_scale)
    if bias is None:
        y = torch.addmm(x.new_empty(1), x, dense.t(), beta=0, alpha=alpha)
    else:
        y = torch.addmm(bias.to(x.dtype), x, dense.t(), alpha=alpha)
    y = y if a is None or b is None else y.addmm_(x @ a.t(), b.t())
    return plain_silu_of_halves(y) if gated else y


@functools.cache
def _hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _few_tokens_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    gated: bool = False,
) -> Tensor:
    tensor = MarlinTensor(weight, scale, global_scale)
    if x.dtype != torch.bfloat16 or not decode_gemm_supported(tensor):
        return decode_gemm_linear_reference(x, tensor, bias, a, b, gated)
    from qerl_kernels import triton_decode_gemm

    folded = gated and weight.shape[1] // 2 % (2 * BLOCK) == 0
    y = triton_decode_gemm.decode_gemm_linear(x.contiguous(), tensor, bias, a, b, starts, gated=folded)
    return silu_of_halves(y) if gated and not folded else y


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    gated: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1] // (4 if gated else 2)))


_library.impl("decode_gemm_linear", _few_tokens_linear, "CompositeExplicitAutograd")

torch.library.register_fake("qerl::decode_gemm_linear", _fake, lib=_library)
