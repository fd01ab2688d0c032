"""Methods of vLLM's linears: the adapter as two plain GEMMs; for 4-bit weights decode GEMM, Marlin or dense weight.

vLLM's own LoRA kernels serve many adapters at once and sum with atomics, so that no rollout repeats bit for bit. One
adapter takes two plain GEMMs, which repeat and round as the trainer's do.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import (
    DenseWeight,
    FrozenWeight,
    MarlinRows,
    MarlinTensor,
    decode_gemm_linear,
    frozen_linear,
)
from qerl_kernels.marlin import TILE
from torch import Tensor

from qerl_pl.engines.base import EngineSpec
from qerl_pl.engines.vllm import weight_map
from qerl_pl.engines.vllm.weight_map import FusedSlice
from qerl_pl.errors import UserError
from qerl_pl.models.families import FUSED

LoraBuffers = dict[str, tuple[Tensor, Tensor]]
"""Views of A [r, in] and B [out, r] by the base model's name of a linear, to be written in place."""


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [tokens, out] += (x [tokens, in] a^T) b^T for a [r, in] and b [out, r], in place; returns y."""
    return y.addmm_(x @ a.T, b.T)


@torch.library.custom_op("qerl::add_adapter", mutates_args={"y"})
def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """`add_lora` as an operator, which must not return its argument.

    PyTorch's compiler turns a plain `addmm_` into a copy and a sum: another pass over the output, and a large tensor in
    prefill.
    """
    add_lora(y, x, a, b)


class LoraMethod:
    """The `quant_method` of a vLLM linear with an adapter: the base's GEMM, then the adapter's two.

    It runs whether the adapter is on or off: with A and B zero the output is the base's.
    """

    def __init__(self, base: Any) -> None:
        self.base = base

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; the delta is added to the base's rounded output, as in the trainer."""
        y: Tensor = self.base.apply(layer, x, bias)
        add_adapter(y, x, layer.qerl_a, layer.qerl_b)
        return y


def attach_adapter(linear: Any, slices: Sequence[FusedSlice], rank: int, dtype: torch.dtype) -> LoraBuffers:
    """Add a zero adapter to a vLLM linear, before vLLM compiles it.

    The A of all slices are stacked, and each B fills the block of its rows and ranks, so that a fused projection takes
    two GEMMs too.

    Args:
        linear: vLLM's; a 4-bit one after `attach_fp4`.
        slices: Its slices with an adapter, ascending. Two of one name, such as of keys that are values too, have one B.
        rank: Rank of the adapter.
        dtype: Data type of activations.

    Returns:
        The buffers that an adapter is written into.
    """
    device = next(linear.parameters()).device
    columns, rows = linear.input_size_per_partition, linear.output_size_per_partition
    bounds: dict[str, tuple[int, int]] = {}
    for name, start, stop in slices:
        bounds[name] = bounds.get(name, (start,))[0], stop
    # Buffers of the module are inputs of vLLM's compiled graphs, which therefore see what is written.
    linear.register_buffer("qerl_a", torch.zeros(len(bounds) * rank, columns, dtype=dtype, device=device), False)
    linear.register_buffer("qerl_b", torch.zeros(rows, len(bounds) * rank, dtype=dtype, device=device), False)
    if isinstance(linear.quant_method, FP4Method):
        linear.quant_method.starts = tuple(start for start, _ in bounds.values())
    else:
        linear.quant_method = LoraMethod(linear.quant_method)
    buffers = {}
    for index, (name, (start, stop)) in enumerate(bounds.items()):
        ranks = slice(index * rank, (index + 1) * rank)
        buffers[name] = (linear.qerl_a[ranks], linear.qerl_b[start:stop, ranks])
    return buffers


TOLERANCE = 0.01
"""Largest relative difference between two GEMMs of one weight: rounding makes 1e-4, another layout 1."""

NEVER = torch.iinfo(torch.int32).max
"""Value of `dense_above` with which Marlin multiplies any number of tokens."""

_KERNEL = re.compile("marlin(nv|mx)fp4", re.IGNORECASE)
_EXPERTS_KERNEL = "MarlinExperts"
DENSE_METHOD = "UnquantizedLinearMethod"
"""vLLM's class of linears in 16 bits."""


def kernel_name(linear: Any) -> str:
    """Class name of the kernel that multiplies by a vLLM linear, or of its method where that has none."""
    method = linear.quant_method
    while hasattr(method, "base"):  # one of this package's
        method = method.base
    return type(getattr(getattr(linear, "scheme", None), "kernel", method)).__name__


