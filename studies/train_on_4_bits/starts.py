"""Where the runs of a study start: adapters that teach a policy, as it is quantized, GSM8K in the rewards' format.

    python -m studies.train_on_4_bits.starts train MODEL STARTS --data GSM8K --format nvfp4 --rounding 0
    python -m studies.train_on_4_bits.starts choose STARTS    # STARTS/nvfp4-0/start: the nearest to a target

`train` writes BASE, a copy of MODEL whose channels are reordered unless the rounding is 0, fine-tunes an adapter on the
quantized BASE with the first rows of the training split, and measures its accuracy on the next rows at intervals.
`choose` takes the lowest of the best accuracies as the target, unless it is given, so that every policy starts alike;
full fine-tuning starts from STARTS/none-0/merged. With `train --target`, a start is chosen at once and its sampled
accuracy measured again with fresh samples: the one that the choice was made by is biased towards the target. Neither
sees the test split, but for `train --test-samples N`, which writes what the policy can do on it before fine-tuning,
asked for a boxed answer, and after it to before.json and after.json for `studies.train_on_4_bits.pretrained table`.
Reinforcement learning trains on the remaining rows, which `train` writes to STARTS/data.

    python -m studies.train_on_4_bits.starts again MODEL STARTS TABLE.json --data GSM8K --only nvfp4-0 --at-once 3

On one kind of GPU the same command writes the same adapter again. `again` makes the chosen starts of a table anew on
all GPUs, from the rows that this kind of GPU measured, by `train --steps N --unmeasured`; it hands its other options
to `train`. If a start has several rows, the last counts.
"""

import argparse
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks import report
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.errors import UserError
from qerl_pl.formats.base import QUANTIZATIONS
from qerl_pl.models.folder import copy_other_files, read_config
from qerl_pl.modules import LoraConfig, PolicyConfig, SFTModule
from qerl_pl.runtime.files import atomic_directory, build_once
from studies.train_on_4_bits.pretrained import ENGINES, Measurement, read_rows
from studies.train_on_4_bits.reordered import reorder_checkpoint
from studies.train_on_4_bits.runner import visible_devices
from studies.train_on_4_bits.word_problems import write_rows

RESULTS = "start.json"


