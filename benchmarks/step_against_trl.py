"""A full step (rollout and update) of this package beside TRL's GRPOTrainer: seconds, phases and memory, in one run.

    pip install trl==1.16.0
    python benchmarks/step_against_trl.py --out results                              # 7B shape: about five minutes
    python benchmarks/step_against_trl.py --parts trl_sleep --out results            # TRL with vLLM's sleep mode
    python benchmarks/step_against_trl.py --shape tiny --device cpu --group 2 --tokens 8 --out results  # does it run?

Both train LoRA of one rank on all seven linears with the same prompts, completions and lengths, in a process of their
own on the same GPU, one after the other: this package on an NVFP4 base with its vLLM engine and one copy of the
weights, TRL on the 16-bit base with colocated vLLM. Weights are random, no token ends a completion. The table is
written anew after each part, so that one that fails leaves the others.

Memory is what the driver counts for the whole GPU, sampled every 20 ms in the steps that count.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import random_model
import report
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

GIB = 2**30
PARTS = {"ours": "step_ours.py", "trl": "step_trl.py", "trl_sleep": "step_trl.py"}


class StepTimer:
    """Seconds of each step and the GPU's largest memory in use, by a label that may change between steps."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.found: dict[str, dict[str, Any]] = {}
        self.peak = 0.0
        self._label, self._left, self._last = "", 0, 0.0
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._sample, daemon=True)
        self._watcher.start()

    def _sample(self) -> None:
        while torch.cuda.is_available() and not self._stop.is_set():
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, (total - free) / GIB)
            time.sleep(0.02)

    def begin(self, label: str, warmup: int | None = None) -> None:
        """Steps from now on are of `label`; the first few do not count."""
        self._label, self._left, self._last = label, self.warmup if warmup is None else warmup, self._now()
        self.found[label] = {"seconds": [], "phases": []}

    def step(self, phases: dict[str, float]) -> None:
        """A step has ended."""
        now = self._now()
        if self._left > 0:
            self._left -= 1
            self.peak = 0.0
        else:
            entry = self.found[self._label]
            entry["seconds"].append(now - self._last)
            entry["phases"].append(phases)
            entry["peak_gib"] = self.peak
        self._last = now

    def steps(self) -> int:
        """How many of the present label have counted."""
        return len(self.found[self._label]["seconds"])

    def end(self) -> None:
        """Stop watching: a thread that is inside the driver when Python ends aborts the process."""
        self._stop.set()
        self._watcher.join()

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What the parent and its parts have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["ours", "trl"])
    parser.add_argument("--modes", nargs="+", default=["true", "selective"], help="gradient_checkpointing of ours")
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a completion")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=2.0, help="of our engine")
    parser.add_argument("--utilization", type=float, default=0.2, help="TRL's vllm_gpu_memory_utilization")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a part")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def write_inputs(args: argparse.Namespace) -> None:
    """Both models, where they are not there yet, and the questions."""
    device = torch.device(args.device)
    for part in {part.partition("_")[0] for part in args.parts}:
        kind = "nvfp4" if part == "ours" else "bf16"
        if not (folder := args.folder / f"{args.shape}-{kind}").is_dir():
            random_model.write_model(folder, args.shape, device, nvfp4=kind == "nvfp4")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    count = args.prompts * len(args.modes) * (args.steps + args.warmup)
    found = questions(AutoTokenizer.from_pretrained(folder), count, args.prompt_tokens)
    (args.out / "questions.json").write_text(json.dumps(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Rows of what has been measured so far."""
    found = {name: one for name, one in found.items() if one["seconds"]}  # one may have ended in its warm-up
    theirs = [statistics.median(one["seconds"]) for name, one in found.items() if name.startswith("TRL")]
    rows: list[list[Any]] = []
    for name, one in found.items():
        median = statistics.median(one["seconds"])
        keys = sorted({key for phases in one["phases"] for key in phases})
        phases = ", ".join(f"{key} {statistics.median(p[key] for p in one['phases']):.2f}" for key in keys)
        ratio = f"{min(theirs) / median:.2f}" if theirs else "–"
        spread = f"{median:.2f} ({min(one['seconds']):.2f} to {max(one['seconds']):.2f})"
        rows.append([name, len(one["seconds"]), spread, phases, f"{one.get('peak_gib', 0.0):.1f}", ratio])
    headers = ["way", "steps", "s a step, median (range)", "phases, s", "peak GiB", "times TRL's fastest"]
    return report.markdown(headers, rows)


def main() -> None:
    args = arguments(__doc__).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    inputs = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); import step_against_trl as s; "
              "s.write_inputs(s.arguments(None).parse_args())", str(here), *sys.argv[1:]]  # fmt: skip
    subprocess.run(inputs, check=True, timeout=args.limit)
    found: dict[str, dict[str, Any]] = {}
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("folder", "out")}
    for part in args.parts:
        (args.out / f"step_{part}.json").unlink(missing_ok=True)
        command = [sys.executable, str(here / PARTS[part]), *sys.argv[1:], "--parts", part]
        began = time.perf_counter()
        with (args.out / f"step_{part}.log").open("w") as log:
            try:
                status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=args.limit).returncode
            except subprocess.TimeoutExpired:
                status = -1
        print(f"{part}: status {status}, {time.perf_counter() - began:.0f} s", flush=True)
        path = args.out / f"step_{part}.json"
        if path.is_file():
            found |= json.loads(path.read_text())
        if found:
            report.write(args.out, "step_against_trl", table(found), {"settings": settings, "found": found})


if __name__ == "__main__":
    main()
