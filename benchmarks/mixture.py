"""A mixture of experts on one GPU: does the trainer compute what vLLM's fused experts do, and how fast are both?

    python benchmarks/mixture.py --out results  # eight layers of Qwen3-30B-A3B's shape, under two and a half minutes
    python benchmarks/mixture.py --shape tiny --device cpu --prompt 16 --tokens 16 --update 256 --out out
    python benchmarks/mixture.py --shape gpt-oss-20b --layers 4 --parts agreement update --out results

Weights in NVFP4, of gpt-oss the experts alone in MXFP4 as published, an adapter on attention, bfloat16. Weights are
random, and exaggerate rounding. "agreement" samples with the adapter on and off, and with
noise; the trainer computes the same tokens with the same noise, choosing experts anew or those of the sampler (R3).
Both are compared, too, with the trainer in float32 and with the sampler's experts. "update" is a forward and a backward
pass over packed sequences of 512 tokens, and an AdamW step, by the engine's memory. Each part writes what has been
measured so far. Rollouts are measured by `rollout_speed.py --shape 30b-a3b --layers 8`.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_profile
import random_model
import report
import torch
from engine_speed import prompts_of, timed, used_gib
from qerl_kernels import ExpertBiases, mixture_of_experts, select_backend
from qerl_kernels import experts as kernels
from torch import Tensor
from transformers import AutoConfig
from update_speed import measure

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.engines.base import SharedWeights
from qerl_pl.engines.vllm.linear_methods import relative_difference
from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BIASES
from qerl_pl.models.memory import GIB
from qerl_pl.models.shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.experts import PackedExperts
from qerl_pl.rollout.collector import pad_completions, pad_routing
from qerl_pl.runtime.random_state import set_cublas_config
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

PARTS = ("agreement", "update")
NOISE = NormNoise(1e-2, seed=0, version=0)
KINDS = ((True, None), (False, None), (True, NOISE))
"""Adapter and noise of the compared rollouts."""
RANK = 32


def kv_gib(args: argparse.Namespace) -> float:
    """Size of the key/value cache for the compared completions, GiB, rounded up: blocks have up to 128 tokens."""
    config = AutoConfig.for_model(**random_model.mixture_config(args.shape, args.layers))
    tokens = args.compared * (args.prompt + args.tokens + 128)  # of many sequences, which no window bounds
    return math.ceil(8 * Shape.of(config).sequence_kv_bytes(tokens, torch.bfloat16, under_way=tokens) / GIB) / 8


def launch(base: Path, config: PolicyConfig, args: argparse.Namespace) -> tuple[RolloutEngine, str | None]:
    """An engine, and why it shares no weights where it should and does not."""
    lora = config.lora_spec
    assert lora is not None
    device = torch.device(args.device)
    longest = args.prompt + args.tokens
    spec = EngineSpec(*(base, config.torch_dtype, device, lora.rank, lora.targets, longest), record_routing=True)
    if args.engine == "transformers":
        reference = TransformersEngine()
        reference.launch(spec)
        return reference, None
    settings = {"kv_cache_gib": kv_gib(args), "max_num_seqs": args.compared, "enforce_eager": True}
    start = time.perf_counter()
    engine, reason = VLLMEngine(**settings), None
    try:
        engine.launch(spec)
    except UserError as error:
        if device.type != "cuda":
            raise
        reason = str(error)
        print("starts again without shared weights:", reason, flush=True)
        engine = VLLMEngine(**settings, share_weights=False)
        engine.launch(spec)
    print(f"vLLM started in {time.perf_counter() - start:.0f} s: {engine.kernels}, off: {engine.inactive}", flush=True)
    return engine, reason


def logprobs_of(
    policy: Policy, batch: Sequence[Tensor], adapter: bool, noise: NormNoise | None, routing: Tensor | None
) -> Tensor:
    """Log-probabilities of a batch's sampled tokens, float32 [M], with the noise that sampled them."""
    tokens, lengths, mask, _ = batch
    with random_model.noisy_norms(policy, noise):
        found = policy.token_values(tokens, lengths, mask, 1.0, reference=not adapter, routing=routing)[0]
    return found[mask].float()


def other_experts(
    policy: Policy, batch: Sequence[Tensor], adapter: bool, noise: NormNoise | None, routing: Tensor
) -> float:
    """Share of (token, layer) whose set of experts the trainer's router chooses otherwise than the sampler's."""
    tokens, lengths, _, _ = batch
    chosen: list[Tensor] = []
    blocks = [module for module in policy.modules() if isinstance(module, PackedExperts)]
    for block in blocks:
        block.route = _watched(block.route, chosen)  # type: ignore[method-assign]
    logprobs_of(policy, batch, adapter, noise, None)
    for block in blocks:
        del block.route
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    own = torch.stack(chosen, dim=1).sort(-1).values
    theirs = routing[real].long().sort(-1).values
    recorded = theirs[:, 0, 0] >= 0
    return (own != theirs)[recorded].any(-1).float().mean().item()


