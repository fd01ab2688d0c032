"""Where a decode step's and an update's time goes on a GPU: PyTorch's profiler, kernels gathered by kind."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import report
import torch

from qerl_pl.types import RolloutRequest, SamplingConfig

DECODE_KINDS = {
    "decode GEMM with LoRA": r"^decode_gemm_stream_k_kernel|^decode_gemm_reduce_kernel",
    "dequantize": r"^_dequantize",
    "Marlin": r"(?i)marlin",
    "16-bit experts": r"^fused_moe_kernel",
    "routing, sum over experts": r"(?i)moe|expert|topkgating|router",
    "vLLM's LoRA": r"(?i)lora",
    "attention and its cache": r"(?i)flash|fmha|attention|attn|reshape_and_cache|kv_cache",
    "16-bit products (lm_head, adapter)": r"(?i)nvjet|gemm|gemv|cutlass|cublas|splitk|xmma",
    "sampling, log-probabilities": r"(?i)sampl|softmax|top_?[kp]|sort|argmax|gumbel|logprob|distribution|exponent",
    "norms, activation, rope": r"(?i)norm|silu|rotary|rope|triton_(poi|red|per)",
}
UPDATE_KINDS = {
    "dequantize": r"^_dequantize",
    "attention, backward": r"(?i)(flash|fmha|attn|attention).*(bwd|backward)",
    "attention, forward": r"(?i)flash|fmha|attn|attention",
    "log-probabilities": r"^_(logprob|divergence)",
    "norms, activation, rope": r"^_(rms_norm|gated_product|rope)",
    "routing, sum over experts": r"^_expert|(?i:sort|topk)",
    "optimizer": r"(?i)multi_tensor|adam",
    "products": r"(?i)nvjet|gemm|gemv|cutlass|cublas|splitk|xmma",
}
Count = dict[str, tuple[float, int]]
"""Microseconds and calls by name of a kernel."""


def kind_of(kernel: str, kinds: Mapping[str, str]) -> str:
    """Of the kinds, the first whose pattern the name fits."""
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, kernel)), "rest")


def kernels_of(work: Callable[[], object]) -> Count:
    """Time and calls of every kernel that `work` runs."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            found[event.name][0] += event.device_time
            found[event.name][1] += 1
    return {name: (time, int(calls)) for name, (time, calls) in found.items()}


def of_a_step(engine: Any, requests: Sequence[RolloutRequest], most: int) -> dict[str, Any]:
    """Milliseconds a decode step: what up to 32 more tokens than one take, less what one token takes.

    Args:
        engine: With `generate(requests, sampling)`.
        requests: Sampled together.
        most: Tokens of the longest completion that the engine has room for.
    """
    steps = min(32, most - 1)

    def generate(tokens: int) -> None:
        engine.generate(requests, SamplingConfig(max_tokens=tokens))

    generate(2)
    one, many = kernels_of(lambda: generate(1)), kernels_of(lambda: generate(1 + steps))
    each = {
        name: ((time - one.get(name, (0.0, 0))[0]) / steps / 1e3, (calls - one.get(name, (0.0, 0))[1]) / steps)
        for name, (time, calls) in many.items()
    }
    return _gathered(each, DECODE_KINDS)


def of_an_update(update: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of an update, which has run before."""
    return _gathered({name: (time / 1e3, calls) for name, (time, calls) in kernels_of(update).items()}, UPDATE_KINDS)


def _gathered(each: Mapping[str, tuple[float, float]], patterns: Mapping[str, str]) -> dict[str, Any]:
    """Milliseconds and calls by kind, and of the largest kernels."""
    kinds: dict[str, list[float]] = {}
    for name, (time, calls) in each.items():
        held = kinds.setdefault(kind_of(name, patterns), [0.0, 0.0])
        held[0], held[1] = held[0] + time, held[1] + calls
    largest = sorted(each.items(), key=lambda one: -one[1][0])[:24]
    return {"kinds": kinds, "largest": [(name[:120], time, calls) for name, (time, calls) in largest]}


def tables(title: str, profile: dict[str, Any], unit: str = "a step") -> list[str]:
    """`of_a_step` or `of_an_update` as Markdown: a title, kernels by kind, and the largest ones."""
    kinds = sorted(profile["kinds"].items(), key=lambda kind: -kind[1][0])
    rows = [[kind, f"{time:.3f}", f"{calls:.1f}"] for kind, (time, calls) in kinds]
    rows.append(["all", f"{sum(time for _, (time, _) in kinds):.3f}", ""])
    largest = [[name, f"{time:.3f}", f"{calls:.1f}"] for name, time, calls in profile["largest"]]
    headers = [f"ms {unit}", "calls"]
    by_kind, by_kernel = report.markdown(["kernels", *headers], rows), report.markdown(["kernel", *headers], largest)
    return [f"{title}, by the profiler", by_kind, by_kernel]
