"""Where a decode step's and an update's time goes on a GPU: PyTorch's profiler, kernels gathered by kind."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import report
import torch

from qerl_pl.types import RolloutRequest, SamplingConfig

DECODE_GEMM, MARLIN, PRODUCTS = "decode GEMM with LoRA", "Marlin", "16-bit products"
SAMPLING = "sampling, log-probabilities"
DECODE_KINDS = {
    DECODE_GEMM: r"^decode_gemm_stream_k_kernel|^decode_gemm_reduce_kernel",
    "dequantize": r"^_dequantize",
    MARLIN: r"(?i)marlin",
    "16-bit experts": r"^fused_moe_kernel",
    "routing, sum over experts": r"(?i)moe|expert|topkgating|router",
    "vLLM's LoRA": r"(?i)lora",
    "cache write": r"(?i)reshape_and_cache|kv_cache|concat_and_cache",
    "attention": r"(?i)flash|fmha|attention|attn",
    PRODUCTS: r"(?i)nvjet|gemm|gemv|cutlass|cublas|splitk|xmma",
    SAMPLING: r"(?i)sampl|softmax|top_?[kp]|sort|argmax|gumbel|logprob|distribution|exponent|_ranks",
    "norms": r"(?i)norm",
    "rope": r"(?i)rotary|rope|triton_poi.*(index_select|split_with_sizes)",
    "activation": r"(?i)silu|gelu|act_and_mul",
    "other compiled": r"^triton_(poi|red|per)",
    "copies and fills": r"(?i)memcpy|memset|FillFunctor|copy",
}
LINEARS = ("qkv", "o", "gate_up", "down")
"""Of a dense layer, in the order in which they run."""
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
HOST_GAP_US = 20
"""A longer gap between kernels is the host's; within a CUDA graph they take up to a few microseconds."""
Kernels = list[tuple[str, float, float]]
"""Name, start and microseconds of each, in the order of their starts."""


def kind_of(kernel: str, kinds: Mapping[str, str]) -> str:
    """Of the kinds, the first whose pattern the name fits."""
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, kernel)), "rest")


def kernels_of(work: Callable[[], object]) -> Kernels:
    """Every kernel that `work` runs."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    on_gpu = (event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA)
    return sorted(((event.name, event.time_range.start, event.device_time) for event in on_gpu), key=lambda one: one[1])


def kinds_of(kernels: Kernels) -> list[str]:
    """The kind of each kernel of decode steps, with its linear where a step has four products a layer and lm_head."""
    kinds = [kind_of(name, DECODE_KINDS) for name, *_ in kernels]
    products: list[int] = []
    for index, kind in enumerate(list(kinds)):
        if kind in (DECODE_GEMM, MARLIN, PRODUCTS):
            products.append(index)
        elif kind == SAMPLING and products:
            first = [one for one in products if "reduce" not in kernels[one][0]]
            four_bit = [one for one in first if kinds[one] != PRODUCTS]
            main = [*four_bit, *[one for one in first[-1:] if kinds[one] == PRODUCTS]] if four_bit else first
            if len(main) > 1 and len(main) % len(LINEARS) == 1:
                names = [LINEARS[number % len(LINEARS)] for number in range(len(main) - 1)] + ["lm_head"]
                for name, start, end in zip(names, main, [*main[1:], index], strict=True):
                    for one in (one for one in products if start <= one < end):
                        kinds[one] = f"{kinds[one]}: {name}"
            products = []
    return kinds


def spans(kernels: Kernels) -> dict[str, float]:
    """Microseconds in which kernels run, and of the gaps between them."""
    found, end = {"GPU busy": 0.0, "gaps between kernels": 0.0, "gaps of the host": 0.0}, kernels[0][1]
    for _, start, us in kernels:
        gap = start - end
        found["gaps of the host" if gap >= HOST_GAP_US else "gaps between kernels"] += max(gap, 0.0)
        found["GPU busy"] += max(start + us - max(start, end), 0.0)
        end = max(end, start + us)
    return found


def of_a_step(engine: Any, requests: Sequence[RolloutRequest], most: int) -> dict[str, Any]:
    """Milliseconds a decode step: what up to 32 more tokens than one take, less what one token takes.

    Args:
        engine: With `generate(requests, sampling)`.
        requests: Sampled together.
        most: Tokens of the longest completion that the engine has room for.
    """
    steps = min(32, most - 1)

    def generate(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(requests, SamplingConfig(max_tokens=tokens))
        return time.perf_counter() - start

    generate(2)
    wall = -generate(1) + generate(1 + steps)
    one, many = kernels_of(lambda: generate(1)), kernels_of(lambda: generate(1 + steps))
    rows: list[tuple[str, str, float, float]] = []
    for kernels, sign in ((one, -1), (many, 1)):
        kinds = kinds_of(kernels)
        rows += [
            (kind, name, sign * us / steps / 1e3, sign / steps)
            for kind, (name, _, us) in zip(kinds, kernels, strict=True)
        ]
    before, after = spans(one), spans(many)
    whole = {name: (after[name] - before[name]) / steps / 1e3 for name in after}
    return _gathered(rows) | {"step": whole | {"a step without the profiler": 1e3 * wall / steps}}


def of_an_update(update: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of an update, which has run before."""
    return _gathered((kind_of(name, UPDATE_KINDS), name, us / 1e3, 1.0) for name, _, us in kernels_of(update))


def _gathered(rows: Iterable[tuple[str, str, float, float]]) -> dict[str, Any]:
    """Milliseconds and calls by kind, and of the largest kernels."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kind, name, milliseconds, calls in rows:
        for held in (kinds[kind], kernels[name[:120]]):
            held[0], held[1] = held[0] + milliseconds, held[1] + calls
    largest = sorted(kernels.items(), key=lambda one: -one[1][0])[:24]
    return {"kinds": dict(kinds), "largest": [(name, *found) for name, found in largest]}


def tables(profiles: Mapping[str, dict[str, Any]], unit: str = "a step") -> list[str]:
    """Results of `of_a_step` or `of_an_update` as Markdown: kernels by kind beside each other, and the largest ones.

    Args:
        profiles: By title.
        unit: What is measured.
    """
    if not profiles:
        return []
    found = list(profiles.values())
    kinds = {kind: max(one["kinds"].get(kind, [0.0])[0] for one in found) for one in found for kind in one["kinds"]}
    rows = [
        [kind, *("{:.3f} ({:.0f})".format(*one["kinds"].get(kind, (0.0, 0.0))) for one in found)]
        for kind in sorted(kinds, key=lambda kind: -kinds[kind])
    ]
    rows.append(["all", *(f"{sum(time for time, _ in one['kinds'].values()):.3f}" for one in found)])
    rows += [[name, *(f"{one['step'][name]:.3f}" for one in found)] for name in found[0].get("step", ())]
    text = [report.markdown([f"kernels, ms {unit} (calls), by the profiler", *profiles], rows)]
    for title, one in profiles.items():
        largest = [[name, f"{time:.3f}", f"{calls:.1f}"] for name, time, calls in one["largest"]]
        text.append(report.markdown([f"kernel, {title}", f"ms {unit}", "calls"], largest))
    return text
