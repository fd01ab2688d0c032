"""Gives vLLM's linears their methods and adapters, and checks the decode GEMM on each kind of them."""

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from qerl_kernels import (
    MarlinRows,
    compile_decode_gemm,
    decode_gemm_measured,
    decode_gemm_sizes,
    decode_gemm_supported,
    frozen_linear,
)
from torch import Tensor

from qerl_pl.engines.vllm import compat
from qerl_pl.engines.vllm.linear_methods import (
    NEVER,
    TOLERANCE,
    FP4Method,
    LoraBuffers,
    add_lora,
    attach_adapter,
    attach_fp4,
    marlin_tensor,
    probe,
    relative_difference,
)
from qerl_pl.engines.vllm.weight_map import FusedSlice
from qerl_pl.errors import UserError
from qerl_pl.models.families import names_match

log = logging.getLogger(__name__)


class Attached(NamedTuple):
    """What `attach_all` has done to a model."""

    lora: LoraBuffers
    """The buffers that adapters are written into."""
    decode_gemm: int
    """Linears with the decode GEMM."""


def attach_all(
    linears: Mapping[str, tuple[Any, Sequence[FusedSlice]]], config: Mapping[str, Any], dtype: torch.dtype
) -> Attached:
    """Give vLLM's linears their methods and adapters, before vLLM compiles them.

    Args:
        linears: vLLM's linears by name, each with all its slices.
        config: Of `worker.engine_config`: `rank` and `targets` of the adapter, `decode_gemm_max_tokens`, `dense_above`.
        dtype: Data type of activations.

    Raises:
        UserError: Two GEMMs of the same weight differ.
    """
    buffers: LoraBuffers = {}
    with_decode_gemm: list[Any] = []
    measured = True
    above, max_tokens = config["dense_above"], config["decode_gemm_max_tokens"]
    if compat.missing_names(compat.DECODE_GEMM):
        above = max_tokens = None
    for linear, slices in linears.values():
        if above is not None or max_tokens is not None:
            attach_fp4(linear, NEVER if above is None else above)
        adapted = [piece for piece in slices if config["rank"] and names_match(piece[0], config["targets"])]
        if adapted:
            buffers |= attach_adapter(linear, adapted, config["rank"], dtype)
        held = marlin_tensor(linear)
        if max_tokens is not None and held is not None and decode_gemm_supported(held):
            linear.quant_method.decode_gemm_max_tokens = max_tokens
            with_decode_gemm.append(linear)
            measured = decode_gemm_measured(held)
    if not measured:
        limit = faster_than_marlin(with_decode_gemm, max_tokens)
        for linear in with_decode_gemm:
            linear.quant_method.decode_gemm_max_tokens = limit
        with_decode_gemm = with_decode_gemm if limit else []
    check_decode_gemm(with_decode_gemm)
    return Attached(buffers, len(with_decode_gemm))


def _one_of_each_kind(linears: Sequence[Any]) -> list[Any]:
    kinds: dict[tuple[object, ...], Any] = {}
    for linear in linears:
        kinds.setdefault((linear.weight.shape, linear.quant_method.starts, linear.bias is None), linear)
    return list(kinds.values())


@torch.inference_mode()
def faster_than_marlin(linears: Sequence[Any], most: int) -> int:
    """Tokens up to which the decode GEMM takes at most 0.9 of Marlin's time for a layer: `most` at most, 0 for none.

    It times each kind of linear at 8, 16, 32 and 64 tokens, about two seconds in all. Kernels that do not compile are
    not faster.
    """
    from triton import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    found = 0
    for tokens in (size for size in (8, 16, 32, 64) if size <= most):
        times = {0: 0.0, tokens: 0.0}  # of Marlin and of the decode GEMM
        for limit, linear in itertools.product(times, _one_of_each_kind(linears)):
            linear.quant_method.decode_gemm_max_tokens = limit
            held = marlin_tensor(linear)
            assert held is not None
            product = functools.partial(linear.quant_method.apply, linear, probe(tokens, held), linear.bias)
            try:
                times[limit] += do_bench(product, warmup=5, rep=20)
            except (CompilationError, OutOfResources, PTXASError):
                return found
        if times[tokens] > 0.9 * times[0]:
            break
        found = tokens
    log.info("the decode GEMM is faster than Marlin on this GPU up to %d tokens", found)
    return found


@torch.inference_mode()
def check_decode_gemm(linears: Sequence[Any]) -> None:
    """Compare the decode GEMM with the dense weight, for each kind of linear and each number of tokens that compiles.

    So nothing compiles while a CUDA graph is captured, and no wrong GEMM decodes.

    Args:
        linears: With an `FP4Method` that has the decode GEMM.

    Raises:
        UserError: The two differ.
    """
    kinds = _one_of_each_kind(linears)
    compile_decode_gemm(product for linear in kinds for product in _products(linear))
    for linear in kinds:
        method = linear.quant_method
        for tokens, held, bias, a, b, _ in _products(linear):
            x = probe(tokens, held)
            weight = MarlinRows(held, alpha=linear.qerl_alpha.item())
            expected = frozen_linear(x, weight, bias)
            difference = relative_difference(method.apply(linear, x, linear.bias), expected)
            if a is not None and difference <= TOLERANCE:  # a zero adapter's product is never wrong
                _randomize(a, b, method.starts, expected.float().std(correction=0).item() or 1.0)
                add_lora(expected, x, a, b)
                difference = relative_difference(method.apply(linear, x, linear.bias), expected)
                for factor in (a, b):
                    factor.zero_()
            if not difference <= TOLERANCE:
                raise UserError(
                    "the decode GEMM must give the product of the dequantized weight, and an adapter's; for "
                    f"{tokens} tokens and a weight {weight.shape[0]} x {weight.shape[1]} they differ by "
                    f"{difference:.2g} of its size: set decode_gemm_max_tokens to null"
                )


def _products(linear: Any) -> Iterator[tuple[Any, ...]]:
    """Each number of tokens that has kernels of its own, and the arguments of `decode_gemm_linear` beside x."""
    method, held = linear.quant_method, marlin_tensor(linear)
    assert isinstance(method, FP4Method) and held is not None
    a, b = (linear.qerl_a, linear.qerl_b) if method.starts else (None, None)
    for tokens in decode_gemm_sizes(held, 0 if a is None else len(a), method.decode_gemm_max_tokens):
        yield tokens, held, linear.qerl_bias, a, b, method.starts or (0,)


def _randomize(a: Tensor, b: Tensor, starts: Sequence[int], size: float) -> None:
    """Fill a zero adapter with random factors, B in the blocks that `decode_gemm_linear` reads.

    Args:
        a: A of all slices [r, K].
        b: B [N, r].
        starts: First row of each slice.
        size: Standard deviation of the adapter's product with `probe`.
    """
    generator, rank = torch.Generator().manual_seed(0), len(a) // len(starts)
    a.copy_(torch.randn(a.shape, generator=generator, device="cpu") * a.shape[1] ** -0.5)
    for index, (start, stop) in enumerate(itertools.pairwise((*starts, len(b)))):
        block = b[start:stop, index * rank : (index + 1) * rank]
        block.copy_(torch.randn(block.shape, generator=generator, device="cpu") * size * rank**-0.5)
