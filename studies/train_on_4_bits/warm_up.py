"""Supervised fine-tuning of a pretrained policy on demonstrations, until it solves enough problems to start RL.

    python -m studies.train_on_4_bits.word_problems runs/problems
    python -m studies.train_on_4_bits.warm_up MODEL runs/policy --data runs/problems --until 0.35

MODEL is a folder in Hugging Face format with a chat template, such as SmolLM2-135M-Instruct. Demonstrations are rows in
GSM8K's format, as "<think>the text before ####</think><answer>the number</answer>", with the prompts of `qerl fit`. At
intervals, held-out problems are sampled at temperature 1 and graded by the reward; training stops at the accuracy
--until. OUT/warm_up.json has these accuracies and a digest of the weights, which is reproducible on the same GPU and
versions. Training uses transformers' Trainer.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks import report
from qerl_pl.chat.template import render_prompts
from qerl_pl.datamodules.tables import read_table
from qerl_pl.rewards import GSM8KAnswer, RewardSample
from qerl_pl.runtime.files import atomic_directory
from qerl_pl.runtime.random_state import deterministic

IGNORED = -100
PROBLEMS = 256
"""Rows of the training split that are held out to measure the accuracy."""


def demonstration(answer: str) -> tuple[str, str]:
    """The completion for an answer in GSM8K's format, and its number."""
    thought, _, number = answer.rpartition("####")
    number = number.replace(",", "").strip()
    return f"<think>{' '.join(thought.split())}</think><answer>{number}</answer>", number


def examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], longest: int) -> list[dict[str, list[int]]]:
    """Token ids and labels of all rows of up to `longest` tokens; labels of the prompt are -100."""
    prompts = render_prompts(tokenizer, [str(row["question"]) for row in rows])
    encoded = []
    for prompt, row in zip(prompts, rows, strict=True):
        text, _ = demonstration(str(row["answer"]))
        completion = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(prompt) + len(completion) <= longest:
            encoded.append({"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion})
    return encoded


def padded(batch: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Right-padded tensors [B, T]; padding is masked in attention and labels."""
    longest = max(len(one["input_ids"]) for one in batch)

    def column(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([one[name] + [fill] * (longest - len(one[name])) for one in batch])

    mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in batch]
    return {
        "input_ids": column("input_ids", 0),
        "labels": column("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], tokens: int, at_once: int = 128
) -> float:
    """Fraction of problems solved by one completion sampled at temperature 1."""
    prompts = render_prompts(tokenizer, [str(row["question"]) for row in rows])
    samples, was_training, device = [], model.training, model.device
    model.eval()
    for start in range(0, len(rows), at_once):
        batch = prompts[start : start + at_once]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in batch], device=device)
        pad = tokenizer.eos_token_id
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        generated = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=pad, eos_token_id=pad, **sampling
        )
        texts = tokenizer.batch_decode(generated[:, longest:], skip_special_tokens=True)
        for row, text in zip(rows[start : start + at_once], texts, strict=True):
            samples.append(RewardSample(str(row["question"]), text, demonstration(str(row["answer"]))[1], False, 0))
    model.train(was_training)
    return sum(GSM8KAnswer()(samples)) / len(samples)


def digest(model: torch.nn.Module) -> str:
    """Hash of the weights."""
    sha256 = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        sha256.update(name.encode() + weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:12]


class Probe(TrainerCallback):
    """Stops training when enough problems are solved.

    Args:
        model: The policy.
        tokenizer: Its tokenizer.
        rows: Held-out problems.
        tokens: Token limit of a completion.
        every: Steps between two evaluations.
        until: Accuracy at which training stops.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Any],
        tokens: int,
        every: int,
        until: float,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.rows = rows
        self.tokens = tokens
        self.every = every
        self.until = until
        self.seen: list[tuple[int, float]] = []

    def look(self, step: int) -> float:
        """Measure and print the accuracy."""
        share = accuracy(self.model, self.tokenizer, self.rows, self.tokens)
        self.seen.append((step, share))
        print(f"step {step}: {share:.3f} of {len(self.rows)} problems solved", flush=True)
        return share

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate every `every` steps."""
        if state.global_step % self.every == 0 and self.look(state.global_step) >= self.until:
            control.should_training_stop = True


def warm_up(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Train and write the policy; return (step, accuracy) pairs."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Gradients of PyTorch's fused attention with a mask are not deterministic.
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    rows = read_table(str(args.data), "train")
    problems, demonstrations = rows[: args.problems], examples(tokenizer, rows[args.problems :], args.longest)
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            scratch,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=min(20, args.steps // 5),
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=args.every,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=args.seed,
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        probe = Probe(model, tokenizer, problems, args.tokens, args.every, args.until)
        trainer = Trainer(model, settings, data_collator=padded, train_dataset=demonstrations, callbacks=[probe])
        model.to(settings.device)
        with deterministic():
            if probe.look(0) < args.until:
                trainer.train()
    with atomic_directory(args.out) as folder:
        model.to(dtype=torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        summary = {
            "solved": probe.seen,
            "demonstrations": len(demonstrations),
            "digest": digest(model),
            **report.environment(),
        }
        summary |= {name: getattr(args, name) for name in ("steps", "batch_size", "lr", "until", "seed")}
        (folder / "warm_up.json").write_text(json.dumps(summary, indent=1) + "\n")
    return probe.seen


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl")
    parser.add_argument("--until", type=float, default=0.35, help="accuracy at which training stops")
    parser.add_argument("--steps", type=int, default=400, help="maximum number of steps")
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--tokens", type=int, default=96, help="token limit of a completion")
    parser.add_argument("--longest", type=int, default=384, help="token limit of a demonstration, including the prompt")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    if args.out.exists():
        parser.error(f"a warm-up writes a new folder; {args.out} exists; choose another, or remove it")
    warm_up(args)


if __name__ == "__main__":
    main()
