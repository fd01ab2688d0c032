"""What benchmarks of an engine share: random adapters and prompts, seconds, memory, the speed of rollouts."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_model import any_config
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
    """An adapter of random numbers, where a trainer's would be: on the device, in float32; none at rank 0."""
    generator, rank = torch.Generator(spec.device).manual_seed(1), spec.lora_rank
    adapter = {
        name: tuple(
            torch.randn(size, generator=generator, device=spec.device) * 0.02 for size in ((rank, inp), (out, rank))
        )
        for name, (out, inp) in linear_shapes(AutoConfig.from_pretrained(base)).items()
        if spec.adapts(name)
    }
    return PolicyWeights(version=0, adapter=adapter or None, scaling=1.0, noise=noise)  # type: ignore[arg-type]


def prompts_of(count: int, length: int, vocabulary: int) -> list[RolloutRequest]:
    ids = torch.randint(10, vocabulary, (count, length), generator=torch.Generator().manual_seed(count))
    return [RolloutRequest(tuple(row), (index,)) for index, row in enumerate(ids.tolist())]


def sampling_seconds(
    engine: VLLMEngine | StockEngine, device: torch.device, requests: list[RolloutRequest], tokens: int
) -> float:
    """Seconds that the engine takes to sample completions of so many tokens, or of the requests' own."""
    return timed(device, lambda: engine.generate(requests, SamplingConfig(max_tokens=tokens)))


def measure_speed(engine: VLLMEngine | StockEngine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Throughput of rollouts and of decoding alone, tokens per second: median, minimum and maximum of several runs."""
    device, vocabulary = torch.device(args.device), any_config(args.shape)["vocab_size"]
    for batch in args.batches:
        run = functools.partial(sampling_seconds, engine, device, prompts_of(batch, args.prompt, vocabulary))
        prefill = run(1)
        seconds = [run(args.tokens) for _ in range(args.repeats)]
        decode = statistics.median(seconds) - prefill
        yield {
            **rates(batch, batch * args.tokens, seconds),
            "decode_tokens_per_s": batch * (args.tokens - 1) / decode,
            "prefill_tokens_per_s": batch * args.prompt / prefill,
        }


def measure_lengths(engine: VLLMEngine | StockEngine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Throughput of rollouts whose completions have the given lengths, all running from the start."""
    device, vocabulary = torch.device(args.device), any_config(args.shape)["vocab_size"]
    for count in args.counts:
        lengths = args.lengths[:count]
        prompts = prompts_of(count, args.prompt, vocabulary)
        requests = [replace(prompt, max_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
        seconds = [sampling_seconds(engine, device, requests, max(lengths)) for _ in range(args.repeats)]
        yield rates(count, sum(lengths), seconds) | {"longest": max(lengths)}


def rates(batch: int, tokens: int, seconds: list[float]) -> dict[str, Any]:
    """Sampled tokens per second."""
    found = {"rollout_tokens_per_s": tokens / statistics.median(seconds)}
    return {"batch": batch, **found, "slowest": tokens / max(seconds), "fastest": tokens / min(seconds)}


def decode_sweep(engine: VLLMEngine | StockEngine, most: int, args: argparse.Namespace) -> list[Any]:
    """Milliseconds of a decode step of every 32nd number of sequences up to `most`, after prompts of 16 tokens."""
    device, vocabulary, rows, tokens = torch.device(args.device), any_config(args.shape)["vocab_size"], [], 64
    for sequences in range(32, most + 1, 32):
        run = functools.partial(sampling_seconds, engine, device, prompts_of(sequences, 16, vocabulary))
        run(1)
        prefill = run(1)
        rows.append([sequences, 1e3 * (run(tokens) - prefill) / (tokens - 1)])
    return rows
