"""What becomes of vLLM's linears at loading: adapter, product of few tokens, product of many."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from qerl_kernels import MarlinRows, few_tokens_sizes, frozen_linear, silu_of_halves

from qerl_pl.engines import vllm_marlin
from qerl_pl.engines.vllm_adapter import Slots, attach_adapter
from qerl_pl.engines.vllm_few import FewTokensMethod, attach_few, attach_gated
from qerl_pl.engines.vllm_parts import Part
from qerl_pl.errors import UserError

log = logging.getLogger(__name__)


def changes_products(config: Mapping[str, Any]) -> bool:
    """Whether 4-bit linears in Marlin's layout multiply otherwise than vLLM's do."""
    return config["dense_above"] is not None or config["few_up_to"] is not None


def attach_all(
    linears: Mapping[str, tuple[Any, Sequence[Part]]],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    modules: Iterable[Any] = (),
) -> Slots:
    """Give vLLM's linears their products and adapters, before vLLM compiles them.

    Args:
        linears: By name; each with its parts.
        config: What `vllm_worker.engine_config` made: adapter, the numbers of tokens `few_up_to` and `dense_above`, and
            whether MLPs are `gated`.
        dtype: Of activations.
        modules: The model's, with its MLPs among them.

    Returns:
        What adapters are written into.

    Raises:
        UserError: Two products of the same weight differ.
    """
    slots: Slots = {}
    few: list[Any] = []
    ours = changes_products(config) and not vllm_marlin.missing()
    few_up_to = config["few_up_to"] if ours else None
    for linear, held in linears.values():
        if ours:
            above = config["dense_above"]
            vllm_marlin.attach_dense(linear, vllm_marlin.NEVER if above is None else above)
        parts = [part for part in held if config["rank"] and part[0].rpartition(".")[2] in config["targets"]]
        if parts:
            slots |= attach_adapter(linear, parts, config["rank"], dtype)
        if few_up_to is not None:
            few += [linear] * attach_few(linear, [start for _, start, _ in parts], few_up_to)
    if few_up_to is not None:
        gated = sum(attach_gated(module) for module in modules) if config["gated"] else 0
        check_few(few, few_up_to)
        log.info(
            "%d of %d linears take few_up_to: %d tokens or fewer at once run in one product with their adapter (Hopper "
            "GPUs only), %d with an MLP's activation",
            *(len(few), len(linears), few_up_to, gated),
        )
    return slots


@torch.inference_mode()
def check_few(linears: Sequence[Any], few_up_to: int) -> None:
    """Run one linear of each kind for as many tokens as compile something of their own, and compare.

    So that nothing compiles while a CUDA graph is captured, and no wrong product decodes.

    Args:
        linears: What `attach_few` has changed.
        few_up_to: Tokens.

    Raises:
        UserError: The product of few tokens is not that of the dequantized weight.
    """
    done: set[tuple[object, ...]] = set()
    for linear in linears:
        method, held = linear.quant_method, vllm_marlin.marlin_tensor(linear)
        assert isinstance(method, FewTokensMethod) and held is not None
        kind = (held.weight.shape, method.starts, method.gated, linear.bias is None)
        if kind in done:
            continue
        done.add(kind)
        weight = MarlinRows(held, alpha=linear.qerl_alpha.item())
        for tokens in few_tokens_sizes(held, len(linear.qerl_a) if method.starts else 0, few_up_to, method.gated):
            x = vllm_marlin.probe(tokens, held)
            few, dense = method.apply(linear, x, linear.bias), frozen_linear(x, weight, linear.qerl_bias)
            dense = silu_of_halves(dense) if method.gated else dense
            by = vllm_marlin.apart(few, dense)
            if not by <= vllm_marlin.TOLERANCE:
                raise UserError(
                    f"the product of {tokens} tokens must be that of the dequantized weight; for a weight "
                    f"{weight.shape[0]} x {weight.shape[1]} they differ by {by:.2g} of its size: set few_up_to to "
                    "null"
                )