class Snapshots(Callback):
    """Saves the adapter to FOLDER/step=N every so many steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, SFTModule)
        if pl_module.policy_version % self.every == 0:
            path = self.folder / f"step={pl_module.policy_version}"
            path.mkdir(parents=True)
            pl_module.policy.save(path)


def split_rows(data: Path, taught: int, held_out: int) -> tuple[list[dict[str, str]], ...]:
    """Training rows of GSM8K: those of the fine-tuning, those held out to choose by, and the remaining ones."""
    rows = read_rows(data / "train.jsonl")
    return rows[:taught], rows[taught : taught + held_out], rows[taught + held_out :]


def write_data(data: Path, folder: Path, held_out: Sequence[dict[str, str]], rows: Sequence[dict[str, str]]) -> None:
    """GSM8K for reinforcement learning: the rows to train on, those to choose settings by, and the test split."""
    with build_once(folder) as missing:
        if not missing:
            return
        test = read_rows(data / "test.jsonl")
        with atomic_directory(folder) as out:
            for split, split_rows in (("train", rows), ("held_out", held_out), ("test", test)):
                write_rows(out / f"{split}.jsonl", split_rows)


def write_base(model: Path, base: Path, rounding: int) -> None:
    """A copy of the model whose channels are reordered, unless the rounding is 0; one for all formats."""
    with build_once(base) as missing:
        if not missing:
            return
        with atomic_directory(base) as out:
            if rounding:
                reorder_checkpoint(model, out, rounding)
            else:
                shutil.copytree(model, out, dirs_exist_ok=True)


def train(args: argparse.Namespace) -> None:
    folder = args.starts / f"{args.format}-{args.rounding}"
    if (folder / RESULTS).is_file():
        print(f"{folder} is finished")
        return
    shutil.rmtree(folder, ignore_errors=True)
    taught, held_out, others = split_rows(args.data, args.taught, args.held_out)
    write_data(args.data, args.starts / "data", held_out, others)
    base = args.starts / f"base-{args.rounding}"
    write_base(args.model, base, args.rounding)
    lora = LoraConfig(args.rank, args.alpha)
    module = SFTModule(
        PolicyConfig(path=str(base), quantization=args.format, dtype=args.dtype, lora=lora),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0),
        lr_scheduler="constant_with_warmup",
        micro_batch_tokens=16384,
        max_grad_norm=1.0,
        seed=args.rounding,  # another adapter and another order of the rows for each rounding
    )
    data = ConversationDataModule(
        list(taught), batch_size=args.batch_size, val_size=0, max_length=args.max_length, seed=args.rounding
    )
    trainer = Trainer(
        devices=1,
        max_steps=args.steps,
        logger=False,
        callbacks=[Snapshots(folder, args.steps if args.unmeasured else args.every)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    shutil.rmtree(folder / "adapter", ignore_errors=True)  # the last of the snapshots
    if args.unmeasured:
        begin(folder, args.steps)
        return
    del module, trainer
    longest = max(args.max_tokens, args.boxed_tokens if args.test_samples else 0)
    policy = Measurement(base, args.format, lora, longest, args.engine, args.dtype)
    measured = [step for step in range(args.every, args.steps + 1, args.every) if step >= args.first]
    steps = []
    for step in measured:
        policy.use(folder / f"step={step}")
        result = policy.accuracy(held_out, "tags", args.samples, max_tokens=args.max_tokens)
        summary = {kind: statistics.fmean(result[kind]) for kind in ("greedy", "sampled")}
        steps.append({"step": step, **summary, "tokens": result["tokens"], "truncated": result["truncated"]})
        print(args.format, args.rounding, steps[-1], flush=True)
    if args.test_samples:
        test, last = read_rows(args.data / "test.jsonl"), folder / f"step={steps[-1]['step']}"
        ways = (("before", None, "boxed", args.boxed_tokens), ("after", last, "tags", args.max_tokens))
        for name, adapter, style, tokens in ways:
            policy.use(adapter)
            result = policy.accuracy(test, style, args.test_samples, max_tokens=tokens)
            (folder / f"{name}.json").write_text(json.dumps({**result, "environment": report.environment()}))
    fresh: dict[str, Any] = {}
    if args.target is not None:
        fresh["chosen"] = begin_nearest(folder, steps, args.target)["step"]
        policy.use(folder / "start")
        result = policy.accuracy(held_out, "tags", args.fresh_samples, max_tokens=args.max_tokens, seed=1)
        fresh["sampled_again"] = statistics.fmean(result["sampled"])
        print(args.format, args.rounding, fresh, flush=True)
    policy.engine.close()
    settings = {name: getattr(args, name) for name in ("format", "rounding", "taught", "held_out", "samples", "lr")}
    results = {**settings, "model": args.model.name, "steps": steps, **fresh, "environment": report.environment()}
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")


def begin(folder: Path, step: int) -> None:
    """Let the runs of STARTS/FORMAT-ROUNDING begin with the adapter of a step; full fine-tuning with it merged."""
    shutil.rmtree(folder / "start", ignore_errors=True)
    shutil.copytree(folder / f"step={step}", folder / "start")
    name, _, rounding = folder.name.rpartition("-")
    if name == "none":
        merge(folder.parent / f"base-{rounding}", folder / "start", folder / "merged")


def begin_nearest(folder: Path, steps: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """Let runs begin with the step of the sampled accuracy nearest to the target, the first of several; return it."""
    nearest = min(steps, key=lambda step: (abs(step["sampled"] - target), step["step"]))
    begin(folder, nearest["step"])
    return nearest


def merge(base: Path, adapter: Path, merged: Path) -> None:
    """Write a 16-bit base with its adapter merged into it, from which full fine-tuning starts."""
    with atomic_directory(merged, replace=True) as out:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        model.merge_and_unload().save_pretrained(out)
        copy_other_files(base, out, read_config(base))


def choose(args: argparse.Namespace) -> None:
    starts = {path.parent: json.loads(path.read_text()) for path in sorted(args.starts.glob(f"*-*/{RESULTS}"))}
    best = {folder: max(step["sampled"] for step in start["steps"]) for folder, start in starts.items()}
    target, rows, results = args.target or min(best.values()), [], []
    for folder, start in starts.items():
        step = begin_nearest(folder, start["steps"], target)
        again = start["sampled_again"] if start.get("chosen") == step["step"] else None
        accuracies = ["" if value is None else f"{value:.3f}" for value in (best[folder], step["sampled"], again)]
        rows.append([folder.name, step["step"], *accuracies, f"{step['greedy']:.3f}"])
        results.append({**start, "chosen": step["step"]})
    accuracies = ["best sampled accuracy", "sampled accuracy", "measured again", "greedy accuracy"]
    headers = ["format and rounding", "steps", *accuracies]
    report.write(args.out, args.name, report.markdown(headers, rows), {"target": target, "starts": results})


def chosen_starts(table: Path, gpu: str, only: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows of a table of starts by format and rounding (`nvfp4-0`), of those chosen on this kind of GPU.

    Raises:
        UserError: The table has no row of this GPU, or not all that are named.
    """
    starts = json.loads(table.read_text())["results"]["starts"]
    rows = {f"{start['format']}-{start['rounding']}": start for start in starts if start["environment"]["gpu"] == gpu}
    missing = [name for name in only if name not in rows]
    if missing or not rows:
        gpus = sorted({start["environment"]["gpu"] for start in starts})
        raise UserError(
            f"a start is made again on the kind of GPU that it was chosen on; {table} has {', '.join(rows) or 'none'} "
            f"for {gpu}, not {', '.join(missing) or 'any'}, and rows of {', '.join(gpus)}; measure by `train --target`"
        )
    return {name: row for name, row in rows.items() if not only or name in only}


