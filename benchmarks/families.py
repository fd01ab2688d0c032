"""Every dense family at a middle size: trainer against engine, noise by tensor, active features, tokens/s.

    python benchmarks/families.py --out results                        # a GPU with vLLM: all families, six at once
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

import report
import torch
from agreement import SIGMA, move_adapter
from qerl_kernels import select_backend
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, TransformersEngine, VLLMEngine
from qerl_pl.formats.architecture import family_of, noisy_norm_names
from qerl_pl.formats.model_folder import ShardWriter, TensorFiles
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.trainer_noise import TrainerNoise
from qerl_pl.rollout.experience import pad_completions
from qerl_pl.toy.tokenizer import build_tokenizer
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

BOUND = 1.7e-3
"""Mean difference of trainer and engine on trained weights, nats a token: `results/agreement_vllm_cuda.md`."""
GRADIENT_BOUND = 0.1
"""Of bfloat16's gradient from float32's, relative: rounding makes a few hundredths, a wrong backward pass one."""
NOISE = NormNoise(SIGMA, seed=0, version=0)
RANK = 32
LLAMA_3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def long_rope(pairs: int, original: int = 4096) -> dict[str, Any]:
    """Phi-4 mini's kind, with factors of this size for so many pairs of channels."""
    factors: dict[str, Any] = {
        "short_factor": [1 + 0.01 * i for i in range(pairs)],
        "long_factor": [1 + i for i in range(pairs)],
    }
    rest = {"original_max_position_embeddings": original, "partial_rotary_factor": 0.75}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **rest}


