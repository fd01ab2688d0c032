"""Where the dequantized weight's product overtakes Marlin's: the four linears of a shape over tokens, on one GPU.

    python benchmarks/marlin_or_dense.py --out results  # half a minute

Median of CUDA graphs that repeat one product on random weights; both halves come from `marlin_or_dense`, the operator
that vLLM's linears call.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import random_model
import report
import torch
from qerl_kernels import marlin_alpha, quantize_nvfp4, select_backend
from qerl_kernels.marlin import to_marlin
from torch import Tensor

from qerl_pl.engines.vllm.linear_methods import TOLERANCE, fp4_linear

REPEATS = 20


def microseconds(work: Callable[[], Tensor]) -> float:
    """GPU time of one call."""
    for _ in range(3):
        work()  # tunes, and takes memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / REPEATS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 192, 256, 384, 512, 768, 1024, 2048, 8192])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    select_backend("triton")
    hidden, intermediate, _, heads, kv_heads, _ = random_model.SHAPES[args.shape]
    sizes = {
        "qkv": (hidden + 2 * kv_heads * (hidden // heads), hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    device = torch.device("cuda")
    rows, results = [], []
    for name, (outputs, inputs) in sizes.items():
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * 0.02
        held = to_marlin(quantize_nvfp4(weight))
        alpha = torch.tensor([marlin_alpha(held.global_scale)])
        workspace = marlin_make_workspace_new(device)
        for tokens in args.tokens:
            x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)

            def product(above: int, x: Tensor = x, workspace: Tensor = workspace) -> Callable[[], Tensor]:
                return lambda: fp4_linear(x, *held, workspace, None, None, alpha, None, None, [], 0, above)  # noqa: B023

            with torch.inference_mode():
                one, other = product(tokens)().float(), product(0)().float()
                times = [microseconds(work) for work in (product(tokens), product(0), lambda x=x, w=weight: x @ w.T)]
            apart = ((one - other).norm() / one.norm()).item()
            if apart > TOLERANCE:
                raise SystemExit(f"{name} at {tokens} tokens: the products differ by {apart:.2g}; no time is reported")
            results.append({"linear": name, "tokens": tokens, "us": times, "apart": apart})
            rows.append(
                [name, tokens, *(f"{time:.0f}" for time in times), f"{times[1] / times[0]:.2f}", f"{apart:.1e}"]
            )
    headers = ["linear", "tokens", "Marlin us", "dense us", "BF16 weight us", "dense : Marlin", "relative difference"]
    report.write(args.out, f"marlin_or_dense_{args.shape}", report.markdown(headers, rows), results)


if __name__ == "__main__":
    main()
