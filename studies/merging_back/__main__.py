"""What is left of a trained adapter by the way it is served: beside its 4-bit base, merged, and rounded again.

    python -m studies.merging_back RUN --base MODEL --data FOLDER --out results

RUN is a finished run on an NVFP4 base, MODEL the 16-bit checkpoint that this base is of, FOLDER has GSM8K's train.jsonl
and test.jsonl. Every way is graded on the test questions, greedily and by samples; differences are paired by question.
GPTQ wants llm-compressor (`--site`, where it needs packages of its own) and sees training rows.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import report
from qerl_pl.cli.compare import paired_interval

Grades = dict[str, dict[str, list[int]]]
"""By "greedy" and "sampled", then by question: 1 for each right answer, 0 for others."""


class Way(NamedTuple):
    """How the policy is served."""

    name: str
    base: Path
    quantization: str
    adapter: Path | None = None
    made_by: tuple[object, ...] = ()
    """Arguments of `qerl quantize` that make the base of the merged model."""


def qerl(*words: object, site: str | None = None) -> None:
    """Run a command of the command line."""
    paths = [path for path in (site, os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    subprocess.run([sys.executable, "-m", "qerl_pl", *map(str, words)], check=True, env=environment)


def ways(args: argparse.Namespace) -> list[Way]:
    """Write the adapter and the merged model, and list what serves them."""
    merged, adapter = args.folder / "merged", args.folder / "adapter"
    if not adapter.is_dir():
        qerl("export", args.run, adapter)
    if not merged.is_dir():
        qerl("export", args.run, merged, "--merge", "true")
    rows = ("--calibration", args.data / "train.jsonl", "--samples", args.samples_seen)
    return [
        Way("base in NVFP4, no adapter", args.base, "nvfp4"),
        Way("adapter beside the NVFP4 base, as trained", args.base, "nvfp4", adapter),
        Way("adapter beside the 16-bit base", args.base, "none", adapter),
        Way("merged into 16 bits", merged, "none"),
        Way("merged and rounded to NVFP4", args.folder / "rounded", "nvfp4", made_by=("--format", "nvfp4")),
        Way("merged and rounded to NVFP4 by GPTQ", args.folder / "gptq", "nvfp4", made_by=rows),
    ]


def evaluate(way: Way, args: argparse.Namespace) -> Grades:
    """Make what the way serves, if it is missing, and grade it."""
    if way.made_by and not way.base.is_dir():
        site = args.site if "--calibration" in way.made_by else None
        qerl("quantize", args.folder / "merged", way.base, *way.made_by, site=site)
    folder = args.folder / "evaluations" / way.name.replace(" ", "-").replace(",", "")
    settings = {
        "model.policy.path": way.base,
        "model.policy.quantization": way.quantization,
        "data.path": args.data,
        "rollout.evaluation.samples": args.samples,
        "noise": "null",
        "report": "{}",
        "trainer.default_root_dir": folder,
        **({} if way.adapter is None else {"model.policy.adapter": way.adapter, "model.policy.lora.targets": "null"}),
    }
    if not (folder / "evaluation.json").is_file():
        qerl("test", "-c", args.run / "config.yaml", *(f"--{key}={value}" for key, value in settings.items()))
    file = folder / json.loads((folder / "evaluation.json").read_text())["samples"]
    return graded(file.read_text().splitlines())


def graded(lines: Sequence[str]) -> Grades:
    """Of each question the greedy answer's grade, and those of its samples."""
    found: Grades = {"greedy": {}, "sampled": {}}
    for one in map(json.loads, lines):
        grades = found["greedy" if one["sample"] is None else "sampled"]
        grades.setdefault(one["prompt_id"], []).append(int(one["correct"]))
    return found


def table(found: dict[str, Grades], trained: str) -> str:
    """Accuracy by way, and its paired difference from the adapter as trained, on the questions that both have."""
    rows = []
    for name, grades in found.items():
        cells = [name]
        for kind, mine in grades.items():
            reference = found[trained][kind]
            both = sorted(mine.keys() & reference.keys())
            accuracy = np.mean([np.mean(mine[key]) for key in both]) if both else np.nan
            cells += [str(len(both)), f"{accuracy:.3f}" if both else "–"]
            if name == trained or len(both) < 2:
                cells.append("–")
                continue
            mean, low, high = paired_interval(np.array([np.mean(mine[key]) - np.mean(reference[key]) for key in both]))
            cells.append(f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]")
        rows.append(cells)
    headers = ["served as", "questions", "greedy", "less as trained", "questions", "sampled", "less as trained"]
    return report.markdown(headers, rows)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of models and evaluations, to go on from; by default RUN.served")
    parser.add_argument("--site", help="folder of packages for GPTQ alone")
    parser.add_argument("--samples", type=int, default=4, help="of a question")
    parser.add_argument("--samples-seen", type=int, default=256, help="rows that GPTQ is calibrated on")
    parser.add_argument("--together", type=int, default=1, help="evaluations at once")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    args.folder = args.folder or args.run.with_name(f"{args.run.name}.served")
    served = ways(args)
    with ThreadPoolExecutor(args.together) as pool:
        found = dict(zip([way.name for way in served], pool.map(lambda way: evaluate(way, args), served), strict=True))
    report.write(args.out, "merging_back", table(found, served[1].name), found)


if __name__ == "__main__":
    main()
