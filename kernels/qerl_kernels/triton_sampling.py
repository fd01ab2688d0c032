"""Triton kernels of Gumbel-max sampling: seeds, then blocks of the vocabulary, then the best of a row's blocks."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from qerl_kernels.backend import interpreting
from qerl_kernels.reference import BELOW_ONE, SMALLEST_UNIFORM
from qerl_kernels.triton_launch import Direct

BLOCK = 2048
"""Tokens of a CTA: the same for every batch, for it fixes the order of a row's sum of exponentials."""
WARPS = 4
_SMALLEST, _BELOW_ONE = tl.constexpr(SMALLEST_UNIFORM), tl.constexpr(BELOW_ONE)


@triton.jit
def _murmur3_word(state, word):
    """MurmurHash3's state, uint32, with another word of 32 bits."""
    word = word.to(tl.uint32) * 0xCC9E2D51
    state ^= ((word << 15) | (word >> 17)) * 0x1B873593
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def _sample_seeds_kernel(
    temperatures, seeds, positions, requests, last, row_temperatures, row_seeds, MURMUR3: tl.constexpr
):
    """Gather what all blocks of a row need: vLLM's temperatures and seeds lie in host memory."""
    row = tl.program_id(0)
    request, at = tl.load(requests + row).to(tl.int64), tl.load(last + row).to(tl.int64)
    tl.store(row_temperatures + row, tl.load(temperatures + request))
    seed, position = tl.load(seeds + request), tl.load(positions + at)
    if MURMUR3:  # the state after seed and position, to which a block adds the token
        state = _murmur3_word(_murmur3_word(tl.full((), 0, tl.uint32), seed), seed >> 32)
        tl.store(row_seeds + row, _murmur3_word(state, position).to(tl.int64))
    else:
        tl.store(row_seeds + row, tl.randint(seed, position).to(tl.int64))


@triton.jit
def _scaled(z, temperature):
    """As vLLM divides: not at all by 1, for which a division on a GPU need not be exact."""
    if (temperature != 0.0) & (temperature != 1.0):
        z = z / temperature
    return z


@triton.jit
def _murmur3_noise(seed, token):
    """In the precision of vLLM's, so that both take the same tokens: a series of degree 8 below 1/4."""
    state = _murmur3_word(seed.to(tl.uint32), token) ^ 16  # bytes
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state ^= state >> 16
    upper, lower = (state >> 16).to(tl.float32), (state & 0xFFFF).to(tl.float32)
    u = upper * 2.0**-16 + (lower + 0.5) * 2.0**-32
    series = tl.full(u.shape, 1 / 8, tl.float32)
    for power in tl.static_range(7, 0, -1):
        series = 1 / power + u * series
    rate = tl.where(u < 0.25, u * series, -tl.log(1.0 - tl.minimum(u, _BELOW_ONE)))
    return -tl.log(rate)


@triton.jit
def _noise(seed, token, ON_GPU: tl.constexpr):
    u = tl.maximum(tl.rand(seed, token), _SMALLEST)
    if ON_GPU:
        rate = -libdevice.log1p(-u)
    else:  # Triton's interpreter has no log1p
        rate = (-tl.log(1.0 - u.to(tl.float64))).to(tl.float32)
    return -tl.log(rate)


@triton.jit
def _sample_blocks_kernel(
    logits, row_temperatures, row_seeds, best, best_token, top, mass, stride, vocabulary: tl.constexpr,
    blocks: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr, MURMUR3: tl.constexpr,
):  # fmt: skip
    cta = tl.program_id(0)
    row = cta // blocks
    token = (cta % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    at = logits + row.to(tl.int64) * stride + token
    temperature = tl.load(row_temperatures + row)
    z = _scaled(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32), temperature)
    largest = tl.max(z, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(top + cta, largest)
    tl.store(mass + cta, tl.sum(tl.exp(z - shift), axis=0))
    if temperature != 0.0:
        seed = tl.load(row_seeds + row)
        noise = _murmur3_noise(seed, token) if MURMUR3 else _noise(seed, token, ON_GPU)
        z = tl.where(inside, z + noise, float("-inf"))
    value, index = tl.max(z, axis=0, return_indices=True)
    tl.store(best + cta, value)
    tl.store(best_token + cta, (cta % blocks) * BLOCK + index)


@triton.jit
def _sample_rows_kernel(
    logits, row_temperatures, best, best_token, top, mass, tokens, logprobs, stride, vocabulary: tl.constexpr,
    blocks: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    inside, at = block < blocks, row * blocks + block
    value = tl.load(best + at, mask=inside, other=float("-inf"))
    _, first = tl.max(value, axis=0, return_indices=True)  # the lowest of equal ones
    # NaN among the logits must not lead out of the row.
    token = tl.minimum(tl.load(best_token + row * blocks + tl.minimum(first, blocks - 1)), vocabulary - 1)
    tops = tl.load(top + at, mask=inside, other=float("-inf"))
    largest = tl.max(tops, axis=0)
    masses = tl.load(mass + at, mask=inside, other=0.0)
    total = tl.sum(tl.where(masses > 0, masses * tl.exp(tops - largest), masses), axis=0)
    z = _scaled(tl.load(logits + row * stride + token).to(tl.float32), tl.load(row_temperatures + row))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, z - largest - tl.log(total))


_seeds, _blocks, _rows = Direct(_sample_seeds_kernel), Direct(_sample_blocks_kernel), Direct(_sample_rows_kernel)


def sampled(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    requests: Tensor,
    last: Tensor,
    murmur3: bool,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] and their log-probabilities float32 [rows]; see `sampling.sample_tokens`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    requests, last = requests.contiguous(), last.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    row_seeds, tokens = (logits.new_empty(rows, dtype=torch.int64) for _ in range(2))
    row_temperatures, logprobs = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    best, top, mass = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(3))
    best_token = logits.new_empty(rows, blocks, dtype=torch.int32)
    per_row = row_temperatures, row_seeds
    _seeds(rows, 1, (temperatures, seeds, positions, requests, last, *per_row), MURMUR3=murmur3)
    partial, sizes = (best, best_token, top, mass), {"vocabulary": vocabulary, "blocks": blocks}
    constants = {**sizes, "BLOCK": BLOCK, "ON_GPU": not interpreting(), "MURMUR3": murmur3}
    _blocks(rows * blocks, WARPS, (logits, *per_row, *partial), logits.stride(0), **constants)
    constants = {**sizes, "PADDED": triton.next_power_of_2(blocks)}
    _rows(rows, 1, (logits, row_temperatures, *partial, tokens, logprobs), logits.stride(0), **constants)
    return tokens, logprobs
