"""What it costs to admit waiting requests one by one, beside an eighth of the running ones at a time.

    python benchmarks/admission.py MODEL --data FOLDER --out results

MODEL is the folder of a 16-bit model with a chat template, FOLDER has GSM8K's `test.jsonl`. Each way samples the same
completions, twice, in alternation, after a smaller batch that is not counted.
"""

import argparse
import json
import time
from pathlib import Path

import report
import torch
from transformers import AutoTokenizer

from qerl_pl.chat_template import render_prompts
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm.requests import BatchSource
from qerl_pl.types import PolicyWeights, RolloutRequest, SamplingConfig

ROUNDS = 2


class OneByOne(BatchSource):
    """Requests that are admitted as soon as there is room."""

    ADMITTED_FRACTION = 0.0


def requests_of(model: Path, data: Path, questions: int, samples: int) -> list[RolloutRequest]:
    """A request for each of the first questions of the test split, of so many samples."""
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()[:questions]]
    prompts = render_prompts(AutoTokenizer.from_pretrained(model), [row["question"] for row in rows], None)
    return [
        RolloutRequest(tuple(ids), tuple(range(100 * index, 100 * index + samples)))
        for index, ids in enumerate(prompts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=192)
    parser.add_argument("--samples", type=int, default=16, help="completions a question, at most 100")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--out", type=Path, default=report.ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = VLLMEngine(
        kv_cache_gib=3.0, max_num_seqs=args.max_num_seqs, linear_backend="auto", share_weights=False, sleep_mode=False
    )
    engine.launch(EngineSpec(args.model, torch.bfloat16, device, 0, (), 384 + args.max_tokens))
    engine.sync(PolicyWeights(0, None, 1.0))
    work, sampling = requests_of(args.model, args.data, args.questions, args.samples), SamplingConfig(args.max_tokens)
    engine.generate(work[: args.questions // 6], sampling)
    rows = []
    for _ in range(ROUNDS):
        for name, kind in (("an eighth at a time", BatchSource), ("one by one", OneByOne)):
            source, begun = kind(work, args.max_num_seqs), time.perf_counter()
            engine.generate_from(source, sampling)
            seconds = time.perf_counter() - begun
            tokens = sum(len(completion.token_ids) for completion in source.completions)
            rows.append([name, len(source.completions) / seconds, tokens / seconds, tokens / len(source.completions)])
    engine.close()
    table = report.markdown(
        ["waiting requests are admitted", "completions/s", "tokens/s", "tokens of a completion"],
        [[name, *(f"{value:.0f}" for value in values)] for name, *values in rows],
    )
    report.write(args.out, "admission", table, rows)


if __name__ == "__main__":
    main()
