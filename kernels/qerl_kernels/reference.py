"""Plain PyTorch versions of the ops: the tests' reference, and the implementation without a GPU.

Shapes: N output features, K input features, M tokens, V vocabulary, D hidden size. Layouts are those of
compressed-tensors: two E2M1 codes per byte, the even k in the low nibble; a scale per block along K.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
MX_BLOCK = 32
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SMALLEST_UNIFORM = 4.6566127342e-10
"""Replaces a uniform number of zero when sampling; also the factor of 31-bit integers."""
BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1."""
CPU_BLOCKS, CUDA_BLOCKS = 1 << 15, 1 << 22
"""Blocks quantized at a time."""


class NVFP4Tensor(NamedTuple):
    """A weight in NVFP4: W = e2m1 * scale / global_scale."""

    packed: Tensor
    """uint8 [N, K/2]."""
    scale: Tensor
    """float8_e4m3fn [N, K/16]."""
    global_scale: Tensor
    """float32 [1], a divisor."""


class MXFP4Tensor(NamedTuple):
    """A weight in MXFP4: W = e2m1 * 2**(scale - 127)."""

    packed: Tensor
    """uint8 [N, K/2]."""
    scale: Tensor
    """uint8 [N, K/32], E8M0."""


def nvfp4_global_scale(*weights: Tensor) -> Tensor:
    """Global scale that `weights` share, such as those of q, k and v, which an engine fuses.

    It is llm-compressor's: 448 * 6 / amax in the weights' dtype, 1 for zero weights. Where float16
    overflows, at amax below 0.041, the division is in float32; llm-compressor's 1 would round most weights to zero.

    Args:
        weights: Matrices [N_i, K] of one dtype; the result is float32 [1].

    Raises:
        ValueError: No weights, or weights of different dtypes.
    """
    if not weights or len({weight.dtype for weight in weights}) > 1:
        dtypes = sorted({str(weight.dtype) for weight in weights})
        raise ValueError(f"A global scale needs weights of one dtype, got {dtypes}; cast them to the same dtype first.")
    amax = torch.stack([weight.abs().amax() for weight in weights]).amax().reshape(1)
    scale = (E4M3_MAX * E2M1_MAX / amax.clamp(min=torch.finfo(amax.dtype).tiny)).float()
    scale = torch.where(scale.isinf(), E4M3_MAX * E2M1_MAX / amax.float(), scale)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> NVFP4Tensor:
    """Round a weight to NVFP4, bit for bit as llm-compressor's NVFP4A16 scheme stores it.

    Args:
        weight: [N, K], K a multiple of 16, bfloat16, float16 or float32.
        global_scale: float32 [1], shared with the matrices fused with this one; from `weight` if None.

    Raises:
        ValueError: The weight is no matrix, or K is no multiple of 16.
    """
    check_matrix(weight, BLOCK, "NVFP4")
    if global_scale is None:
        global_scale = nvfp4_global_scale(weight)
    gs = global_scale.float().reshape(1)
    chunks = []
    for x in _columns(weight, BLOCK):
        scale = _minmax_scales(x, weight.new_tensor(E2M1_MAX), gs)
        chunks.append((_encode(x.div_(scale.float() / gs)), scale))
    codes, scales = (torch.cat(tensors, dim=-1) for tensors in zip(*chunks, strict=True))
    return NVFP4Tensor(_pack(codes, weight), scales.view(len(weight), -1), gs)


def _columns(weight: Tensor, block: int) -> Iterator[Tensor]:
    """Chunks of a weight's blocks as columns, float32 [block, n]: fast to reduce, small enough for a CPU's caches."""
    blocks = weight.reshape(-1, block)
    for chunk in blocks.split(CUDA_BLOCKS if weight.is_cuda else CPU_BLOCKS):
        yield chunk.float().t().clone(memory_format=torch.contiguous_format)  # callers overwrite it


