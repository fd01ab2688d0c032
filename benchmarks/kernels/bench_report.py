"""Shared by the kernel benchmarks: timing and Markdown."""

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


def parser(description: str | None, stem: str) -> argparse.ArgumentParser:
    """Of a benchmark that writes STEM.md and STEM.json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help=f"folder for {stem}.md and {stem}.json")
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


def micro(times: Times) -> Row:
    return {"p20_us": times[0] * 1e6, "p50_us": times[1] * 1e6, "p80_us": times[2] * 1e6}


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
