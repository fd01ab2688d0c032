"""Times the decode GEMM beside vLLM's Marlin and two plain products.

Its tests run first, on the same machine; if one fails, nothing is timed. Every call is in a CUDA graph and finds the
caches cold, for the weights rotate. A layer is its four linears with copies, a sum and SiLU between them, by ordinary
launches as in an engine; the time of those alone is taken off. Writes DIR/decode_gemm.md and DIR/decode_gemm.json.
`--tiny` runs the same code on small shapes, on a CPU in Triton's interpreter: its numbers mean nothing.
"""

import functools
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_report import Row, copy_time, correct, environment, micro, parser, replayed, table

GATE = ("tests/test_decode_gemm.py",)
NVFP4_BYTES = 0.5625

Apply = Callable[["Linear", torch.Tensor], torch.Tensor]


class Linear(NamedTuple):
    """One linear with an adapter on each fused slice."""

    weight: Any
    a: torch.Tensor
    b: torch.Tensor
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """What is measured; `layers` are rows, columns and the first rows of fused slices."""

    device: str = "cuda"
    layers: dict[str, tuple[int, int, tuple[int, ...]]] = field(
        default_factory=lambda: {
            "qkv": (4608, 3584, (0, 3584, 4096)),
            "o": (3584, 3584, (0,)),
            "gate_up": (37888, 3584, (0, 18944)),
            "down": (3584, 18944, (0,)),
        }
    )
    tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    rank: int = 32
    cold_bytes: int = 2**28
    """Of the weights that rotate: several times what the caches hold."""
    copy_bytes: int = 2**31


TINY = Sizes(
    "cpu",
    {"qkv": (192, 64, (0, 64, 128)), "o": (64, 64, (0,)), "gate_up": (256, 64, (0, 128)), "down": (64, 128, (0,))},
    (3, 9),
    8,
    0,
    2**16,
)