def marlin_tensor(linear: Any) -> MarlinTensor | None:
    """The 4-bit weight of a vLLM linear; None where it is not in Marlin's layout, or padded."""
    if not _KERNEL.match(kernel_name(linear)):
        return None
    columns, rows = linear.input_size_per_partition, linear.output_size_per_partition
    if linear.weight.shape != (columns // 16, 2 * rows):
        return None
    return MarlinTensor(linear.weight.data, linear.weight_scale.data, _global_scale(linear))


def _global_scale(linear: Any) -> Tensor | None:
    """Global scale of an NVFP4 weight; None for MXFP4, which has none."""
    scale = getattr(linear, "weight_global_scale", None)
    return None if scale is None else scale.data


def shared_rows(linear: Any, slices: Sequence[FusedSlice]) -> Mapping[str, FrozenWeight] | None:
    """Frozen weights that the trainer can use, one for each slice of a vLLM linear.

    Args:
        linear: vLLM's.
        slices: All its slices.

    Returns:
        Empty for a convolution, which vLLM has as a linear; None where its weight cannot be shared: it is padded, in
        another layout, or one of Marlin's tiles has rows of two slices.
    """
    if weight_map.is_nf4(linear):
        return weight_map.shared_rows(linear, slices)
    if getattr(linear, "weight_scale", None) is None:
        held, shape = linear.weight.data, (linear.output_size_per_partition, linear.input_size_per_partition)
        if held.dim() > 2:
            return {}
        if held.shape != shape or not held.is_floating_point():
            return None
        return {name: DenseWeight(held[start:stop]) for name, start, stop in slices}
    weight = marlin_tensor(linear)
    if weight is None or any(start % TILE or stop % TILE for _, start, stop in slices):
        return None
    return {name: MarlinRows(weight, start, stop) for name, start, stop in slices}


def check_marlin_shapes(linears: dict[str, tuple[int, int]]) -> None:
    """Reject weights that Marlin's tiles do not cover.

    Args:
        linears: (out, in) of each quantized linear by name.

    Raises:
        UserError: A weight, with q/k/v and gate/up fused, divides into neither 64 x 128 nor 128 x 64.
    """
    for name, (rows, columns) in linears.items():
        stem, _, last = name.rpartition(".")
        group = next((group for group in FUSED if last in group), (last,))
        if last == "lm_head" or last != group[0]:
            continue
        rows = sum(linears.get(f"{stem}.{member}", (0, 0))[0] for member in group) if len(group) > 1 else rows
        if (rows % 64 or columns % 128) and (rows % 128 or columns % 64):
            raise UserError(
                f"Marlin takes weights that divide into 64 x 128 or 128 x 64; {'+'.join(group)} of {stem} is {rows} x "
                f"{columns}: set linear_backend to auto, which pads them"
            )


def why_not_shared(kernels: Sequence[str], spec: EngineSpec) -> str | None:
    """Why vLLM can share neither its linears' weights nor its experts'; None where it can.

    Args:
        kernels: Class names of the kernels of linears and experts.
        spec: What the engine was launched with.
    """
    if spec.device.type == "cpu":
        return "vLLM's CPU build repacks them"
    if spec.full_finetuning:
        return "full fine-tuning trains its own"
    if weight_map.METHOD in kernels or {*kernels} == {DENSE_METHOD}:
        return None
    if not any(_KERNEL.match(kernel) or kernel == _EXPERTS_KERNEL for kernel in kernels):
        return f"only Marlin's layout can be shared, and vLLM's kernels are {', '.join(kernels)}"
    if spec.dtype != torch.bfloat16:
        return f"vLLM scales weights otherwise for {spec.dtype} than for bfloat16"
    return None


@torch.library.custom_op("qerl::fp4_linear", mutates_args=())
def fp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    workspace: Tensor | None,
    permuted_bias: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    starts: Sequence[int],
    decode_gemm_max_tokens: int,
    dense_above: int,
    merged: Tensor | None = None,
    merged_above: int = 0,
) -> Tensor:
    """x [tokens, K] W^T + bias + (x a^T) b^T -> [tokens, N], by the decode GEMM up to `decode_gemm_max_tokens` tokens.

    Above `dense_above` tokens by the dense weight, between them by Marlin; above `merged_above` tokens by the merged
    copy, which comes before the others. An operator, for the choice depends on the number of tokens, which vLLM's
    compiled graphs leave open.

    Args:
        x: bfloat16.
        weight: With `scale` and `global_scale` a `MarlinTensor`.
        scale: See weight.
        global_scale: See weight.
        workspace: Marlin's locks, which vLLM 0.25 to 0.30 holds in the layer, and later releases by themselves.
        permuted_bias: [N], in Marlin's order.
        bias: [N], in plain order.
        alpha: `alpha` of `MarlinRows`, float32 [1] in the host's memory, where reading it does not wait for the
            device. A number would make every layer a compiled graph of its own.
        a: [r, K], of all fused slices stacked; None without an adapter.
        b: [N, r], each slice's in the block of its rows and ranks.
        starts: First row of each slice with an adapter; empty without one.
        decode_gemm_max_tokens: Tokens; 0 for none.
        dense_above: Tokens, or NEVER.
        merged: Weight with the adapter in it [N, K]; None for none.
        merged_above: Tokens.
    """
    if merged is not None and len(x) > merged_above:
        return torch.nn.functional.linear(x, merged, bias)
    held = MarlinTensor(weight, scale, global_scale)
    if len(x) <= decode_gemm_max_tokens:
        return decode_gemm_linear(x, held, bias, a=a, b=b, starts=starts or (0,))
    if len(x) > dense_above:
        y = frozen_linear(x, MarlinRows(held, alpha=alpha.item()), bias)
    else:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

        sizes = {"size_n": weight.shape[1] // 2, "size_k": 16 * len(weight)}
        y = apply_fp4_marlin_linear(x, *held, workspace, bias=permuted_bias, **sizes)
    return y if a is None or b is None else add_lora(y, x, a, b)  # y is no input of the operator: in place is allowed


@fp4_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] // 2)  # len() would fix the number of tokens


