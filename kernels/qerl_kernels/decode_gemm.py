"""Linear layer with LoRA on an NVFP4 weight in Marlin's layout, for the few tokens of a decode step.

It rounds where the trainer does: the base product to bfloat16, then the sum with the adapter's.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qerl_kernels.backend import interpreting, runs_triton
from qerl_kernels.frozen_weights import MarlinRows
from qerl_kernels.linear import LoraFactors, frozen_linear
from qerl_kernels.marlin import MarlinTensor

DECODE_GEMM_MAX_TOKENS = 1024
"""Default limit of engines; the kernels take any number. Rollouts were measured up to it."""


def decode_gemm_linear(
    x: Tensor,
    weight: MarlinTensor,
    bias: Tensor | None = None,
    *,
    a: Tensor | None = None,
    b: Tensor | None = None,
    starts: Sequence[int] = (0,),
) -> Tensor:
    """x W^T + bias + (x A^T) B^T, rounded to bfloat16 before the adapter's product is added.

    Without gradients or host synchronization: a CUDA graph can capture it. The same call returns the same bits.

    Args:
        x: bfloat16 [tokens, K]; for other types plain PyTorch computes it.
        weight: NVFP4 W, the engine's own tensors.
        bias: [N], in plain order.
        a: The adapter's A, bfloat16 [r, K]; those of a fused projection's slices concatenated by rows.
        b: Its B times its scaling, bfloat16 [N, r]; block-diagonal for a fused projection.
        starts: First row of each slice that has an adapter, ascending; all adapters have the same rank.

    Returns:
        bfloat16 [tokens, N].
    """
    if x.dtype != torch.bfloat16 or not decode_gemm_supported(weight):
        return decode_gemm_linear_reference(x, weight, bias, a, b)
    from qerl_kernels import triton_decode_gemm

    return triton_decode_gemm.decode_gemm_linear(x.contiguous(), weight, bias, a, b, starts)


def decode_gemm_supported(weight: MarlinTensor) -> bool:
    """Whether the kernels run: NVFP4, Triton backend, a GPU of compute capability 8.0 or later.

    Else `decode_gemm_linear` is slow plain PyTorch.
    """
    if weight.global_scale is None or not runs_triton(weight.weight):
        return False
    return len(weight.weight) % 4 == 0 and (interpreting() or _capability(weight.weight.get_device()) >= (8, 0))


def decode_gemm_measured(weight: MarlinTensor) -> bool:
    """Whether the kernels were measured on such a GPU, Hopper; on others they compile, and nobody has run them."""
    return interpreting() or _capability(weight.weight.get_device())[0] == 9


def decode_gemm_sizes(weight: MarlinTensor, rank: int, up_to: int) -> list[int]:
    """Numbers of tokens to run once, so that all kernel variants up to `up_to` tokens and this rank are compiled."""
    from qerl_kernels import triton_decode_gemm

    return triton_decode_gemm.sizes(weight, rank, up_to)


def compile_decode_gemm(products: Iterable[tuple[Any, ...]]) -> None:
    """Compile the kernels of several products, a thread each: one after the other they take half a minute.

    Without effect where they are compiled, or Triton has no such mode.

    Args:
        products: Of each the number of tokens, and weight, bias, a, b and starts, as `decode_gemm_linear` takes them.
    """
    from qerl_kernels import triton_decode_gemm

    triton_decode_gemm.compile_at_once(products)


def decode_gemm_linear_reference(
    x: Tensor, weight: MarlinTensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """`decode_gemm_linear` in plain PyTorch: dequantize, then three products. Synchronizes with the device."""
    lora = None if a is None or b is None else LoraFactors(a, b, 1.0)
    return frozen_linear(x, MarlinRows(weight), bias, lora)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
