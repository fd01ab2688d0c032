"""Every dense family at a middle size: trainer against engine, noise by tensor, active features, tokens/s.

    python benchmarks/families.py --out results                        # a GPU with vLLM: all families at once
    python benchmarks/families.py --family phi3 --out results          # one of them, in this process
    python benchmarks/families.py --shape tiny --device cpu --out results

A few layers of random weights in the shape of a model of 3 to 8 billion, 4-bit base, a random adapter on every linear,
and the engine as in production: CUDA graphs, decode GEMM, shared weights, Triton sampler. Trainer and engine round in
different orders, on random weights by more than on trained ones; the trainer's own distance from itself in float32 is
the floor that their difference is judged by. The table is joined from the JSON files of all families in DIR. The exit
status is 1 where an optional feature is off, a norm has noise that it should not have (or the reverse), or trainer and
engine differ by more than the bound.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import random_model
import report
import torch
from agreement import SIGMA
from family_models import MODELS, config_of, prompts_of, write_source
from qerl_kernels import select_backend
from torch import Tensor

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, TransformersEngine, VLLMEngine
from qerl_pl.engines.vllm.compat import DECODE_GEMM
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.families import family_of, noisy_norm_names
from qerl_pl.models.folder import TensorFiles
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.runtime.files import atomic_write
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

BOUND = 1.7e-3
"""Mean difference of trainer and engine on trained weights, nats a token: `results/agreement_vllm_cuda.md`."""
GRADIENT_BOUND = 0.2
"""Of bfloat16's gradient from float32's, relative: rounding makes a few hundredths, a wrong backward pass one."""
NOISE = NormNoise(SIGMA, seed=0, version=0)
STRONG = replace(NOISE, sigma=0.2)
"""Noise whose effect is far above that of rounding, to show that the engine's graphs compute with it."""
RANK = 32


@torch.no_grad()
def logprobs_of(
    policy: Policy,
    prompts: Sequence[Prompt],
    completions: Sequence[list[Completion]],
    adapter: bool,
    noise: NormNoise | None,
) -> Tensor:
    """The trainer's log-probabilities of the sampled tokens, float32 [M], computed a prompt at a time."""
    found = []
    for prompt, group in zip(prompts, completions, strict=True):
        tokens, lengths, mask, _ = (t.to(policy.device) for t in pad_completions([prompt], [group], 0))
        with random_model.noisy_norms(policy, noise):
            own = policy.token_values(tokens, lengths, mask, 1.0, reference=not adapter)[0]
        found.append(own[mask].float())
    return torch.cat(found)


def read_norms(engine: VLLMEngine | TransformersEngine) -> dict[str, Tensor]:
    """Weights of the engine's norms by module name, float32, on the CPU."""

    def read(model: torch.nn.Module) -> dict[str, Tensor]:
        named = ((name.removesuffix(".weight"), parameter) for name, parameter in model.named_parameters())
        return {name: p.detach().float().cpu().clone() for name, p in named if name.endswith("norm")}

    if isinstance(engine, VLLMEngine):
        found: dict[str, Tensor] = engine._llm.collective_rpc(lambda worker: read(worker.get_model()))[0]
        return found
    assert engine._model is not None
    return read(engine._model)


def noise_by_tensor(engine: VLLMEngine | TransformersEngine, base: Path, model_type: str) -> dict[str, Any]:
    """What the noise that was synced did to each norm of the engine, beside the numbers that were drawn.

    Returns:
        Root mean square of (weight - base's weight) in the norms before quantized linears, smallest and largest; the
        largest change of another norm; the largest difference from a drawn number; how many norms there are.
    """
    tensors, norms = TensorFiles(base), read_norms(engine)
    changes = {name: weight - tensors.read(f"{name}.weight").float() for name, weight in norms.items()}
    noisy = noisy_norm_names(norms, family_of(model_type))
    sizes = [changes[name].double().square().mean().sqrt().item() for name in noisy]
    drawn = [(changes[name] - NOISE.draw(name, len(changes[name]))).abs().max().item() for name in noisy]
    others = [change.abs().max().item() for name, change in changes.items() if name not in noisy]
    return {
        "norms": len(norms),
        "noisy": len(noisy),
        "rms_min": min(sizes),
        "rms_max": max(sizes),
        "others_max": max(others),
        "off_the_draw": max(drawn),
    }


