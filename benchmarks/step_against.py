"""Full steps (rollout and update) of this package, of TRL's GRPOTrainer and of Unsloth: seconds, phases and memory.

    python benchmarks/step_against.py --site trl=/tmp/site_trl unsloth=/tmp/site_uns --out results
    python benchmarks/step_against.py --parts ours-nvfp4 --adapter fused merged --sizes 4x8x512 --out results
    python benchmarks/step_against.py --parts ours-nvfp4 trl --shape tiny --device cpu --sizes 2x2x8 --out results

All train LoRA of one rank on all seven linears (`ours-full` every weight) with the same prompts, completions and
lengths. Every part, size and adapter has a process of its own on the same GPU, one after the other: this package with
its vLLM engine in any base format, TRL (`pip install trl==1.16.0`) and Unsloth on the 16-bit base with colocated vLLM.
Weights are random, no token ends a completion. The table is written anew after each process, and a process that is
ended at its limit leaves the steps that it made.

Memory is what the driver counts for the whole GPU, sampled every 20 ms in the steps that count.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import random_model
import report
import torch
from step_timer import PARTS, parsed, size_of
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.formats.quantize import quantize_checkpoint


def questions(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[str]:
    """So many different questions whose prompts, chat template included, have exactly so many tokens."""
    draw, found = random.Random(0), list[str]()
    while len(found) < count:
        text = ""
        while (size := len(tokenizer(rendered(tokenizer, text), add_special_tokens=False)["input_ids"])) < tokens:
            text += "".join(draw.choices("bcdfghjklmnpqrstvwxz0123456789 ", k=max(1, (tokens - size) // 2)))
        if size == tokens and text == text.strip():
            found.append(text)
    return found


def rendered(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The prompt of a question, without a system message."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def write_inputs(args: argparse.Namespace) -> None:
    """The models, where they are not there yet, and the questions."""
    device, bases = torch.device(args.device), {PARTS[part][2] for part in args.parts}
    for kind in sorted(bases | ({"bf16"} if bases & {"mxfp4", "nf4"} else set())):  # which are quantized from it
        if (folder := args.folder / f"{args.shape}-{kind}").is_dir():
            continue
        if kind in ("bf16", "nvfp4"):
            random_model.write_model(folder, args.shape, device, nvfp4=kind == "nvfp4", codes=True)
        else:
            quantize_checkpoint(args.folder / f"{args.shape}-bf16", folder, kind, device=args.device)
    count = (args.steps + args.warmup + 1) * max(size_of(size)[0] for size in args.sizes)
    found = questions(AutoTokenizer.from_pretrained(folder), count, args.prompt_tokens)
    (args.out / "questions.json").write_text(json.dumps(found))


def table(found: list[dict[str, Any]]) -> str:
    """Rows of what has been measured so far."""
    rows: list[list[Any]] = []
    for one in found:
        median = statistics.median(one["seconds"])
        row = [one["label"], one["size"].replace("x", " x "), len(one["seconds"])]
        row.append(f"{median:.2f} ({min(one['seconds']):.2f} to {max(one['seconds']):.2f})")
        row += [f"{statistics.median(step[name] for step in one['phases']):.2f}" for name in ("rollout", "update")]
        row.append(" / ".join(f"{one['peak_gib'].get(name, 0.0):.1f}" for name in ("rollout", "update")))
        for peer in ("TRL", "Unsloth"):
            same = [two for two in found if two["size"] == one["size"] and two["label"].startswith(peer)]
            fastest = min((statistics.median(two["seconds"]) for two in same), default=None)
            row.append("–" if fastest is None else f"{fastest / median:.2f}")
        rows.append(row)
    headers = ["way", "prompts x completions x tokens", "steps", "s a step, median (range)", "rollout s", "update s"]
    return report.markdown([*headers, "peak GiB, rollout / update", "over TRL", "over Unsloth"], rows)


def run(args: argparse.Namespace, part: str, size: str, adapter: str) -> dict[str, Any] | None:
    """Steps in a process of their own; None where it made none that counts."""
    name = "-".join(filter(None, ("step", part, adapter, size)))
    path, sites = args.out / f"{name}.json", dict(site.split("=") for site in args.site)
    path.unlink(missing_ok=True)
    (prompts, group, tokens), config = size_of(size), random_model.any_config(args.shape)
    cache = args.kv_gib or random_model.cache_gib(config, args.prompt_tokens + tokens, prompts * group)
    own = ["--kv-gib", str(cache), "--sizes", size, "--adapter", adapter, "--parts", part]
    environment = os.environ | {"STEP_OUT": str(path), "UNSLOTH_DISABLE_STATISTICS": "1"}
    folders = [sites.get(part.partition("-")[0]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command, began = [sys.executable, str(Path(__file__).with_name(PARTS[part][1])), *sys.argv[1:], *own], time.time()
    with (args.out / f"{name}.log").open("w") as log:
        try:
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=args.limit, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    print(f"{name}: status {status}, {time.time() - began:.0f} s", flush=True)
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    label = ", ".join(filter(None, (PARTS[part][0], adapter, found.get("version"))))
    return {"label": label, "part": part, "adapter": adapter, "size": size} | found


def main() -> None:
    args = parsed(__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    inputs = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); import step_against as s; "
              "s.write_inputs(s.parsed())", str(Path(__file__).parent), *sys.argv[1:]]  # fmt: skip
    subprocess.run(inputs, check=True, timeout=args.limit)  # its own process: the GPU is then empty
    found = []
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("folder", "out", "site")}
    for size, part in itertools.product(args.sizes, args.parts):
        for adapter in args.adapter if part.startswith("ours") else [""]:
            if one := run(args, part, size, adapter):
                found.append(one)
                name = f"step_against_{args.shape}"
                report.write(args.out, name, table(found), {"settings": settings, "found": found})


if __name__ == "__main__":
    main()
