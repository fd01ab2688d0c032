"""Lengths of a model's completions of GSM8K's and MATH's problems at temperature 1, for `rollout_speed.py --lengths`.

    python benchmarks/sample_lengths.py --model FOLDER --gsm8k gsm8k/train.jsonl --math math500.jsonl --out lengths.json

The problems of both take turns, with `--group` completions of each after the other, as in a rollout.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from transformers import AutoTokenizer

from qerl_pl.chat.template import render_prompts
from qerl_pl.datamodules import TableConfig
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.types import RolloutRequest, SamplingConfig

INSTRUCTION = "\nReason step by step, and put the final answer within \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a 16-bit instruct model")
    parser.add_argument("--gsm8k", required=True, help="a table of problems, as data.path of TableDataModule")
    parser.add_argument("--math", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=512, help="completions")
    parser.add_argument("--group", type=int, default=8, help="completions of a problem")
    parser.add_argument("--limit", type=int, default=2048, help="tokens of a completion")
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    tables = [TableConfig(path, limit=args.count).rows(name) for name, path in (("g", args.gsm8k), ("m", args.math))]
    texts = [row.question + INSTRUCTION for pair in zip(*tables, strict=False) for row in pair]
    texts = texts[: args.count // args.group]
    prompts = render_prompts(AutoTokenizer.from_pretrained(args.model), texts, None)
    longest = max(map(len, prompts)) + args.limit
    engine = VLLMEngine(kv_cache_gib=args.kv_gib, max_num_seqs=args.count)
    engine.launch(EngineSpec(args.model, torch.bfloat16, torch.device(args.device), 0, (), longest))
    seeds = tuple(range(args.group))
    requests = [RolloutRequest(tuple(ids), seeds) for ids in prompts]
    sampled = engine.generate(requests, SamplingConfig(max_tokens=args.limit))
    engine.close()
    lengths = [len(completion.token_ids) for group in sampled for completion in group]
    args.out.write_text(json.dumps(lengths))
    cut = sum(length == args.limit for length in lengths) / len(lengths)
    quartiles = statistics.quantiles(lengths, n=4)
    print(
        f"{len(lengths)} completions of {statistics.mean(lengths):.0f} tokens, quartiles {quartiles}, {cut:.1%} cut off"
    )


if __name__ == "__main__":
    main()
