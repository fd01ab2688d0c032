"""Rollouts beside plain vLLM in 16 bits, by base, way of the adapter and rank, and where a decode step's time goes.

    python benchmarks/rollout_speed.py --out DIR            # 7B, default parts; --shape 3b, 14b, 32b
    python benchmarks/rollout_speed.py --parts stock nvfp4-auto bf16-auto --batches 8 64 192 --together 3 --out DIR
    python benchmarks/rollout_speed.py --parts stock nvfp4-auto --batches --lengths lengths.json --out DIR
    python benchmarks/rollout_speed.py --parts nvfp4 nvfp4@128 nvfp4@256 --batches 8 64 192 384 --out DIR
    python benchmarks/rollout_speed.py --profile --parts nvfp4 --batches 8 64 192 --repeats 1 --out DIR

A part is a base (`nvfp4`, `mxfp4`, `nf4`, `bf16`: this package's engine; `stock`: plain vLLM), a way of the adapter
(`-fused`, `-merged`, `-auto` as `VLLMEngine.adapter`, `-bare` for none, `-marlin` without decode GEMM; plain vLLM has
merged 16-bit weights, with `-lora` its own LoRA kernels) and `@rank`. Random weights; of gpt-oss `nvfp4` has experts in
MXFP4, as published. Adapters are on all linears, of a mixture of experts on attention.
The tests of the products run first; where one fails, nothing is timed. Each part has a process of its own; `--together`
of them start at once and are measured one after the other, the others idle and asleep. The table is written anew with
every row, with `--sweep` also a picture of decode steps. `--lengths FILE` measures completions of the lengths that
`sample_lengths.py` has written.
`--shape tiny --device cpu --no-tests` tries the script on the CPU build.
"""

import argparse
import functools
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
from engine_speed import RANK, TARGETS, decode_sweep, measure_lengths, measure_speed, prompts_of, random_policy, timed
from random_model import MIXTURES, SHAPES, any_config, cache_gib, write_model
from report import correct
from stock_engine import StockEngine

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.types import SamplingConfig

GATE = (
    "tests/test_decode_gemm.py",
    "tests/test_vllm_decode_gemm_gpu.py",
    "tests/test_ops_sampling.py",
    "tests/test_vllm_sampler_gpu.py",
)
BASES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "bf16": "BF16", "stock": "plain vLLM, BF16"}
WAYS: dict[str, dict[str, Any]] = {  # settings of the engine
    "": {},
    **{adapter: {"adapter": adapter} for adapter in ("fused", "merged", "auto")},
    "bare": {},
    "marlin": {"decode_gemm_max_tokens": None},
    "lora": {},
}


def split(part: str) -> tuple[str, str, int]:
    """Base, way and rank of a part such as "nvfp4-fused@128"."""
    name, _, rank = part.partition("@")
    base, _, way = name.partition("-")
    if base not in BASES or way not in WAYS:
        raise SystemExit(f"a part is one of {', '.join(BASES)}, and a way of {', '.join(WAYS)}; got {part}")
    without = way == "bare" or (base == "stock" and way != "lora")
    return base, way, 0 if without else int(rank or RANK)


def title(part: str) -> str:
    base, way, rank = split(part)
    way = "merged" if base == "stock" and not way else way
    return " ".join(filter(None, (BASES[base], way, f"rank {rank}" if rank else "")))


def started(part: str, args: argparse.Namespace) -> tuple[VLLMEngine | StockEngine, dict[str, Any]]:
    """The engine of a part, with a random adapter, and what its start took."""
    device, (kind, way, rank) = torch.device(args.device), split(part)
    quantized = kind not in ("bf16", "stock")
    base, from_file = args.folder / (kind if quantized else part), quantized or device.type == "cpu"
    if not quantized and from_file:
        write_model(base, args.shape, device, nvfp4=False, layers=args.layers)
    elif not quantized:
        base.mkdir()
        (base / "config.json").write_text(json.dumps(any_config(args.shape, args.layers)))
    longest = args.prompt + max([args.tokens, *args.lengths])
    sequences = max([*args.batches, *args.counts])
    targets = TARGETS[: 4 if args.shape in MIXTURES else None] if rank else ()  # of mixtures attention alone
    spec = EngineSpec(base, torch.bfloat16, device, rank, targets, longest)
    weights = random_policy(base, spec, None)
    begin = time.perf_counter()
    if kind == "stock":
        stock = StockEngine(base, spec, weights.adapter, sequences, args.kv_gib)
        return stock, {"start_s": time.perf_counter() - begin, "kernels": []}
    engine = VLLMEngine(
        kv_cache_gib=args.kv_gib,
        max_num_seqs=sequences,
        prefix_caching=False,
        load_format="auto" if from_file else "dummy",
        **WAYS[way],
    )
    engine.launch(spec)
    result = {"start_s": time.perf_counter() - begin, "kernels": engine.kernels}
    engine.sleep()
    wait(part, args)
    engine.wake()
    one = functools.partial(engine.generate, prompts_of(1, args.prompt, 500), SamplingConfig(max_tokens=1))
    engine.sync(weights)
    one()
    # What is merged is merged by the first rollout after a sync.
    seconds = timed(device, lambda: (engine.sync(weights), one())) - timed(device, one)
    return engine, result | {"sync_ms": 1e3 * seconds, "gib": dict(engine.memory_gib())}


