"""Grade the test questions by greedy decoding and 16 samples each, 4 on another format; rows of counts by question.

    python -m studies.four_bits.evaluate PREPARED counts.jsonl --folder evaluations --orders 0 1 2 --formats none nvfp4
    python -m studies.four_bits.evaluate PREPARED counts.jsonl --folder evaluations --runs RUN ... --formats nvfp4 none

The first line evaluates the policy before training in orders of its channels, the second adapters of finished runs, of
which every format but a run's own is cross-serving. An evaluation that has a row is skipped, one that was cut off
goes on. `--devices 0 1 --at-once 3` evaluates three at once on each of two GPUs.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks import report
from studies.four_bits.analysis import own_format
from studies.sweep.plan import ROOT
from studies.sweep.rows import add_row, read_rows
from studies.sweep.runner import visible_devices

SAMPLES, CROSS_SAMPLES = 16, 4
"""Of a question, in the format that a run trained on or that a policy starts with, and in another one."""


def counts(lines: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Right greedy answers (0 or 1) and right samples of each question, in the order of its ids."""
    greedy: dict[str, int] = {}
    sampled: dict[str, int] = {}
    for line in lines:
        found = greedy if line["sample"] is None else sampled
        found[line["prompt_id"]] = found.get(line["prompt_id"], 0) + line["correct"]
    if set(greedy) != set(sampled):
        raise ValueError(f"{len(greedy)} questions have a greedy answer and {len(sampled)} have samples")
    ids = sorted(greedy)
    return {"greedy": [greedy[one] for one in ids], "sampled": [sampled[one] for one in ids]}


def levels_of(run: Path) -> dict[str, str]:
    """The levels in the name of a run's folder."""
    return dict(level.split("=", 1) for level in run.name.split(","))


def words(prepared: Path, order: int, quantization: str, adapter: Path | None, folder: Path, samples: int) -> list[str]:
    """Arguments of `qerl` for one evaluation."""
    settings = {
        "model.policy.path": prepared / f"base-{order}",
        "model.policy.quantization": quantization,
        "data.path": prepared / "data",
        "data.val_split": "held_out",  # as in the runs
        "rollout.evaluation.samples": samples,
        "rollout.engine.max_num_seqs": 1024,  # 22 000 completions: four times as many at once as in training
        "rollout.engine.kv_cache_gib": 16.0,
        "report": "{}",
        "trainer.default_root_dir": folder,
        **({} if adapter is None else {"model.policy.adapter": adapter, "model.policy.lora.targets": "null"}),
    }
    options = [f"--{key}={value}" for key, value in settings.items()]
    return ["test", "-c", str(ROOT / "studies/four_bits/run.yaml"), *options]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="of the evaluations, to go on from")
    parser.add_argument("--formats", nargs="+", required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a question in a run's own format")
    parser.add_argument("--cross-samples", type=int, default=CROSS_SAMPLES, help="in another one")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--orders", type=int, nargs="+", help="of the channels, before training")
    which.add_argument("--runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--devices", nargs="+", default=["0"], help="GPU numbers")
    parser.add_argument("--at-once", type=int, default=1, help="concurrent evaluations per GPU")
    args, options = parser.parse_known_args(given)  # others are of `qerl test`
    free: SimpleQueue[str] = SimpleQueue()
    for device in args.devices * args.at_once:
        free.put(device)

    def work(job: tuple[Path | int, str]) -> None:
        device = free.get()
        try:
            evaluate(args, options, *job, device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(work, itertools.product(args.runs or args.orders, args.formats)))


def evaluate(args: argparse.Namespace, options: Sequence[str], what: Path | int, served: str, device: str) -> None:
    """Add the row of a run or an order, unless it is there."""
    levels, adapter = {"order": str(what), "method": "start"}, None
    if isinstance(what, Path):
        levels, adapter = levels_of(what), what / "adapter"
    name = ",".join(f"{factor}={level}" for factor, level in {**levels, "served": served}.items())
    if name in read_rows(args.rows):
        return
    folder = args.folder / name
    is_own = levels["method"] == "start" or served == own_format(levels["method"])
    samples = args.samples if is_own else args.cross_samples
    command = words(args.prepared, int(levels["order"]), served, adapter, folder, samples)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices(device)}
    subprocess.run([sys.executable, "-m", "qerl_pl", *command, *options], check=True, cwd=ROOT, env=environment)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    lines = [json.loads(line) for line in (folder / evaluation["samples"]).read_text().splitlines()]
    where = report.environment()
    row = {"run": name, "levels": {**levels, "served": served}, "samples": samples, "where": where}
    add_row(args.rows, {**row, **counts(lines)})


if __name__ == "__main__":
    main()