def _minmax_scales(x: Tensor, largest: Tensor, gs: Tensor) -> Tensor:
    """Block scales that map each column's largest magnitude to `largest`, which has the weight's dtype."""
    # The quotient is rounded to that dtype, as llm-compressor's observer does. The divisor is a tensor because CUDA
    # multiplies by the reciprocal of a number.
    scale = gs * (x.abs().amax(0).to(largest.dtype) / largest).float()
    rounded = scale.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(rounded == 0, 0.125, rounded).to(torch.float8_e4m3fn)


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight e2m1 * (scale / global_scale), computed in float32 and rounded once: dtype [N, K]."""
    unit = scale.float() / global_scale.float()
    return _scaled(_decode(packed), unit).to(dtype)


def dequantize_nvfp4_unscaled(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e2m1 * scale (packed uint8 [N, K/2], scale E4M3 [N, K/16]), exact in bfloat16 and float16: dtype [N, K].

    The global scale becomes the GEMM's alpha, so that all users of the weight round alike.
    """
    return _scaled(_decode(packed), scale.float()).to(dtype)


def quantize_mxfp4(weight: Tensor) -> MXFP4Tensor:
    """Round a weight to MXFP4 (OCP microscaling, blocks of 32), bit for bit as compressed-tensors from bfloat16.

    Raises:
        ValueError: The weight [N, K] is no matrix, or K is no multiple of 32.
    """
    check_matrix(weight, MX_BLOCK, "MXFP4")
    chunks = []
    for x in _columns(weight, MX_BLOCK):
        # Adding a quarter of the mantissa carries 1.75 * 2**e and above to the next exponent: it would round past 6.
        exponent = (x.abs().amax(0).view(torch.int32) + (1 << 21)) >> 23
        scale = (exponent - 2).clamp(min=0).to(torch.uint8)
        chunks.append((_encode(x.div_(e8m0_values(scale))), scale))
    codes, scales = (torch.cat(tensors, dim=-1) for tensors in zip(*chunks, strict=True))
    return MXFP4Tensor(_pack(codes, weight), scales.view(len(weight), -1))


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight e2m1 * 2**(scale - 127) (uint8 [N, K/2], [N, K/32]): dtype [N, K], exact in bfloat16 if normal."""
    return _scaled(_decode(packed), e8m0_values(scale)).to(dtype)


def round_magnitude_(x: Tensor) -> Tensor:
    """Round non-negative float32 numbers in place to E2M1, ties to even, those above 6 to 6."""
    x.clamp_(max=E2M1_MAX)
    # E2M1's step is 1/2 below 2, 1 below 4 and 2 above, which float32's is at 2**22, 2**23 and 2**24.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = power.clamp_(min=1.0).mul_(2.0**22)
    return x.add_(shift).sub_(shift)


def e2m1_values(codes: Tensor) -> Tensor:
    """Values of 4-bit codes: float32 of their shape."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    return values[codes.int()]


def check_matrix(weight: Tensor, block: int, name: str) -> None:
    """Raise ValueError unless `weight` is a matrix whose rows divide into blocks."""
    if weight.dim() != 2 or weight.shape[1] % block:
        raise ValueError(
            f"{name} needs a matrix whose columns are a multiple of {block}, got shape {tuple(weight.shape)}; "
            "leave this weight out of the quantization."
        )


def e8m0_values(scale: Tensor) -> Tensor:
    """2**(scale - 127) of E8M0 bytes: float32."""
    # As bits: 0 is the subnormal 2**-127, which exp2 need not return exactly.
    return torch.where(scale == 0, 1 << 22, scale.int() << 23).view(torch.float32)


def _encode(x: Tensor) -> Tensor:
    """E2M1 codes, uint8 of x's shape; negatives that round to zero keep their sign (0x8)."""
    twice = (round_magnitude_(x.abs()) * 2).to(torch.uint8)  # 0 1 2 3 4 6 8 12
    code = twice - (twice > 4).to(torch.uint8) - (twice > 6).to(torch.uint8) - 3 * (twice > 8).to(torch.uint8)
    return code | ((x < 0).to(torch.uint8) << 3)


def _pack(codes: Tensor, weight: Tensor) -> Tensor:
    """Packs codes whose columns are the blocks of `weight`: uint8 [N, K/2]."""
    return (codes[0::2] | (codes[1::2] << 4)).t().reshape(len(weight), -1)


def _decode(packed: Tensor) -> Tensor:
    """E2M1 values of packed bytes [N, K/2]: float32 [N, K]."""
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = e2m1_values(torch.stack((byte & 0xF, byte >> 4), dim=-1))
    return torch.nn.functional.embedding(packed.int(), pairs).flatten(1)


def _scaled(values: Tensor, unit: Tensor) -> Tensor:
    """values [N, K] times a unit per block, [N, K/block]."""
    return (values.unflatten(1, (unit.shape[1], -1)) * unit.unsqueeze(-1)).flatten(1)
