"""Log-probabilities of trainer and engine on trained weights: adapter on and off, and with noise in the engine.

    python benchmarks/agreement.py --out results                        # a GPU with vLLM: Marlin, shared weights
    python benchmarks/agreement.py --adapter fused merged --out results
    python benchmarks/agreement.py --adapter fused merged --path MODEL --start RUN/adapter --data TABLE --out results
    python benchmarks/agreement.py --engine transformers --device cpu --out results

The policy is the toy policy at a width that Marlin takes (trained on first use, on the CPU, in a minute or two) with
the random adapter of the parity check, or `--path` with an adapter that a run has trained. The engine samples at
temperature 1; the trainer then computes the same tokens. ESS is that of the tokens' importance weights, over their
number.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import report
import torch
from qerl_kernels import select_backend
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.chat.template import render_prompts
from qerl_pl.datamodules import TableConfig
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.toy.policy import ToyConfig
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

SIGMA = 1e-2


def prompts_of(base: Path, count: int, data: str | None) -> list[Prompt]:
    """The first problems of a table, or held-out ones of the toy task, as the trainer would render them."""
    if data is None:
        questions = [ArithmeticTask().problem(index, "validation").question for index in range(count)]
    else:
        questions = [row.question for row in TableConfig(data, limit=count).rows("table")]
    ids = render_prompts(AutoTokenizer.from_pretrained(base), questions)
    return [Prompt(str(index), tuple(tokens), "", "") for index, tokens in enumerate(ids)]


@torch.no_grad()
def logprobs_of(
    policy: Policy, prompts: Sequence[Prompt], completions: list[list[Completion]], adapter: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all sampled tokens: the trainer's and the engine's."""
    device = next(policy.parameters()).device
    tokens, lengths, mask, sampled = (t.to(device) for t in pad_completions(prompts, completions, 0))
    own = policy.token_values(tokens, lengths, mask, 1.0, reference=not adapter)[0]
    return own[mask], sampled[mask]


def compare(engine: RolloutEngine, policy: Policy, prompts: Sequence[Prompt], tokens: int) -> Iterator[dict[str, Any]]:
    """Absolute differences in nats a token: adapter on, off unless it is where training started, and on with noise in
    the engine only."""
    requests = [RolloutRequest(prompt.token_ids, (index,)) for index, prompt in enumerate(prompts)]
    off = [] if policy.config.start else [(False, None)]
    for adapter, noise in ((True, None), *off, (True, NormNoise(SIGMA, seed=0, version=0))):
        noise_std = engine.sync(policy.weights(0, noise, reference=not adapter))
        completions = engine.generate(requests, SamplingConfig(max_tokens=tokens))
        own, sampled = logprobs_of(policy, prompts, completions, adapter)
        other, _ = logprobs_of(policy, prompts, completions, not adapter)
        difference, effect = (own - sampled).abs(), (own - other).abs()
        weights = (own - sampled).double().exp()
        yield {
            "adapter": "on" if adapter else "off",
            "sigma": noise.sigma if noise else 0.0,
            "sigma_measured": noise_std,
            "tokens": len(own),
            "mean": difference.mean().item(),
            "p99": difference.quantile(0.99).item(),
            "max": difference.max().item(),
            "ess": (weights.sum() ** 2 / (len(own) * weights.square().sum())).item(),
            "adapter_effect": effect.mean().item(),
            "logprob_mean": own.mean().item(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens of a completion")
    parser.add_argument("--steps", type=int, default=300, help="of the toy policy's training")
    parser.add_argument("--strength", type=float, default=1.0, help="of the parity check's random adapter")
    parser.add_argument("--adapter", nargs="+", default=[""], help="of VLLMEngine, one after the other")
    parser.add_argument("--path", help="model in place of the toy policy")
    parser.add_argument("--quantization", default="nvfp4")
    parser.add_argument("--start", help="folder of a trained adapter, in place of a random one")
    parser.add_argument("--data", help="table of prompts in place of the toy task")
    parser.add_argument("--graphs", action="store_true", help="compile, and capture CUDA graphs")
    parser.add_argument(
        "--dense-above", type=int, default=512, help="see VLLMEngine; 1 leaves only single tokens to Marlin"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        select_backend("triton")
    toy = ToyConfig(width=256, intermediate=512, heads=4, steps=args.steps)
    lora = LoraConfig() if args.start else LoraConfig(rank=32, alpha=32.0, targets=PROJECTIONS)
    config = PolicyConfig(path=args.path, toy=toy, lora=lora, quantization=args.quantization, adapter=args.start)
    base, lora_spec = config.base_folder(), config.lora_spec
    assert lora_spec is not None
    prompts = prompts_of(base, args.prompts, args.data)
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.tokens
    spec = EngineSpec(base, config.torch_dtype, device, lora_spec.rank, lora_spec.targets, longest)
    rows: list[dict[str, Any]] = []
    for way in args.adapter:
        engine: RolloutEngine = TransformersEngine()
        if args.engine == "vllm":
            given = {"adapter": way} if way else {}
            engine = VLLMEngine(enforce_eager=not args.graphs, dense_above=args.dense_above, **given)
        engine.launch(spec)
        shared = engine.shared_weights()
        policy = Policy(base, config, device, seed=0, shared=shared).eval()
        with nullcontext() if args.start else policy.perturbed(0, args.strength):
            for row in compare(engine, policy, prompts, args.tokens):
                borrowed = 0 if shared is None else len(shared.linears)
                rows.append({"way": way or "default", "borrowed": borrowed} | row)
                write(args, rows, shown=False)
        del policy, shared
        engine.close()
    write(args, rows, shown=True)


def write(args: argparse.Namespace, rows: list[dict[str, Any]], shown: bool) -> None:
    """Write what has been measured so far."""
    headers = ["engine's adapter", "linears shared", "adapter", "sigma", "measured", "tokens"]
    headers += ["mean abs difference", "p99", "max", "adapter's effect, mean", "1 - ESS"]
    cells = [
        [row[name] for name in ("way", "borrowed", "adapter", "sigma")]
        + [f"{row['sigma_measured']:.3e}", row["tokens"]]
        + [f"{row[name]:.2e}" for name in ("mean", "p99", "max", "adapter_effect")]
        + [f"{1 - row['ess']:.2e}"]
        for row in rows
    ]
    how = f", {'with' if args.graphs else 'without'} CUDA graphs, dense above {args.dense_above} tokens"
    policy = f"{args.path or 'toy policy'}, {args.quantization}, {args.start or f'random adapter {args.strength:g}'}"
    table = f"{report.markdown(headers, cells)}\n\n{policy}; {args.engine} on {args.device}{how}; nats a token"
    report.write(args.out, f"agreement_{args.engine}_{args.device}_{args.quantization}", table, rows, shown=shown)


if __name__ == "__main__":
    main()