def wait(part: str, args: argparse.Namespace) -> None:
    """Say that the engine has started, and wait for the turn."""
    parent = os.getppid()
    (args.folder / f"{part}.ready").touch()
    while not (args.folder / f"{part}.go").exists():
        if os.getppid() != parent:  # else it would hold the GPU for ever
            raise SystemExit(f"{part} ends, for what started it has been killed")
        time.sleep(0.5)


def run_part(part: str, args: argparse.Namespace) -> None:
    """Start, say so, wait for the turn, measure, and write the result anew with every row."""
    engine, result = started(part, args)
    if isinstance(engine, StockEngine):
        wait(part, args)
    partial = args.folder / f"{part}.json.partial"

    def save() -> None:
        partial.write_text(json.dumps(result))
        partial.rename(args.folder / f"{part}.json")

    vocabulary = any_config(args.shape)["vocab_size"]
    warm_up = prompts_of(max([*args.batches, *args.counts]), args.prompt, vocabulary)
    engine.generate(warm_up, SamplingConfig(max_tokens=8))
    for name, measured in (("lengths", measure_lengths), ("speed", measure_speed)):
        result[name] = []
        for row in measured(engine, args):
            result[name].append(row)
            save()
    if args.profile:
        result["profile"] = {}
        for batch in args.batches:
            requests = prompts_of(batch, args.prompt, vocabulary)
            result["profile"][batch] = kernel_profile.of_a_step(engine, requests, args.tokens)
            save()
    if args.sweep:
        result["sweep"] = decode_sweep(engine, max(args.batches), args)
    save()


def tables(parts: dict[str, Any]) -> str:
    """The figures as Markdown."""
    text = []
    for name, head in (("speed", "sequences"), ("lengths", "completions of real lengths")):
        measured = {part: {row["batch"]: row for row in one[name]} for part, one in parts.items() if one.get(name)}
        if not measured:
            continue
        rates = [{count: row["rollout_tokens_per_s"] for count, row in rows.items()} for rows in measured.values()]
        rows = [
            [count, *(f"{one[count]:.0f} ({one[count] / first:.2f})" if count in one else "–" for one in rates)]
            for count, first in rates[0].items()
        ]
        text.append(report.markdown([f"{head}: tokens/s (over the first)", *map(title, measured)], rows))
    rows = []
    for part, found in parts.items():
        for row in found.get("speed", []) + found.get("lengths", []):
            spread, rest = f"{row['slowest']:.0f} to {row['fastest']:.0f}", ["real lengths", "–", "–"]
            if decode := row.get("decode_tokens_per_s"):
                rest = [f"{decode:.0f}", f"{row['prefill_tokens_per_s']:.0f}", f"{1e3 * row['batch'] / decode:.2f}"]
            rows.append([title(part), row["batch"], f"{row['rollout_tokens_per_s']:.0f}", spread, *rest])
    headers = ["engine", "sequences", "rollout tok/s", "range", "decode tok/s", "prefill tok/s", "ms a decode step"]
    text.append(report.markdown(headers, rows))
    starts = [
        [title(part), f"{one['start_s']:.0f}", f"{one.get('sync_ms', 0.0):.0f}"]
        + [", ".join(f"{name} {gib:.1f}" for name, gib in one.get("gib", {}).items())]
        for part, one in parts.items()
    ]
    headers = ["engine", "start s, beside the others", "sync ms", "GiB"]
    text.append(report.markdown(headers, starts))
    if swept := {part: dict(one["sweep"]) for part, one in parts.items() if "sweep" in one}:
        text.append("Milliseconds of a decode step after prompts of 16 tokens:")
        counts = next(iter(swept.values()))
        rows = [[count, *(f"{steps[count]:.2f}" for steps in swept.values())] for count in counts]
        text.append(report.markdown(["sequences", *map(title, swept)], rows))
    profiled = ((part, batch, one) for part, found in parts.items() for batch, one in found.get("profile", {}).items())
    return "\n\n".join([*text, *kernel_profile.tables({f"{title(p)}, {batch}": one for p, batch, one in profiled})])


