"""What quantizing takes from the toy policy, and what on-policy distillation from its 16-bit base brings back.

    python -m studies.distillation --out studies/distillation    # about half an hour of one CPU core

`configs/distill.yaml` trains, with another format or objective. Every policy is merged by `qerl export`, or else
dequantized, and measured by transformers in float32: nats per token of correct solutions to held-out problems, greedy
and sampled accuracy, and the exact KL divergence to the 16-bit policy on the policy's own samples. Intervals are 95
%: of nats bootstrapped over problems, of accuracy Wilson's. What is left is the gap to 16 bits divided by that before
training.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import report
from qerl_pl.chat.template import render_prompt
from qerl_pl.cli.main import main as qerl
from qerl_pl.evaluation.metrics import bootstrap_interval
from qerl_pl.formats.quantize import in_format
from qerl_pl.toy.policy import ToyConfig, build_toy_policy
from qerl_pl.toy.task import ArithmeticTask, Problem, careful_demonstration
from studies.quantization_loss.quantization_table import dense_model

CONFIG = report.ROOT / "configs" / "distill.yaml"
TOY = ToyConfig(task=ArithmeticTask(digits=3, operands=3), careless_fraction=0.0, steps=1500)
"""As in CONFIG."""
FIRST = 256
"""Problems that CONFIG validates on; those after them are measured."""
MAX_TOKENS = 96
BATCH = 32
"""Prompts of a rollout, by CONFIG."""
WAYS = {
    "distilled": ["--trainer.val_check_interval", "10"],
    "distilled, full vocabulary": [
        *("--trainer.val_check_interval", "10"),
        *("--model.objective.distillation_divergence", "full_vocabulary"),
    ],
    "GRPO": ["--trainer.val_check_interval", "10", "--model.objective", "GRPO", "--model.objective.beta", "0"],
}
"""Options of qerl fit: the teacher alone, by sampled tokens or all, and rewards alone."""


def held_out(count: int) -> list[Problem]:
    return [TOY.task.problem(index, "validation") for index in range(FIRST, FIRST + count)]


@torch.no_grad()
def nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> list[float]:
    """Negative log-likelihood of each problem's solution, mean over its tokens."""
    losses = []
    for problem in problems:
        prompt = render_prompt(tokenizer, problem.question)
        solution = [*tokenizer(careful_demonstration(problem))["input_ids"], tokenizer.eos_token_id]
        tokens = torch.tensor([prompt + solution])
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, tokens[0, len(prompt) :, None]).mean().item())
    return losses


@torch.no_grad()
def completions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], sampled: bool
) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each problem, the end-of-sequence token included, in batches of 128."""
    torch.manual_seed(0)
    found = []
    prompts = [render_prompt(tokenizer, problem.question) for problem in problems]
    for first in range(0, len(prompts), 128):
        batch = prompts[first : first + 128]
        width = max(map(len, batch))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(one)) + one for one in batch])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in batch])
        choice: dict[str, Any] = {"do_sample": sampled} | ({"top_k": 0, "temperature": 1.0} if sampled else {})
        rows = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, **choice)[:, width:].tolist()
        for prompt, row in zip(batch, rows, strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            found.append((prompt, row[:end]))
    return found


def right(tokenizer: PreTrainedTokenizerBase, problem: Problem, completion: list[int]) -> bool:
    return f"<answer>{problem.answer}</answer>" in tokenizer.decode(completion)


@torch.no_grad()
def kl(model: PreTrainedModel, teacher: PreTrainedModel, samples: list[tuple[list[int], list[int]]]) -> float:
    """KL(policy || teacher) over the vocabulary, in nats, mean over the tokens of the policy's samples."""
    total, tokens = 0.0, 0
    for prompt, completion in samples:
        ids = torch.tensor([prompt + completion])
        own, other = (one(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for one in (model, teacher))
        total += (own.exp() * (own - other)).sum().item()
        tokens += len(completion)
    return total / tokens


def measured(folder: Path, source: Path, count: int) -> dict[str, Any]:
    tokenizer, model, teacher = (
        AutoTokenizer.from_pretrained(source),
        dense_model(folder, source, "cpu"),
        dense_model(source, source, "cpu"),
    )
    problems = held_out(count)
    samples = completions(model, tokenizer, problems, sampled=True)
    greedy = completions(model, tokenizer, problems, sampled=False)
    return {
        "nats": nats(model, tokenizer, problems),
        "greedy": [right(tokenizer, problem, row) for problem, (_, row) in zip(problems, greedy, strict=True)],
        "sampled": [right(tokenizer, problem, row) for problem, (_, row) in zip(problems, samples, strict=True)],
        "kl": kl(model, teacher, samples),
    }


def train(run: Path, quantization: str, *options: str) -> tuple[Path, float]:
    """The merged weights after a run of CONFIG, and its seconds."""
    start = time.perf_counter()
    given = ["--model.policy.quantization", quantization, "--trainer.default_root_dir", str(run), *options]
    quiet = ["--trainer.enable_progress_bar", "false", "--summary", "null", "--completions", "null"]
    if qerl(["fit", "-c", str(CONFIG), *given, *quiet]) or qerl(
        ["export", str(run), f"{run}-merged", "--merge", "true"]
    ):
        raise SystemExit("the run failed")
    return Path(f"{run}-merged"), time.perf_counter() - start


def table(results: dict[str, dict[str, Any]]) -> str:
    full, lines = results["16-bit"], []
    for name, found in results.items():
        low, high = bootstrap_interval(torch.tensor(found["nats"], dtype=torch.float64), seed=0)
        line = [name, f"{statistics.fmean(found['nats']):.4f} [{low:.4f}, {high:.4f}]", f"{found['kl']:.4f}"]
        for kind in ("greedy", "sampled"):
            bounds = report.wilson(sum(found[kind]), len(found[kind]))
            line.append("{:.3f} [{:.3f}, {:.3f}]".format(statistics.fmean(found[kind]), *bounds))
        back = []
        for kind in ("nats", "greedy", "sampled") if "before" in found else ():
            before, after, best = (statistics.fmean(one[kind]) for one in (results[found["before"]], found, full))
            back.append(f"{(after - best) / (before - best) + 0.0:.3f}")  # no -0
        lines.append([*line, *(back or [""] * 3)])
    headers = ["policy", "nats per token", "KL to 16-bit", "greedy accuracy", "sampled accuracy"]
    return report.markdown([*headers, "nats left", "greedy left", "sampled left"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10, 60], help="lengths of the runs")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not report.correct(["tests/test_distillation.py"]):
        raise SystemExit("tests of distillation fail: nothing is measured")
    torch.set_num_threads(1)
    source = build_toy_policy(TOY)
    results = {"16-bit": measured(source, source, args.problems)}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.formats:
            label = name.upper()
            results[label] = measured(in_format(source, name), source, args.problems)
            for rollouts, (way, options) in itertools.product(args.rollouts, WAYS.items()):
                run = Path(scratch) / f"{name}-{way}-{rollouts}"
                merged, seconds = train(run, name, "--data.train_size", str(BATCH * rollouts), *options)
                found = measured(merged, source, args.problems) | {"before": label, "seconds": seconds}
                results[f"{label}, {way}, {rollouts} rollouts"] = found
                report.write(args.out, "distillation_toy", table(results), {"toy": TOY.digest, "policies": results})


if __name__ == "__main__":
    main()
