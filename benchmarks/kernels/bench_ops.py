"""Times every op beside its floor, eager PyTorch and 16 bits: `python benchmarks/kernels/bench_ops.py --out DIR`.

The correctness tests run first, on the same machine; if one fails, nothing is timed. Writes DIR/ops.md and
DIR/ops.json. `--tiny` runs the same code on small shapes, on a CPU in Triton's interpreter: its numbers mean nothing.
"""

import functools
import gc
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_report import (
    HEAD_COLUMNS,
    LINEAR_COLUMNS,
    SPLIT_COLUMNS,
    WEIGHT_COLUMNS,
    Row,
    copy_time,
    correct,
    enqueued,
    environment,
    extra_memory,
    micro,
    parser,
    replayed,
    table,
    timed,
)

GATE = ("tests/test_ops_triton.py", "tests/test_ops_linear.py", "tests/test_ops.py")
SECTIONS = ("weights", "layers", "logprobs")
NVFP4_BYTES, MXFP4_BYTES, BF16 = 0.5625, 0.53125, torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    device: str = "cuda"
    layers: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "qkv": (4608, 3584),
            "o": (3584, 3584),
            "gate_up": (37888, 3584),
            "down": (3584, 18944),
        }
    )
    tokens: tuple[int, ...] = (2048, 8192)
    rank: int = 32
    head_tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    vocabulary: int = 152064
    hidden: int = 3584
    copy_bytes: int = 2**31
    """Of the copy whose bandwidth the ops are compared with; as many are read as written."""
    cold_bytes: int = 2**28
    """Moved between two uses of the same bytes in a CUDA graph: several times what the caches hold."""


TINY = Sizes("cpu", {"qkv": (128, 64), "down": (64, 96)}, (8,), 4, (8, 24), 500, 32, 2**16, 0)


def random_weight(shape: tuple[int, int], device: str) -> torch.Tensor:
    return (torch.randn(shape, device=device) * 0.02).bfloat16()


