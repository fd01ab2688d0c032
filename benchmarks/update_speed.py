"""Speed and memory of the policy update: NVFP4 by this package, by eager PyTorch dequantization, and in bfloat16.

    python benchmarks/update_speed.py --out results  # 7B shape, three to four minutes
    python benchmarks/update_speed.py --parts nvfp4 selective no_checkpointing --tokens 6144 --out results
    python benchmarks/update_speed.py --shape tiny --device cpu --tokens 256 --out results  # does the script run?

One update is a forward and a backward pass of `Policy.token_values` over packed sequences of 1024 random tokens
(activation checkpointing of each layer, LoRA on all linears) and an AdamW step; "selective" saves the linears' products
and attention's result, "no_checkpointing" everything: loss and norm of the gradient must then be NVFP4's to the last
bit. "eager" is how public code trains on NVFP4: every forward dequantizes in plain PyTorch, and autograd keeps the
dense weight until the backward pass.
Gradients repeat bit for bit, as in a run; "free" is NVFP4 without that.
"""

import argparse
import gc
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kernel_profile
import random_model
import report
import torch
from qerl_kernels import LoraFactors, NVFP4Tensor, NVFP4Weight, dequantize_nvfp4, select_backend
from torch import Tensor
from torch.nn import functional

from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.lora import FrozenLinear, LoraLinear
from qerl_pl.runtime.random_state import deterministic, forget_cublas_config, set_cublas_config

GIB = 2**30
WAYS = ("bf16", "nvfp4", "selective", "no_checkpointing", "eager", "free")


class EagerLinear(FrozenLinear):
    """The same weight, dequantized by plain PyTorch in every forward pass and then multiplied like any other."""

    def __init__(self, packed: FrozenLinear) -> None:
        self.tensor = NVFP4Tensor(*(packed.get_parameter(f"weight_{part}") for part in NVFP4Tensor._fields))
        super().__init__(NVFP4Weight(self.tensor), packed.bias, own=True)

    def forward(self, x: Tensor, lora: LoraFactors | None = None) -> Tensor:
        y = functional.linear(x, dequantize_nvfp4(*self.tensor, x.dtype), self.bias)
        if lora is None:
            return y
        a, b, scaling = lora
        return y + functional.linear(functional.linear(x, a.to(x.dtype)), b.to(x.dtype)) * scaling


def load(way: str, base: Path, device: torch.device, rank: int) -> Policy:
    """The policy, its linears computed in one of `WAYS`."""
    config = PolicyConfig(
        path=str(base),
        quantization="none" if way == "bf16" else "nvfp4",
        lora=LoraConfig(rank=rank, alpha=float(rank)),
        gradient_checkpointing={"selective": "selective", "no_checkpointing": False}.get(way, True),  # type: ignore[arg-type]
    )
    policy = Policy(base, config, device, seed=0).train()
    if way == "eager":
        for module in list(policy.modules()):
            if isinstance(module, LoraLinear) and isinstance(module.base_layer, FrozenLinear):
                module.base_layer = EagerLinear(module.base_layer)
    return policy


def measure(
    policy: Policy,
    tokens: int,
    length: int,
    vocabulary: int,
    repeats: int,
    repeatable: bool = True,
    profile: bool = False,
) -> dict[str, Any]:
    """Median seconds of an update on `tokens` packed tokens, after one that is not counted, and the peak of memory.

    With `profile`, on a GPU, also the kernels of one more update, by kind.
    """
    device = next(policy.parameters()).device
    forget_cublas_config(device)
    length = min(length, tokens)
    shape = (tokens // length, length)
    ids = torch.randint(10, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.full((shape[0],), length, device=device)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    mask[:, 0] = False  # has no prediction
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-5)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    losses: list[float] = []
    norms: list[float] = []

    def update() -> Tensor:
        optimizer.zero_grad()
        with deterministic() if repeatable else nullcontext():
            logprobs, *_ = policy.token_values(ids, lengths, mask, 1.0)
            loss: Tensor = -logprobs.sum() / mask.sum()
            loss.backward()
            optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        return loss

    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = update()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm(p.grad for p in policy.parameters() if p.grad is not None).item())
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    profiled = {"profile": kernel_profile.of_an_update(update)} if profile and on_gpu else {}
    optimizer.zero_grad()
    median = statistics.median(seconds[1:])
    return {
        "seconds": median,
        "spread": (max(seconds[1:]) - min(seconds[1:])) / median,
        "tokens_per_s": ids.numel() / median,
        "peak_gib": peak,
        "loss": losses[0],
        "grad_norm": norms[0],
        **profiled,
    }


