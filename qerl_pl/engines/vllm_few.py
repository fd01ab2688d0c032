"""NVFP4 linears of vLLM in a decode step: weight and adapter in one product of this package's own.

Marlin and the adapter's two plain products take four to five launches a linear, this takes two, and reads the weights
faster. It rounds where they round and where the trainer does; its sums repeat bit for bit. Above `dense_above` tokens a
linear of many rows (gate and up) takes its adapter into the dense weight's product, which rounds once: closer to the
exact sum, but not where the trainer rounds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from qerl_kernels import (
    MarlinRows,
    MarlinTensor,
    few_tokens_linear,
    few_tokens_supported,
    silu_of_halves,
    widened_linear,
    widening_pays,
)
from torch import Tensor, nn

from qerl_pl.engines.vllm_adapter import AdaptedMethod, add_products
from qerl_pl.engines.vllm_marlin import MarlinOrDenseMethod, marlin_tensor, product_by_tokens

GATED = True
"""Whether activations are computed with the product before them; a benchmark compares with False."""
MLP_CLASSES = ("LlamaMLP", "MistralMLP", "Qwen2MLP")
"""Of vLLM's models; Qwen3's is Qwen2's."""
MLP_PARTS = ("gate_up_proj", "act_fn", "down_proj")


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
    few_up_to: int,
    dense_above: int,
    gated: bool,
) -> Tensor:
    """x [tokens, K] W^T + bias + (x a^T) b^T -> [tokens, N], by `few_tokens_linear` up to `few_up_to` tokens.

    Above, `product_by_tokens` and two plain products, or for many tokens and rows `widened_linear`. An operator, for
    the choice depends on the number of tokens, which vLLM's compiled graphs leave open. If `gated`, silu(first half) *
    second half of that, [tokens, N/2].

    Args:
        x: bfloat16.
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
        few_up_to: Tokens.
        dense_above: Tokens.
        gated: Whether the rows are an MLP's gate and up projection, and the result is activated.
    """
    held = MarlinTensor(weight, scale, global_scale)
    if len(x) <= few_up_to:
        return few_tokens_linear(x, held, bias, a=a, b=b, starts=starts or (0,), gated=gated)
    if a is not None and b is not None and len(x) > dense_above and widening_pays(a, b):
        y = widened_linear(x, MarlinRows(held, alpha=alpha.item()), bias, a, b)
    else:
        y = product_by_tokens(x, *held, workspace, permuted_bias, bias, alpha, dense_above)
        if a is not None and b is not None:
            add_products(y, x, a, b)  # in place, for y is no input: the product before made it
    return silu_of_halves(y) if gated else y


@adapted_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    rows = weight.shape[1] // 2
    return x.new_empty(x.shape[0], rows // 2 if rest[-1] else rows)  # len() would fix the number of tokens


class FewTokensMethod:
    """Stands in for the `quant_method` of one of vLLM's NVFP4 linears, with its adapter and, if `gated`, activation."""

    def __init__(self, base: Any, starts: Sequence[int], few_up_to: int, dense_above: int) -> None:
        self.base = base
        self.starts = tuple(starts)
        self.few_up_to = few_up_to
        self.dense_above = dense_above
        self.gated = False

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, in] -> [tokens, out], or half of it if `gated`; `bias` is the layer's own, in Marlin's order."""
        weight = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        plain = None if bias is None else layer.qerl_bias
        a, b = (layer.qerl_a, layer.qerl_b) if self.starts else (None, None)
        numbers = (list(self.starts), self.few_up_to, self.dense_above, self.gated)
        y: Tensor = adapted_linear(x, *weight, layer.workspace, bias, plain, layer.qerl_alpha, a, b, *numbers)
        return y


def attach_few(linear: Any, starts: Sequence[int], few_up_to: int) -> bool:
    """Let one of vLLM's linears run few tokens with its adapter in one product, before vLLM compiles it.

    Args:
        linear: With an adapter, if it gets one, and after `attach_dense`.
        starts: First row of each part that has an adapter, ascending.
        few_up_to: Tokens.

    Returns:
        Whether it does: not without an NVFP4 weight in Marlin's layout, or where the kernels do not run.
    """
    held, method = marlin_tensor(linear), linear.quant_method
    if held is None or not few_tokens_supported(held):
        return False
    base = method.base if isinstance(method, AdaptedMethod) else method
    assert isinstance(base, MarlinOrDenseMethod), "attach_dense comes first"
    linear.quant_method = FewTokensMethod(method, starts, few_up_to, base.dense_above)
    return True


def attach_gated(mlp: Any) -> bool:
    """Let the gate and up projection of one of vLLM's MLPs activate its own output, before vLLM compiles it.

    Decoding then writes and reads half as much between the MLP's two linears, in a launch less. The activation rounds
    where the trainer's does: silu(gate) first, which compiled graphs keep in float32.

    Args:
        mlp: After `attach_few`.

    Returns:
        Whether it does: not where the MLP is none of a known class that computes down(act(gate_up(x))) and no more.
    """
    if type(mlp).__name__ not in MLP_CLASSES or {name for name, _ in mlp.named_children()} != set(MLP_PARTS):
        return False
    code, method = getattr(type(mlp).forward, "__code__", None), mlp.gate_up_proj.quant_method
    plain = code is not None and code.co_names == MLP_PARTS  # all that its forward looks up, in this order
    if not plain or type(mlp.act_fn).__name__ != "SiluAndMul" or not isinstance(method, FewTokensMethod):
        return False
    method.gated = True
    mlp.act_fn = nn.Identity()
    return True