def bench_weights(sizes: Sizes, bandwidth: float) -> Iterator[Row]:
    """Dequantize from each layout, and quantize."""
    from qerl_kernels import frozen_weights, marlin, reference

    for name, shape in sizes.layers.items():
        weight = random_weight(shape, sizes.device)
        nv, mx = reference.quantize_nvfp4(weight), reference.quantize_mxfp4(weight)
        cases: list[tuple[str, float, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
            (
                "dequantize, compressed-tensors layout",
                NVFP4_BYTES + 2,
                lambda packed, scale, _: frozen_weights.dequantize_nvfp4_unscaled(packed, scale, BF16),
                lambda *tensors: reference.dequantize_nvfp4(*tensors, BF16),
                nv,
            ),
            (
                "dequantize, Marlin layout",
                NVFP4_BYTES + 2,
                lambda words, scale, _: frozen_weights.dequantize_marlin(words, scale, BF16),
                lambda words, scale, _: marlin.dequantize_marlin(words, scale, BF16),
                marlin.to_marlin(nv),
            ),
            (
                "dequantize MXFP4, compressed-tensors layout",
                MXFP4_BYTES + 2,
                lambda packed, scale: frozen_weights.dequantize_mxfp4(packed, scale, BF16),
                lambda packed, scale: reference.dequantize_mxfp4(packed, scale, BF16),
                mx,
            ),
            (
                "dequantize MXFP4, Marlin layout",
                MXFP4_BYTES + 2,
                lambda words, scale: frozen_weights.dequantize_marlin(words, scale, BF16, mx=True),
                lambda words, scale: marlin.dequantize_marlin(words, scale, BF16, mx=True),
                marlin.to_marlin(mx)[:2],
            ),
        ]
        for op, bytes_a_weight, ours, eager, tensors in cases:
            count = bytes_a_weight * weight.numel()
            times = timed(lambda ours=ours, tensors=tensors: ours(*tensors), sizes.device)
            copies = [
                [tensor.clone() for tensor in tensors] for _ in range(max(2, math.ceil(sizes.cold_bytes / count)))
            ]
            alone = replayed([functools.partial(ours, *copy) for copy in copies], sizes.device)
            yield {
                "op": op,
                "layer": f"{name} {shape[0]}x{shape[1]}",
                "floor_us": count / bandwidth * 1e6,
                **micro(times),
                "gpu_us": alone and alone[1] * 1e6,
                "percent_of_copy": 100 * count / bandwidth / times[1],
                "gpu_percent_of_copy": alone and 100 * count / bandwidth / alone[1],
                "copy_us": copy_time(int(count), sizes.device) * 1e6,
                "eager_p50_us": timed(lambda eager=eager, tensors=tensors: eager(*tensors), sizes.device)[1] * 1e6,
            }


def bench_linear(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward of each layer with an adapter."""
    from qerl_kernels import DenseWeight, LoraFactors, MarlinRows, NVFP4Weight, frozen_linear, marlin, reference

    for name, (rows, columns) in sizes.layers.items():
        weight = random_weight((rows, columns), sizes.device)
        nv = reference.quantize_nvfp4(weight)
        words = marlin.to_marlin(nv)
        held = {"bf16": DenseWeight(weight), "own": NVFP4Weight(nv), "shared": MarlinRows(words)}
        lora = LoraFactors(
            (torch.randn(sizes.rank, columns, device=sizes.device) * 0.02).requires_grad_(),
            (torch.randn(rows, sizes.rank, device=sizes.device) * 0.02).requires_grad_(),
            2.0,
        )

        def adapted(x: torch.Tensor, weight: torch.Tensor, lora: LoraFactors = lora) -> torch.Tensor:
            inner = torch.nn.functional.linear(x, lora.a.to(x.dtype))
            delta = torch.nn.functional.linear(inner, lora.b.to(x.dtype))
            return torch.nn.functional.linear(x, weight) + delta * lora.scaling

        variants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            **{kind: lambda x, w=one, lora=lora: frozen_linear(x, w, lora=lora) for kind, one in held.items()},
            "bf16_peft": lambda x, w=weight, f=adapted: f(x, w),
            "eager": lambda x, nv=nv, f=adapted: f(x, reference.dequantize_nvfp4(*nv, x.dtype)),
        }
        for tokens in sizes.tokens:
            x = torch.randn(tokens, columns, device=sizes.device).bfloat16().requires_grad_()
            grad = torch.randn(tokens, rows, device=sizes.device).bfloat16()
            row: Row = {"layer": f"{name} {rows}x{columns}", "tokens": tokens}
            for variant, forward in variants.items():

                def step(forward=forward, x=x, grad=grad, inputs=(x, lora.a, lora.b)) -> None:
                    torch.autograd.grad(forward(x), inputs, grad)

                row[variant] = micro(timed(step, sizes.device))
                row[variant]["cpu_us"] = enqueued(step, sizes.device) * 1e6
                alone = None if variant == "eager" else replayed([step], sizes.device)
                row[variant]["gpu_us"] = alone and alone[1] * 1e6
            marlin_gemm = vllm_marlin(words, x.detach(), rows, columns)
            row["vllm_marlin_forward"] = None if marlin_gemm is None else micro(timed(marlin_gemm, sizes.device))
            for variant in ("own", "shared"):
                row[f"{variant}_ratio"] = row[variant]["p50_us"] / row["bf16"]["p50_us"]
                alone, base = row[variant]["gpu_us"], row["bf16"]["gpu_us"]
                row[f"{variant}_gpu_ratio"] = alone / base if alone and base else None
            yield row


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


def head_variants(sizes: Sizes, lm_head: torch.Tensor, targets: torch.Tensor) -> dict[str, Callable[..., Any]]:
    from qerl_kernels import chunked_token_logprobs

    def plain(x: torch.Tensor) -> torch.Tensor:
        logp = (torch.nn.functional.linear(x, lm_head).float() / 0.9).log_softmax(-1)
        with torch.no_grad():
            -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1)

    variants: dict[str, Callable[..., Any]] = {
        "ours": lambda x: chunked_token_logprobs(x, lm_head, targets, 0.9, entropy_gradient=False)[0],
        "ours_entropy_gradient": lambda x: chunked_token_logprobs(x, lm_head, targets, 0.9)[0],
        "plain": plain,
    }
    if importlib.util.find_spec("liger_kernel") is not None and sizes.device == "cuda":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        # Neither temperature nor entropy; "mean" is one number a batch, "none" one a token, as a policy's loss needs.
        for reduction in ("mean", "none"):
            loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction)
            variants[f"liger_{reduction}"] = lambda x, loss=loss: loss(lm_head, x, targets)
    return variants


def bench_head(sizes: Sizes) -> Iterator[Row]:
    """Log-probability, entropy and the gradient to the hidden states; memory beyond the inputs."""
    lm_head = random_weight((sizes.vocabulary, sizes.hidden), sizes.device)
    for tokens in sizes.head_tokens:
        x = torch.randn(tokens, sizes.hidden, device=sizes.device).bfloat16().requires_grad_()
        targets = torch.randint(sizes.vocabulary, (tokens,), device=sizes.device)
        for name, forward in head_variants(sizes, lm_head, targets).items():

            def step(forward=forward, x=x) -> None:
                y = forward(x)
                torch.autograd.grad(y, x, torch.ones_like(y))

            row: Row = {"variant": name, "tokens": tokens, "p50_us": None, "extra_gib": None}
            try:
                row["extra_gib"] = extra_memory(step, sizes.device)
                row.update(micro(timed(step, sizes.device)))
            except torch.OutOfMemoryError:
                row["note"] = "out of memory"
            gc.collect()
            if sizes.device == "cuda":
                torch.cuda.empty_cache()
            yield row


def run(
    out: Path,
    sizes: Sizes,
    gate: tuple[str, ...] = GATE,
    commit: str | None = None,
    sections: tuple[str, ...] = SECTIONS,
) -> int:
    """Test, measure, write. Returns the exit status: 1 if a test failed, and then nothing is measured."""
    if not correct(gate):
        sys.stderr.write("a correctness test failed: no op is timed\n")
        return 1
    from qerl_kernels import select_backend

    select_backend("triton")
    torch.manual_seed(0)
    bandwidth = 2 * sizes.copy_bytes / copy_time(2 * sizes.copy_bytes, sizes.device)
    results: Row = {"environment": environment(commit), "copy_tb_per_s": bandwidth / 1e12}
    text = [f"{results['environment']}, device-to-device copy {bandwidth / 1e12:.2f} TB/s"]
    layers, head = f"forward and backward, rank {sizes.rank}", f"V {sizes.vocabulary}, D {sizes.hidden}"
    parts = {
        "weights": ("Weights", bench_weights(sizes, bandwidth), (WEIGHT_COLUMNS,)),
        "layers": (f"Layers, {layers}", bench_linear(sizes), (LINEAR_COLUMNS, SPLIT_COLUMNS)),
        "logprobs": (f"Token log-probabilities, {head}", bench_head(sizes), (HEAD_COLUMNS,)),
    }
    out.mkdir(parents=True, exist_ok=True)
    for title, rows, tables in (parts[name] for name in sections):
        start = time.perf_counter()
        results[title] = list(rows)
        text += [f"## {title}", *(table(results[title], columns) for columns in tables)]
        sys.stdout.write(f"\n## {title} ({time.perf_counter() - start:.0f} s)\n\n{text[-1]}\n")
        sys.stdout.flush()
        # After every section, so that a run that is cut short leaves what it measured.
        (out / "ops.md").write_text("\n\n".join(text) + "\n")
        (out / "ops.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


def main() -> int:
    made = parser(__doc__, "ops")
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="by default all")
    arguments = made.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if arguments.tiny else "0"
    sizes = TINY if arguments.tiny else Sizes()
    return run(arguments.out, sizes, commit=arguments.commit, sections=tuple(arguments.sections))


if __name__ == "__main__":
    sys.exit(main())
