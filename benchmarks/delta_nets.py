"""Qwen3.5 on one GPU: steps of RL at 27B, 9B and 35B-A3B, the update beside Qwen3-8B's, trainer against sampler.

    python benchmarks/delta_nets.py --out results                         # on one H100 eight minutes without step_35b
    python benchmarks/delta_nets.py --parts update_8b update_9b --out results
    python benchmarks/delta_nets.py --tiny --out results                  # does the script run? On a CPU

step_27b           16 prompts x 8 completions x 1024 tokens: seconds a step and peak memory of the whole GPU
step_9b            8 completions of 1024 tokens: the same
step_35b           35B-A3B, 8 prompts x 8 completions x 1024 tokens: the same, with the sampler's experts in the update
update_8b          Qwen3-8B: tokens/s of an update on sequences of 2048 tokens
update_9b          the same at 9B, its recurrence by fla-core
update_9b_pytorch  the same, its recurrence by PyTorch
drift              trainer against sampler at 9B, with a random adapter on every linear: windows of the last tokens
                   before 256, 2048 and 8192 new ones

Random NVFP4 weights in the published shapes, one copy, LoRA of rank 32 on every linear, at 35B-A3B on those of
attention and delta nets. Every part is a process of its own: the table is joined from what the parts have written, so a
part that fails loses no other.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import random_model
import report
import torch
import update_speed
from qerl_kernels import flash_linear_attention, select_backend
from torch import Tensor

from qerl_pl.engines import EngineSpec, TransformersEngine, VLLMEngine
from qerl_pl.models.families import DELTA_NET, PROJECTIONS
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.runtime.files import atomic_write
from qerl_pl.runtime.random_state import set_cublas_config
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

PARTS = ("step_27b", "step_9b", "step_35b", "update_8b", "update_9b", "update_9b_pytorch", "drift")
RANK = 32
ATTENTION = PROJECTIONS[:4]  # q, k, v and o


def base_of(shape: str, args: argparse.Namespace) -> Path:
    """The checkpoint of a shape; written where it is missing."""
    shape = "qwen3.5-tiny" if args.tiny and shape != "8b" else "tiny" if args.tiny else shape
    base: Path = args.base / f"{shape}-codes"
    if not base.is_dir():
        random_model.write_model(base, shape, torch.device(args.device), codes=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return base


def step(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """One step of RL at 27B, whose start is in it, or the second of two at 9B and 35B-A3B."""
    began, size, warmup, cache = time.perf_counter(), "1x8x1024", 0, ["--kv-gib", "1.0"]
    if shape == "qwen3.5-27b":
        size, warmup, cache = "16x8x1024", -1, ["--kv-gib", str(args.kv_gib)]  # `step_against.py` leaves one more out
    mixture = shape in random_model.MIXTURES
    if mixture:
        size, cache = "8x8x1024", []
    own = [*cache, "--checkpointing", "true", "--sequences", "7"]
    if args.tiny:
        shape, size = "qwen3.5-moe-tiny" if mixture else "qwen3.5-tiny", "2x2x8"
        own = ["--device", "cpu", "--engine", "TransformersEngine"]
    own += ["--replay-routing", "--targets", *ATTENTION, *DELTA_NET] if mixture else []
    own += ["--shape", shape, "--sizes", size, "--steps", "1", f"--warmup={warmup}", "--limit", str(args.timeout)]
    out = args.out / "delta_nets" / shape
    script = Path(__file__).with_name("step_against.py")
    folders = ["--folder", str(args.base), "--out", str(out)]
    subprocess.run([sys.executable, str(script), "--parts", "ours-nvfp4", *own, *folders], check=True)
    (found,) = json.loads((out / f"step_against_{shape}.json").read_text())["results"]["found"]
    fla = importlib.util.find_spec("fla") is not None
    return found | {"fla": fla, "seconds_in_all": time.perf_counter() - began}


def update(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update, as `update_speed.measure`."""
    device, base = torch.device(args.device), base_of(shape, args)
    policy = update_speed.load("nvfp4", base, device, RANK)
    tokens, length = (128, 64) if args.tiny else (20480, 2048)
    return update_speed.measure(policy, tokens, length, policy.base.config.vocab_size, repeats=2)