def make_again(args: argparse.Namespace, options: Sequence[str]) -> None:
    """Make chosen starts again, several at once on each device; the output of each goes to STARTS/NAME.txt."""
    rows = chosen_starts(args.table, report.environment()["gpu"], args.only)
    devices: queue.Queue[str] = queue.Queue()
    for _ in range(args.at_once):
        for device in range(max(1, torch.cuda.device_count())):
            devices.put(str(device))
    args.starts.mkdir(parents=True, exist_ok=True)

    def make(name: str) -> int:
        row, device = rows[name], devices.get()
        given = {"format": row["format"], "rounding": row["rounding"], "steps": row["chosen"], "lr": row["lr"]}
        given |= {"data": args.data.resolve(), "taught": row["taught"], "held-out": row["held_out"]}
        words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
        folders = (args.model.resolve(), args.starts.resolve())
        command = [
            sys.executable,
            "-m",
            "studies.train_on_4_bits.starts",
            "train",
            *folders,
            *words,
            "--unmeasured",
            *options,
        ]
        with (args.starts / f"{name}.txt").open("wb") as output:
            status = subprocess.run(
                command,
                cwd=report.ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices(device)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        devices.put(device)
        print(f"{name} ended with status {status}", flush=True)
        return status

    with ThreadPoolExecutor(devices.qsize()) as pool:
        statuses = dict(zip(rows, pool.map(make, rows), strict=True))
    if failed := [name for name, status in statuses.items() if status]:
        raise UserError(f"each start must be made; {', '.join(failed)} failed: see {args.starts / failed[0]}.txt")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("model", type=Path, help="folder of a 16-bit model with a chat template")
    one.add_argument("starts", type=Path)
    one.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    one.add_argument("--format", choices=QUANTIZATIONS, required=True)
    one.add_argument("--rounding", type=int, default=0, help="seed of the channels' order; 0 is the model's own")
    one.add_argument("--taught", type=int, default=2048, help="rows that are taught")
    one.add_argument("--held-out", type=int, default=1024, help="rows that the accuracy is measured on")
    one.add_argument("--steps", type=int, default=96)
    one.add_argument("--every", type=int, default=16, help="steps between two measurements")
    one.add_argument("--first", type=int, default=0, help="no measurement before this step")
    one.add_argument("--unmeasured", action="store_true", help="start from the last step, whatever its accuracy")
    one.add_argument("--batch-size", type=int, default=32)
    one.add_argument("--max-length", type=int, default=1024, help="most tokens of a row that is taught")
    one.add_argument("--lr", type=float, default=2e-4)
    one.add_argument("--rank", type=int, default=32)
    one.add_argument("--alpha", type=float, default=32.0)
    one.add_argument("--samples", type=int, default=2, help="samples a question, beside the greedy one")
    one.add_argument("--target", type=float, help="sampled accuracy; the nearest step is chosen and measured again")
    one.add_argument("--fresh-samples", type=int, default=4, help="samples a question of that measurement")
    one.add_argument("--max-tokens", type=int, default=320)
    one.add_argument("--test-samples", type=int, default=0, help="samples a question of the test split; 0: no test")
    one.add_argument("--boxed-tokens", type=int, default=512, help="tokens of a boxed answer")
    one.add_argument("--engine", choices=ENGINES, default="vllm")
    one.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    two = commands.add_parser("choose")
    two.add_argument("starts", type=Path)
    two.add_argument("--target", type=float, help="sampled accuracy; default: the lowest of the best")
    two.add_argument("--name", default="starts", help="of the table")
    two.add_argument("--out", type=Path, default=Path(__file__).parent)
    three = commands.add_parser("again")
    three.add_argument("model", type=Path, help="the folder that the starts were made from")
    three.add_argument("starts", type=Path)
    three.add_argument("table", type=Path, help="JSON file that `choose` wrote")
    three.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    three.add_argument("--only", nargs="+", default=[], metavar="FORMAT-ROUNDING", help="default: all of the table")
    three.add_argument("--at-once", type=int, default=1, help="starts at once per GPU")
    args, options = parser.parse_known_args(words)
    if options and args.command != "again":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if args.command == "train" and args.first > args.steps:
        parser.error(f"--first names a step that is measured, at most --steps {args.steps}; got {args.first}; lower it")
    try:
        if args.command == "again":
            make_again(args, options)
        elif args.command == "choose":
            choose(args)
        else:
            train(args)
    except UserError as error:
        raise SystemExit(f"starts: {error}") from error


if __name__ == "__main__":
    main()