def plot_sweep(results: dict[str, Any], path: Path) -> None:
    """Plot the milliseconds of a decode step over the number of sequences, a line for each engine with a sweep."""
    from matplotlib.figure import Figure  # takes a second, which the engines' processes do without

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, result in results.items():
        if "sweep" in result:
            sequences, milliseconds = zip(*result["sweep"], strict=True)
            axis.plot(sequences, milliseconds, marker=".", label=title(name))
    axis.set(xlabel="sequences", ylabel="ms a decode step", xlim=0, ylim=0)
    axis.grid(alpha=0.3)
    axis.legend()
    report.save_figure(figure, path)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> bool:
    """Whether the file appears before the process ends."""
    while not path.exists():
        if process.poll() is not None:
            return path.exists()
        time.sleep(0.2)
    return True


def prepare(args: argparse.Namespace) -> None:
    """Models of random weights; those of other formats than NVFP4 are quantized from one in 16 bits."""
    device, kinds = torch.device(args.device), {split(part)[0] for part in args.parts} - {"bf16", "stock"}
    if "nvfp4" in kinds:
        write_model(args.folder / "nvfp4", args.shape, device, layers=args.layers)
    for kind in sorted(kinds - {"nvfp4"}):
        if not (args.folder / "16").is_dir():
            write_model(args.folder / "16", args.shape, device, nvfp4=False, layers=args.layers)
        quantize_checkpoint(args.folder / "16", args.folder / kind, kind, device=args.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(args: argparse.Namespace) -> int:
    """Start parts, measure one after the other. Returns the exit status: 1 if a part has failed."""
    prepare(args)
    command = [sys.executable, *sys.argv, "--folder", str(args.folder), "--part"]
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", "part", "folder")}
    results: dict[str, Any] = {}

    def write(part: str, shown: bool = False) -> None:
        path, name = args.folder / f"{part}.json", f"rollout_{args.shape}"
        found = json.loads(path.read_text()) if path.exists() else None
        if found is not None and (shown or found != results.get(part)):
            results[part] = found
            report.write(args.out, name, tables(results), {"settings": settings, "parts": results}, shown=shown)
            if "sweep" in found:
                plot_sweep(results, args.out / f"{name}_sweep.png")

    failed = False
    at_once = args.together or len(args.parts)
    for start in range(0, len(args.parts), at_once):
        together = args.parts[start : start + at_once]
        running = {part: subprocess.Popen([*command, part]) for part in together}
        ready = {part: wait_for(args.folder / f"{part}.ready", process) for part, process in running.items()}
        for part, process in running.items():
            (args.folder / f"{part}.go").touch()
            while ready[part] and process.poll() is None:
                write(part)
                time.sleep(0.5)
            if not ready[part] or process.wait():
                failed = True
                sys.stderr.write(f"{part} has failed\n")
            write(part, shown=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *MIXTURES], default="7b")
    parser.add_argument("--layers", type=int, help="by default the shape's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["stock", "nvfp4", "nvfp4-bare", "stock-lora"])
    parser.add_argument("--repeats", type=int, default=2, help="of each rollout")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 64, 192])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a completion")
    parser.add_argument("--lengths", type=Path, help="JSON file: also completions of these numbers of tokens")
    parser.add_argument("--counts", type=int, nargs="+", default=[128, 512], help="of such completions")
    parser.add_argument("--kv-gib", type=float, help="by default what the largest batch needs")
    parser.add_argument("--sweep", action="store_true", help="also a decode step of every 32nd number of sequences")
    parser.add_argument("--together", type=int, help="parts that start at once; by default all")
    parser.add_argument("--profile", action="store_true", help="also a table of a decode step by kind of kernel")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out that must pass before a timing")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the JSON")
    parser.add_argument("--part", help="run this part in this process")
    parser.add_argument("--folder", type=Path, help="where that process writes")
    args = parser.parse_args()
    args.lengths = json.loads(args.lengths.read_text()) if args.lengths else []
    args.counts = args.counts if args.lengths else []
    if args.kv_gib is None:
        config = any_config(args.shape, args.layers)
        equal = cache_gib(config, args.prompt + args.tokens, max(args.batches, default=0))
        mean = sum(args.lengths) / max(len(args.lengths), 1)
        args.kv_gib = max(equal, cache_gib(config, args.prompt + mean, max(args.counts, default=0)))
    if args.part:
        run_part(args.part, args)
        return 0
    if not args.no_tests and not correct(GATE):
        sys.stderr.write("a correctness test failed: no rollout is timed\n")
        return 1
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        args.folder = Path(name)
        return measure(args)


if __name__ == "__main__":
    sys.exit(main())
