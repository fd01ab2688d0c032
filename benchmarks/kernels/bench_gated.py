"""Times a decode step's gate_up with the activation in its second launch and after it.

Their tests run first, on the same machine; if one fails, nothing is timed. Calls are in a CUDA graph on rotating
weights, as in `bench_few.py`, with an adapter of rank 32 on both parts. A last row has the activation of a prompt
alone. `--out DIR` writes gated.md and gated.json there; `--tiny` tries the script on the CPU.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_few import TINY, Linear, Sizes, between, ours, rotating_linears
from bench_report import Row, correct, environment, micro, parser, replayed, table

GATE = ("tests/test_ops_few.py", "tests/test_ops_activation.py")
COLUMNS = {
    "work": "work",
    "tokens": "tokens",
    "product.p50_us": "product alone µs",
    "folded.p50_us": "activated in its second launch",
    "after.p50_us": "activated after it",
    "compiled.p50_us": "activated after it, by torch.compile",
}


def folded(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    from qerl_kernels import decode_gemm_linear

    return decode_gemm_linear(x, linear.weight, a=linear.a, b=linear.b, starts=linear.starts, gated=True)


def after(activate: Callable[[torch.Tensor], torch.Tensor], linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return activate(ours(linear, x))


def timed(
    row: Row, ways: Mapping[str, Callable[..., torch.Tensor]], inputs: Sequence[tuple[Any, ...]], device: str
) -> Row:
    """The row with the times of each way to work on the inputs."""
    for name, way in ways.items():
        times = replayed([functools.partial(way, *some) for some in inputs], device)
        row[name] = times and micro(times)
    return row


def bench(sizes: Sizes, tokens: Sequence[int], prompt: int) -> Iterator[Row]:
    from qerl_kernels import silu_of_halves

    def plain(y: torch.Tensor) -> torch.Tensor:
        return between(y, y, "down")

    compiled = torch.compile(plain, dynamic=True) if sizes.device == "cuda" else plain
    activations = {"after": silu_of_halves, "compiled": compiled}
    ways = {"product": ours, "folded": folded}
    ways |= {name: functools.partial(after, activate) for name, activate in activations.items()}
    rows, columns, starts = sizes.layers["gate_up"]
    linears = rotating_linears((rows, columns, starts), sizes)
    for some in tokens:
        x = torch.randn(some, columns, device=sizes.device).bfloat16()
        row: Row = {"work": f"gate_up {rows}x{columns}", "tokens": some}
        yield timed(row, ways, [(linear, x) for linear in linears], sizes.device)
    prompts = [(torch.randn(prompt, rows, device=sizes.device).bfloat16(),) for _ in range(2)]
    yield timed({"work": "activation of a prompt", "tokens": prompt}, activations, prompts, sizes.device)


def run(out: Path | None, tiny: bool, gate: tuple[str, ...] = GATE, commit: str | None = None) -> int:
    """Test, measure, write. Returns the exit status: 1 if a test failed, and then nothing is measured."""
    if gate and not correct(gate):
        sys.stderr.write("a correctness test failed: nothing is timed\n")
        return 1
    from qerl_kernels import select_backend

    select_backend("triton")
    torch.manual_seed(0)
    results: Row = {"environment": environment(commit)}
    results["rows"] = list(bench(TINY, (9,), 4) if tiny else bench(Sizes(), (8, 16, 32, 64, 128, 192, 256), 8192))
    text = f"{results['environment']}\n\n{table(results['rows'], COLUMNS)}\n"
    sys.stdout.write(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gated.md").write_text(text)
        (out / "gated.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def main() -> int:
    made = parser(__doc__, "gated", out_required=False)
    made.add_argument("--no-tests", action="store_true")
    options = made.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    return run(options.out, options.tiny, () if options.no_tests else GATE, options.commit)


if __name__ == "__main__":
    sys.exit(main())
