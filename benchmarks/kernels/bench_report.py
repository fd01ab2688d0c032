"""Shared by the kernel benchmarks: timing, memory, and Markdown."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder alone is on the path
import report

correct = report.correct
QUANTILES = (0.2, 0.5, 0.8)
REPLAYED = 16
"""Calls in a CUDA graph, at least: so many that the graph's own launch does not count."""

Times = tuple[float, float, float]
Row = dict[str, Any]


def parser(description: str | None, stem: str, out_required: bool = True) -> argparse.ArgumentParser:
    """Of a benchmark that writes STEM.md and STEM.json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=out_required, help=f"folder for {stem}.md and {stem}.json")
    made.add_argument("--commit", help="its hash is recorded beside the numbers; by default git's HEAD")
    made.add_argument("--tiny", action="store_true", help="small shapes on the CPU, to try the script")
    return made


def timed(fn: Callable[[], Any], device: str, ms: int = 100) -> Times:
    """Seconds a call at the 20th, 50th and 80th percentile, the caches cold; on a CPU those of a single call.

    A GPU repeats it for about `ms` milliseconds, after a quarter of them to warm up.
    """
    if device == "cuda":
        import triton

        p20, p50, p80 = triton.testing.do_bench(fn, warmup=ms // 4, rep=ms, quantiles=QUANTILES)
        return p20 / 1e3, p50 / 1e3, p80 / 1e3
    start = time.perf_counter()
    fn()
    seconds = time.perf_counter() - start
    return seconds, seconds, seconds


def replayed(calls: Sequence[Callable[[], Any]], device: str, ms: int = 100) -> Times | None:
    """Seconds one of `calls` takes the GPU: they are captured in a CUDA graph, so the CPU launches them all at once.

    Their results stay alive during a round: with inputs and results of more than the caches hold, each call finds the
    caches cold. None where something in a call cannot be captured.
    """
    rounds = -(-REPLAYED // len(calls))
    if device != "cuda":
        low, middle, high = timed(lambda: [call() for call in calls], device)
        return low / len(calls), middle / len(calls), high / len(calls)
    for call in calls:
        call()  # compiles and tunes
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), [None] * len(calls)
    try:
        with torch.cuda.graph(graph):
            for i in range(rounds * len(calls)):
                results[i % len(calls)] = calls[i % len(calls)]()
    except RuntimeError as error:
        sys.stderr.write(f"a CUDA graph is left out: {error}\n")
        return None
    low, middle, high = timed(graph.replay, device, ms)
    each = rounds * len(calls)
    return low / each, middle / each, high / each


def copy_time(count: int, device: str) -> float:
    """Seconds of a copy on the device that reads and writes `count` bytes in all, its source out of the caches."""
    source = torch.randint(256, (count // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), device)[1]


def enqueued(step: Callable[[], Any], device: str) -> float:
    """Seconds of the CPU a call: the median time until it returns, while the GPU may still be working."""
    seconds = []
    for _ in range(20 if device == "cuda" else 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def micro(times: Times) -> Row:
    return {"p20_us": times[0] * 1e6, "p50_us": times[1] * 1e6, "p80_us": times[2] * 1e6}


def extra_memory(step: Callable[[], None], device: str) -> float | None:
    """GiB allocated at most during a step, beyond what was there."""
    if device != "cuda":
        step()
        return None
    step()  # compiles, tunes, and makes cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def environment(commit: str | None) -> Row:
    result: Row = report.environment()
    return result | {"commit": commit} if commit else result


def table(rows: list[Row], columns: dict[str, str]) -> str:
    """Markdown of `rows`; a column's key may go into a nested row by a dot."""

    def cell(row: Row, key: str) -> str:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 10 else f"{value:.0f}"
        return "–" if value is None else str(value)

    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row, key) for key in columns) + " |" for row in rows])


WEIGHT_COLUMNS = {
    "op": "op",
    "layer": "layer",
    "floor_us": "floor µs",
    "p20_us": "p20",
    "p50_us": "p50",
    "p80_us": "p80",
    "gpu_us": "in a CUDA graph",
    "percent_of_copy": "% of copy bandwidth",
    "gpu_percent_of_copy": "% in a CUDA graph",
    "copy_us": "copy of as many bytes",
    "eager_p50_us": "eager PyTorch",
}
LINEAR_COLUMNS = {
    "layer": "layer",
    "tokens": "tokens",
    "bf16.p50_us": "BF16 LoRA µs",
    "bf16_peft.p50_us": "BF16 LoRA, as PEFT does",
    "own.p50_us": "NVFP4, own copy",
    "shared.p50_us": "NVFP4, Marlin layout",
    "eager.p50_us": "NVFP4, eager dequantize",
    "vllm_marlin_forward.p50_us": "vLLM Marlin (forward only)",
    "own_ratio": "own : BF16",
    "shared_ratio": "shared : BF16",
}
SPLIT_COLUMNS = {
    "layer": "layer",
    "tokens": "tokens",
    "bf16.gpu_us": "GPU: BF16 LoRA µs",
    "bf16_peft.gpu_us": "BF16 LoRA, as PEFT does",
    "own.gpu_us": "NVFP4, own copy",
    "shared.gpu_us": "NVFP4, Marlin layout",
    "own_gpu_ratio": "own : BF16",
    "shared_gpu_ratio": "shared : BF16",
    "bf16.cpu_us": "CPU: BF16 LoRA µs",
    "bf16_peft.cpu_us": "BF16 LoRA, as PEFT does",
    "own.cpu_us": "NVFP4, own copy",
    "shared.cpu_us": "NVFP4, Marlin layout",
}
HEAD_COLUMNS = {
    "variant": "variant",
    "tokens": "tokens",
    "p20_us": "p20 µs",
    "p50_us": "p50",
    "p80_us": "p80",
    "extra_gib": "extra GiB",
    "note": "note",
}
