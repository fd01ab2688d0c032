"""The adapter inside vLLM's linears, as two plain matrix products.

vLLM's own LoRA kernels serve many adapters at once and sum with atomics, so that no rollout can be repeated bit for
bit. A single adapter takes two plain products, which repeat and round as the trainer does.
"""

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import (
    FrozenWeight,
    MarlinRows,
    MarlinTensor,
    decode_gemm_linear,
    decode_gemm_sizes,
    decode_gemm_supported,
    frozen_linear,
)
from qerl_kernels.marlin import TILE
from torch import Tensor

from qerl_pl.engines.vllm import weight_map
from qerl_pl.engines.vllm.compat import look_up
from qerl_pl.engines.vllm.weight_map import Part
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import FUSED

Slots = dict[str, tuple[Tensor, Tensor]]

"""Views of A [r, in] and B [out, r] by the base model's name of a linear, to be written in place."""


def add_products(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [tokens, out] += (x [tokens, in] a^T) b^T for a [r, in] and b [out, r], in place; y, for use in operators."""
    return y.addmm_(x @ a.T, b.T)


@torch.library.custom_op("qerl::add_adapter", mutates_args={"y"})
def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """`add_products` as an operator, which may not return what it was given.

    An operator, for PyTorch's compiler turns a plain `addmm_` into a copy and a sum beside it: one more pass over the
    output, and a large tensor while prompts are read.
    """
    add_products(y, x, a, b)


class AdaptedMethod:
    """Stands in for the `quant_method` of one of vLLM's linears: its product, and the adapter's.

    Always at work, also while the adapter is off: then A and B are zero, and the output is the base's.
    """

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; the delta is added to the base's rounded output, as in the trainer."""
        y: Tensor = self.base.apply(layer, x, bias)
        add_adapter(y, x, layer.qerl_a, layer.qerl_b)
        return y


def attach_adapter(linear: Any, parts: Sequence[Part], rank: int, dtype: torch.dtype) -> Slots:
    """Give a linear of vLLM an adapter of zeros, before vLLM compiles it.

    One product with all A, one below the other, and one with all B, each in the block of its rows and ranks: a fused
    projection takes two kernels too.

    Args:
        linear: vLLM's, which may hold several of the base model's.
        parts: Those adapted.
        rank: Of the adapter.
        dtype: Of activations.

    Returns:
        What an adapter is written into.
    """
    device = next(linear.parameters()).device
    columns, rows = linear.input_size_per_partition, linear.output_size_per_partition
    # As buffers of the module they are inputs of vLLM's compiled graphs, which therefore see what is written.
    linear.register_buffer("qerl_a", torch.zeros(len(parts) * rank, columns, dtype=dtype, device=device), False)
    linear.register_buffer("qerl_b", torch.zeros(rows, len(parts) * rank, dtype=dtype, device=device), False)
    linear.quant_method = AdaptedMethod(linear.quant_method)
    slots = {}
    for index, (part, start, stop) in enumerate(parts):
        ranks = slice(index * rank, (index + 1) * rank)
        slots[part] = (linear.qerl_a[ranks], linear.qerl_b[start:stop, ranks])
    return slots


TOLERANCE = 0.01

"""Of the two products' difference to their size: rounding makes 1e-4, another layout 1."""

NEVER = torch.iinfo(torch.int32).max

"""As `dense_above`: Marlin for any number of tokens."""

_KERNEL = re.compile("marlin(nv|mx)fp4", re.IGNORECASE)

_MODULE, _FUNCTION = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4", "apply_fp4_marlin_linear"


def missing() -> list[str]:
    """What this file relies on that this vLLM lacks."""
    try:
        found = look_up(importlib.import_module(_MODULE), _FUNCTION)
    except ImportError:
        found = None
    return [] if found else [f"{_MODULE}.{_FUNCTION}"]


def marlin_tensor(linear: Any) -> MarlinTensor | None:
    """The 4-bit weight of one of vLLM's linears; None where it has none in Marlin's layout, or a padded one."""
    if not _KERNEL.match(type(look_up(linear, "scheme.kernel")).__name__):
        return None
    columns, rows = linear.input_size_per_partition, linear.output_size_per_partition
    if linear.weight.shape != (columns // 16, 2 * rows):
        return None
    return MarlinTensor(linear.weight.data, linear.weight_scale.data, _global_scale(linear))


def _global_scale(linear: Any) -> Tensor | None:
    """That of an NVFP4 weight; MXFP4 has none."""
    held = getattr(linear, "weight_global_scale", None)
    return None if held is None else held.data


def shared_rows(linear: Any, parts: Sequence[Part]) -> Mapping[str, FrozenWeight] | None:
    """What one of vLLM's linears lends: a frozen weight for each of the base model's linears that it holds.

    Args:
        linear: vLLM's.
        parts: Those that it holds.

    Returns:
        Empty where it has no 4-bit weight; None where its weight cannot be lent, for it is padded, in another layout,
        or one of Marlin's tiles holds rows of two parts.
    """
    if weight_map.is_nf4(linear):
        return weight_map.shared_rows(linear, parts)
    if getattr(linear, "weight_scale", None) is None:
        return {}
    held = marlin_tensor(linear)
    if held is None or any(start % TILE or stop % TILE for _, start, stop in parts):
        return None
    return {name: MarlinRows(held, start, stop) for name, start, stop in parts}


def check_marlin_shapes(linears: dict[str, tuple[int, int]]) -> None:
    """Reject weights that Marlin's tiles do not cover.

    Args:
        linears: (out, in) of each quantized linear by name.

    Raises:
        UserError: A weight, q/k/v and gate/up taken together, divides into neither 64 x 128 nor 128 x 64.
    """
    for name, (rows, columns) in linears.items():
        stem, _, last = name.rpartition(".")
        group = next((group for group in FUSED if last in group), (last,))
        if last == "lm_head" or last != group[0]:
            continue
        rows = sum(linears.get(f"{stem}.{part}", (0, 0))[0] for part in group) if len(group) > 1 else rows
        if (rows % 64 or columns % 128) and (rows % 128 or columns % 64):
            raise UserError(
                f"Marlin takes weights that divide into 64 x 128 or 128 x 64; {'+'.join(group)} of {stem} is {rows} x "
                f"{columns}: set linear_backend to auto, which pads them"
            )


def why_not_shared(kernels: Sequence[str], dtype: torch.dtype) -> str | None:
    """What keeps vLLM from lending the weights of its linears; None where it may.

    Args:
        kernels: Class names of what multiplies by them.
        dtype: Of activations.
    """
    if weight_map.METHOD in kernels:
        return None
    if not any(_KERNEL.match(kernel) for kernel in kernels):
        return f"only Marlin's layout can be lent, and vLLM's kernels are {', '.join(kernels)}"
    if dtype != torch.bfloat16:
        return f"vLLM scales weights otherwise for {dtype} than for bfloat16"
    return None


def product_by_tokens(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    workspace: Tensor,
    permuted_bias: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    dense_above: int,
) -> Tensor:
    """x [tokens, K] W^T + bias -> [tokens, N], by Marlin up to `dense_above` tokens, by the dense weight above.

    Args:
        x: bfloat16.
        weight: With `scale` and `global_scale` a `MarlinTensor`.
        scale: See weight.
        global_scale: See weight.
        workspace: Marlin's.
        permuted_bias: [N], in Marlin's order.
        bias: [N], in plain order.
        alpha: That of `MarlinRows`, float32 [1] in the host's memory, where reading it does not wait for the
            device. A number would make every layer a compiled graph of its own.
        dense_above: Tokens, or NEVER.
    """
    if len(x) > dense_above:
        held = MarlinTensor(weight, scale, global_scale)
        return frozen_linear(x, MarlinRows(held, alpha=alpha.item()), bias)
    product = getattr(importlib.import_module(_MODULE), _FUNCTION)
    rows, columns = weight.shape[1] // 2, 16 * len(weight)
    y: Tensor = product(x, weight, scale, global_scale, workspace, size_n=rows, size_k=columns, bias=permuted_bias)
    return y


# An operator, for the choice depends on the number of tokens, which vLLM's compiled graphs leave open.
marlin_or_dense = torch.library.custom_op("qerl::marlin_or_dense", product_by_tokens, mutates_args=())


@marlin_or_dense.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] // 2)  # len() would fix the number of tokens


class MarlinOrDenseMethod:
    """Stands in for the `quant_method` of one of vLLM's 4-bit linears."""

    def __init__(self, base: Any, dense_above: int) -> None:
        self.base = base
        self.dense_above = dense_above

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; `bias` is the layer's own, in Marlin's order, or None."""
        weight = (layer.weight, layer.weight_scale, _global_scale(layer))
        plain = None if bias is None else layer.qerl_bias
        y: Tensor = marlin_or_dense(x, *weight, layer.workspace, bias, plain, layer.qerl_alpha, self.dense_above)
        return y


def probe(tokens: int, held: MarlinTensor) -> Tensor:
    """Activations to try a weight with, the same at every start: bfloat16 [tokens, K], on its device."""
    x = torch.randn(tokens, 16 * len(held.weight), generator=torch.Generator().manual_seed(0), device="cpu")
    return x.to(held.weight.device, torch.bfloat16)


def apart(found: Tensor, expected: Tensor) -> float:
    """Norm of what two products differ by, in units of the expected one's: see TOLERANCE."""
    return ((found - expected).float().norm() / expected.float().norm()).item()


@torch.inference_mode()
def attach_dense(linear: Any, dense_above: int) -> None:
    """Let one of vLLM's linears multiply more than `dense_above` tokens by its dense weight, before vLLM compiles it.

    One that has no 4-bit weight in Marlin's layout is left as it is.

    Raises:
        UserError: The two products differ.
    """
    held = marlin_tensor(linear)
    if held is None:
        return
    weight = MarlinRows(held)
    linear.register_buffer("qerl_alpha", torch.tensor([weight.alpha], device="cpu"), False)
    x = probe(1, held)
    few, many = linear.quant_method.apply(linear, x), frozen_linear(x, weight)
    by = apart(many, few)
    if by > TOLERANCE:
        raise UserError(
            f"Marlin and the dequantized weight must give the same product; they differ by {by:.2g} of its size, so "
            "this vLLM lays weights out otherwise: set dense_above to null and share_weights to false"
        )
    # The product of zeros is the bias, in plain order.
    bias = None if linear.bias is None else linear.quant_method.apply(linear, torch.zeros_like(x), linear.bias)[0]
    linear.register_buffer("qerl_bias", bias, False)
    linear.quant_method = MarlinOrDenseMethod(linear.quant_method, dense_above)


@torch.library.custom_op("qerl::adapted_linear", mutates_args=())
def adapted_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    workspace: Tensor,
    permuted_bias: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    decode_gemm_max_tokens: int,
    dense_above: int,
) -> Tensor:
    """x W^T + bias + (x a^T) b^T by `decode_gemm_linear` for few tokens, by three products for more.

    An operator, for the choice depends on the number of tokens, which vLLM's compiled graphs leave open.

    Args:
        x: bfloat16 [tokens, K].
        weight: See `product_by_tokens`, as up to `alpha` and for `dense_above`.
        scale: See weight.
        global_scale: See weight.
        workspace: See weight.
        permuted_bias: See weight.
        bias: See weight.
        alpha: See weight.
        a: [r, K], of all parts one below the other; None without an adapter.
        b: [N, r], each part's in the block of its rows and ranks.
        starts: First row of each part that has an adapter; empty without one.
        decode_gemm_max_tokens: Tokens.
        dense_above: Tokens.

    Returns:
        [tokens, N].
    """
    held = MarlinTensor(weight, scale, global_scale)
    if len(x) <= decode_gemm_max_tokens:
        return decode_gemm_linear(x, held, bias, a=a, b=b, starts=starts or (0,))
    y = product_by_tokens(x, *held, workspace, permuted_bias, bias, alpha, dense_above)
    if a is not None and b is not None:
        add_products(y, x, a, b)  # in place, for y is no input: the product before made it
    return y