def layers_of(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


TINY = {**layers_of(256, 512, 2, 4, 2, 64), "vocab_size": 512, "max_position_embeddings": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama-3.1-8B",
        {
            **layers_of(4096, 14336, 4, 32, 8, 128),
            "rope_parameters": LLAMA_3 | {"rope_theta": 5e5, "original_max_position_embeddings": 4096},
        },
    ),
    "mistral": (
        "Mistral-7B-v0.1",
        {**layers_of(4096, 14336, 4, 32, 8, 128), "sliding_window": 4096, "rope_parameters": plain_rope(1e4)},
    ),
    "qwen2": ("Qwen2.5-7B", {**layers_of(3584, 18944, 4, 28, 4, 128), "rope_parameters": plain_rope(1e6)}),
    "qwen3": ("Qwen3-8B", {**layers_of(4096, 12288, 4, 32, 8, 128), "rope_parameters": plain_rope(1e6)}),
    "phi3": (
        "Phi-4-mini",
        {
            **layers_of(3072, 8192, 4, 24, 8, 128),
            "sliding_window": 262144,
            "original_max_position_embeddings": 4096,
            "rope_parameters": long_rope(48),
            "tie_word_embeddings": True,
        },
    ),
    "phi3_mini": (
        "Phi-3-mini-4k",
        {**layers_of(3072, 8192, 4, 32, 32, 96), "sliding_window": 2047, "rope_parameters": plain_rope(1e4)},
    ),
    "gemma3_text": (
        "Gemma-3-4B",
        {
            **layers_of(2560, 10240, 6, 8, 4, 256),
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
            "rope_parameters": {
                "sliding_attention": plain_rope(1e4),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
}
"""By family, the model whose layers they are and config.json; phi3_mini has heads of 96 channels and a window."""


def config_of(name: str, shape: str) -> dict[str, Any]:
    """config.json; no token ends a completion, so that every one has its full length."""
    config: dict[str, Any] = {
        "vocab_size": 32768,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "attention_dropout": 0.0,
    }
    config |= {"tie_word_embeddings": False} | MODELS[name][1]
    if shape == "tiny":
        config |= TINY | ({"sliding_window": 24} if "sliding_window" in config else {})
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][-2:]
        if "original_max_position_embeddings" in config:
            config |= {"rope_parameters": long_rope(24, 128), "original_max_position_embeddings": 128}
    model_type = "phi3" if name.startswith("phi3") else name
    config |= {"model_type": model_type, "architectures": [f"{family_of(model_type).classes}ForCausalLM"]}
    return config | {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def write_source(folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """A 16-bit checkpoint of random weights, whose norms and biases show, with the toy tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    writer, generator = ShardWriter(folder), torch.Generator(device).manual_seed(0)
    family = family_of(config["model_type"])
    # Scaled embeddings that are the output layer, too, repeat the last token unless they are small beside the layers.
    scaled = family.embedding_scale is not None
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if "norm" in name:
            middle = 5.0 if scaled and name == "model.norm.weight" else 1.0  # multiplies the logits
            values.uniform_(middle - 0.25, middle + 0.25, generator=generator).sub_(family.norm_offset)
        else:
            values.normal_(std=0.004 if scaled and "embed" in name else 0.02, generator=generator)
        writer.add(name, values)
    writer.finish()


def prompts_of(config: Mapping[str, Any], count: int) -> list[Prompt]:
    """Random prompts of 16 to 256 tokens (a tenth of it in the tiny shape), the last one longer than the window."""
    vocabulary, known = config["vocab_size"], config["max_position_embeddings"]
    generator = torch.Generator().manual_seed(1)
    longest = 256 if known > 256 else 26
    window = config.get("sliding_window") or known
    lengths = torch.randint(longest // 16, longest + 1, (count,), generator=generator).tolist()
    lengths[-1] = window + longest // 2 if window < known else 3 * longest
    return [
        Prompt(str(index), tuple(torch.randint(10, vocabulary, (length,), generator=generator).tolist()), "", "")
        for index, length in enumerate(lengths)
    ]


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
        rows = torch.arange(len(tokens))
        with TrainerNoise(policy.trained.norms(), noise, None).added(rows):
            own = policy.token_logprobs(tokens, lengths, mask, 1.0, reference=not adapter)[0]
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
        one.token_logprobs(tokens, lengths, mask, 1.0)[0][mask].sum().backward()
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
    move_adapter(policy, args.move)
    exact = Policy(base, replace(settings, dtype="float32"), device, seed=0).eval()
    exact.load_trained_state(policy.trained_state())
    rows: dict[str, Any] = {}
    for row, adapter, noise in (("adapter", True, None), ("no adapter", False, None), ("noise", True, NOISE)):
        synced = engine.sync(policy.weights(0, noise, reference=not adapter))
        rows[row] = differences(engine, policy, exact, prompts, args.tokens, adapter, noise)
    by_tensor = noise_by_tensor(engine, base, config["model_type"]) | {"std_reported": synced.noise_std}
    gradient = gradient_difference(policy, exact, prompts[:-1], args.tokens)
    tokens_per_s = speed(engine, config["vocab_size"], 64, args.tokens)
    worker = engine._call("qerl_report") if isinstance(engine, VLLMEngine) else None
    result = {
        "family": name,
        "model": MODELS[name][0],
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
    found = [f"without {feature}: {reason}" for feature, reason in result["inactive"].items() if on_gpu]
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
        bound = max(BOUND, 2 * row["trainer_from_float32"])
        found += [
            f"{name}: {where} differ by {row[key]:.2e} nats a token, above {bound:.2e}"
            for key, where in (("mean", "all tokens"), ("mean_after_last_prompt", "those after the longest prompt"))
            if row[key] > bound
        ]
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
                f"{result['model']}, {result['layers']} layers",
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


def result_file(out: Path, name: str) -> Path:
    return out / f"families_{name}.json"


def write_table(out: Path, at_once: int) -> list[str]:
    """Join the table of all families that have a JSON file in a folder; returns what failed."""
    files = [result_file(out, name) for name in MODELS]
    results = [json.loads(file.read_text())["results"] for file in files if file.is_file()]
    report.write(out, "families", table(results, at_once), results)
    return [f"{result['family']}: {failure}" for result in results for failure in result["failures"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=MODELS, help="by default all, each in a process of its own")
    parser.add_argument("--at-once", type=int, help="processes; by default all on a GPU and one on a CPU")
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
    at_once = args.at_once or (len(MODELS) if args.device == "cuda" else 1)
    if args.family:
        result = run_family(args.family, args)
        report.write(args.out, f"families_{args.family}", table([result], at_once), result)
        sys.exit(1 if result["failures"] else 0)

    def run(name: str) -> int:
        return subprocess.run([sys.executable, *sys.argv, "--family", name], check=False).returncode

    for name in MODELS:
        result_file(args.out, name).unlink(missing_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        statuses = dict(zip(MODELS, pool.map(run, MODELS), strict=True))
    failed = write_table(args.out, at_once)
    failed += [
        f"{name}: status {status} and no result"
        for name, status in statuses.items()
        if not result_file(args.out, name).is_file()
    ]
    print("\n".join(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