@torch.no_grad()
def logprobs_of(policy: Policy, prompts: list[Prompt], completions: list[list[Completion]]) -> Tensor:
    """The trainer's log-probabilities [sequences, tokens], a sequence at a time, in float64 on the CPU."""
    found = []
    for prompt, group in zip(prompts, completions, strict=True):
        tokens, lengths, mask, _ = (t.to(policy.device) for t in pad_completions([prompt], [group], 0))
        found.append(policy.token_values(tokens, lengths, mask, 1.0)[0][mask].double().cpu())
    return torch.stack(found)


def drift(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Differences of log-probabilities in nats a token, in windows that end at some lengths."""
    device, base = torch.device(args.device), base_of(shape, args)
    windows, width, count = ([8, 16, 32], 8, 2) if args.tiny else ([256, 2048, 8192], 256, args.sequences)
    settings = PolicyConfig(path=str(base), quantization="nvfp4", lora=LoraConfig(rank=RANK, alpha=float(RANK)))
    assert settings.lora_spec is not None
    spec = EngineSpec(base, settings.torch_dtype, device, RANK, settings.lora_spec.targets, windows[-1] + 64)
    engine = TransformersEngine() if args.tiny else VLLMEngine(kv_cache_gib=6.0, max_num_seqs=count, sleep_mode=False)
    began = time.perf_counter()
    engine.launch(spec)
    started = time.perf_counter() - began
    policy = Policy(base, settings, device, seed=0, shared=engine.shared_weights()).eval()
    random_model.move_trained(policy, args.move)
    engine.sync(policy.weights(0))
    drawn = torch.randint(10, 500, (count, 64), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [Prompt(str(index), tuple(row), "", "") for index, row in enumerate(drawn)]
    requests = [RolloutRequest(prompt.token_ids, (index,)) for index, prompt in enumerate(prompts)]
    began = time.perf_counter()
    completions = engine.generate(requests, SamplingConfig(max_tokens=windows[-1]))
    sampling = time.perf_counter() - began
    said = torch.tensor([group[0].logprobs for group in completions], dtype=torch.float64)
    own = logprobs_of(policy, prompts, completions)
    rows = []
    for end in windows:
        difference, ratio = (own - said)[:, end - width : end], (own - said)[:, :end]
        rows.append(
            {
                "tokens": end,
                "mean": difference.abs().mean().item(),
                "p99": difference.abs().flatten().quantile(0.99).item(),
                "bias": difference.mean().item(),
                "weight_mean": difference.exp().mean().item(),
                "weights_beyond_2": (difference.abs() > 0.6931).double().mean().item(),
                "sequence_log_weight": ratio.sum(1).abs().mean().item(),
                "logprob_mean": own[:, end - width : end].mean().item(),
            }
        )
    kernels = engine.kernels if isinstance(engine, VLLMEngine) else []
    inactive = engine.inactive if isinstance(engine, VLLMEngine) else {}
    engine.close()
    return {
        **{"rows": rows, "start_s": started, "sampling_s": sampling, "sequences": count, "window": width},
        **{"kernels": kernels, "inactive": inactive, "move": args.move},
    }


def run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part's figures."""
    kind, _, size = part.partition("_")
    shape = {"27b": "qwen3.5-27b", "8b": "8b", "35b": "qwen3.5-35b-a3b"}.get(size, "qwen3.5-9b")
    if kind == "step":
        return step(shape, args)
    run = {"update": update, "drift": drift}[kind]
    if args.device == "cuda":
        select_backend("triton")
    began = time.perf_counter()
    without = args.without_fla or size == "9b_pytorch"
    with patch.object(flash_linear_attention, "available", lambda _: False) if without else nullcontext():
        fla = flash_linear_attention.available(args.device)
        return run(shape, args) | {"fla": fla, "seconds_in_all": time.perf_counter() - began}


def tables(found: dict[str, dict[str, Any]]) -> str:
    """What there is of the parts, as Markdown."""
    text = []
    steps = [
        [
            *(part.removeprefix("step_"), one["size"].replace("x", " x "), f"{one['seconds'][0]:.1f}"),
            *(f"{one['phases'][0][name]:.1f}" for name in ("rollout", "update")),
            " / ".join(f"{one['peak_gib'].get(phase, 0):.1f}" for phase in ("rollout", "update")),
            *("yes" if one["fla"] else "no", f"{one['seconds_in_all']:.0f}"),
        ]
        for part, one in found.items()
        if part.startswith("step")
    ]
    if steps:
        headers = ["Qwen3.5", "prompts x completions x tokens", "s a step", "rollout s", "update s"]
        headers += ["peak GiB rollout / update", "fla-core", "s of the part"]
        text.append(report.markdown(headers, steps))
    updates = {part: one for part, one in found.items() if part.startswith("update")}
    if updates:
        speed = updates.get("update_8b", {}).get("tokens_per_s")
        rows = [
            [
                *(part.removeprefix("update_"), f"{one['seconds']:.3f}", f"{one['tokens_per_s']:.0f}"),
                *(f"{one['tokens_per_s'] / speed:.2f}" if speed else "–", f"{one['peak_gib']:.1f}"),
                *(f"{one['loss']:.4f}", f"{one['grad_norm']:.4g}", "yes" if one["fla"] else "no"),
            ]
            for part, one in updates.items()
        ]
        headers = ["update", "s", "tokens/s", "over Qwen3-8B", "peak GiB", "loss", "norm of the gradient", "fla-core"]
        text.append(report.markdown(headers, rows))
    if one := found.get("drift"):
        keys = ("mean", "p99", "bias", "weight_mean", "weights_beyond_2", "sequence_log_weight", "logprob_mean")
        rows = [[row["tokens"], *(f"{row[key]:.3g}" for key in keys)] for row in one["rows"]]
        headers = ["new tokens", "mean difference", "p99", "mean with its sign", "mean importance weight"]
        headers += ["weights beyond 2 or 1/2", "log weight of the sequence", "mean log-probability"]
        about = f"Trainer against sampler, nats a token, {one['sequences']} sequences, the last {one['window']} tokens "
        about += f"before each length; fla-core in the trainer: {'yes' if one['fla'] else 'no'}; {one['kernels']}"
        about += f"; without {one['inactive']}; {one['sampling_s']:.0f} s of sampling"
        text.append(f"{about}\n\n{report.markdown(headers, rows)}")
    return "\n\n".join(text) or "no part has a result"


def join(args: argparse.Namespace) -> list[str]:
    """Write the table of all parts that have a result, and return them."""
    files = {part: args.out / "delta_nets" / f"{part}.json" for part in PARTS}
    found = {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}
    report.write(args.out, "delta_nets", tables(found), found)
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, with TransformersEngine")
    parser.add_argument("--without-fla", action="store_true", help="PyTorch's recurrence in updates and drift")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="of states, keys and values at 27B")
    parser.add_argument("--sequences", type=int, default=8, help="of the drift")
    parser.add_argument("--move", type=float, default=0.01, help="standard deviation added to the adapter's matrices")
    parser.add_argument("--timeout", type=float, default=420, help="seconds of a part")
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run-part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    set_cublas_config()
    if args.run_part:
        result = run_part(args.run_part, args)
        atomic_write(args.out / "delta_nets" / f"{args.run_part}.json", json.dumps(result).encode())
        return
    failed = []
    for part in args.parts:
        words = [sys.executable, *sys.argv, "--run-part", part]
        try:
            subprocess.run(words, check=True, timeout=args.timeout)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(f"{part} has no result: {error}")
        join(args)
    print("\n".join(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