def vllm_marlin(words: Any, x: torch.Tensor, rows: int, columns: int) -> Callable[[], Any] | None:
    """vLLM's own product with the same weight, forward and without an adapter; None where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None or not x.is_cuda:
        return None
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

        workspace = marlin_utils.marlin_make_workspace_new(x.device)

        def product() -> torch.Tensor:
            return marlin_utils_fp4.apply_fp4_marlin_linear(
                x, words.weight, words.scale, words.global_scale, workspace, rows, columns
            )

        product()
    except (ImportError, TypeError, RuntimeError) as error:  # its signature differs between releases
        sys.stderr.write(f"vLLM's Marlin product is left out: {error}\n")
        return None
    return product


def random_linear(rows: int, columns: int, starts: tuple[int, ...], sizes: Sizes) -> Linear:
    """Random words and scales: as many bits of information as any weight."""
    from qerl_kernels import MarlinTensor

    words = torch.randint(-(2**31), 2**31, (columns // 16, 2 * rows), dtype=torch.int64, device=sizes.device).int()
    scale = torch.randint(128, 247, (columns // 16, rows), device=sizes.device).to(torch.uint8)
    weight = MarlinTensor(words, scale.view(torch.float8_e4m3fn), torch.tensor(2.0**104, device=sizes.device))
    a = (torch.randn(len(starts) * sizes.rank, columns, device=sizes.device) * 0.02).bfloat16()
    b = torch.zeros(rows, len(starts) * sizes.rank, device=sizes.device).bfloat16()
    for slot, (start, stop) in enumerate(zip(starts, (*starts[1:], rows), strict=True)):
        b[start:stop, slot * sizes.rank : (slot + 1) * sizes.rank].normal_(std=0.02)
    return Linear(weight, a, b, starts)


def rotating_linears(layer: tuple[int, int, tuple[int, ...]], sizes: Sizes) -> list[Linear]:
    """So many random linears of these rows, columns and first rows of slices that each finds the caches cold."""
    rows, columns, starts = layer
    count = max(2, math.ceil(sizes.cold_bytes / (NVFP4_BYTES * rows * columns)))
    return [random_linear(rows, columns, starts, sizes) for _ in range(count)]


def ours(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl_kernels import decode_gemm_linear

    return decode_gemm_linear(x, linear.weight, a=linear.a, b=linear.b, starts=linear.starts)


def base_only(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl_kernels import decode_gemm_linear

    return decode_gemm_linear(x, linear.weight)


class Theirs:
    """vLLM's Marlin, and the adapter as two plain products: what the engine does without this kernel."""

    def __init__(self, adapter: bool) -> None:
        self._adapter = adapter

    def __call__(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

        words, rows = linear.weight, linear.weight.weight.shape[1] // 2
        y: torch.Tensor = marlin_utils_fp4.apply_fp4_marlin_linear(
            x, words.weight, words.scale, words.global_scale, _workspace(x.device), rows, x.shape[1]
        )
        return y.addmm_(x @ linear.a.T, linear.b.T) if self._adapter else y


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    return marlin_utils.marlin_make_workspace_new(device)


def variants(sizes: Sizes) -> dict[str, Apply]:
    """By name; vLLM's only where it is installed and takes these tensors."""
    methods: dict[str, Apply] = {"ours": ours, "ours_base": base_only}
    rows, columns, starts = next(iter(sizes.layers.values()))
    probe = random_linear(rows, columns, starts, sizes)
    if vllm_marlin(probe.weight, torch.zeros(8, columns, device=sizes.device).bfloat16(), rows, columns) is not None:
        methods |= {"marlin": Theirs(True), "marlin_base": Theirs(False)}
    return methods


def bench_linears(sizes: Sizes, bandwidth: float, methods: dict[str, Apply]) -> Iterator[Row]:
    for name, (rows, columns, starts) in sizes.layers.items():
        count = NVFP4_BYTES * rows * columns
        copies = rotating_linears((rows, columns, starts), sizes)
        for tokens in sizes.tokens:
            x = torch.randn(tokens, columns, device=sizes.device).bfloat16()
            row: Row = {"layer": f"{name} {rows}x{columns}", "tokens": tokens, "floor_us": count / bandwidth * 1e6}
            for variant, apply in methods.items():
                times = replayed([functools.partial(apply, copy, x) for copy in copies], sizes.device)
                row[variant] = times and micro(times)
            yield compared(row)


def between(x: torch.Tensor, hidden: torch.Tensor, step: str) -> torch.Tensor:
    """What stands for attention, sums and activation: reads `x`, writes one tensor."""
    if step == "o":
        return x[:, : hidden.shape[1]].contiguous()
    if step == "down":
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return x + hidden


def layer(linears: dict[str, Linear], apply: Apply, hidden: torch.Tensor) -> torch.Tensor:
    x = hidden
    for step, linear in linears.items():
        x = apply(linear, between(x, hidden, step))
    return x


def bench_layers(sizes: Sizes, methods: dict[str, Apply]) -> Iterator[Row]:
    count = sum(NVFP4_BYTES * rows * columns for rows, columns, _ in sizes.layers.values())
    stack = [
        {name: random_linear(*shape, sizes) for name, shape in sizes.layers.items()}
        for _ in range(max(2, math.ceil(sizes.cold_bytes / count)))
    ]
    columns = sizes.layers["qkv"][1]
    for tokens in sizes.tokens:
        hidden = torch.randn(tokens, columns, device=sizes.device).bfloat16()
        outputs = {
            name: torch.randn(tokens, shape[0], device=sizes.device).bfloat16() for name, shape in sizes.layers.items()
        }
        inputs = dict(zip(outputs, [hidden, *list(outputs.values())[:-1]], strict=True))

        def alone(hidden: torch.Tensor = hidden, inputs: dict[str, torch.Tensor] = inputs) -> list[torch.Tensor]:
            return [between(x, hidden, step) for step, x in inputs.items()]

        rest = replayed([alone], sizes.device)
        row: Row = {"layer": "all four", "tokens": tokens, "between": rest and micro(rest)}
        for variant, apply in methods.items():
            calls = [functools.partial(layer, linears, apply, hidden) for linears in stack]
            times = replayed(calls, sizes.device)
            row[variant] = times and rest and micro((times[0] - rest[1], times[1] - rest[1], times[2] - rest[1]))
        yield compared(row)


def compared(row: Row) -> Row:
    """With the ratio of vLLM's time to ours, both with the adapter."""
    ours, theirs = row.get("ours"), row.get("marlin")
    row["ratio"] = theirs["p50_us"] / ours["p50_us"] if ours and theirs else None
    return row


def run(out: Path, sizes: Sizes, gate: tuple[str, ...] = GATE, commit: str | None = None) -> int:
    """Test, measure, write. Returns the exit status: 1 if a test failed, and then nothing is measured."""
    if not correct(gate):
        sys.stderr.write("a correctness test failed: no product is timed\n")
        return 1
    from qerl_kernels import select_backend

    select_backend("triton")
    torch.manual_seed(0)
    bandwidth = 2 * sizes.copy_bytes / copy_time(2 * sizes.copy_bytes, sizes.device)
    methods = variants(sizes)
    results: Row = {"environment": _environment(commit, methods), "copy_tb_per_s": bandwidth / 1e12}
    text = [f"{results['environment']}, device-to-device copy {bandwidth / 1e12:.2f} TB/s"]
    sections = {
        f"A layer's four linears, adapter of rank {sizes.rank}": bench_layers(sizes, methods),
        f"One linear, adapter of rank {sizes.rank}": bench_linears(sizes, bandwidth, methods),
    }
    out.mkdir(parents=True, exist_ok=True)
    for title, rows in sections.items():
        results[title] = list(rows)
        text += [f"## {title}", table(results[title], COLUMNS)]
        sys.stdout.write(f"\n## {title}\n\n{text[-1]}\n")
        sys.stdout.flush()
        (out / "decode_gemm.md").write_text("\n\n".join(text) + "\n")
        (out / "decode_gemm.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _environment(commit: str | None, methods: dict[str, Apply]) -> Row:
    if "marlin" not in methods:
        return environment(commit)
    import vllm

    return environment(commit) | {"vllm": vllm.__version__}


COLUMNS = {
    "layer": "linear",
    "tokens": "tokens",
    "floor_us": "floor µs",
    "ours.p20_us": "ours p20",
    "ours.p50_us": "p50",
    "ours.p80_us": "p80",
    "ours_base.p50_us": "ours, no adapter",
    "marlin.p20_us": "Marlin and two products p20",
    "marlin.p50_us": "p50",
    "marlin.p80_us": "p80",
    "marlin_base.p50_us": "Marlin, no adapter",
    "ratio": "theirs : ours",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, "decode_gemm").parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    return run(options.out, TINY if options.tiny else Sizes(), commit=options.commit)


if __name__ == "__main__":
    sys.exit(main())
