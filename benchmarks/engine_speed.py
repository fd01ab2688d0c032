"""What benchmarks of an engine share: random adapters and prompts, seconds, memory, the speed of rollouts."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_model import SHAPES
from stock_engine import StockEngine
from transformers import AutoConfig

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.models.families import linear_shapes
from qerl_pl.types import PolicyWeights, RolloutRequest, SamplingConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 32


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that `work` takes, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def used_gib(device: torch.device) -> float:
    """GiB of the device that are taken, as the driver sees it; nan on a CPU."""
    if device.type != "cuda":
        return float("nan")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def random_policy(base: Path, spec: EngineSpec, noise: NormNoise | None) -> PolicyWeights:
    """An adapter of random numbers, where a trainer's would be: on the device, in float32."""
    shapes = linear_shapes(AutoConfig.from_pretrained(base))
    generator = torch.Generator(spec.device).manual_seed(1)
    adapter = {
        name: tuple(
            torch.randn(size, generator=generator, device=spec.device) * 0.02 for size in ((RANK, inp), (out, RANK))
        )
        for name, (out, inp) in shapes.items()
        if name.endswith(TARGETS)
    }
    return PolicyWeights(version=0, adapter=adapter, scaling=1.0, noise=noise)  # type: ignore[arg-type]


def prompts_of(count: int, length: int, vocabulary: int) -> list[RolloutRequest]:
    ids = torch.randint(10, vocabulary, (count, length), generator=torch.Generator().manual_seed(count))
    return [RolloutRequest(tuple(row), (index,)) for index, row in enumerate(ids.tolist())]


def sampling_seconds(
    engine: VLLMEngine | StockEngine, device: torch.device, requests: list[RolloutRequest], tokens: int
) -> float:
    """Seconds that the engine takes to sample completions of so many tokens."""
    return timed(device, lambda: engine.generate(requests, SamplingConfig(max_tokens=tokens)))


def measure_speed(engine: VLLMEngine | StockEngine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Throughput of rollouts and of decoding alone, tokens per second: median, minimum and maximum of several runs."""
    device, vocabulary = torch.device(args.device), SHAPES[args.shape][-1]
    engine.generate(prompts_of(args.batches[0], args.prompt, vocabulary), SamplingConfig(max_tokens=8))  # warm up
    rows = []
    for batch in args.batches:
        run = functools.partial(sampling_seconds, engine, device, prompts_of(batch, args.prompt, vocabulary))
        run(1)
        prefill = run(1)  # once: of wide batches it takes as long as the rollout's other half
        seconds = sorted(run(args.tokens) for _ in range(args.repeats))
        median = statistics.median(seconds)
        rows.append(
            {
                "batch": batch,
                "rollout_tokens_per_s": batch * args.tokens / median,
                "slowest": batch * args.tokens / seconds[-1],
                "fastest": batch * args.tokens / seconds[0],
                "decode_tokens_per_s": batch * (args.tokens - 1) / (median - prefill),
                "prefill_tokens_per_s": batch * args.prompt / prefill,
            }
        )
    return rows


def decode_sweep(engine: VLLMEngine | StockEngine, most: int, args: argparse.Namespace) -> list[Any]:
    """Milliseconds of a decode step of every 32nd number of sequences up to `most`, after prompts of 16 tokens."""
    device, rows, tokens = torch.device(args.device), [], 64
    for sequences in range(32, most + 1, 32):
        run = functools.partial(sampling_seconds, engine, device, prompts_of(sequences, 16, SHAPES[args.shape][-1]))
        run(1)
        prefill = run(1)
        rows.append([sequences, 1e3 * (run(tokens) - prefill) / (tokens - 1)])
    return rows