def check(ours: dict[str, float], eager: dict[str, float]) -> None:
    """No speed without the right result: both ways compute the same policy from the same start."""
    for name, bound in (("loss", 0.01), ("grad_norm", 0.05)):
        if not abs(ours[name] - eager[name]) <= bound * abs(eager[name]):
            raise SystemExit(
                f"{name} must be the eager way's, {eager[name]:.5g}, within {bound:.0%}; got {ours[name]:.5g}"
            )


def run_way(way: str, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Figures of one way by number of tokens, but for those that do not fit; its memory is free again afterwards."""
    device = torch.device(args.device)
    nvfp4 = way != "bf16"
    base = args.base / f"{args.shape}-{'nvfp4' if nvfp4 else 'bf16'}"
    if not base.is_dir():
        random_model.write_model(base, args.shape, device, nvfp4=nvfp4)
    policy = load(way, base, device, args.rank)
    vocabulary = random_model.SHAPES[args.shape][-1]
    found = {}
    for count in args.tokens:
        try:
            found[count] = measure(policy, count, args.length, vocabulary, args.repeats, way != "free", args.profile)
        except torch.OutOfMemoryError:
            policy.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
    del policy
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="packed tokens of an update")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also a table of an update by kind of kernel")
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    set_cublas_config()
    if args.device == "cuda":
        select_backend("triton")
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for way in args.parts:
        found[way] = run_way(way, args)
        write(found, args)


def write(found: dict[str, dict[int, dict[str, Any]]], args: argparse.Namespace) -> None:
    """Check and write what has been measured so far."""
    rows: list[list[Any]] = []
    for count in args.tokens:
        have = {way: measured[count] for way, measured in found.items() if count in measured}
        if "nvfp4" in have and "eager" in have:
            check(have["nvfp4"], have["eager"])
        for way in {"selective", "no_checkpointing"} & have.keys() if "nvfp4" in have else ():
            if any(have[way][name] != have["nvfp4"][name] for name in ("loss", "grad_norm")):
                raise SystemExit(f"{way} must give the bits of nvfp4; got {have[way]} and {have['nvfp4']}")
        for way in found:
            if way not in have:
                rows.append([way, count, "out of memory", *5 * ["–"]])
                continue
            one = have[way]
            speed = one["tokens_per_s"]
            row = [way, count, f"{one['seconds']:.3f}", f"{100 * one['spread']:.1f}", f"{speed:.0f}"]
            over = [f"{speed / have[base]['tokens_per_s']:.2f}" if base in have else "–" for base in ("bf16", "nvfp4")]
            rows.append([*row, *over, f"{one['peak_gib']:.1f}"])
    headers = ["base", "tokens", "s an update", "spread %", "tokens/s", "over bf16", "over nvfp4", "peak GiB"]
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("base", "out")}
    text = [report.markdown(headers, rows)]
    measured = {f"{way}, {count} tokens": found[way].get(count, {}) for way in found for count in args.tokens}
    profiles = {title: one["profile"] for title, one in measured.items() if "profile" in one}
    text += kernel_profile.tables(profiles, "an update")
    report.write(args.out, "update_speed", "\n\n".join(text), {"settings": settings, "found": found})


if __name__ == "__main__":
    main()
