"""The best tile of the decode GEMM for each number of tokens: `python benchmarks/kernels/bench_tiles.py --out DIR`.

Shapes are a 7B model's, others by `--shapes 3b 14b 32b`.

Every tile's product is compared with the plain one, on the shapes and numbers of tokens that are timed, by processes
that compile for the timing: one that differs, or whose bits do not repeat, is not timed, and the tests of the products
run first. Calls are in a CUDA graph on rotating weights, as in `bench_decode_gemm.py`; the adapter has rank 32 on every
projection. Writes DIR/tiles.md, DIR/tiles.json and DIR/decode_gemm_tiles.json after every row; the last is the file
that the kernels choose by, kernels/qerl_kernels/decode_gemm_tiles.json. `--earlier` gives it the rows of other runs,
too: tiles are chosen for all shapes at once.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_decode_gemm import GATE, Linear, Sizes, Theirs, random_linear, rotating_linears, vllm_marlin
from bench_report import Row, correct, environment, replayed, table

Shape = tuple[int, int, tuple[int, ...]]
HIDDEN = {
    "3b": (2048, 11008, 16, 2),
    "7b": (3584, 18944, 28, 4),
    "14b": (5120, 13824, 40, 8),
    "32b": (5120, 27648, 40, 8),
}
REPEATS = 100
"""Of a product whose bits are compared, while other processes crowd the GPU."""
WIDE = {"tokens": 128, "extra_tokens": 64, "k_tiles": 2}
TWO, TMA = {"n_tiles": 2}, {"use_tma": True}
TILES: dict[str, dict[str, Any]] = {
    "8": {"tokens": 8},
    "16": {"tokens": 16},
    "32": {"tokens": 32},
    "32, TMA": {"tokens": 32, **TMA},
    "64": {"tokens": 64},
    "64, 3 of 128 rows": {"tokens": 64, **TWO, "ctas_per_sm": 3},
    "64, 3 of 128 rows, TMA": {"tokens": 64, **TWO, "ctas_per_sm": 3, **TMA},
    "64, 3 of 128 rows, 128 columns, TMA": {"tokens": 64, **TWO, "k_tiles": 8, "stages": 3, "ctas_per_sm": 3, **TMA},
    "96, 2 of 128 rows, TMA": {"tokens": 64, "extra_tokens": 32, **TWO, **TMA},
    "96, 3 of 128 rows, TMA": {"tokens": 64, "extra_tokens": 32, **TWO, "ctas_per_sm": 3, **TMA},
    "128, 2 of 128 rows": {"tokens": 128, **TWO},
    "128, 2 of 128 rows, TMA": {"tokens": 128, **TWO, **TMA},
    "128, 2 of 128 rows, TMA, data-parallel": {"tokens": 128, **TWO, **TMA, "data_parallel": True},
    "192, 2 of 128 rows, data-parallel": {**WIDE, **TWO, "data_parallel": True},
    "192, 2 of 128 rows, TMA": {**WIDE, **TWO, **TMA},
    "192, 2 of 128 rows, TMA, data-parallel": {**WIDE, **TWO, **TMA, "data_parallel": True},
    "64, 2 of 256 rows, TMA": {"tokens": 64, **TMA},
}
"""Keyword arguments of `Tile`; data-parallel waves come first only where there are enough tiles."""


def layers_of(shape: str) -> dict[str, Shape]:
    """The four linears of a layer: rows, columns, first rows of the fused slices."""
    hidden, intermediate, heads, kv_heads = HIDDEN[shape]
    kv = kv_heads * hidden // heads
    return {
        "qkv": (hidden + 2 * kv, hidden, (0, hidden, hidden + kv)),
        "o": (hidden, hidden, (0,)),
        "gate_up": (2 * intermediate, hidden, (0, intermediate)),
        "down": (hidden, intermediate, (0,)),
    }


def tiles_for(tokens: int) -> list[str]:
    """Names of the tiles that do not waste more than half, in up to eight blocks of tokens."""
    widths = {name: tile["tokens"] + tile.get("extra_tokens", 0) for name, tile in TILES.items()}
    blocks = {name: -(-tokens // width) for name, width in widths.items()}
    return [
        name
        for name, width in widths.items()
        if width < 2 * tokens and blocks[name] * width < 1.6 * tokens and blocks[name] <= 8
    ]


def product(linear: Linear, x: torch.Tensor, name: str) -> torch.Tensor:
    from qerl_kernels import triton_decode_gemm

    tile = triton_decode_gemm.Tile(**TILES[name])
    return triton_decode_gemm.decode_gemm_linear(x, linear.weight, None, linear.a, linear.b, linear.starts, tile)


def check(layer: Shape, name: str, tokens: list[int], sizes: Sizes) -> list[tuple[int, str]]:
    """Compile a tile for a layer, and say for which numbers of tokens its product is wrong, and how."""
    from qerl_kernels import decode_gemm_linear_reference, select_backend
    from triton.compiler.errors import CompilationError  # not above: Triton reads TRITON_INTERPRET when it is imported
    from triton.runtime.errors import TritonError

    select_backend("triton")
    torch.manual_seed(0)
    linear, wrong = random_linear(*layer, sizes), []
    times = REPEATS if sizes.device == "cuda" else 1
    for count in tokens:
        if name not in tiles_for(count):
            continue
        x = torch.randn(count, layer[1], device=sizes.device).bfloat16()
        try:
            y = product(linear, x, name)
            repeats = all(torch.equal(y, product(linear, x, name)) for _ in range(times))
        except (RuntimeError, TritonError, CompilationError) as error:  # a result too
            wrong.append((count, f"{type(error).__name__}: {str(error)[:80]}"))
            continue
        plain = decode_gemm_linear_reference(x, linear.weight, None, linear.a, linear.b)
        apart = ((y - plain).float().norm() / plain.float().norm()).item()
        if not apart <= 4e-3 or not repeats:
            wrong.append((count, f"differs by {apart:.2g}, repeats: {repeats}"))
    return wrong


def checked(layers: dict[str, Shape], tokens: list[int], sizes: Sizes, workers: int) -> dict[tuple[str, str, int], str]:
    """What is wrong with tiles, by linear, tile and tokens; many processes, for compiling takes most of it."""
    wrong: dict[tuple[str, str, int], str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = {
            pool.submit(check, layer, name, tokens, sizes): (linear, name)
            for name in TILES
            for linear, layer in layers.items()
        }
        for job in as_completed(jobs):
            for count, reason in job.result():
                wrong[*jobs[job], count] = reason
    return wrong


def references(layer: Shape, sizes: Sizes) -> dict[str, Any]:
    """What the engine does today for some number of tokens, and 16 bits: all with the adapter, the last without too."""
    from qerl_kernels import MarlinRows, frozen_linear

    rows, columns, starts = layer
    count = max(2, math.ceil(sizes.cold_bytes / (2 * rows * columns)))
    dense = itertools.cycle([torch.randn(rows, columns, device=sizes.device).bfloat16() for _ in range(count)])

    def dequantized(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return frozen_linear(x, MarlinRows(linear.weight, alpha=2.0**-15)).addmm_(x @ linear.a.T, linear.b.T)

    where = {"dequantized": dequantized, "bf16": lambda linear, x: x @ next(dense).T}
    probe = random_linear(rows, columns, starts, sizes)
    if vllm_marlin(probe.weight, torch.zeros(8, columns, device=sizes.device).bfloat16(), rows, columns) is not None:
        where["marlin"] = Theirs(True)
    return where


def bench(
    shape: str, tokens: list[int], sizes: Sizes, results: list[Row], seconds: float, save: Callable[..., None]
) -> None:
    """Add rows of a shape to the results, and save all after each."""
    begin = time.perf_counter()
    layers = layers_of(shape) if sizes.device == "cuda" else sizes.layers
    wrong = checked(layers, tokens, sizes, 14 if sizes.device == "cuda" else 1)
    sys.stdout.write(f"{shape}: compiled and compared in {time.perf_counter() - begin:.0f} s; wrong: {wrong}\n")
    rotating = {linear: rotating_linears(layer, sizes) for linear, layer in layers.items()}
    others = {linear: references(layer, sizes) for linear, layer in layers.items()}
    for count, (linear, layer) in itertools.product(tokens, layers.items()):
        if time.perf_counter() - begin > seconds:
            sys.stdout.write("out of time\n")
            return
        x = torch.randn(count, layer[1], device=sizes.device).bfloat16()
        rows, columns, _ = layer
        row: Row = {"shape": shape, "linear": f"{linear} {rows}x{columns}", "tokens": count}
        row |= {"rows": rows, "columns": columns}
        work = {name: functools.partial(product, name=name) for name in tiles_for(count)}
        for name, apply in {**work, **others[linear]}.items():
            if (linear, name, count) in wrong:
                row[name] = "wrong"
                continue
            times = replayed([functools.partial(apply, copy, x) for copy in rotating[linear]], sizes.device, ms=40)
            row[name] = times and times[1] * 1e6
        best = min(((row[name], name) for name in work if isinstance(row[name], float)), default=(math.nan, "none"))
        row["best"] = f"{best[1]}: {best[0]:.1f}"
        results.append(row)
        save(results, wrong)


def chosen(results: list[Row], within: float = 0.03) -> dict[str, Any]:
    """The content of decode_gemm_tiles.json: few tiles, of which each weight and number of tokens has a fast one.

    Every tile is a kernel to compile at an engine's start, so tiles are taken one by one, always that which is within
    `within` of the fastest for most of the weights and numbers of tokens that have none yet.
    """
    measured: dict[tuple[int, int, int], dict[str, list[float]]] = {}
    for row in sorted(results, key=lambda row: row["tokens"]):  # a weight that two models share is measured twice
        times = measured.setdefault((row["rows"], row["columns"], row["tokens"]), {})
        for name in TILES:
            if isinstance(row.get(name), float):
                times.setdefault(name, []).append(row[name])
    cases = [
        (key, {name: statistics.fmean(one) for name, one in times.items()}) for key, times in measured.items() if times
    ]
    fast = [{name for name, time in times.items() if time <= (1 + within) * min(times.values())} for _, times in cases]
    taken: list[str] = []
    while left := [names for names in fast if not names.intersection(taken)]:
        taken.append(max(TILES, key=lambda name: sum(name in names for names in left)))
    weights: dict[tuple[int, int], list[list[Any]]] = {}
    for (rows, columns, tokens), times in cases:
        fastest = min((name for name in taken if name in times), key=times.__getitem__)
        tiles = weights.setdefault((rows, columns), [])
        if tiles and tiles[-1][1] == fastest:
            tiles.pop()
        tiles.append([tokens, fastest])
    return {
        "tiles": {name: TILES[name] for name in taken},
        "weights": [[*key, tiles] for key, tiles in weights.items()],
    }


def write(out: Path, earlier: list[Row], results: list[Row], wrong: dict[tuple[str, str, int], str]) -> None:
    """All results so far, and for each number of tokens the sum over a layer's linears; tiles by all rows."""
    names = [*TILES, "dequantized", "marlin", "bf16"]
    sums: list[Row] = []
    for shape, count in dict.fromkeys((row["shape"], row["tokens"]) for row in results):
        rows = [row for row in results if (row["shape"], row["tokens"]) == (shape, count)]
        total: Row = {"shape": shape, "linear": f"sum of {len(rows)}", "tokens": count}
        for name in names:
            if all(isinstance(row.get(name), float) for row in rows):
                total[name] = sum(row[name] for row in rows)
        total["best"] = f"{sum(float(row['best'].rpartition(': ')[2]) for row in rows):.0f}"
        sums.append(total)
    columns = {"shape": "shape", "linear": "linear", "tokens": "tokens"} | {name: name for name in names}
    where = environment(os.environ.get("QERL_COMMIT"))
    text = [str(where), table(sums, columns | {"best": "best"}), table(results, columns | {"best": "best"})]
    out.mkdir(parents=True, exist_ok=True)
    (out / "tiles.md").write_text("\n\n".join(text) + "\n")
    held = {"environment": where, "rows": results, "wrong": [[*key, reason] for key, reason in wrong.items()]}
    (out / "tiles.json").write_text(json.dumps(held, indent=1) + "\n")
    (out / "decode_gemm_tiles.json").write_text(json.dumps({"measured": where} | chosen([*earlier, *results])) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=HIDDEN, default=["7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 96, 128, 160, 192, 256, 384, 512, 768, 1024])
    parser.add_argument("--tiles", nargs="+", choices=TILES, default=list(TILES))
    parser.add_argument("--seconds", type=float, default=280, help="of a shape")
    parser.add_argument("--earlier", type=Path, nargs="+", default=[], help="tiles.json of other runs with these tiles")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to try the script")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if args.tiny else "0"
    if not args.no_tests and not correct(GATE):
        sys.stderr.write("a correctness test failed: no tile is timed\n")
        return 1
    for name in set(TILES) - set(args.tiles):
        del TILES[name]
    from qerl_kernels import select_backend

    select_backend("triton")
    sizes = Sizes()
    if args.tiny:
        sizes = replace(sizes, device="cpu", layers={"qkv": (192, 64, (0, 64, 128))}, rank=8, cold_bytes=0)
    results: list[Row] = []
    earlier = [row for path in args.earlier for row in json.loads(path.read_text())["rows"]]
    for shape in args.shapes:
        bench(shape, args.tokens, sizes, results, args.seconds, functools.partial(write, args.out, earlier))
    sys.stdout.write((args.out / "tiles.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