def _watched(route: Any, chosen: list[Tensor]) -> Any:
    def watched(x: Tensor) -> tuple[Tensor, Tensor]:
        found = route(x)
        chosen.append(found[1])
        return found

    return watched


def prompts_for(args: argparse.Namespace) -> list[Prompt]:
    """Random tokens."""
    requests = prompts_of(args.compared, args.prompt, random_model.MIXTURES[args.shape][-1])
    return [Prompt(str(index), request.prompt_ids, "", "") for index, request in enumerate(requests)]


@torch.no_grad()
def agreement(
    engine: RolloutEngine, policy: Policy, exact: Policy | None, prompts: Sequence[Prompt], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Differences of log-probabilities of trainer, engine and, of the first completions, the trainer in float32."""
    requests = [RolloutRequest(prompt.token_ids, (index,)) for index, prompt in enumerate(prompts)]
    rows = []
    for adapter, noise in KINDS:
        engine.sync(policy.weights(0, noise, reference=not adapter))
        completions: list[list[Completion]] = engine.generate(requests, SamplingConfig(max_tokens=args.tokens))
        batch = [tensor.to(policy.device) for tensor in pad_completions(prompts, completions, 0)]
        recorded = pad_routing(completions, batch[0].shape)
        assert recorded is not None
        routing = recorded.to(policy.device)
        said = batch[3][batch[2]]
        float32 = said[:0]
        if exact is not None:
            first = [tensor[: args.float32] for tensor in batch]
            float32 = logprobs_of(exact, first, adapter, noise, routing[: args.float32])
        flipped = other_experts(policy, batch, adapter, noise, routing)
        without = logprobs_of(policy, batch, not adapter, noise, routing)
        for replay in (False, True):
            own = logprobs_of(policy, batch, adapter, noise, routing if replay else None)
            gap = (own - said).abs()
            rows.append(
                {
                    "adapter": "on" if adapter else "off",
                    "sigma": noise.sigma if noise else 0.0,
                    "replay": replay,
                    "tokens": len(gap),
                    "mean": gap.mean().item(),
                    "p99": gap.quantile(0.99).item(),
                    "max": gap.max().item(),
                    "other_experts": flipped,
                    "trainer_from_float32": (own[: len(float32)] - float32).abs().mean().item(),
                    "engine_from_float32": (said[: len(float32)] - float32).abs().mean().item(),
                    "adapter_effect": (without - said).abs().mean().item(),
                    "logprob_mean": said.mean().item(),
                }
            )
    return rows


@torch.no_grad()
def grouped_against_loop(policy: Policy, device: torch.device) -> dict[str, float]:
    """Relative difference of the grouped product from a loop over experts, and seconds of each, for one layer."""
    block = next(module for module in policy.modules() if isinstance(module, PackedExperts))
    stacks = (block._gate_up, block._down)
    biases = ExpertBiases(*map(block.get_parameter, BIASES)) if block._has_biases else None
    settings = (*stacks, block._activation, biases, block._experts.stored_in_stacks)
    dtype = torch.bfloat16
    x = torch.randn(4096, stacks[0].shape[2], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    topk_weights, topk_ids = block.route(x)
    found, has_kernel = {}, kernels._has_kernel
    for name, choice in (("grouped", has_kernel), ("loop", lambda rows: False)):
        kernels._has_kernel = choice
        y = mixture_of_experts(x, topk_weights, topk_ids, *settings)
        seconds = [timed(device, lambda: mixture_of_experts(x, topk_weights, topk_ids, *settings)) for _ in range(3)]
        found[name] = (y, statistics.median(seconds))
    kernels._has_kernel = has_kernel
    (one, one_s), (other, other_s) = found["grouped"], found["loop"]
    difference = relative_difference(one, other)
    return {"difference": difference, "grouped_s": one_s, "loop_s": other_s}


def update(policy: Policy, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Speed and memory of the update by the number of tokens; the memory includes the engine's."""
    vocabulary = random_model.MIXTURES[args.shape][-1]
    rows = []
    for tokens in args.update:
        found = measure(policy, tokens, 512, vocabulary, 2, profile=args.profile)
        rows.append({"tokens": tokens, "used_gib": used_gib(torch.device(args.device)), **found})
        print({name: value for name, value in rows[-1].items() if name != "profile"}, flush=True)
    return rows


def write(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Write and print what has been measured so far."""
    tables = []
    if rows := found.get("agreement"):
        headers = ["adapter", "noise", "experts", "tokens", "mean", "99 %", "max", "other experts chosen"]
        headers += ["trainer from float32", "engine from float32", "adapter's effect", "mean log-probability"]
        names = ("mean", "p99", "max", "other_experts", "trainer_from_float32", "engine_from_float32")
        cells = [
            [row["adapter"], row["sigma"], "the sampler's" if row["replay"] else "chosen anew", row["tokens"]]
            + [f"{row[name]:.2e}" for name in (*names, "adapter_effect", "logprob_mean")]
            for row in rows
        ]
        tables.append("Differences of log-probabilities, nats a token:\n\n" + report.markdown(headers, cells))
    if rows := found.get("update"):
        names = ("tokens", "seconds", "tokens_per_s", "peak_gib", "used_gib")
        cells = [[f"{row[name]:.4g}" for name in names] for row in rows]
        tables.append(report.markdown(["tokens", "s an update", "tokens/s", "peak GiB", "GPU's GiB"], cells))
        profiles = {f"update of {row['tokens']} tokens": row["profile"] for row in rows if "profile" in row}
        tables += kernel_profile.tables(profiles, "an update")
    about = {name: value for name, value in found.items() if name not in PARTS}
    tables.append(", ".join(f"{name}: {value}" for name, value in about.items()))
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("base", "out")}
    report.write(args.out, f"mixture_{args.shape}", "\n\n".join(tables), {"settings": settings, **found})


def trained_policy(
    base: Path, config: PolicyConfig, device: torch.device, shared: SharedWeights | None, move: float
) -> Policy:
    """The policy, its adapter moved away from zero by random numbers of this standard deviation."""
    policy = Policy(base, config, device, seed=0, shared=shared)
    random_model.move_trained(policy, move)
    return policy


def float32_policy(base: Path, config: PolicyConfig, policy: Policy) -> Policy:
    """The policy computed in float32, with a base of its own: on a GPU expert by expert."""
    exact = Policy(base, replace(config, dtype="float32"), policy.device, seed=0).eval()
    exact.load_trained_state(policy.trained_state())
    return exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.MIXTURES, default="30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a completion")
    parser.add_argument("--compared", type=int, default=16, help="completions that trainer and engine are compared on")
    parser.add_argument("--float32", type=int, default=16, help="of them, compared in float32, too; 0 for none")
    parser.add_argument("--move", type=float, default=0.02, help="standard deviation added to the adapter's matrices")
    parser.add_argument("--update", type=int, nargs="+", default=[4096, 16384], help="packed tokens of an update")
    parser.add_argument("--profile", action="store_true", help="also tables of an update by kind of kernel")
    parser.add_argument("--base", type=Path, help="a folder with a model that this script wrote there; None writes one")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    set_cublas_config()
    device, start = torch.device(args.device), time.perf_counter()
    if device.type == "cuda":
        select_backend("triton")
    with tempfile.TemporaryDirectory(prefix="qerl-mixture-") as folder:
        base = args.base or Path(folder) / "base"
        if args.base is None:
            write_base(base, device, args)
            print(f"wrote the model in {time.perf_counter() - start:.0f} s", flush=True)
        run(base, device, args)


def write_base(base: Path, device: torch.device, args: argparse.Namespace) -> None:
    """Write the model in 4 bits."""
    random_model.write_random(base, random_model.mixture_config(args.shape, args.layers), device)


def run(base: Path, device: torch.device, args: argparse.Namespace) -> None:
    """All parts; the table is written after each."""
    lora = LoraConfig(rank=RANK, alpha=float(RANK))
    config = PolicyConfig(path=str(base), lora=lora, gradient_checkpointing=True)
    engine, reason = launch(base, config, args)
    shared = engine.shared_weights()
    borrowed = 0 if shared is None else len(shared.linears) + len(shared.experts)
    found: dict[str, Any] = {"not_shared": reason, "borrowed": borrowed}
    policy = trained_policy(base, config, device, shared, args.move).eval()
    found["layer"] = grouped_against_loop(policy, device)
    if "agreement" in args.parts:
        exact = float32_policy(base, config, policy) if args.float32 else None
        found["agreement"] = agreement(engine, policy, exact, prompts_for(args), args)
        write(found, args)
        del exact  # the update's memory is without it
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if "update" in args.parts:
        engine.sleep()
        found["update"] = update(policy.train(), args)
        write(found, args)
    engine.close()


if __name__ == "__main__":
    main()
