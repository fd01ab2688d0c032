"""Gumbel-max sampling: a token per row and its log-probability, in one pass over the logits, with per-row noise.

The largest of logits / temperature + Gumbel noise is a draw from their softmax. A token's noise depends on the row's
seed, its position in the sequence and the token alone, as in vLLM's GPU sampler: both take the same tokens from the
same logits. vLLM draws by MurmurHash3 since 0.31, and before by Philox 4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3").
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from qerl_kernels.backend import runs_triton
from qerl_kernels.reference import BELOW_ONE, SMALLEST_UNIFORM

WORD = 0xFFFFFFFF
FACTORS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Philox's multipliers of words, and increments of the key's words in each of the ten rounds."""

Generator = Literal["philox", "murmur3"]


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    requests: Tensor,
    last: Tensor,
    generator: Generator = "philox",
) -> tuple[Tensor, Tensor]:
    """Draw a token per row, with its log-probability under softmax(logits / temperature).

    A row's bits do not depend on other rows. Ties take the first. Temperature 0 takes the largest logit, with its
    log-probability at temperature 1.

    Args:
        logits: [rows, V], bfloat16, float16 or float32, each row contiguous.
        temperatures: float32, of all requests.
        seeds: int64, of all requests.
        positions: int64, of all tokens of the batch.
        requests: int32 or int64 [rows], index of a row's temperature and seed.
        last: int32 or int64 [rows], index of a row's position.
        generator: Of the noise.

    Returns:
        (tokens int64 [rows], log-probabilities float32 [rows]).
    """
    if runs_triton(logits):
        from qerl_kernels import triton_sampling

        return triton_sampling.sampled(logits, temperatures, seeds, positions, requests, last, generator == "murmur3")
    temperature = temperatures[requests.long()].float()[:, None]
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)
    noise = gumbel_noise(seeds[requests.long()], positions[last.long()], logits.shape[1], generator)
    tokens = torch.where(greedy, scaled, scaled + noise).argmax(-1, keepdim=True)
    return tokens[:, 0], scaled.log_softmax(-1).gather(-1, tokens)[:, 0]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary: int, generator: Generator = "philox") -> Tensor:
    """Noise -log(-log(1 - u)) of int64 seeds and positions [rows]: float32 [rows, vocabulary]."""
    token = torch.arange(vocabulary, device=seeds.device)[None]
    seed = seeds & WORD, seeds >> 32 & WORD
    if generator == "murmur3":
        words = [word[:, None] for word in (*seed, positions & WORD)]
        u = ((murmur3([*words, token]).double() + 0.5) * 2**-32).float().clamp(max=BELOW_ONE)
    else:
        keys = philox((positions & WORD, positions >> 32 & WORD), seed)[:, None]
        word = philox((token, torch.zeros_like(token)), (keys, torch.zeros_like(keys)))
        u = uniform(word).clamp(min=SMALLEST_UNIFORM)
    return -(-(-u).log1p()).log()


def murmur3(words: Sequence[Tensor]) -> Tensor:
    """MurmurHash3_x86_32 (Appleby) with seed 0; words are integers below 2^32 in int64, as is the result."""

    def rotated(word: Tensor, bits: int) -> Tensor:
        return word << bits & WORD | word >> 32 - bits

    state = torch.zeros_like(words[0])
    for word in words:  # int64 wraps around, which keeps the lower 32 bits
        state = state ^ rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = rotated(state, 13) * 5 + 0xE6546B64 & WORD
    state = state ^ 4 * len(words)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> bits) * factor & WORD
    return state


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> Tensor:
    """First word of Philox 4x32-10's block; words are integers below 2^32 in int64, lowest first, absent ones zero."""
    words = [*counter, *[torch.zeros_like(counter[0])] * (4 - len(counter))]
    for turn in range(10):
        keys = [(word + turn * step) & WORD for word, step in zip(key, STEPS, strict=True)]
        products = [words[0] * FACTORS[0], words[2] * FACTORS[1]]  # int64 wraps around, which keeps all 64 bits
        high, low = [product >> 32 & WORD for product in products], [product & WORD for product in products]
        words = [high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]]
    return words[0]


def uniform(word: Tensor) -> Tensor:
    """A float32 in [0, 1) of each word (int64 below 2^32): its lower 31 bits, inverted where the highest is set."""
    return torch.where(word > WORD >> 1, WORD - word, word).float() * SMALLEST_UNIFORM
