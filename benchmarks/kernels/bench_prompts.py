"""Times linears while prompts are read, by their adapter's way in.

Its tests run first, on the same machine; if one fails, nothing is timed. The weight is dequantized from Marlin's layout
in every call; the adapter is left out, added by two plain products, or part of the one product (`widened_linear`). All
calls are in a CUDA graph and find the caches cold, for the weights rotate. Writes DIR/prompts.md and DIR/prompts.json.
`--tiny` runs the same code on small shapes, on a CPU in Triton's interpreter: its numbers mean nothing.
"""

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import bench_few
import torch
from bench_few import Linear, Sizes, rotating_linears
from bench_report import Row, correct, environment, extra_memory, micro, parser, replayed, table

GATE = ("tests/test_ops_triton.py",)
SIZES = replace(Sizes(), tokens=(1024, 2048, 8192))
TINY = replace(bench_few.TINY, tokens=(24,))


def base_only(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl_kernels import frozen_linear

    return frozen_linear(x, linear.weight)


def added(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return base_only(linear, x).addmm_(x @ linear.a.T, linear.b.T)


def one_product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl_kernels import widened_linear

    return widened_linear(x, linear.weight, None, linear.a, linear.b)


VARIANTS = {"base": base_only, "added": added, "one_product": one_product}


def as_rows(linear: Linear) -> Linear:
    from qerl_kernels import MarlinRows

    return linear._replace(weight=MarlinRows(linear.weight))


def bench_linears(sizes: Sizes) -> Iterator[Row]:
    from qerl_kernels import widening_pays

    for name, (rows, columns, starts) in sizes.layers.items():
        copies = [as_rows(linear) for linear in rotating_linears((rows, columns, starts), sizes)]
        for tokens in sizes.tokens:
            x = torch.randn(tokens, columns, device=sizes.device).bfloat16()
            engine = "one product" if widening_pays(copies[0].a, copies[0].b) else "added"
            row: Row = {"layer": f"{name} {rows}x{columns}", "tokens": tokens, "engine": engine}
            one, other = one_product(copies[0], x).float(), added(copies[0], x).float()
            row["apart"] = ((one - other).norm() / other.norm()).item()
            for variant, apply in VARIANTS.items():
                times = replayed([functools.partial(apply, copy, x) for copy in copies], sizes.device)
                row[variant] = times and micro(times)
                row[f"{variant}_gib"] = extra_memory(functools.partial(apply, copies[0], x), sizes.device)
            both = row["added"] and row["one_product"]
            row["ratio"] = both and row["added"]["p50_us"] / row["one_product"]["p50_us"]
            yield row


def run(out: Path, sizes: Sizes, gate: tuple[str, ...] = GATE, commit: str | None = None) -> int:
    """Test, measure, write. Returns the exit status: 1 if a test failed, and then nothing is measured."""
    if not correct(gate):
        sys.stderr.write("a correctness test failed: no product is timed\n")
        return 1
    from qerl_kernels import select_backend

    select_backend("triton")
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = list(bench_linears(sizes))
    about = environment(commit)
    out.mkdir(parents=True, exist_ok=True)
    title = f"Linears while prompts are read, adapter of rank {sizes.rank}"
    (out / "prompts.md").write_text(f"{about}\n\n## {title}\n\n{table(rows, COLUMNS)}\n")
    (out / "prompts.json").write_text(json.dumps({"environment": about, title: rows}, indent=1) + "\n")
    sys.stdout.write((out / "prompts.md").read_text())
    return 0


COLUMNS = {
    "layer": "linear",
    "tokens": "tokens",
    "engine": "the engine's way",
    "base.p50_us": "no adapter µs",
    "added.p50_us": "added",
    "one_product.p50_us": "one product",
    "one_product.p20_us": "p20",
    "one_product.p80_us": "p80",
    "ratio": "added : one product",
    "apart": "relative difference",
    "added_gib": "extra GiB, added",
    "one_product_gib": "one product",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, "prompts").parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    return run(options.out, TINY if options.tiny else SIZES, commit=options.commit)


if __name__ == "__main__":
    sys.exit(main())