def differences(
    engine: VLLMEngine | TransformersEngine,
    policy: Policy,
    exact: Policy,
    prompts: list[Prompt],
    max_tokens: int,
    adapter: bool,
    noise: NormNoise | None,
) -> dict[str, Any]:
    """Absolute differences in nats a token of what the engine samples now.

    Args:
        engine: Synced with this adapter and noise.
        policy: The trainer's.
        exact: The same in float32. It leaves out the last prompt, whose scores would need too much memory.
        prompts: Four completions each.
        max_tokens: Of a completion.
        adapter: Whether it is on.
        noise: In the norms of engine and trainer.
    """
    requests = [RolloutRequest(p.token_ids, tuple(range(4 * i, 4 * i + 4))) for i, p in enumerate(prompts)]
    completions = engine.generate(requests, SamplingConfig(max_tokens=max_tokens))
    sampled = torch.tensor([x for group in completions for completion in group for x in completion.logprobs])
    own = logprobs_of(policy, prompts, completions, adapter, noise).cpu()
    float32 = logprobs_of(exact, prompts[:-1], completions[:-1], adapter, noise).cpu()
    without = logprobs_of(policy, prompts, completions, adapter if noise else not adapter, None).cpu()
    count, difference = len(float32), (own - sampled).abs()
    return {
        "tokens": len(own),
        "mean": difference.mean().item(),
        "max": difference.max().item(),
        "mean_after_last_prompt": difference[count:].mean().item(),
        "trainer_from_float32": (own[:count] - float32).abs().mean().item(),
        "engine_from_float32": (sampled[:count] - float32).abs().mean().item(),
        "effect": (own - without).abs().mean().item(),
        "logprob_mean": own.mean().item(),
    }


def gradient_difference(policy: Policy, exact: Policy, prompts: Sequence[Prompt], max_tokens: int) -> float:
    """Relative difference of the adapter's gradient from that in float32, norm by norm over all of its matrices.

    Of the sum of log-probabilities of random tokens after packed prompts.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 500, (len(prompts), max_tokens), generator=generator).tolist()
    completions = [[Completion(tuple(row), (0.0,) * max_tokens, "length")] for row in ids]
    tokens, lengths, mask, _ = (t.to(policy.device) for t in pad_completions(prompts, completions, 0))
    gradients = []
    for one in (policy, exact):
        one.token_values(tokens, lengths, mask, 1.0)[0][mask].sum().backward()
        trained = (parameter for parameter in one.parameters() if parameter.requires_grad)
        gradients.append(torch.cat([p.grad.flatten().double() for p in trained if p.grad is not None]))
        one.zero_grad()
    return ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


def speed(engine: VLLMEngine | TransformersEngine, vocabulary: int, sequences: int, max_tokens: int) -> float:
    """Rollout tokens/s of so many sequences of distinct prompts of 64 tokens, the faster of two."""
    ids = torch.randint(10, vocabulary, (sequences, 64), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [RolloutRequest(tuple(row), (index,)) for index, row in enumerate(ids)]
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        completions = engine.generate(requests, SamplingConfig(max_tokens=max_tokens))
        seconds = time.perf_counter() - start
        rates.append(sum(len(completion.token_ids) for group in completions for completion in group) / seconds)
    return max(rates[1:])


def run_family(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured of one family."""
    device, start = torch.device(args.device), time.perf_counter()
    if device.type == "cuda":
        select_backend("triton")
    config, memory = config_of(name, args.shape), Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        source, base = Path(folder) / "source", Path(folder) / "base"
        write_source(source, config, device)
        quantize_checkpoint(source, base, args.format, device="cuda" if device.type == "cuda" else "cpu")
        shutil.rmtree(source)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return measure(name, base, config, args) | {"seconds": time.perf_counter() - start}