@adapted_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] // 2)  # len() would fix the number of tokens


class DecodeGemmMethod:
    """Stands in for the `quant_method` of one of vLLM's NVFP4 linears, with its adapter."""

    def __init__(self, base: Any, starts: Sequence[int], decode_gemm_max_tokens: int, dense_above: int) -> None:
        self.base = base
        self.starts = tuple(starts)
        self.decode_gemm_max_tokens = decode_gemm_max_tokens
        self.dense_above = dense_above

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; `bias` is the layer's own, in Marlin's order."""
        weight = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        plain = None if bias is None else layer.qerl_bias
        a, b = (layer.qerl_a, layer.qerl_b) if self.starts else (None, None)
        numbers = (list(self.starts), self.decode_gemm_max_tokens, self.dense_above)
        y: Tensor = adapted_linear(x, *weight, layer.workspace, bias, plain, layer.qerl_alpha, a, b, *numbers)
        return y


def attach_decode_gemm(linear: Any, starts: Sequence[int], decode_gemm_max_tokens: int) -> bool:
    """Let one of vLLM's linears run few tokens with its adapter in one product, before vLLM compiles it.

    Args:
        linear: With an adapter, if it gets one, and after `attach_dense`.
        starts: First row of each part that has an adapter, ascending.
        decode_gemm_max_tokens: Tokens.

    Returns:
        Whether it does: not without an NVFP4 weight in Marlin's layout, or where the kernels do not run.
    """
    held, method = marlin_tensor(linear), linear.quant_method
    if held is None or not decode_gemm_supported(held):
        return False
    base = method.base if isinstance(method, AdaptedMethod) else method
    assert isinstance(base, MarlinOrDenseMethod), "attach_dense comes first"
    linear.quant_method = DecodeGemmMethod(method, starts, decode_gemm_max_tokens, base.dense_above)
    return True


log = logging.getLogger(__name__)


def changes_products(config: Mapping[str, Any]) -> bool:
    """Whether 4-bit linears in Marlin's layout multiply otherwise than vLLM's do."""
    return config["dense_above"] is not None or config["decode_gemm_max_tokens"] is not None


def attach_all(
    linears: Mapping[str, tuple[Any, Sequence[Part]]],
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> Slots:
    """Give vLLM's linears their products and adapters, before vLLM compiles them.

    Args:
        linears: By name; each with its parts.
        config: What `worker.engine_config` made: the adapter, and the numbers of tokens `decode_gemm_max_tokens` and
            `dense_above`.
        dtype: Of activations.

    Returns:
        What adapters are written into.

    Raises:
        UserError: Two products of the same weight differ.
    """
    slots: Slots = {}
    few: list[Any] = []
    ours = changes_products(config) and not missing()
    decode_gemm_max_tokens = config["decode_gemm_max_tokens"] if ours else None
    for linear, held in linears.values():
        if ours:
            above = config["dense_above"]
            attach_dense(linear, NEVER if above is None else above)
        parts = [part for part in held if config["rank"] and part[0].rpartition(".")[2] in config["targets"]]
        if parts:
            slots |= attach_adapter(linear, parts, config["rank"], dtype)
        if decode_gemm_max_tokens is not None:
            few += [linear] * attach_decode_gemm(linear, [start for _, start, _ in parts], decode_gemm_max_tokens)
    if decode_gemm_max_tokens is not None:
        check_decode_gemm(few, decode_gemm_max_tokens)
        log.info(
            "%d of %d linears take decode_gemm_max_tokens: %d tokens or fewer at once run in one product with their "
            "adapter (Hopper GPUs only)",
            *(len(few), len(linears), decode_gemm_max_tokens),
        )
    return slots


@torch.inference_mode()
def check_decode_gemm(linears: Sequence[Any], decode_gemm_max_tokens: int) -> None:
    """Run one linear of each kind for as many tokens as compile something of their own, and compare.

    So that nothing compiles while a CUDA graph is captured, and no wrong product decodes.

    Args:
        linears: What `attach_decode_gemm` has changed.
        decode_gemm_max_tokens: Tokens.

    Raises:
        UserError: The product of few tokens is not that of the dequantized weight.
    """
    done: set[tuple[object, ...]] = set()
    for linear in linears:
        method, held = linear.quant_method, marlin_tensor(linear)
        assert isinstance(method, DecodeGemmMethod) and held is not None
        kind = (held.weight.shape, method.starts, linear.bias is None)
        if kind in done:
            continue
        done.add(kind)
        weight = MarlinRows(held, alpha=linear.qerl_alpha.item())
        rank = len(linear.qerl_a) if method.starts else 0
        for tokens in decode_gemm_sizes(held, rank, decode_gemm_max_tokens):
            x = probe(tokens, held)
            few, dense = method.apply(linear, x, linear.bias), frozen_linear(x, weight, linear.qerl_bias)
            by = apart(few, dense)
            if not by <= TOLERANCE:
                raise UserError(
                    f"the product of {tokens} tokens must be that of the dequantized weight; for a weight "
                    f"{weight.shape[0]} x {weight.shape[1]} they differ by {by:.2g} of its size: set "
                    "decode_gemm_max_tokens to null"
                )
