"""The vLLM engine alone on one GPU: rollout speed, noise, sync time and sleep, as a Markdown table and JSON.

    python benchmarks/engine_h200.py --out benchmarks/results

Random weights of the model's shape, made by this package's quantizer; about ten minutes at 7B, most of it five starts
of vLLM, each in a process of its own, so that memory figures are its own: NVFP4 as by default, with Marlin for all,
with Humming kernels, BF16, and BF16 as plain vLLM serves a LoRA adapter. `--shape tiny --device cpu --parts nvfp4 bf16
stock` runs the script on the CPU build.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from random_model import SHAPES, config_of, write_model
from stock_engine import StockEngine
from transformers import AutoConfig

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.formats.architecture import linear_shapes
from qerl_pl.types import PolicyWeights, RolloutRequest, SamplingConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 32
PARTS = {
    "nvfp4": "NVFP4",
    "marlin": "NVFP4, Marlin for all",
    "humming": "NVFP4",
    "bf16": "BF16",
    "stock": "BF16, vLLM's LoRA",
}
SIGMAS = [1e-2 * 10 ** (-2 * stage / 8) for stage in range(9)]


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
    """Tokens a second of whole rollouts and of decoding alone, medians and extremes of several runs."""
    device, vocabulary = torch.device(args.device), SHAPES[args.shape][-1]
    engine.generate(prompts_of(args.batches[0], args.prompt, vocabulary), SamplingConfig(max_tokens=8))  # warm up
    rows = []
    for batch in args.batches:
        run = functools.partial(sampling_seconds, engine, device, prompts_of(batch, args.prompt, vocabulary))
        run(1)
        prefill = run(1)  # once: of wide batches it takes as long as the rollout's other half
        whole = sorted(run(args.tokens) for _ in range(args.repeats))
        middle = statistics.median(whole)
        rows.append(
            {
                "batch": batch,
                "rollout_tokens_per_s": batch * args.tokens / middle,
                "slowest": batch * args.tokens / whole[-1],
                "fastest": batch * args.tokens / whole[0],
                "decode_tokens_per_s": batch * (args.tokens - 1) / (middle - prefill),
                "prefill_tokens_per_s": batch * args.prompt / prefill,
            }
        )
    return rows


def decode_sweep(engine: VLLMEngine | StockEngine, most: int, args: argparse.Namespace, tokens: int = 64) -> list[Any]:
    """Milliseconds of a decode step of every 32nd number of sequences up to `most`, after prompts of 16 tokens."""
    device, rows = torch.device(args.device), []
    for sequences in range(32, most + 1, 32):
        run = functools.partial(sampling_seconds, engine, device, prompts_of(sequences, 16, SHAPES[args.shape][-1]))
        run(1)
        prefill = run(1)
        rows.append([sequences, 1e3 * (run(tokens) - prefill) / (tokens - 1)])
    return rows


def measure_noise(engine: VLLMEngine, weights: PolicyWeights, args: argparse.Namespace) -> dict[str, Any]:
    """Whether greedy output repeats when nothing changes; each stage's noise, asked and measured; whether greedy output
    changes with it, and whether it comes back bit-equal.
    """
    requests = prompts_of(4, args.prompt, SHAPES[args.shape][-1])
    greedy = SamplingConfig(max_tokens=min(32, args.tokens), temperature=0.0)
    engine.sync(weights)
    clean = engine.generate(requests, greedy)
    repeats = all(engine.generate(requests, greedy) == clean for _ in range(3))
    stages = []
    for stage, sigma in enumerate(SIGMAS):
        noise = NormNoise(sigma=sigma, seed=0, version=stage)
        synced = engine.sync(replace(weights, version=stage, noise=noise))
        noisy = engine.generate(requests, greedy)
        engine.sync(weights)
        stages.append(
            {
                "sigma": sigma,
                "measured": synced.noise_std,
                "changes": noisy != clean,
                "comes_back_bit_equal": engine.generate(requests, greedy) == clean,
            }
        )
    return {"repeats": repeats, "stages": stages}


def measure_sync(engine: VLLMEngine, weights: PolicyWeights, device: torch.device) -> dict[str, float]:
    """Milliseconds of a sync of all adapters and all noisy norms."""
    noisy = PolicyWeights(0, weights.adapter, weights.scaling, noise=NormNoise(1e-2, seed=0, version=0))
    times = [1000 * timed(device, lambda: engine.sync(noisy)) for _ in range(23)][3:]
    quantiles = statistics.quantiles(times, n=10)
    engine.sync(weights)
    return {"p20_ms": quantiles[1], "p50_ms": quantiles[4], "p80_ms": quantiles[7]}


def measure_sleep(engine: VLLMEngine, weights: PolicyWeights, args: argparse.Namespace) -> dict[str, Any]:
    """Memory before, during and after sleep, over many cycles, and whether the output stays the same."""
    device = torch.device(args.device)
    requests = prompts_of(2, args.prompt, SHAPES[args.shape][-1])
    greedy = SamplingConfig(max_tokens=min(16, args.tokens), temperature=0.0)
    engine.sync(weights)
    before = engine.generate(requests, greedy)
    awake = used_gib(device)
    after_wake, asleep, sleep_s, wake_s = [], [], [], []
    for _ in range(args.cycles):
        sleep_s.append(timed(device, engine.sleep))
        asleep.append(used_gib(device))
        wake_s.append(timed(device, engine.wake))
        after_wake.append(used_gib(device))
    return {
        "awake_gib": awake,
        "asleep_gib_first": asleep[0],
        "asleep_gib_last": asleep[-1],
        "awake_gib_last": after_wake[-1],
        "sleep_s": statistics.median(sleep_s),
        "wake_s": statistics.median(wake_s),
        "cycles": args.cycles,
        "same_output_after": engine.generate(requests, greedy) == before,
    }


def run_part(part: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that is measured with one kind of base or kernels."""
    device = torch.device(args.device)
    quantized = part in ("nvfp4", "marlin", "humming")
    base = folder / ("nvfp4" if quantized else part)
    if quantized and not base.exists():
        write_model(base, args.shape, device)
    elif not quantized:
        base.mkdir()
        (base / "config.json").write_text(json.dumps(config_of(args.shape)))
    spec = EngineSpec(base, torch.bfloat16, device, RANK, TARGETS, args.prompt + args.tokens)
    weights = random_policy(base, spec, None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if part == "stock":
        assert weights.adapter is not None
        return {
            "kernels": [],
            "speed": measure_speed(StockEngine(base, spec, weights.adapter, max(args.batches), args.kv_gib), args),
        }
    engine = VLLMEngine(
        kv_cache_gib=args.kv_gib,
        max_num_seqs=max(args.batches),
        linear_backend="humming" if part == "humming" else "marlin",
        **({"dense_above": None} if part == "marlin" else {}),
        prefix_caching=False,
        load_format="auto" if quantized else "dummy",
    )
    start = timed(device, lambda: engine.launch(spec))
    result: dict[str, Any] = {"kernels": engine.kernels, "start_s": start, "memory_after_start_gib": used_gib(device)}
    engine.sync(weights)
    result["speed"] = measure_speed(engine, args)
    result["sync"] = measure_sync(engine, weights, device)
    if part == "nvfp4":
        off = PolicyWeights(0, None, 1.0)
        result["noise"] = {name: measure_noise(engine, one, args) for name, one in (("off", off), ("on", weights))}
        result["sleep"] = measure_sleep(engine, weights, args)
    engine.close()
    return result


def speed_rows(parts: dict[str, Any]) -> list[list[object]]:
    """Rates of each part, and over plain vLLM's in 16 bits at the same batch."""
    bases = {row["batch"]: row["rollout_tokens_per_s"] for row in parts.get("stock", {}).get("speed", [])}
    rows: list[list[object]] = []
    for name, part in parts.items():
        for row in part["speed"]:
            rate, base = row["rollout_tokens_per_s"], bases.get(row["batch"])
            rates = [
                f"{rate:.0f}",
                f"{row['slowest']:.0f} to {row['fastest']:.0f}",
                f"{rate / base:.2f}" if base else "–",
            ]
            rates += [f"{row[f'{kind}_tokens_per_s']:.0f}" for kind in ("decode", "prefill")]
            rows.append([PARTS[name], ", ".join(part["kernels"]) or "–", row["batch"], *rates])
    return rows


def tables(parts: dict[str, Any]) -> str:
    """The figures as Markdown."""
    start, rest = [], []
    for name, part in parts.items():
        if "sync" in part:
            times = " / ".join(f"{value:.1f}" for value in part["sync"].values())
            memory = f"{part['memory_after_start_gib']:.2f}"
            start.append([PARTS[name], ", ".join(part["kernels"]), f"{part['start_s']:.0f}", memory, times])
        stages = [
            [adapter, f"{row['sigma']:.4e}", f"{row['measured']:.4e}", row["changes"], row["comes_back_bit_equal"]]
            + [noise["repeats"]]
            for adapter, noise in part.get("noise", {}).items()
            for row in noise["stages"]
        ]
        if stages:
            headers = ["adapter", "sigma asked", "measured", "greedy output changes", "comes back bit-equal"]
            rest.append(report.markdown([*headers, "repeats unchanged"], stages))
            rest.append(report.markdown(["sleep", ""], list(part["sleep"].items())))
    headers = [
        "base",
        "kernels",
        "batch",
        "rollout tok/s",
        "range",
        "over plain vLLM BF16",
        "decode tok/s",
        "prefill tok/s",
    ]
    found = [report.markdown(headers, speed_rows(parts))]
    found.append(report.markdown(["base", "kernels", "start s", "GiB after start", "sync ms p20 / p50 / p80"], start))
    return "\n\n".join(found + rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="of each rollout")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 192])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of a completion")
    parser.add_argument("--kv-gib", type=float, default=9.0)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the JSON")
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    parser.add_argument("--folder", type=Path, help="where that process writes")
    args = parser.parse_args()
    if args.part:
        (args.folder / f"{args.part}.json").write_text(json.dumps(run_part(args.part, args, args.folder)))
        return
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", "part", "folder")}
    results: dict[str, Any] = {}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        for part in args.parts:
            subprocess.run([sys.executable, *sys.argv, "--part", part, "--folder", name], check=True)
            results[part] = json.loads((folder / f"{part}.json").read_text())
            # After every part, so that a run that is cut short leaves what it measured.
            report.write(args.out, "engine", tables(results), {"settings": settings, "rank": RANK, "parts": results})


if __name__ == "__main__":
    main()
