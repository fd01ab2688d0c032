"""NF4 with double quantization, as QLoRA has it (arXiv 2305.14314, section 3), in plain PyTorch.

Blocks of 64 weights share their largest magnitude and round to 16 quantiles of a normal distribution. These magnitudes,
less their mean, are rounded in their turn: blocks of 256 share their largest and round to the 256 numbers of a dynamic
map. Layout and bits are those of bitsandbytes: two codes a byte, the even k in the high nibble; blocks lie along K.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from qerl_kernels.reference import check_matrix

NF4_BLOCK, NESTED_BLOCK = 64, 256
NF4_CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of the 16 codes, from the paper's appendix E."""
STEPS = 1 << 16
SMALLEST = 1e-38
"""What a block is divided by at least, so that zeros stay zeros."""


class NF4Tensor(NamedTuple):
    """A weight in NF4: W = code * magnitude, magnitude = map[absmax] * nested_absmax + offset."""

    packed: Tensor
    """uint8 [N, K/2], or flat."""
    absmax: Tensor
    """uint8 [N K/64], in the order of the blocks; or the magnitudes themselves, float32."""
    nested_absmax: Tensor
    """float32 [N K/64/256], rounded up; empty where absmax is not rounded."""
    offset: float


@functools.cache
def nf4_values(device: torch.device) -> Tensor:
    """The numbers of the codes: float32 [16]."""
    # Kept for good: not in a default type that someone, such as an engine that loads, has set for a while.
    return torch.tensor(NF4_CODE, dtype=torch.float32, device=device)


@functools.cache
def dynamic_map(device: torch.device) -> Tensor:
    """The numbers that 8 bits stand for, ascending: float32 [256].

    A sign, a decimal exponent from -6 to 0, and a fraction that has the more bits the larger the exponent: the middles
    of 2**i equal parts of [0.1, 1] (Dettmers, arXiv 1511.04561, made signed).
    """
    positive = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        positive += (10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted([*positive, *(-value for value in positive), 0.0, 1.0]), dtype=torch.float32).to(device)


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of a weight.

    Args:
        weight: [N, K], K a multiple of 64.

    Returns:
        Codes, uint8 [N, K/2], and each block's largest magnitude, float32 [N, K/64].

    Raises:
        ValueError: The weight is no matrix, or K is no multiple of 64.
    """
    check_matrix(weight, NF4_BLOCK, "NF4")
    x = weight.float().unflatten(1, (-1, NF4_BLOCK))
    absmax = x.abs().amax(-1)
    values = nf4_values(weight.device)
    scaled = (x * (1.0 / absmax.clamp(min=SMALLEST)).unsqueeze(-1)).clamp_(-1, 1)
    codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8).flatten(1)
    return codes[:, 0::2] << 4 | codes[:, 1::2], absmax


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, float]:
    """Round the magnitudes of all blocks of a weight.

    Args:
        absmax: float32, in the order of the blocks.

    Returns:
        Places in `dynamic_map`, uint8 [blocks]; float32 [blocks / 256], rounded up; what was subtracted.
    """
    offset = absmax.mean()
    rest = (absmax - offset).flatten()
    padded = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(-1)
    values = dynamic_map(absmax.device)
    # bitsandbytes' CPU kernel looks a code up by one of 2**16 steps of [-1, 1]; on every device here it is the same.
    step = ((padded * (1.0 / nested).unsqueeze(-1) + 1.0) * 0.5 * (STEPS - 1) + 0.5).int()
    scaled = step.float() * 2.0 / (STEPS - 1) - 1.0
    codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True)
    codes = torch.where(nested.unsqueeze(-1) == 0, 0, codes)
    return codes.to(torch.uint8).flatten()[: len(rest)], nested, offset.item()


def nf4_magnitudes(tensor: NF4Tensor) -> Tensor:
    """Those of all blocks, as they are held: float32 [N K/64]."""
    absmax = tensor.absmax
    if absmax.dtype == torch.uint8:
        nested = tensor.nested_absmax.repeat_interleave(NESTED_BLOCK)[: len(absmax)]
        absmax = dynamic_map(absmax.device)[absmax.int()] * nested + tensor.offset
    return absmax


def dequantize_nf4(packed: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight, rounded once: packed uint8 [N, K/2] and magnitudes float32 [N, K/64] -> dtype [N, K]."""
    codes = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(1)
    values = nf4_values(packed.device)[codes.int()].unflatten(1, (-1, NF4_BLOCK))
    return (values * magnitudes.unsqueeze(-1)).flatten(1).to(dtype)
