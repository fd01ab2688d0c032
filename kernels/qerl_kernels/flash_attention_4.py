"""FlashAttention 4 for packed sequences on Hopper GPUs, from the package `flash-attn-4`.

Both passes use the tensor cores' asynchronous matrix multiplications (wgmma), unlike PyTorch's FlashAttention 2, and
the deterministic backward pass is one call for all heads. The first call for a head size, data type or kind of window
compiles kernels; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk.
"""

import functools
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
HEAD_SIZES = (64, 96, 128)
"""Elements of a head for which tests compare both passes with PyTorch's."""


@functools.cache
def available(device: torch.device, head_size: int) -> bool:
    """Whether `forward` and `backward` run: the package is installed, the GPU is Hopper, the head size tested.

    Warns of a package that is installed and cannot be imported.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or head_size not in HEAD_SIZES:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    try:
        import flash_attn.cute.interface  # noqa: F401
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # versions that do not go together
        log.warning("FlashAttention 2 computes attention: flash-attn-4 cannot be imported (%s)", error)
        return False
    return True


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None, left: int
) -> tuple[Tensor, Tensor]:
    """Causal attention within each packed sequence.

    Args:
        query: query, key, value, cu_seqlens, max_seqlen and scale are those of `qerl_kernels.varlen_attention`.
        left: Tokens before its own that each attends to; -1 for all.

    Returns:
        The result [S, heads, head size], and the logarithm of each row's sum of exponentials, float32 [heads, S].
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    rows = (tensor.detach() for tensor in (query, key, value))
    out, log_sum, *_ = _flash_attn_fwd(*rows, **_options(cu_seqlens, max_seqlen, scale, left), return_lse=True)
    return out, log_sum


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; the same bits each time if PyTorch's algorithms are deterministic.

    Args:
        grad: Of the result, [S, heads, head size].
        query: query, key, value, cu_seqlens, max_seqlen, scale and left are those of `forward`.
        out: Its result.
        log_sum: Its second result.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    of_query, of_key, of_value = _flash_attn_bwd(
        query,
        key,
        value,
        out,
        grad,
        log_sum,
        **_options(cu_seqlens, max_seqlen, scale, left),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return of_query, of_key, of_value


def _options(cu_seqlens: Tensor, max_seqlen: int, scale: float | None, left: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": left < 0,
        "window_size_left": None if left < 0 else left,
        "window_size_right": 0,
    }
