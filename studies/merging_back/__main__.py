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


class Way(NamedTuple):
    """How the policy is served."""

    name: str
    base: Path
    quantization: str
    adapter: Path | None


def qerl(*words: object, site: str | None = None) -> None:
    """Run a command of the command line."""
    paths = [path for path in (site, os.environ.get("PYTHONPATH")) if path]
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    subprocess.run([sys.executable, "-m", "qerl_pl", *map(str, words)], check=True, env=environment)


def ways(args: argparse.Namespace) -> list[Way]:
    """Write what each way serves, and list them."""
    merged, adapter = args.folder / "merged", args.folder / "adapter"
    made = {kind: args.folder / kind for kind in ("rounded", "gptq")}
    if not adapter.is_dir():
        qerl("export", args.run, adapter)
    if not merged.is_dir():
        qerl("export", args.run, merged, "--merge", "true")
    if not made["rounded"].is_dir():
        qerl("quantize", merged, made["rounded"], "--format", "nvfp4")
    if not made["gptq"].is_dir():
        rows = ["--calibration", args.data / "train.jsonl", "--samples", args.samples_seen]
        qerl("quantize", merged, made["gptq"], *rows, site=args.site)
    return [
        Way("base in NVFP4, no adapter", args.base, "nvfp4", None),
        Way("adapter beside the NVFP4 base, as trained", args.base, "nvfp4", adapter),
        Way("merged into 16 bits", merged, "none", None),
        Way("merged and rounded to NVFP4", made["rounded"], "nvfp4", None),
        Way("merged and rounded to NVFP4 by GPTQ", made["gptq"], "nvfp4", None),
        Way("base in 16 bits, no adapter", args.base, "none", None),
        Way("adapter beside the 16-bit base", args.base, "none", adapter),
    ]


def evaluate(way: Way, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Of each question, in the order of ids, the greedy answer's grade and the share of right samples."""
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


def graded(lines: Sequence[str]) -> list[tuple[float, float]]:
    """Of each question, in the order of ids, the greedy answer's grade and the share of right samples."""
    greedy: dict[str, float] = {}
    sampled: dict[str, list[float]] = {}
    for one in map(json.loads, lines):
        if one["sample"] is None:
            greedy[one["prompt_id"]] = float(one["correct"])
        else:
            sampled.setdefault(one["prompt_id"], []).append(float(one["correct"]))
    return [(greedy[key], float(np.mean(sampled[key]))) for key in sorted(greedy)]


def table(found: dict[str, list[tuple[float, float]]], trained: str) -> str:
    """Accuracy by way, and its paired difference from the adapter as trained."""
    rows = []
    for name, values in found.items():
        cells = [name]
        for kind in range(2):
            mine, reference = (np.array(which)[:, kind] for which in (values, found[trained]))
            mean, low, high = paired_interval(mine - reference)
            against = "–" if name == trained else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            cells += [f"{mine.mean():.3f}", against]
        rows.append(cells)
    return report.markdown(["served as", "greedy", "less as trained", "sampled", "less as trained"], rows)


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
