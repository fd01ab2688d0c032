"""Quantization loss of a pretrained policy: negative log-likelihood of reference solutions, nats per token.

    python -m studies.quantization_loss.format_cost MODEL --data FOLDER --out results    # FOLDER has test.jsonl

Prompts are rendered as in training, and everything but the quantized weights is float32. Differences are paired by row,
with 95 % intervals over rows.

`--orders 5` adds four copies of the policy with permuted and sign-flipped channels, and writes format_cost_orders. They
compute the same function but round differently, which shows the spread over rounding errors. `--ways none mxfp4
mxfp4_loftq32` measures LoftQ's adapter of rank 32 over MXFP4 beside it.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks import report
from qerl_pl.chat.template import render_prompts
from qerl_pl.datamodules.tables import read_table
from qerl_pl.formats.loftq import LOFTQ
from qerl_pl.formats.quantize import Device, quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.rollout.collector import pad_completions
from qerl_pl.types import Completion, Prompt
from studies.quantization_loss.reordered import reorder_checkpoint

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("16-bit", {}),
    "nvfp4": ("NVFP4", {}),
    "mxfp4": ("MXFP4", {}),
    "nf4": ("NF4", {}),
}
ROUNDED = tuple(WAYS)
WAYS |= {
    f"{kind}_loftq{rank}": (f"{WAYS[kind][0]}, LoftQ of rank {rank}", {"loftq_rank": rank})
    for kind in ("nvfp4", "mxfp4", "nf4")
    for rank in (32, 128)
}


def solutions(base: Path, data: Path, count: int) -> list[tuple[list[int], int]]:
    """Token ids of each row's prompt and solution, and the length of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = read_table(str(data), "test")[:count]
    prompts = render_prompts(tokenizer, [str(row["question"]) for row in rows])
    answers = [str(row["answer"]).replace("####", "The answer is") for row in rows]
    ends = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    return [(list(prompt) + end, len(prompt)) for prompt, end in zip(prompts, ends, strict=True)]


@torch.no_grad()
def nats(policy: Policy, rows: Sequence[tuple[list[int], int]], at_once: int = 8) -> list[float]:
    """Mean negative log-likelihood of each row's solution, nats per token."""
    device, losses = next(policy.parameters()).device, list[float]()
    for first in range(0, len(rows), at_once):
        batch = rows[first : first + at_once]
        prompts = [Prompt("", tuple(ids[:start]), "", "") for ids, start in batch]
        completions = [[Completion(tuple(ids[start:]), (0.0,) * (len(ids) - start), "stop")] for ids, start in batch]
        tokens, lengths, mask, _ = (tensor.to(device) for tensor in pad_completions(prompts, completions, 0))
        logprobs: Tensor = policy.token_values(tokens, lengths, mask, 1.0)[0]
        losses += (-(logprobs * mask).sum(1) / mask.sum(1)).tolist()
    return losses


def measure(args: argparse.Namespace) -> list[dict[str, list[float]]]:
    """Loss of each row, by channel order and base format; 16-bit only in the first order."""
    rows, losses = solutions(args.model, args.data, args.rows), list[dict[str, list[float]]]()
    for order in range(args.orders):
        with tempfile.TemporaryDirectory() as scratch:
            source = args.model
            if order:
                source = Path(scratch) / "reordered"
                source.mkdir()
                reorder_checkpoint(args.model, source, order)
            ways = [way for way in args.ways if way != "none" or not order]
            losses.append({way: one_way(source, way, rows, args.device) for way in ways})
    return losses


def one_way(source: Path, way: str, rows: Sequence[tuple[list[int], int]], device: Device) -> list[float]:
    """Loss of each row after quantizing a 16-bit model in one format."""
    kind: Any = way.partition("_")[0]
    with tempfile.TemporaryDirectory() as scratch:
        base = source
        if kind != "none":
            base = Path(scratch) / way
            quantize_checkpoint(source, base, kind, device=device, **WAYS[way][1])
        loftq = "loftq_rank" in WAYS[way][1]
        adapter, lora = (str(base / LOFTQ), LoraConfig()) if loftq else (None, LoraConfig(rank=1, alpha=1.0))
        config = PolicyConfig(path=str(base), quantization=kind, lora=lora, adapter=adapter, dtype="float32")
        return nats(Policy(base, config, torch.device(device), seed=0).eval(), rows)


def tables(losses: dict[str, list[float]]) -> str:
    """Loss by format as Markdown."""
    lines = []
    for way, values in losses.items():
        cells = [WAYS[way][0], f"{statistics.fmean(values):.3f}"]
        if way != "none" and "none" in losses:
            more = [value - least for value, least in zip(values, losses["none"], strict=True)]
            half = f" ± {1.96 * statistics.stdev(more) / math.sqrt(len(more)):.3f}" if len(more) > 1 else ""
            cells.append(f"{statistics.fmean(more):.3f}{half}")
        lines.append([*cells, "–"][:3])
    return report.markdown(["base", "nats per token", "above 16-bit"], lines)


def order_tables(losses: Sequence[dict[str, list[float]]]) -> str:
    """Loss above 16-bit by format and channel order, as Markdown."""
    least, lines = statistics.fmean(losses[0]["none"]), []
    for way in losses[1]:
        costs = [statistics.fmean(one[way]) - least for one in losses]
        spread = f"{statistics.fmean(costs):.3f} ± {statistics.stdev(costs):.3f}"
        lines.append([WAYS[way][0], *(f"{cost:.3f}" for cost in costs), spread])
    orders = [f"order {number}" for number in range(1, len(losses))]
    return report.markdown(["base", "original", *orders, "mean ± standard deviation"], lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a 16-bit model with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="folder with test.jsonl")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=ROUNDED)
    parser.add_argument("--orders", type=int, default=1, help="channel orders, including the original")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    if args.orders > 1 and "none" not in args.ways:
        parser.error("--orders compares with 16-bit; keep none in --ways")
    losses = measure(args)
    results: dict[str, Any] = {"rows": args.rows, "nats": losses[0]}
    if args.orders > 1:
        report.write(args.out, "format_cost_orders", order_tables(losses), results | {"reordered": losses[1:]})
    else:
        report.write(args.out, "format_cost", tables(losses[0]), results)


if __name__ == "__main__":
    main()
