"""Ops in plain PyTorch that the package does not need: Marlin's layout written, log-probabilities, KL, experts."""

import math

import torch
from qerl_kernels import ExpertBiases, MarlinTensor, MXFP4Tensor, NVFP4Tensor
from qerl_kernels.experts import Activation
from qerl_kernels.marlin import TILE
from torch import Tensor
from torch.nn import functional

SMALLEST_SCALE = 2.0**-6
"""Marlin reads smaller block scales as zero."""


def to_marlin(tensor: NVFP4Tensor | MXFP4Tensor) -> MarlinTensor:
    """Convert from the compressed-tensors layout as vLLM does at loading (which pads N to 64)."""
    rows, columns = len(tensor.packed), 2 * tensor.packed.shape[1]
    if rows % TILE:
        raise ValueError(f"Marlin's layout needs rows that are a multiple of {TILE}, got {rows}; pad the weight.")
    codes = torch.stack((tensor.packed & 0xF, tensor.packed >> 4), dim=-1)
    # (n tile, (n%64)//16, (n>>3)&1, n%8, k tile, (k>>3)&1, (k%8)//2, k&1)
    nibbles = codes.view(-1, 4, 2, 8, columns // 16, 2, 4, 2).permute(4, 0, 3, 6, 1, 7, 2, 5)
    nibbles = nibbles.reshape(columns // 16, 2 * rows, 8)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for i in range(8):
        words |= nibbles[..., i].int() << 4 * i
    if isinstance(tensor, MXFP4Tensor):
        return MarlinTensor(words, _permute_scales(tensor.scale), None)
    factor = scale_factor(tensor.scale)
    halves = (marlin_scale(tensor.scale).float() * (factor * 2.0**7)).half()
    scale = (halves.view(torch.int16) >> 7).to(torch.uint8)
    global_scale = tensor.global_scale.reciprocal().reshape(()) * (2.0**119 / factor)
    return MarlinTensor(words, _permute_scales(scale).view(torch.float8_e4m3fn), global_scale)


def _permute_scales(scale: Tensor) -> Tensor:
    """[N, blocks] -> [blocks, N] in Marlin's order."""
    tiles = scale.view(-1, 2, 2, 2, 8, scale.shape[1])  # n tile, bits 5, 4 and 3 of n, n%8
    return tiles.permute(5, 0, 4, 1, 3, 2).reshape(scale.shape[1], -1)


def scale_factor(scale: Tensor) -> float:
    """The power of two by which vLLM scales a weight's block scales up, to at most 448."""
    largest = scale.float().amax().item()
    return 1.0 if largest == 0 else 2.0 ** (math.frexp(448.0 / largest)[1] - 1)


def marlin_scale(scale: Tensor) -> Tensor:
    """Block scales as Marlin reads them: zero below 2**-6 after scaling, 3.5e-5 of the matrix's largest weight."""
    seen = scale.float()
    return torch.where(seen * scale_factor(scale) < SMALLEST_SCALE, 0.0, seen).to(scale.dtype)


def token_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, with [M, V] logits in memory.

    Arguments and results are those of `chunked_token_logprobs`.
    """
    logp = log_distributions(hidden, lm_head, temperature, soft_cap)
    entropy = -torch.xlogy(logp.exp(), logp.exp()).sum(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def log_distributions(
    hidden: Tensor, lm_head: Tensor, temperature: float = 1.0, soft_cap: float | None = None
) -> Tensor:
    """Log-probabilities of all tokens [M, V], for the arguments of `chunked_token_logprobs`.

    Logits are rounded to the dtype of `hidden`, as an engine's are, and divided by the temperature in float32.
    """
    logits = functional.linear(hidden, lm_head)
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    return (logits.to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(-1)


def reverse_kl(
    hidden: Tensor,
    lm_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
) -> Tensor:
    """`chunked_reverse_kl` in plain PyTorch: sum over the vocabulary of p (log p - log q), [M]."""
    own = log_distributions(hidden, lm_head, temperature, soft_cap=soft_cap)
    theirs = log_distributions(teacher_hidden, teacher_head, temperature, soft_cap=teacher_soft_cap)
    return (own.exp() * (own - theirs)).sum(-1)


def mixture_reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    biases: ExpertBiases | None = None,
    interleaved: bool = False,
) -> Tensor:
    """`mixture_of_experts` in plain PyTorch, by dense weights gate_up [E, 2 I, D] and down [E, D, I]."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        bias, last_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        hidden = functional.linear(rows, gate_up[expert], bias)
        intermediate = activation(*((hidden[..., ::2], hidden[..., 1::2]) if interleaved else hidden.chunk(2, dim=-1)))
        y = functional.linear(intermediate, down[expert], last_bias)
        out = out.index_add(0, tokens, (topk_weights[tokens, slots, None] * y).to(x.dtype))
    return out
