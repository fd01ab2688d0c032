"""What float32 norm scales cost vLLM's decoding: the engine as it is beside one with 16-bit scales, in one run.

    python benchmarks/norm_cost.py --out results

Random weights of the 7B shape, NVFP4 by our quantizer, adapter of rank 32. Each kind runs in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import engine_h200
import random_model
import report
import torch
from torch import nn

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import worker
from qerl_pl.types import SamplingConfig

ROUNDS = 5


class SixteenBitNorms(worker.PolicyWorker):
    """The worker, with its float32 scales rounded to bfloat16 before anything is compiled."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        worker.PolicyWorker.load_model(self, load_dummy_weights=load_dummy_weights)
        for name in self._qerl_noisy:
            norm = self._qerl_norms[name]
            norm.weight = nn.Parameter(norm.weight.data.bfloat16(), requires_grad=False)
            self._qerl_clean[name] = self._qerl_base[name].bfloat16()


def GPUSixteenBitNorms() -> Any:
    """The class, over vLLM's worker for GPUs."""
    from vllm.v1.worker.gpu_worker import Worker

    return type("GPUSixteenBitNorms", (SixteenBitNorms, Worker), {"__module__": __name__})


def measure(kind: str, base: Path, batches: list[int], tokens: int) -> dict[int, list[float]]:
    """Decode tokens a second, `ROUNDS` times a batch size."""
    device = torch.device("cuda")
    if kind == "bfloat16":
        worker.GPUPolicyWorker = GPUSixteenBitNorms()  # vLLM imports the worker by this name
    spec = EngineSpec(base, torch.bfloat16, device, engine_h200.RANK, engine_h200.TARGETS, 64 + tokens)
    engine = VLLMEngine(kv_cache_gib=6.0, max_num_seqs=max(batches), prefix_caching=False)
    engine.launch(spec)
    engine.sync(engine_h200.random_policy(base, spec, None))
    speeds: dict[int, list[float]] = {}
    for batch in batches:
        requests = engine_h200.prompts_of(batch, 64, random_model.SHAPES["7b"][-1])
        engine.generate(requests, SamplingConfig(max_tokens=8))
        speeds[batch] = []
        for _ in range(ROUNDS):
            first = engine_h200.timed(device, lambda: engine.generate(requests, SamplingConfig(max_tokens=1)))  # noqa: B023
            whole = engine_h200.timed(device, lambda: engine.generate(requests, SamplingConfig(max_tokens=tokens)))  # noqa: B023
            speeds[batch].append(batch * (tokens - 1) / (whole - first))
    engine.close()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kind", choices=("float32", "bfloat16"), help="measure one kind in this process")
    parser.add_argument("--base", type=Path)
    args = parser.parse_args()
    if args.kind:
        (args.base.parent / f"{args.kind}.json").write_text(
            json.dumps(measure(args.kind, args.base, args.batches, args.tokens))
        )
        return
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        base = Path(name) / "7b"
        random_model.write_model(base, "7b", torch.device("cuda"))
        torch.cuda.empty_cache()
        for kind in ("float32", "bfloat16"):
            # vLLM caches compiled graphs by configuration, which does not tell the two apart.
            variables = os.environ | {"VLLM_CACHE_ROOT": str(Path(name) / f"cache-{kind}")}
            command = [sys.executable, *sys.argv, "--kind", kind, "--base", str(base)]
            subprocess.run(command, check=True, env=variables)
            results[kind] = json.loads((Path(name) / f"{kind}.json").read_text())
    rows = []
    for batch in map(str, args.batches):
        wide, narrow = (statistics.median(results[kind][batch]) for kind in ("float32", "bfloat16"))
        spread = max(max(v[batch]) / min(v[batch]) - 1 for v in results.values())
        rows.append([batch, f"{wide:.0f}", f"{narrow:.0f}", f"{wide / narrow:.3f}", f"{100 * spread:.1f}"])
    headers = ["batch", "float32 scales tok/s", "bfloat16 scales tok/s", "ratio", "spread %"]
    report.write(args.out, "norm_cost", report.markdown(headers, rows), results)


if __name__ == "__main__":
    main()
