"""Log-probabilities of trainer and engine on trained weights: adapter on and off, and with noise in the engine.

    python benchmarks/agreement.py --out results                              # a GPU with vLLM: Marlin, lent weights
    python benchmarks/agreement.py --engine transformers --device cpu --out results

The policy is the toy policy at a width that Marlin takes (trained on first use, on the CPU, in a minute or two), its
adapter moved away from zero. The engine samples at temperature 1; the trainer then computes the same tokens.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import torch
from qerl_kernels import select_backend
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.chat.template import render_prompts
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.toy.policy import ToyConfig
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

SIGMA = 1e-2


def prompts_of(base: Path, count: int) -> list[Prompt]:
    """The first held-out problems, as the trainer would render them."""
    problems = [ArithmeticTask().problem(index, "validation") for index in range(count)]
    ids = render_prompts(AutoTokenizer.from_pretrained(base), [problem.question for problem in problems])
    return [
        Prompt(f"validation-{index}", tuple(tokens), problem.question, str(problem.answer))
        for index, (problem, tokens) in enumerate(zip(problems, ids, strict=True))
    ]


def move_adapter(policy: Policy, size: float) -> None:
    """Add noise to all that is trained, so that an adapter that is lost shows."""
    generator = torch.Generator().manual_seed(7)
    state = policy.trained_state()
    policy.load_trained_state(
        {name: t + size * torch.randn(t.shape, generator=generator).to(t.device) for name, t in state.items()}
    )


@torch.no_grad()
def logprobs_of(
    policy: Policy, prompts: Sequence[Prompt], completions: list[list[Completion]], adapter: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all sampled tokens: the trainer's and the engine's."""
    device = next(policy.parameters()).device
    tokens, lengths, mask, sampled = (t.to(device) for t in pad_completions(prompts, completions, 0))
    own = policy.token_values(tokens, lengths, mask, 1.0, reference=not adapter)[0]
    return own[mask], sampled[mask]


def compare(engine: RolloutEngine, policy: Policy, prompts: Sequence[Prompt], tokens: int) -> list[dict[str, Any]]:
    """Absolute differences in nats a token: adapter on, adapter off, and on with noise in the engine only."""
    requests = [RolloutRequest(prompt.token_ids, (index,)) for index, prompt in enumerate(prompts)]
    rows = []
    for adapter, noise in ((True, None), (False, None), (True, NormNoise(SIGMA, seed=0, version=0))):
        synced = engine.sync(policy.weights(0, noise, reference=not adapter))
        completions = engine.generate(requests, SamplingConfig(max_tokens=tokens))
        own, sampled = logprobs_of(policy, prompts, completions, adapter)
        other, _ = logprobs_of(policy, prompts, completions, not adapter)
        difference, effect = (own - sampled).abs(), (own - other).abs()
        rows.append(
            {
                "adapter": "on" if adapter else "off",
                "sigma": noise.sigma if noise else 0.0,
                "sigma_measured": synced.noise_std,
                "tokens": len(own),
                "mean": difference.mean().item(),
                "max": difference.max().item(),
                "adapter_effect": effect.mean().item(),
                "logprob_mean": own.mean().item(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens of a completion")
    parser.add_argument("--steps", type=int, default=300, help="of the toy policy's training")
    parser.add_argument("--move", type=float, default=0.05, help="standard deviation added to the adapter's matrices")
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
    lora = LoraConfig(rank=32, alpha=32.0, targets=PROJECTIONS)
    config = PolicyConfig(toy=toy, lora=lora)
    base = config.base_folder()
    prompts = prompts_of(base, args.prompts)
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.tokens
    spec = EngineSpec(base, config.torch_dtype, device, 32, PROJECTIONS, longest)
    engine: RolloutEngine = TransformersEngine()
    if args.engine == "vllm":
        engine = VLLMEngine(enforce_eager=not args.graphs, dense_above=args.dense_above)
    engine.launch(spec)
    shared = engine.shared_weights()
    policy = Policy(base, config, device, seed=0, shared=shared).eval()
    move_adapter(policy, args.move)
    rows = compare(engine, policy, prompts, args.tokens)
    borrowed = 0 if shared is None else len(shared.linears)
    engine.close()
    headers = ["adapter", "sigma", "measured", "tokens", "mean abs difference", "max", "adapter's effect, mean"]
    cells = [
        [row["adapter"], row["sigma"], f"{row['sigma_measured']:.3e}", row["tokens"]]
        + [f"{row[name]:.2e}" for name in ("mean", "max", "adapter_effect")]
        for row in rows
    ]
    how = f", {'with' if args.graphs else 'without'} CUDA graphs, dense above {args.dense_above} tokens"
    about = f"{args.engine} on {args.device}{how}, bfloat16; {borrowed} linears borrowed; nats a token"
    table = f"{report.markdown(headers, cells)}\n\n{about}"
    name = f"agreement_{args.engine}_{args.device}" + (
        f"_dense_above_{args.dense_above}" if args.dense_above != 512 else ""
    )
    report.write(args.out, name, table, {"borrowed": borrowed, "rows": rows})


if __name__ == "__main__":
    main()