class FP4Method:
    """The `quant_method` of a vLLM 4-bit linear in Marlin's layout, with its adapter: see `fp4_linear`."""

    def __init__(self, base: Any, dense_above: int) -> None:
        self.base = base
        self.starts: tuple[int, ...] = ()
        self.decode_gemm_max_tokens = 0
        self.dense_above = dense_above
        self.merged_above = NEVER

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out]; `bias` is the layer's own, in Marlin's order, or None."""
        weight = (layer.weight, layer.weight_scale, _global_scale(layer))
        plain = None if bias is None else layer.qerl_bias
        a, b = (layer.qerl_a, layer.qerl_b) if self.starts else (None, None)
        limits = (list(self.starts), self.decode_gemm_max_tokens, self.dense_above)
        merged = (getattr(layer, "qerl_merged", None), self.merged_above)
        locks = getattr(layer, "workspace", None)
        y: Tensor = fp4_linear(x, *weight, locks, bias, plain, layer.qerl_alpha, a, b, *limits, *merged)
        return y


def probe(tokens: int, weight: MarlinTensor) -> Tensor:
    """Activations to check a weight with, the same at every start: bfloat16 [tokens, K], on its device."""
    x = torch.randn(tokens, 16 * len(weight.weight), generator=torch.Generator().manual_seed(0), device="cpu")
    return x.to(weight.weight.device, torch.bfloat16)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`, 0 where both are zero: see TOLERANCE."""
    difference = (actual - expected).float().norm()
    return 0.0 if difference == 0 else (difference / expected.float().norm()).item()


@torch.inference_mode()
def attach_fp4(linear: Any, dense_above: int) -> None:
    """Give a vLLM linear an `FP4Method`, before vLLM compiles it, if its weight is in Marlin's layout.

    Args:
        linear: vLLM's, before `attach_adapter`.
        dense_above: Tokens above which it multiplies by the dense weight, or NEVER.

    Raises:
        UserError: The two GEMMs differ.
    """
    held = marlin_tensor(linear)
    if held is None:
        return
    weight = MarlinRows(held)
    linear.register_buffer("qerl_alpha", torch.tensor([weight.alpha], device="cpu"), False)
    x = probe(1, held)
    difference = relative_difference(frozen_linear(x, weight), linear.quant_method.apply(linear, x))
    if not difference <= TOLERANCE:  # not a number, either
        raise UserError(
            f"Marlin and the dequantized weight must give the same product; they differ by {difference:.2g} of its "
            "size, so this vLLM lays weights out otherwise: set dense_above to null and share_weights to false"
        )
    # The product of zeros is the bias, in plain order.
    bias = None if linear.bias is None else linear.quant_method.apply(linear, torch.zeros_like(x), linear.bias)[0]
    linear.register_buffer("qerl_bias", bias, False)
    linear.quant_method = FP4Method(linear.quant_method, dense_above)
