"""How fast rollouts are beside plain vLLM in 16 bits, what the adapter costs, and where a decode step's time goes.

    python benchmarks/rollout_speed.py --out DIR            # 7B: about five minutes; --shape 3b, 14b, 32b
    python benchmarks/rollout_speed.py --profile --parts nvfp4 --out DIR

The tests of the products run first; where one fails, nothing is timed. Random weights. Each part has a process of its
own; they start at once and are measured one after the other, the others idle. Their results are written as they come,
with `--sweep` also a picture of decode steps.
`--shape tiny --device cpu --no-tests` tries the script on the CPU build.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kernel_profile
import report
import torch
from engine_speed import RANK, TARGETS, decode_sweep, measure_speed, prompts_of, random_policy, used_gib
from random_model import SHAPES, config_of, write_model
from report import correct
from stock_engine import StockEngine

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.types import PolicyWeights

GATE = (
    "tests/test_decode_gemm.py",
    "tests/test_vllm_decode_gemm_gpu.py",
    "tests/test_ops_sampling.py",
    "tests/test_vllm_sampler_gpu.py",
)
PARTS: dict[str, tuple[str, int, dict[str, Any]]] = {  # name, rank, settings of the engine
    "nvfp4": ("NVFP4", RANK, {}),
    "nvfp4_bare": ("NVFP4", 0, {}),
    "stock": ("BF16, plain vLLM and its LoRA", RANK, {}),
    "before": ("NVFP4, Marlin without decode GEMM", RANK, {"decode_gemm_max_tokens": None}),
    "before_bare": ("NVFP4, Marlin without decode GEMM", 0, {"decode_gemm_max_tokens": None}),
    "decode_gemm_256": ("NVFP4, decode GEMM up to 256 tokens", RANK, {"decode_gemm_max_tokens": 256}),
    "bf16": ("BF16, same engine", RANK, {}),
    "bf16_bare": ("BF16, same engine", 0, {}),
}
DEFAULT = ("nvfp4", "nvfp4_bare", "stock")
QUANTIZED = tuple(part for part in PARTS if not part.startswith(("stock", "bf16")))


def started(part: str, args: argparse.Namespace) -> tuple[VLLMEngine | StockEngine, dict[str, Any]]:
    """The engine of a part, with a random adapter, and what its start took."""
    device = torch.device(args.device)
    _, rank, settings = PARTS[part]
    base = args.folder / ("nvfp4" if part in QUANTIZED else part)
    if part not in QUANTIZED:
        base.mkdir()
        (base / "config.json").write_text(json.dumps(config_of(args.shape)))
    spec = EngineSpec(base, torch.bfloat16, device, rank, TARGETS, args.prompt + args.tokens)
    weights = random_policy(base, spec, None) if rank else PolicyWeights(0, None, 1.0)
    begin = time.perf_counter()
    if part == "stock":
        assert weights.adapter is not None
        engine: VLLMEngine | StockEngine = StockEngine(base, spec, weights.adapter, max(args.batches), args.kv_gib)
    else:
        engine = VLLMEngine(
            kv_cache_gib=args.kv_gib,
            max_num_seqs=max(args.batches),
            prefix_caching=False,
            load_format="auto" if part in QUANTIZED else "dummy",
            **settings,
        )
        engine.launch(spec)
        engine.sync(weights)
    kernels = [] if isinstance(engine, StockEngine) else engine.kernels
    return engine, {"start_s": time.perf_counter() - begin, "kernels": kernels, "gib": used_gib(device)}


def run_part(part: str, args: argparse.Namespace) -> None:
    """Start, say so, wait for the turn, measure, write."""
    parent = os.getppid()
    engine, result = started(part, args)
    (args.folder / f"{part}.ready").touch()
    while not (args.folder / f"{part}.go").exists():
        if os.getppid() != parent:  # else it would hold the GPU for ever
            raise SystemExit(f"{part} ends, for what started it has been killed")
        time.sleep(0.5)
    result["speed"] = measure_speed(engine, args)
    if args.sweep:
        result["sweep"] = decode_sweep(engine, max(args.batches), args)
    if args.profile:
        result["profile"] = {}
        for batch in args.batches:
            requests = prompts_of(batch, args.prompt, SHAPES[args.shape][-1])
            result["profile"][batch] = kernel_profile.of_a_step(engine, requests, args.tokens)
    partial = args.folder / f"{part}.json.partial"
    partial.write_text(json.dumps(result))
    partial.rename(args.folder / f"{part}.json")


def tables(parts: dict[str, Any]) -> str:
    """The figures as Markdown."""
    bases = {row["batch"]: row["rollout_tokens_per_s"] for row in parts.get("stock", {}).get("speed", [])}
    rows: list[list[object]] = []
    for part, found in parts.items():
        for row in found["speed"]:
            rate, base = row["rollout_tokens_per_s"], bases.get(row["batch"])
            spread = f"{row['slowest']:.0f} to {row['fastest']:.0f}"
            cells = [row["batch"], f"{rate:.0f}", spread, f"{rate / base:.2f}" if base else "–"]
            cells += [f"{row[f'{kind}_tokens_per_s']:.0f}" for kind in ("decode", "prefill")]
            rows.append(
                [PARTS[part][0], PARTS[part][1], *cells, f"{1e3 * row['batch'] / row['decode_tokens_per_s']:.2f}"]
            )
    headers = ["base", "rank", "batch", "rollout tok/s", "range", "over plain vLLM BF16", "decode tok/s"]
    text = [report.markdown([*headers, "prefill tok/s", "ms a decode step"], rows)]
    costs = [
        cost
        for pair in (("nvfp4", "nvfp4_bare"), ("before", "before_bare"), ("bf16", "bf16_bare"))
        if set(pair) <= set(parts)
        for cost in adapter_costs(*(parts[one]["speed"] for one in pair), PARTS[pair[0]][0])
    ]
    if costs:
        text.append(report.markdown(["base", "batch", "adapter, % of a decode step"], costs))
    starts = [
        [PARTS[part][0], PARTS[part][1], f"{one['start_s']:.0f}", f"{one['gib']:.1f}"] for part, one in parts.items()
    ]
    text.append(report.markdown(["base", "rank", "start s, beside the others", "GiB of the GPU, all parts'"], starts))
    if swept := {part: dict(one["sweep"]) for part, one in parts.items() if "sweep" in one}:
        text.append("Milliseconds of a decode step after prompts of 16 tokens:")
        counts = next(iter(swept.values()))
        rows = [[count, *(f"{steps[count]:.2f}" for steps in swept.values())] for count in counts]
        text.append(report.markdown(["sequences", *(PARTS[part][0] for part in swept)], rows))
    for part, one in parts.items():
        for batch, profile in one.get("profile", {}).items():
            text += kernel_profile.tables(f"{PARTS[part][0]}, rank {PARTS[part][1]}, batch {batch}", profile)
    return "\n\n".join(text)


def plot_sweep(results: dict[str, Any], path: Path) -> None:
    """Plot the milliseconds of a decode step over the number of sequences, a line for each engine with a sweep."""
    from matplotlib.figure import Figure  # takes a second, which the engines' processes do without

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, result in results.items():
        if "sweep" in result:
            sequences, milliseconds = zip(*result["sweep"], strict=True)
            axis.plot(sequences, milliseconds, marker=".", label=PARTS[name][0])
    axis.set(xlabel="sequences", ylabel="ms a decode step", xlim=0, ylim=0)
    axis.grid(alpha=0.3)
    axis.legend()
    report.save_figure(figure, path)


def adapter_costs(with_it: list[dict[str, Any]], without: list[dict[str, Any]], name: str) -> list[list[object]]:
    """What of a decode step the adapter takes: the step with it less the step without, over the step with it."""
    pairs = zip(with_it, without, strict=True)
    rates = [(one["batch"], one["decode_tokens_per_s"] / other["decode_tokens_per_s"]) for one, other in pairs]
    return [[name, batch, f"{100 * (1 - rate):.1f}"] for batch, rate in rates]


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> bool:
    """Whether the file appears before the process ends."""
    while not path.exists():
        if process.poll() is not None:
            return path.exists()
        time.sleep(0.2)
    return True


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Start all parts, measure one after the other. Returns the exit status: 1 if a part has failed."""
    if any(part in QUANTIZED for part in args.parts):
        write_model(folder / "nvfp4", args.shape, torch.device(args.device))
        if args.device == "cuda":
            torch.cuda.empty_cache()
    command = [sys.executable, *sys.argv, "--folder", str(folder), "--part"]
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", "part", "folder")}
    results: dict[str, Any] = {}
    for together in [[part] for part in args.parts] if args.one_by_one else [args.parts]:
        running = {part: subprocess.Popen([*command, part]) for part in together}
        ready = {part: wait_for(folder / f"{part}.ready", process) for part, process in running.items()}
        for part, process in running.items():
            (folder / f"{part}.go").touch()
            if not ready[part] or not wait_for(folder / f"{part}.json", process):
                sys.stderr.write(f"{part} has failed\n")
                continue
            process.wait()
            results[part] = json.loads((folder / f"{part}.json").read_text())
            report.write(args.out, f"rollout_{args.shape}", tables(results), {"settings": settings, "parts": results})
            if args.sweep:
                plot_sweep(results, args.out / f"rollout_{args.shape}_sweep.png")
    return 0 if len(results) == len(args.parts) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(DEFAULT))
    parser.add_argument("--repeats", type=int, default=3, help="of each rollout")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 192])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of a completion")
    parser.add_argument("--kv-gib", type=float, help="by default what the largest batch needs")
    parser.add_argument("--sweep", action="store_true", help="also a decode step of every 32nd number of sequences")
    parser.add_argument("--one-by-one", action="store_true", help="start a part when the one before has ended")
    parser.add_argument("--profile", action="store_true", help="also a table of a decode step by kind of kernel")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out that must pass before a timing")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the JSON")
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    parser.add_argument("--folder", type=Path, help="where that process writes")
    args = parser.parse_args()
    if args.kv_gib is None:
        _, _, layers, heads, kv_heads, _ = SHAPES[args.shape]
        each = 4 * layers * kv_heads * (SHAPES[args.shape][0] // heads)
        args.kv_gib = 1.05 * each * (args.prompt + args.tokens + 16) * max(args.batches) / 2**30
    if args.part:
        run_part(args.part, args)
        return 0
    if not args.no_tests and not correct(GATE):
        sys.stderr.write("a correctness test failed: no rollout is timed\n")
        return 1
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        return measure(args, Path(name))


if __name__ == "__main__":
    sys.exit(main())
