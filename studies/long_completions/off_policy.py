"""How far noise moves the sampler from the trainer, and what each correction makes of it, by the completion's length.

    python -m studies.long_completions.off_policy MODEL --data test.jsonl --out results    # or --engine transformers

For each sigma the NVFP4 policy samples completions with noise and an engine of this package, and the trainer computes
its own log-probabilities. No completion ends early: the model's end-of-sequence tokens are replaced, and the table of a
length is that of the first so many tokens of all completions. The adapter is new, so that the trainer is the base.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import select_backend
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import report
from qerl_pl.algorithm import GRPO, NormNoise, RolloutCorrection
from qerl_pl.algorithm.off_policy import PRESETS, correction_weights, level_log_ratio
from qerl_pl.datamodules import TableDataModule
from qerl_pl.engines import EngineSpec, TransformersEngine, VLLMEngine
from qerl_pl.models.folder import end_token_ids
from qerl_pl.modules import Policy, PolicyConfig
from qerl_pl.policy.packing import partition_micro_batches
from qerl_pl.rewards import as_rewards
from qerl_pl.rollout import Collector, CollectorConfig, Scorer
from qerl_pl.rollout.parity_check import check_logprob_parity
from qerl_pl.types import Experience, SamplingConfig


def endless(source: Path, folder: Path) -> Path:
    """A copy of a model whose completions end at the token limit: a token that it hardly ever samples ends them."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = set(end_token_ids(folder))
    last = max(set(tokenizer.vocab.values()) - ends)
    other = tokenizer.convert_ids_to_tokens(last)
    for name in ("config.json", "generation_config.json"):
        if (path := folder / name).is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": last}))
    tokenizer.eos_token = other
    tokenizer.save_pretrained(folder)
    return folder


def zero(completions: list[str], **columns: Any) -> list[float]:
    """A reward that nothing is trained on."""
    return [0.0 for _ in completions]


@torch.no_grad()
def trainer_logprobs(policy: Policy, experience: Experience, max_tokens: int) -> Tensor:
    """The clean trainer's log-probabilities of the sampled tokens, [B, T]."""
    policy.eval()
    logprobs = torch.zeros_like(experience.sampler_logprobs)
    for rows in partition_micro_batches(experience.lengths.tolist(), max_tokens):
        batch = experience.tokens[rows], experience.lengths[rows], experience.mask[rows]
        logprobs[rows] = policy.token_values(*batch, experience.temperature)[0]
    return logprobs


def first_tokens(mask: Tensor, length: int) -> Tensor:
    """The first `length` tokens of the completions that have as many, bool [B, T]."""
    return mask & (mask.cumsum(1) <= length) & (mask.sum(1, keepdim=True) >= length)


def ratios(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """What the ratios of trainer and sampler are, over the tokens or completions of `mask`."""
    token = log_ratio[mask]
    rows = mask.any(1)
    of = {level: level_log_ratio(log_ratio, mask, level)[rows, -1] for level in ("sequence", "geometric")}
    return {
        "completions": int(rows.sum()),
        "logprob_abs_mean": token.abs().mean().item(),
        "k3": (token.exp() - 1 - token).mean().item(),
        "sequence_std": of["sequence"].std().item(),
        "geometric_low": of["geometric"].exp().quantile(0.05).item(),
        "geometric_high": of["geometric"].exp().quantile(0.95).item(),
    }


def corrected(correction: RolloutCorrection, old: Tensor, sampler: Tensor, mask: Tensor) -> Any:
    """Shares of tokens that a correction rejects or caps, and the effective sample size as a share."""
    found = correction_weights(correction, old, sampler, mask)
    weights = found.weights[mask]
    squares = (len(weights) * weights.square().sum()).item()
    return {
        "rejected": found.rejected[mask].float().mean().item(),
        "capped": found.capped[mask].float().mean().item(),
        "ess": weights.sum().item() ** 2 / squares if squares else 0.0,
        "weight_mean": weights.mean().item(),
    }


def tables(results: Sequence[dict[str, Any]]) -> str:
    lengths = [row["length"] for row in results[0]["lengths"]]
    header = ["sigma", "tokens", "mean abs. log ratio", "k3", "std of the sequence's", "geometric mean, 5 to 95 %"]
    lines = [
        [f"{sigma['sigma']:g}", row["length"], f"{row['logprob_abs_mean']:.2e}", f"{row['k3']:.2e}"]
        + [f"{row['sequence_std']:.2f}", f"{row['geometric_low']:.4f} to {row['geometric_high']:.4f}"]
        for sigma in results
        for row in sigma["lengths"]
    ]
    parts = [report.markdown(header, lines)]
    for sigma in results:
        cells = [
            [name]
            + [
                f"{row[name]['rejected']:.1%} / {row[name]['capped']:.1%} / {row[name]['ess']:.3f}"
                for row in (length["corrections"] for length in sigma["lengths"])
            ]
            for name in PRESETS
        ]
        title = f"sigma {sigma['sigma']:g}: rejected / capped / effective sample size"
        parts += [title, report.markdown(["correction", *(f"{length} tokens" for length in lengths)], cells)]
    return "\n\n".join(parts)


def measured(args: argparse.Namespace, folder: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    config = PolicyConfig(path=str(folder), dtype=args.dtype)
    base, lora = config.base_folder(), config.lora_spec
    assert lora is not None
    engine = VLLMEngine() if args.engine == "vllm" else TransformersEngine()
    limit = args.max_prompt_tokens + max(args.lengths)
    engine.launch(EngineSpec(base, config.torch_dtype, device, lora.rank, lora.targets, limit))
    policy = Policy(base, config, device, 0, engine.shared_weights())
    data = TableDataModule(
        str(args.data),
        batch_size=args.prompts,
        val_size=0,
        max_prompt_tokens=args.max_prompt_tokens,
        system_prompt=None,
        tokenizer=str(base),
    )
    data.setup("fit")
    prompts = next(iter(data.train_dataloader())).prompts
    sampling = SamplingConfig(max_tokens=max(args.lengths))
    settings = CollectorConfig(Scorer(as_rewards([zero])), args.group_size, sampling)
    objective = GRPO()
    for sigma in args.sigmas:
        collector = Collector(settings, engine, AutoTokenizer.from_pretrained(base), objective, seed=0)
        check_logprob_parity(engine, policy, prompts[:2], 0, 0, sampling.max_tokens, args.mismatch_bound)
        engine.sync(policy.weights(0, NormNoise(sigma, 0, 0)))
        experience = collector.collect(prompts, 0, lambda *_: []).to(device)
        old, sampler = trainer_logprobs(policy, experience, args.micro_batch_tokens), experience.sampler_logprobs
        lengths = []
        for length in args.lengths:
            mask = first_tokens(experience.mask, length)
            each = {name: corrected(one, old, sampler, mask) for name, one in PRESETS.items()}
            lengths.append({"length": length, **ratios(old - sampler, mask), "corrections": each})
        tokens = statistics.fmean(record.tokens for record in experience.records)
        yield {"sigma": sigma, "tokens_mean": tokens, "lengths": lengths}
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a 16-bit model with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="table of questions")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.0, 1e-3, 1e-2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--mismatch-bound", type=float, default=0.25)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        select_backend("triton")
    with tempfile.TemporaryDirectory() as scratch:
        results = list(measured(args, endless(args.model, Path(scratch) / "endless"), device))
    report.write(args.out, "off_policy", tables(results), {"model": args.model.name, "sigmas": results})


if __name__ == "__main__":
    main()
