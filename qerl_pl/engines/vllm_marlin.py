"""4-bit linears of vLLM in Marlin's layout: how they are lent, and who multiplies by them.

For few tokens at once Marlin does: it reads a quarter of the bytes, which pays while reading weights is the limit, as
in decoding. For many, as while prompts are read, arithmetic is the limit, and there the plain 16-bit product of the
dequantized weight is about twice as fast.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import FrozenWeight, MarlinRows, MarlinTensor, frozen_linear
from qerl_kernels.marlin import TILE
from torch import Tensor

from qerl_pl.engines import vllm_nf4
from qerl_pl.engines.vllm_names import look_up
from qerl_pl.engines.vllm_parts import Part
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import FUSED

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


def lent_rows(linear: Any, parts: Sequence[Part]) -> Mapping[str, FrozenWeight] | None:
    """What one of vLLM's linears lends: a frozen weight for each of the base model's linears that it holds.

    Args:
        linear: vLLM's.
        parts: Those that it holds.

    Returns:
        Empty where it has no 4-bit weight; None where its weight cannot be lent, for it is padded, in another layout,
        or one of Marlin's tiles holds rows of two parts.
    """
    if vllm_nf4.is_nf4(linear):
        return vllm_nf4.lent_rows(linear, parts)
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


def why_not_lent(kernels: Sequence[str], dtype: torch.dtype) -> str | None:
    """What keeps vLLM from lending the weights of its linears; None where it may.

    Args:
        kernels: Class names of what multiplies by them.
        dtype: Of activations.
    """
    if vllm_nf4.METHOD in kernels:
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
