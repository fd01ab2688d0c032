"""What each way of quantizing leaves of a pretrained policy: held-out nats per token, and greedy accuracy.

    python -m studies.quantization_loss.quantization_table MODEL --data FOLDER --out results

FOLDER has GSM8K's train.jsonl and test.jsonl. Nats are those of the test set's solutions under the model's chat
template. The accuracy is greedy on test questions, asked for a \\boxed{} answer. GPTQ is llm-compressor's,
calibrated on training rows; the table's AWQ is of an earlier commit. Every model is dequantized and computes in
float32, so that differences are those of the weights. Intervals are 95 %: of nats paired by row with the 16-bit model,
of accuracy Wilson's.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import report
from qerl_pl.chat.template import render_prompts
from qerl_pl.cli.quantize import quantize
from qerl_pl.datamodules import TableConfig
from qerl_pl.formats.base import format_of
from qerl_pl.models.folder import TensorFiles
from qerl_pl.rewards import MathAnswer, RewardSample

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
WAYS: dict[str, dict[str, Any] | None] = {
    "16-bit": None,
    "NVFP4": {"format": "nvfp4"},
    "NVFP4, GPTQ": {"format": "nvfp4", "calibrated": True},
    "MXFP4": {"format": "mxfp4"},
    "MXFP4, GPTQ": {"format": "mxfp4", "calibrated": True},
    "NF4": {"format": "nf4"},
}


def dense_model(folder: Path, source: Path, device: str) -> PreTrainedModel:
    """A checkpoint's weights, dequantized, in a float32 model of `source`'s architecture."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    dense = dict(format_of(folder).iterate_dense(TensorFiles(folder), torch.float32))
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.to(device).eval()


@torch.no_grad()
def nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, str]]) -> list[float]:
    """Negative log-likelihood of each row's solution, mean over its tokens."""
    losses = []
    prompts = render_prompts(tokenizer, [row["question"] for row in rows], None)
    for row, prompt in zip(rows, prompts, strict=True):
        end = tokenizer(row["answer"].replace("####", "The answer is"), add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([prompt + end], device=model.device)
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, tokens[0, len(prompt) :, None]).mean().item())
    return losses


@torch.no_grad()
def right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, table: Path, count: int, at_once: int, limit: int
) -> list[bool]:
    """Whether the greedy answer to each of the first `count` questions is correct."""
    rows = TableConfig(str(table), limit=count).rows("test")
    prompts = render_prompts(tokenizer, [row.question for row in rows], INSTRUCTION)
    samples = []
    for first in range(0, len(rows), at_once):
        batch = prompts[first : first + at_once]
        width = max(map(len, batch))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(one)) + one for one in batch])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in batch])
        output = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=limit, do_sample=False
        )
        texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        for row, text in zip(rows[first : first + at_once], texts, strict=True):
            samples.append(RewardSample(row.question, text, row.reference, False, 1))
    return [value > 0.5 for value in MathAnswer(tag=None)(samples)]


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for way, found in results.items():
        more = [own - least for own, least in zip(found["nats"], results["16-bit"]["nats"], strict=True)]
        half = 1.96 * statistics.stdev(more) / math.sqrt(len(more))
        low, high = report.wilson(sum(found["right"]), len(found["right"]))
        share = statistics.fmean(found["right"])
        above = "" if way == "16-bit" else f"{statistics.fmean(more):.4f} ± {half:.4f}"
        lines.append([way, f"{statistics.fmean(found['nats']):.4f}", above, f"{share:.3f} [{low:.3f}, {high:.3f}]"])
    return report.markdown(["base", "nats per token", "above 16-bit", "greedy accuracy"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a 16-bit model with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--rows", type=int, default=256, help="solutions whose nats are measured")
    parser.add_argument("--questions", type=int, default=512, help="questions that are answered")
    parser.add_argument("--calibration", type=int, default=128, help="training rows to calibrate on")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if "16-bit" not in args.ways:
        parser.error("--ways needs 16-bit, which the others are compared with")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in (args.data / "test.jsonl").read_text().splitlines()[: args.rows]]
    results: dict[str, dict[str, Any]] = {}
    for way in args.ways:
        with tempfile.TemporaryDirectory() as scratch:
            folder, options = args.model, WAYS[way]
            if options is not None:
                folder = Path(scratch) / "quantized"
                calibration = str(args.data / "train.jsonl") if "calibrated" in options else None
                quantize(args.model, folder, options["format"], calibration=calibration, samples=args.calibration)
            model = dense_model(folder, args.model, device)
        test = args.data / "test.jsonl"
        results[way] = {
            "nats": nats(model, tokenizer, rows),
            "right": right(model, tokenizer, test, args.questions, args.at_once, args.max_tokens),
        }
        del model
        report.write(args.out, "quantization_table", table(results), {"model": args.model.name, "ways": results})


if __name__ == "__main__":
    main()