def measure(name: str, base: Path, config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """`run_family` from a quantized base on."""
    device = torch.device(args.device)
    settings = PolicyConfig(path=str(base), quantization=args.format, lora=LoraConfig(rank=RANK, alpha=float(RANK)))
    lora, prompts = settings.lora_spec, prompts_of(config, args.prompts)
    assert lora is not None
    longest = max(64, *(len(prompt.token_ids) for prompt in prompts)) + args.tokens
    spec = EngineSpec(base, settings.torch_dtype, device, RANK, lora.targets, longest)
    engine: VLLMEngine | TransformersEngine = TransformersEngine()
    if args.engine == "vllm":  # without sleep mode, which is for a GPU of one's own
        engine = VLLMEngine(kv_cache_gib=args.kv_gib, max_num_seqs=64, sleep_mode=False)
    start = time.perf_counter()
    engine.launch(spec)
    started = time.perf_counter() - start
    shared = engine.shared_weights()
    policy = Policy(base, settings, device, seed=0, shared=shared).eval()
    random_model.move_trained(policy, args.move)
    exact = Policy(base, replace(settings, dtype="float32"), device, seed=0).eval()
    exact.load_trained_state(policy.trained_state())
    rows: dict[str, Any] = {}
    kinds = (
        ("adapter", True, None),
        ("no adapter", False, None),
        ("noise", True, NOISE),
        ("strong noise", True, STRONG),
    )
    by_tensor: dict[str, Any] = {}
    for row, adapter, noise in kinds:
        engine.sync(policy.weights(0, noise, reference=not adapter))
        if noise is NOISE:
            by_tensor = noise_by_tensor(engine, base, config["model_type"])
        rows[row] = differences(engine, policy, exact, prompts, args.tokens, adapter, noise)
    gradient = gradient_difference(policy, exact, prompts[:-1], args.tokens)
    tokens_per_s = speed(engine, config["vocab_size"], 64, args.tokens)
    worker = engine._call("qerl_report") if isinstance(engine, VLLMEngine) else None
    result = {
        "family": name,
        "model": MODELS[name][0],
        "format": args.format,
        "layers": config["num_hidden_layers"],
        "linears": len(policy.weights(0).adapter or {}),
        "kernels": [] if worker is None else worker.kernels,
        "engine_linears": None if worker is None else worker.linears,
        "decode_gemm": None if worker is None else worker.decode_gemm,
        "lent": 0 if shared is None else len(shared.linears),
        "inactive": engine.inactive if isinstance(engine, VLLMEngine) else {},
        "start_s": started,
        "tokens_per_s": tokens_per_s,
        "gradient_from_float32": gradient,
        "noise": by_tensor,
        "rows": rows,
    }
    engine.close()
    return result | {"failures": failures(result, on_gpu=device.type == "cuda" and args.engine == "vllm")}


def failures(result: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """What must not be; on a GPU also where an optional feature of vLLM is off."""
    without = (DECODE_GEMM,) if result["format"] == "mxfp4" else ()
    inactive = result["inactive"].items() if on_gpu else ()
    found = [f"without {feature}: {reason}" for feature, reason in inactive if feature not in without]
    if on_gpu and result["lent"] != result["linears"]:
        found.append(f"{result['lent']} of {result['linears']} linears are lent")
    noise = result["noise"]
    for key in ("rms_min", "rms_max"):
        if abs(noise[key] / SIGMA - 1) > 1e-3:
            found.append(f"noise of {noise[key]:.3e} in a norm before quantized linears")
    if noise["others_max"] > 0:
        found.append(f"noise of up to {noise['others_max']:.3e} in other norms")
    if noise["off_the_draw"] > 1e-6:
        found.append(f"noise up to {noise['off_the_draw']:.3e} from the drawn numbers")
    if not result["gradient_from_float32"] < GRADIENT_BOUND:
        found.append(f"the gradient differs from that in float32 by {result['gradient_from_float32']:.2g} of its size")
    for name, row in result["rows"].items():
        floor = row["trainer_from_float32"]
        compared = (("mean", "all tokens", 2), ("mean_after_last_prompt", "those after the longest prompt", 3))
        for key, where, factor in compared:  # few tokens follow the longest prompt
            bound = max(BOUND, factor * floor)
            if row[key] > bound:
                found.append(f"{name}: {where} differ by {row[key]:.2e} nats a token, above {bound:.2e}")
        if name != "noise" and row["effect"] < 3 * row["mean"]:
            found.append(f"{name}: without it log-probabilities change by {row['effect']:.2e}, too little to show it")
    return found


def table(results: Sequence[Mapping[str, Any]], at_once: int) -> str:
    """The families as Markdown: agreement, then noise and features."""
    agreement, features = [], []
    for result in results:
        for name, row in result["rows"].items():
            keys = ("mean", "max", "mean_after_last_prompt", "trainer_from_float32", "engine_from_float32", "effect")
            agreement.append([result["family"], name, row["tokens"], *(f"{row[key]:.2e}" for key in keys)])
        noise, linears = result["noise"], result["engine_linears"]
        features.append(
            [
                result["family"],
                f"{result['model']}, {result['layers']} layers, {result['format']}",
                ", ".join(result["kernels"]) or "–",
                f"{result['lent']} of {result['linears']}",
                "–" if linears is None else f"{result['decode_gemm']} of {linears}",
                f"{noise['noisy']} of {noise['norms']}",
                f"{noise['rms_min']:.3e} to {noise['rms_max']:.3e}",
                f"{noise['others_max']:.0e}",
                f"{result['gradient_from_float32']:.3f}",
                f"{result['tokens_per_s']:.0f}",
                "; ".join(result["failures"]) or "ok",
            ]
        )
    headers = ["family", "with", "tokens", "mean", "max", "mean after the longest prompt"]
    headers += ["trainer from float32", "engine from float32", "effect of adapter or noise"]
    text = "Log-probabilities of trainer and engine, absolute difference in nats a token\n\n"
    text += report.markdown(headers, agreement)
    headers = ["family", "shape of", "kernels", "linears lent", "decode GEMM", "norms with noise", "its size (rms)"]
    headers += [
        "largest change of other norms",
        "gradient from float32",
        f"tokens/s, {at_once} at once on the machine",
        "verdict",
    ]
    return f"{text}\n\nNoise of {SIGMA} and features\n\n{report.markdown(headers, features)}"


def write_table(out: Path, at_once: int) -> dict[str, list[str]]:
    """Join the table of all families that have a result in a folder; returns the failures of each."""
    files = [out / "families" / f"{name}.json" for name in MODELS]
    results = [json.loads(file.read_text()) for file in files if file.is_file()]
    report.write(out, "families", table(results, at_once), results)
    return {result["family"]: result["failures"] for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=MODELS, help="by default all; several in a process each")
    parser.add_argument("--at-once", type=int, help="processes; by default as many on a GPU and one on a CPU")
    parser.add_argument("--shape", choices=("middle", "tiny"), default="middle")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), default="nvfp4")
    parser.add_argument("--prompts", type=int, default=8, help="with four completions each")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a completion")
    parser.add_argument("--move", type=float, default=0.03, help="standard deviation added to the adapter's matrices")
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    names, results = args.family or list(MODELS), args.out / "families"
    at_once = args.at_once or (len(names) if args.device == "cuda" else 1)
    if len(names) == 1:
        result = run_family(names[0], args)
        atomic_write(results / f"{names[0]}.json", json.dumps(result).encode())
        write_table(args.out, at_once)
        sys.exit(1 if result["failures"] else 0)

    def run(name: str) -> str:
        """What a family's process wrote to the standard error."""
        words = [sys.executable, *sys.argv, "--at-once", str(at_once), "--family", name]
        return subprocess.run(words, check=False, capture_output=True, text=True).stderr

    shutil.rmtree(results, ignore_errors=True)
    with ThreadPoolExecutor(at_once) as pool:
        errors = dict(zip(names, pool.map(run, names), strict=True))
    found = write_table(args.out, at_once)
    shutil.rmtree(results)  # families.json has them all
    failed = [f"{name}: {failure}" for name, lines in found.items() for failure in lines]
    failed += [f"{name} has no result: {error[-2000:]}" for name, error in errors.items() if name not in found]
    print("\n".join(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
